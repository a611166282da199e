"""Flow-GRPO's loss and gradient, with its variants, against float64."""

import itertools

import pytest
import torch
from chain_in_float64 import (
    Steps,
    assert_same_direction,
    between,
    cps,
    expected_gradient,
    flow_sde,
    gaussian,
    gradient,
    load_sd3,
    nudge,
    prepared,
)
from helpers import repeating
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import FlowGRPO


def negative_square(sample, mean, std):
    return -((sample - mean) ** 2).mean()


VARIANTS = {
    "plain": (RolloutSpec("flow_sde", 4), {}, flow_sde, gaussian),
    "guidance": (RolloutSpec("flow_sde", 4, guidance=3.0), {}, flow_sde, gaussian),
    "louder": (RolloutSpec("flow_sde", 4, noise_level=0.9), {}, flow_sde, gaussian),
    "cps": (RolloutSpec("cps", 4), {}, cps, negative_square),
    "guard": (RolloutSpec("flow_sde", 4), {"guard": True}, flow_sde, gaussian),
    "fast": (RolloutSpec("flow_sde", 6), {"fast": True}, flow_sde, gaussian),
}


ALL = [*itertools.product(VARIANTS, [0.0, 0.5], [None, 2])]
SHOWN = [*((name, 0.5, None) for name in VARIANTS), ("plain", 0.0, None), ("plain", 0.0, 2), ("plain", 0.5, 2)]


@pytest.mark.parametrize(("name", "kl_weight", "lora"), repeating(ALL, slow={*ALL} - {*SHOWN}))
def test_loss_and_gradient_in_float64(tiny_sd3, name, kl_weight, lora):
    spec, options, formula, density = VARIANTS[name]
    policy = load_sd3(tiny_sd3, lora_rank=lora)
    objective = FlowGRPO(spec, kl_weight=kl_weight, **options)
    rollout, experience = prepared(policy, objective)
    steps = Steps(rollout, formula=formula, level=spec.noise_level or 0.7)
    with torch.no_grad():
        old = steps.outputs(policy, spec.guidance)
    nudge(policy, 0.1 if lora else 0.02)
    shared = {"kl_weight": kl_weight, "density": density, "guard": objective.guard}
    outputs = steps.outputs(policy, spec.guidance)
    ratio = steps.loss(outputs.detach(), old, 1.0, **shared)[1]
    objective.clip = between(ratio)
    expected, direction = expected_gradient(
        policy, outputs, lambda outputs: steps.loss(outputs, old, objective.clip, **shared)[0]
    )
    loss, metrics = objective.loss(policy, experience)
    deviation = (ratio.view(6, -1) - 1).abs()
    outside = (deviation > objective.clip).double().mean(1)
    assert loss.item() == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert_same_direction(gradient(policy, loss), direction, 5e-3)
    torch.testing.assert_close(metrics["ratio_deviation"].double(), deviation.mean(1), rtol=1e-2, atol=1e-5)
    assert metrics["clip_fraction"].double().tolist() == pytest.approx(outside.tolist())
    assert ("kl" in metrics) == (kl_weight > 0)
    if kl_weight:
        assert metrics["kl"].min() > 0


def test_the_kl_is_zero_at_the_start(tiny_sd3):
    policy = load_sd3(tiny_sd3)
    objective = FlowGRPO(RolloutSpec("flow_sde", 4))
    _, experience = prepared(policy, objective)
    assert objective.loss(policy, experience)[1]["kl"].max() < 1e-9


def test_published_clips():
    assert FlowGRPO().clip == 1e-4
    assert FlowGRPO(RolloutSpec("cps")).clip == 1e-5
    assert FlowGRPO(RolloutSpec("cps"), clip=0.1).clip == 0.1
    spec = FlowGRPO().rollout
    assert (spec.solver, spec.steps, spec.guidance) == ("flow_sde", 10, 4.5)


@settings(deadline=None)
@given(steps=st.integers(2, 30), size=st.integers(1, 29), iteration=st.integers(0, 10**6))
def test_the_fast_window_is_whole_and_leaves_the_last_step(steps, size, iteration):
    objective = FlowGRPO(RolloutSpec("flow_sde", steps), fast=True, fast_window=min(size, steps - 1))
    first, stop = objective.rollout_spec(iteration).window
    assert first >= 0
    assert stop - first == min(size, steps - 1)
    assert stop <= steps - 1
    assert objective.rollout_spec(iteration) == objective.rollout_spec(iteration)
