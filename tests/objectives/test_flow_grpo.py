"""Flow-GRPO's loss and gradient, with its variants, against float64."""

import pytest
import torch
from chain_in_float64 import (
    Steps,
    between,
    cps,
    dance_sde,
    expected_gradient,
    flow_sde,
    gaussian,
    gradient,
    load_sd3,
    prepared,
)
from helpers import make_module
from hypothesis import given, settings
from hypothesis import strategies as st
from pair_methods import assert_same_gradient, loss_and_gradient, nudge

from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.solvers import DEFAULT_NOISE
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import DanceGRPO, FlowGRPO, MixGRPO


def negative_square(sample, mean, std):
    return -((sample - mean) ** 2).mean()


FLOW, MIX = RolloutSpec("flow_sde", 4), RolloutSpec("flow_sde", 7)
VARIANTS = {
    # a method, and the formula and noise level of its steps
    "plain": (lambda: FlowGRPO(FLOW, kl_weight=0.5), flow_sde, 0.7),
    "no KL": (lambda: FlowGRPO(FLOW, kl_weight=0.0), flow_sde, 0.7),
    "LoRA": (lambda: FlowGRPO(FLOW, kl_weight=0.5), flow_sde, 0.7),
    "guidance": (lambda: FlowGRPO(RolloutSpec("flow_sde", 4, guidance=3.0), kl_weight=0.5), flow_sde, 0.7),
    "louder": (lambda: FlowGRPO(RolloutSpec("flow_sde", 4, noise_level=0.9), kl_weight=0.5), flow_sde, 0.9),
    "cps": (lambda: FlowGRPO(RolloutSpec("cps", 4), kl_weight=0.5), cps, 0.8),
    "guard": (lambda: FlowGRPO(FLOW, kl_weight=0.5, guard=True), flow_sde, 0.7),
    "fast": (lambda: FlowGRPO(RolloutSpec("flow_sde", 6), kl_weight=0.5, fast=True), flow_sde, 0.8),
    "dance": (lambda: DanceGRPO(RolloutSpec("dance_sde", 6, shared_noise=True)), dance_sde, 0.3),
    "mix": (lambda: MixGRPO(MIX, 2, window_interval=1), flow_sde, 0.7),
    "mix, flash": (lambda: MixGRPO(MIX, 2, window_interval=1, flash=True), flow_sde, 0.7),
    "mix, KL": (lambda: MixGRPO(MIX, 2, window_interval=1, kl_weight=0.5), flow_sde, 0.7),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradient_in_float64(tiny_sd3, name):
    make, formula, level = VARIANTS[name]
    policy, objective = load_sd3(tiny_sd3, lora_rank=2 if name == "LoRA" else None), make()
    rollout, experience = prepared(policy, objective, iteration=3 if "mix" in name else 0)
    chosen, guidance = objective.choose_steps(rollout), objective.spec.guidance
    steps = Steps(rollout, None if chosen is None else chosen.tolist(), formula, level)
    if "mix" in name:
        assert torch.equal(steps.chain.times, rollout.schedule[3:6])
    assert objective.loss(policy, experience)[1]["ratio_deviation"].max() < 1e-6
    with torch.no_grad():
        old = steps.outputs(policy, guidance)
    nudge(policy, size=0.1 if name == "LoRA" else 0.02)
    shared = {"kl_weight": objective.kl_weight, "density": negative_square if formula is cps else gaussian}
    shared["guard"] = name == "guard"
    outputs = steps.outputs(policy, guidance)
    ratio = steps.loss(outputs.detach(), old, 1.0, **shared)[1]
    objective.clip = between(ratio)
    expected, direction = expected_gradient(
        policy, outputs, lambda outputs: steps.loss(outputs, old, objective.clip, **shared)[0]
    )
    loss, metrics = objective.loss(policy, experience)
    deviation = (ratio.view(6, -1) - 1).abs()
    outside = (deviation > objective.clip).double().mean(1)
    assert loss.item() == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert_same_gradient(gradient(policy, loss), direction, 5e-3)
    assert_same_gradient(loss_and_gradient(policy, objective, experience.micro_batches(2))[1], direction, 5e-3)
    torch.testing.assert_close(metrics["ratio_deviation"].double(), deviation.mean(1), rtol=1e-2, atol=1e-5)
    assert metrics["clip_fraction"].double().tolist() == pytest.approx(outside.tolist())
    assert ("kl" in metrics) == (objective.kl_weight > 0)
    if objective.kl_weight:
        assert metrics["kl"].min() > 0


def test_published_settings():
    chain, fast, cps = FlowGRPO(), FlowGRPO(fast=True), FlowGRPO(RolloutSpec("cps"))
    assert chain.rollout == RolloutSpec("flow_sde", 10, guidance=4.5)
    assert fast.rollout == RolloutSpec("cps", 10, guidance=1.0, noise_level=0.8)
    assert DEFAULT_NOISE["cps"] == 0.8
    assert FlowGRPO(RolloutSpec("flow_sde"), fast=True).rollout.noise_level == 0.8
    assert [(m.clip, m.kl_weight) for m in (chain, fast, cps)] == [(1e-4, 0.04), (1e-5, 0.0), (1e-5, 0.0)]
    given = FlowGRPO(RolloutSpec("cps", noise_level=0.5), clip=0.1, kl_weight=0.2, fast=True)
    assert (given.clip, given.kl_weight, given.rollout.noise_level) == (0.1, 0.2, 0.5)


def places(objective, iterations=60):
    return [objective.rollout_spec(iteration).window for iteration in range(iterations)]


def test_the_fast_window_lies_in_the_first_half_or_in_the_given_range():
    assert {*places(FlowGRPO(fast=True))} == {(0, 3), (1, 4), (2, 5)}
    assert {*places(FlowGRPO(RolloutSpec("cps", 6), fast=True))} == {(0, 3)}
    assert {*places(FlowGRPO(fast=True, fast_range=(6, 9), fast_window=2))} == {(6, 8), (7, 9)}
    narrow = FlowGRPO(fast=True, fast_range=(4, 6))
    assert "fast_range=[4, 6] is too short for fast_window=3 steps" in narrow.check(Sizes(2, 2))[0]
    assert "would train on the last" in FlowGRPO(fast=True, fast_range=(0, 10)).check(Sizes(2, 2))[0]


@pytest.mark.parametrize("make", [lambda: FlowGRPO(fast=True), lambda: MixGRPO(window_strategy="random")])
def test_every_seed_draws_other_windows_and_every_rank_and_resume_the_same(make):
    def drawn(seed):
        objective = make()
        objective.connect(None, seed)
        return places(objective)

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_the_module_passes_its_seed_on(tiny_sd3):
    module = make_module(tiny_sd3, FlowGRPO(RolloutSpec("cps", 6), fast=True), seed=5)
    module.configure_model()
    assert module.objective.seed == 5


@settings(deadline=None)
@given(steps=st.integers(2, 30), size=st.integers(1, 29), iteration=st.integers(0, 10**6))
def test_the_fast_window_is_whole_and_leaves_the_last_step(steps, size, iteration):
    objective = FlowGRPO(RolloutSpec("flow_sde", steps), fast=True, fast_window=min(size, steps - 1))
    first, stop = objective.rollout_spec(iteration).window
    assert first >= 0
    assert stop - first == min(size, steps - 1)
    assert stop <= steps - 1
    assert stop <= max(steps // 2, size)
    assert objective.rollout_spec(iteration) == objective.rollout_spec(iteration)


FLAT = torch.tensor([1.0, 0.0, -1.0, 0.0, 0.0, 0.0])  # the second group has no spread, the first an image at its mean


def losses_of(policy, drop, images=range(6), all_ranks=None):
    objective = FlowGRPO(RolloutSpec("flow_sde", 4), kl_weight=0.5, drop_zero_advantages=drop)
    if all_ranks is not None:
        objective.all_ranks = all_ranks
    _, experience = prepared(policy, objective, advantages=FLAT)
    nudge(policy)
    loss, _ = objective.loss(policy, experience.select(torch.tensor(list(images))))
    found = loss.item(), gradient(policy, loss)
    nudge(policy, size=-0.02)
    return found


def test_images_without_advantage_leave_the_batch_and_its_mean(tiny_sd3):
    policy = load_sd3(tiny_sd3)
    assert FlowGRPO().drop_zero_advantages  # published
    assert not MixGRPO().drop_zero_advantages
    loss, direction = losses_of(policy, drop=True)
    expected, expected_direction = losses_of(policy, drop=False, images=[0, 2])
    assert loss == pytest.approx(expected, rel=1e-4)
    assert_same_gradient(direction, expected_direction, 1e-3)
    kept, _ = losses_of(policy, drop=False)
    assert abs(kept - loss) > 1e-3 * abs(loss)


def test_the_mean_is_that_of_the_images_kept_on_all_ranks(tiny_sd3):
    policy = load_sd3(tiny_sd3)
    alone, _ = losses_of(policy, drop=True)
    with_a_rank_that_keeps_all, _ = losses_of(
        policy, drop=True, all_ranks=lambda kept: torch.cat([kept, torch.ones(6)])
    )
    assert with_a_rank_that_keeps_all == pytest.approx(alone * (2 / 6) / (8 / 12), rel=1e-5)


@pytest.mark.parametrize(("options", "expected"), [({}, (1e-4, 0.04)), ({"fast": True}, (1e-5, 0.0))])
def test_null_switches_the_clip_and_the_kl_off(options, expected):
    published, plain = FlowGRPO(**options), FlowGRPO(**options, clip=None, kl_weight=None)
    assert (published.clip, published.kl_weight) == expected
    assert (plain.clip, plain.kl_weight) == (None, None)
