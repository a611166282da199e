"""A method's copies: which passes they need, what is kept where the weights are the policy's, and when they move."""

from dataclasses import dataclass

import pytest
import torch
from all_methods import ANCHOR
from pair_methods import Pairs64, assert_mixed, nudge, prepare, roll, spread_copies, weights

from lit_vgrpo.core.records import PassLedger
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.snapshots import Decay
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import AWM, CRD, DGPO, EPG, RAM, VGRPO, DiffusionNFT, FlowGRPO
from lit_vgrpo.objectives.base import Copy
from lit_vgrpo.objectives.pairs import PairObjective, prediction


@dataclass(eq=False)
class Measured(PairObjective):
    """Its loss is the distance to what each copy keeps."""

    default_rollout = RolloutSpec(steps=2)
    num_times: int = 2
    copy: Copy = Copy({"copy": prediction})  # noqa: RUF009  it is frozen

    def copies_needed(self):
        return super().copies_needed() | {"copy": self.copy}

    def losses(self, now, kept, micro):
        distance = (now.prediction - kept["copy"]).square().flatten(1).mean(1)
        return distance + micro.advantages * now.error.square().flatten(1).mean(1), {"distance": distance.detach()}


KEEPS, TWO = {"copy": prediction}, RolloutSpec(steps=2)
CASES = {
    # decay, moves, asked: passes per image in an iteration of two updates, and with one
    "the start": (Copy(KEEPS), 2, 2),
    "of the iteration's start": (Copy(KEEPS, decay=0.0), 2, None),
    "of now": (Copy(KEEPS, decay=0.0, moves="update"), None, None),
    "follows iterations": (Copy(KEEPS, decay=0.5), 2, 2),
    "follows updates": (Copy(KEEPS, decay=0.5, moves="update", asked="update"), 4, 2),
    "of the rollout": (Copy(KEEPS, decay=0.0, asked="rollout"), None, None),
    "samples only": (Copy(decay=Decay(rate=0.1, max=0.5), samples_from=0), None, None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_passes_follow_from_the_declaration(policy, name):
    copy, of_two, of_one = CASES[name]
    objective, ledger = Measured(copy=copy), PassLedger()
    objective.setup(policy)
    assert (objective.copies == {}) == (copy.decay == 0)
    ledger.attach(policy.network)
    for updates, expected in ((2, of_two), (1, of_one)):
        planned = objective.prediction_passes(Sizes(2, 3, updates, micro_batch_size=6))
        assert planned == {"update": 2 * updates, **({} if expected is None else {"copy": expected})}
        if not copy.keeps:
            continue
        ledger.counts.clear()
        with ledger.phase("rollout"):
            experience = prepare(policy, objective, updates=updates, ledger=ledger)
        for _ in range(updates):
            objective.before_update(policy, [experience], ledger)
        counted = sum(ledger.counts.get("copy", {}).values()) / 6
        assert counted == (expected or 0)


def test_what_is_kept_is_of_the_weights_that_are_declared(policy):
    for copy, moved in ((Copy(KEEPS, decay=0.0), True), (Copy(KEEPS, decay=0.0, moves="update"), False)):
        objective = Measured(copy=copy)
        experience = prepare(policy, objective, updates=2)
        assert objective.loss(policy, experience)[1]["distance"].max() == 0
        nudge(policy)
        assert (objective.loss(policy, experience)[1]["distance"].min() > 0) == moved
    start = Measured()
    spread_copies(policy, start)
    experience = prepare(policy, start)
    expected = Pairs64(policy, experience).predict_with(start.copies["copy"])
    torch.testing.assert_close(experience.kept["copy"].double(), expected, rtol=1e-4, atol=1e-5)
    assert start.loss(policy, experience)[1]["distance"].min() > 0


def test_a_forgotten_pass_is_one_line(policy):
    objective = Measured(copy=Copy(KEEPS, decay=0.5, moves="update", asked="update"))
    experience = prepare(policy, objective)
    with pytest.raises(RuntimeError, match="The experience lacks copy. Call prepare, and before_update for every upd"):
        objective.loss(policy, experience)


DECLARED = Decay(rate=0.1, max=0.5, start=0.2)
FOLLOWERS = {
    # a method, its copy, what moves it, how much it keeps at step 99, and from which step its images are a copy's
    "iteration": (lambda: Measured(copy=Copy(KEEPS, DECLARED, samples_from=3)), "copy", "iteration", 0.5, 3),
    "update": (lambda: Measured(copy=Copy(KEEPS, DECLARED, "update", samples_from=3)), "copy", "update", 0.5, 3),
    "V-GRPO": (lambda: VGRPO(TWO, **ANCHOR), "anchor", "iteration", 0.3, None),
    "Flow-GRPO": (lambda: FlowGRPO(RolloutSpec("flow_sde", 3), **ANCHOR), "anchor", "iteration", 0.3, None),
    "AWM": (lambda: AWM(TWO, 1), "ema", "iteration", 0.099, None),
    "DiffusionNFT": (lambda: DiffusionNFT(TWO), "old", "iteration", 0.099, 0),
    "EPG": (lambda: EPG(TWO), "old", "iteration", 0.099, 0),
    "DGPO": (lambda: DGPO(TWO, 1, noisiest=2, behaviour_from_step=98), "old", "update", 0.099, 98),
    "CRD": (lambda: CRD(TWO, 1), "old", "update", 0.349, 0),
    "CRD, sampler": (lambda: CRD(TWO, 1), "sampler", "iteration", 0.099, 0),
    "RAM": (lambda: RAM(TWO), "old", "update", 0.9, 0),
}


@pytest.mark.parametrize("name", FOLLOWERS)
def test_a_copy_moves_and_samples_as_declared(policy, name):
    make, key, moves, decay, samples_from = FOLLOWERS[name]
    objective = make()
    objective.setup(policy)
    objective.num_updates = 98
    at_start, start = roll(policy, objective).latents, weights(policy)
    nudge(policy)
    moved = weights(policy)
    for objective.num_updates in (0, 97, 98):
        is_sampled = samples_from is not None and objective.num_updates >= samples_from
        assert torch.equal(roll(policy, objective).latents, at_start) == is_sampled
    objective.after_update(policy)
    assert_mixed(objective.copies[key], decay if moves == "update" else 1.0, start, moved)
    objective.after_iteration(policy)
    assert_mixed(objective.copies[key], decay, start, moved)
    if "reference" in objective.copies:
        assert all(torch.equal(tensor, start[k]) for k, tensor in objective.copies["reference"].tensors.items())
    assert key in objective.state_dict()["copies"]
    assert Measured().state_dict()["copies"] == {}


@pytest.mark.parametrize("options", [{"antithetic": True}, {"times": "uniform", "noisiest": 1}])
def test_a_method_without_a_draw_of_its_own_has_the_options_of_all(policy, options):
    pairs = [prepare(policy, Measured(num_times=4, **one)).pairs for one in ({}, options)]
    assert not torch.equal(pairs[0].noise, pairs[1].noise) or not torch.equal(pairs[0].times, pairs[1].times)
    assert len(pairs[1].noise) == 2  # one row per group
    assert torch.equal(pairs[1].noise[:, ::2], -pairs[1].noise[:, 1::2]) == ("antithetic" in options)


class PerPair(Measured):
    def losses(self, now, kept, micro):
        return now.error.square().flatten(2).mean(2), {}


def test_losses_that_are_not_per_image_are_one_line(policy):
    objective = PerPair(num_times=6)  # as many pairs as images
    objective.setup(policy)
    with pytest.raises(ValueError, match=r"PerPair.losses returned losses of shape \(6, 6\) for 6 images. Return one"):
        objective.loss(policy, prepare(policy, objective))
