"""Four guidance scales: of the rollout, of training, of the reference and of the evaluation."""

import pytest
import torch
from helpers import make_module, repeating
from pair_methods import ADVANTAGES, prepare, roll
from policy_copies import load_copy

from lit_vgrpo import AWM, DGPO, VGRPO, DiffusionNFT, FlowGRPO, RolloutSpec, SD3Policy
from lit_vgrpo.core.records import PassLedger
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.types import Experience
from lit_vgrpo.objectives.base import PrepareContext

ODE, SDE = RolloutSpec(steps=4, guidance=2.0), RolloutSpec("flow_sde", steps=4, guidance=2.0)
GUIDED = {"training_guidance": 3.0, "reference_guidance": 4.0}
PAIRS = {
    "vgrpo": lambda **g: VGRPO(ODE, num_mc_samples=2, **{k: v for k, v in g.items() if k == "training_guidance"}),
    "nft": lambda **g: DiffusionNFT(ODE, **g),
    "dgpo": lambda **g: DGPO(ODE, num_times=2, noisiest=3, **g),
    "awm": lambda **g: AWM(ODE, num_times=2, **g),
}
CHAINS = {
    "flow_grpo": lambda **g: FlowGRPO(SDE, kl_weight=0.1, **g),
    "guard": lambda **g: FlowGRPO(SDE, kl_weight=0.1, guard=True, **g),
}
METHODS = PAIRS | CHAINS
REPEATS = ("nft", "dgpo", "guard")


class Listener(SD3Policy):
    """Notes the guidance of every pass by the phase of its ledger."""

    def __init__(self, checkpoint, embeds=False, **options):
        super().__init__(checkpoint, max_sequence_length=1, **options)
        self.embeds, self.ledger, self.heard = embeds, PassLedger(), {}

    @property
    def embeds_guidance(self):
        return self.embeds

    def forward(self, z, t, cond, guidance=1.0):
        self.heard.setdefault(self.ledger.current_phase, set()).add(guidance)
        return super().forward(z, t, cond, guidance)


def heard_in_an_iteration(policy, objective, updates=1):
    ledger = policy.ledger
    ledger.attach(policy.network)
    objective.setup(policy)
    with ledger.phase("rollout"):
        rollout = roll(policy, objective)
    experience = objective.prepare(
        PrepareContext(policy, rollout, ADVANTAGES, micro_batch_size=6, updates=updates, ledger=ledger)
    )
    objective.before_update(policy, [experience], ledger)
    _, metrics = objective.loss(policy, experience)
    return policy.heard, metrics


@pytest.mark.parametrize("guided", [GUIDED, {}], ids=["given", "default"])
@pytest.mark.parametrize("name", repeating(METHODS, slow=REPEATS))
def test_each_use_has_its_own_scale_and_by_default_only_a_chain_trains_with_the_rollouts(name, guided, tiny_sd3):
    policy, objective = Listener(str(tiny_sd3)).load(), METHODS[name](**guided)
    heard, _ = heard_in_an_iteration(policy, objective)
    by_default = 2.0 if name in CHAINS else 1.0
    trained, start = (3.0, 4.0) if guided else (by_default, by_default)
    assert heard["rollout"] == {2.0}
    assert heard["update"] == {trained}
    assert heard.get("reference", {start}) == {start}
    assert all(heard[copy] == {trained} for copy in heard.keys() & {"old", "ema"})
    assert guided or "old" not in heard or name in PAIRS
    passes = {phase: sum(count.values()) / 6 for phase, count in policy.ledger.counts.items()}
    assert passes == objective.passes_per_image(Sizes(2, 3, micro_batch_size=6), policy)


def test_an_embedded_scale_is_trained_as_it_was_sampled(tiny_sd3):
    policy, objective = Listener(str(tiny_sd3), embeds=True), METHODS["awm"]()
    assert objective.guidance_in("training", policy) == 2.0
    assert objective.guidance_in("reference", policy) == 2.0
    embedded, by_two_passes = (objective.passes_per_image(Sizes(2, 3), p) for p in (policy, None))
    assert embedded["rollout"] * 2 == by_two_passes["rollout"]


@pytest.mark.parametrize("name", repeating(CHAINS, slow=REPEATS))
def test_the_ratio_is_one_before_an_update_whatever_the_scale(name, tiny_sd3):
    policy, objective = Listener(str(tiny_sd3)).load(), METHODS[name](training_guidance=1.0)
    heard, metrics = heard_in_an_iteration(policy, objective)
    assert "old" not in heard  # the only update has the old policy's weights
    assert metrics["ratio_deviation"].max() == 0
    heard, metrics = heard_in_an_iteration(policy, objective, updates=2)
    assert heard["old"] == {1.0}
    assert metrics["ratio_deviation"].max() < 1e-6


@pytest.mark.slow
def test_the_evaluation_has_a_scale_of_its_own(tiny_sd3):
    def draw(evaluation):
        module = make_module(tiny_sd3, VGRPO(ODE, num_mc_samples=2), evaluation=evaluation)
        module.policy.load()
        return module.evaluator.generate(["a red circle on the left"], [0])

    assert torch.equal(draw(None), draw(ODE))
    assert not torch.allclose(draw(None), draw(RolloutSpec(steps=4, guidance=5.0)), atol=1e-4)


def test_an_experience_moves_with_only_the_rows_it_uses(tiny_sd3):
    policy = load_copy(SD3Policy, tiny_sd3, max_sequence_length=1)
    experience = prepare(policy, VGRPO(RolloutSpec(steps=2), num_mc_samples=2))
    assert experience.to(torch.device("cpu")) is experience
    moved = experience.select(slice(3, 6)).to(torch.device("meta"))
    assert isinstance(moved, Experience)
    assert {t.device.type for t in (moved.latents, moved.rows, moved.pairs.noise, moved.pairs.rows)} == {"meta"}
    assert len(experience.conditioning) == 2
    assert len(moved.conditioning) == len(moved.pairs.noise) == 1
