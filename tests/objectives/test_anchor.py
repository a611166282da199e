"""The anchor in every method: the pull and its gradient, the copy's move, the passes, and what is refused."""

from dataclasses import dataclass, replace

import pytest
import torch
from chain_in_float64 import Steps, cps, dance_sde, expected_gradient, flow_sde
from pair_methods import (
    ADVANTAGES,
    Pairs64,
    assert_same_gradient,
    assert_state_comes_back,
    loss_and_gradient,
    nudge,
    pixel_mean,
    prepare,
    roll,
    spread_copies,
    weights,
)

from lit_vgrpo.core.records import PassLedger
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import AWM, CRD, DGPO, EPG, RAM, VGRPO, DanceGRPO, DiffusionNFT, FlowGRPO
from lit_vgrpo.objectives.base import Copy, PrepareContext
from lit_vgrpo.objectives.pairs import prediction

SIZES = Sizes(2, 3, micro_batch_size=6)
ANCHOR = {"anchor_weight": 3.0, "anchor_decay": 0.3}
PAIRS = {
    "V-GRPO": (VGRPO, {"num_mc_samples": 2}, "x"),
    "AWM": (AWM, {"num_times": 2}, "own"),
    "DiffusionNFT": (DiffusionNFT, {"num_times": 2}, "x"),
    "EPG": (EPG, {"num_times": 2}, "x"),
    "DGPO": (DGPO, {"num_times": 2, "noisiest": 4}, "own"),
    "CRD": (CRD, {"num_times": 2}, "own"),
    "RAM": (RAM, {"num_times": 2, "reward_weight": 0.1}, "own"),
}
ALL_IMAGES = {"drop_zero_advantages": False}  # one of ADVANTAGES is 0
CHAINS = {
    "Flow-GRPO": (FlowGRPO, {"rollout": RolloutSpec("flow_sde", 4), **ALL_IMAGES}, flow_sde),
    "Flow-GRPO, cps": (FlowGRPO, {"rollout": RolloutSpec("cps", 4), "kl_weight": 0.0, **ALL_IMAGES}, cps),
    "DanceGRPO": (DanceGRPO, {"rollout": RolloutSpec("dance_sde", 6)}, dance_sde),
}
METHODS = PAIRS | CHAINS


def make(name, **options):
    cls, given, _ = METHODS[name]
    return cls(**{"rollout": RolloutSpec(steps=5), **given, **options})


def assert_the_pull_is(policy, name, objective, experience, ledger, expected, direction):
    """Check what the anchor adds to the loss, its gradient and the passes; without one nothing is added."""
    planned = objective.prediction_passes(SIZES)
    assert planned["anchor"] == planned["update"]
    assert ledger.counts["anchor"] == {"with_grad": 0, "without_grad": 6 * planned["anchor"]}
    assert "anchor" not in make(name).prediction_passes(SIZES)
    objective.before_update(policy, [experience])
    bare = replace(experience, kept={name: value for name, value in experience.kept.items() if name != "anchor"})
    assert len(bare.kept) == len(experience.kept) - 1
    cases = (objective, experience), (make(name), bare)
    (loss, gradient), (less, rest) = (loss_and_gradient(policy, one, [images]) for one, images in cases)
    assert loss - less == pytest.approx(3 * expected, rel=2e-3)
    assert_same_gradient(gradient - rest, 3 * direction, rtol=5e-3)
    distances = objective.loss(policy, experience)[1]["anchor_distance"]
    assert distances.shape == (6,)
    assert float(distances.mean()) == pytest.approx(expected, rel=1e-3)
    value, metrics = make(name).loss(policy, bare)
    assert value.item() == less
    assert "anchor_distance" not in metrics


@pytest.mark.parametrize("name", PAIRS)
def test_the_pull_on_pairs_in_float64(policy, name):
    objective, ledger = make(name, **ANCHOR), PassLedger()
    ledger.attach(policy.network)
    spread_copies(policy, objective)
    experience = prepare(policy, objective, ledger=ledger)
    pairs, in_x = Pairs64(policy, experience), METHODS[name][2] == "x"
    anchor = pairs.predict_with(objective.copies["anchor"])

    def formula(v):
        moved, error = (pairs.t * (v - anchor), pairs.x_of(v) - pairs.x) if in_x else (v - anchor, v - pairs.target)
        return (pixel_mean(moved**2) / pixel_mean(error.detach().abs())).mean()

    assert_the_pull_is(policy, name, objective, experience, ledger, *pairs.loss_and_gradient(formula))


@pytest.mark.parametrize("name", CHAINS)
def test_the_pull_on_a_chain_in_float64(policy, name):
    objective, ledger = make(name, **ANCHOR), PassLedger()
    ledger.attach(policy.network)
    spread_copies(policy, objective)
    rollout = roll(policy, objective)
    experience = objective.prepare(PrepareContext(policy, rollout, ADVANTAGES, micro_batch_size=6, ledger=ledger))
    chosen, formula = objective.choose_steps(rollout), METHODS[name][2]
    level = {dance_sde: 0.3, cps: 0.8}.get(formula, 0.7)
    steps = Steps(rollout, None if chosen is None else chosen.tolist(), formula, level)
    with objective.copies["anchor"].swapped_into(policy):
        anchor = [mean for mean, _, _ in steps.distributions(steps.outputs(policy, 1.0))]

    def distance(outputs):
        each = zip(steps.distributions(outputs), anchor, strict=True)
        return torch.stack([((m - other) ** 2).mean() / (2 * s**2) for (m, _, s), other in each]).mean()

    expected = expected_gradient(policy, steps.outputs(policy, 1.0), distance)
    assert_the_pull_is(policy, name, objective, experience, ledger, *expected)


@pytest.mark.parametrize("name", ["V-GRPO", "AWM", "DiffusionNFT", "CRD", "Flow-GRPO"])
def test_the_anchor_moves_once_an_iteration_and_comes_back(policy, name):
    objective = make(name, **ANCHOR)
    objective.setup(policy)
    start = weights(policy)
    nudge(policy)
    objective.after_update(policy)
    assert all(torch.equal(tensor, start[key]) for key, tensor in objective.copies["anchor"].tensors.items())
    objective.after_iteration(policy)
    moved = weights(policy)
    for key, tensor in objective.copies["anchor"].tensors.items():
        expected = 0.3 * start[key].double() + 0.7 * moved[key].double()
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-6)
    assert_state_comes_back(policy, make(name, **ANCHOR), make(name, **ANCHOR))
    plain = make(name)
    plain.setup(policy)
    assert "anchor" not in plain.copies
    with pytest.raises(RuntimeError, match=r"copies of the weights \(.*anchor.*\) that differ"):
        plain.load_state_dict(objective.state_dict())


def test_the_anchor_has_the_guidance_of_training(policy):
    objective = FlowGRPO(RolloutSpec("flow_sde", 3, guidance=2.0), reference_guidance=1.0, **ANCHOR)
    objective.setup(policy)
    experience = prepare(policy, objective)
    assert objective.loss(policy, experience)[1]["anchor_distance"].max() < 1e-9  # the policy's own means
    assert objective.loss(policy, experience)[1]["kl"].min() > 1e-6


@pytest.mark.parametrize("name", ["V-GRPO", "Flow-GRPO"])
@pytest.mark.parametrize("half", [{"anchor_weight": 2.0}, {"anchor_decay": 0.3}])
def test_half_an_anchor_is_refused(name, half):
    assert make(name, **ANCHOR).check(SIZES) == make(name).check(SIZES) == []
    (line,) = make(name, **half).check(SIZES)
    assert "must be set together. Use values" in line


@dataclass(eq=False)
class OwnAnchor(VGRPO):
    """A method whose own copy has the name of the base's."""

    def copies_needed(self):
        return super().copies_needed() | {"anchor": Copy({"own": prediction}, decay=0.3)}


@pytest.mark.parametrize("options", [{}, ANCHOR])
def test_a_copy_of_a_method_does_not_replace_the_anchor(options):
    (line,) = OwnAnchor(RolloutSpec(steps=5), **options).check(SIZES)
    assert line == "OwnAnchor defines a copy named anchor, the name of anchor_weight's. Rename it."
