"""V-GRPO against arithmetic in float64, on a small real pipeline."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from pair_methods import ADVANTAGES, GROUP, Pairs64, loss_and_gradient, nudge, pixel_mean, prepare
from policy_copies import load_copy

from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import VGRPO
from lit_vgrpo.policies import UNetPolicy

SIZES = Sizes(prompts_per_iteration=2, group_size=GROUP, micro_batch_size=6)


def test_loss_and_gradient_equal_the_paper_in_float64(policy):
    objective = VGRPO(RolloutSpec(steps=4), num_mc_samples=3, clip=0.01, kl_weight=0.3)
    experience = prepare(policy, objective, updates=2)
    assert objective.loss(policy, experience)[1]["ratio_deviation"].max() == 0
    pairs, a, found = Pairs64(policy, experience), ADVANTAGES.double(), {}
    with torch.no_grad():
        old = pairs.predict().double()
    nudge(policy, size=0.05)

    def elbo(v):
        error = pairs.x_of(v) - pairs.x
        return (pixel_mean(error**2) / pixel_mean(error.detach().abs())).mean(1)

    def paper(v):
        ratio = (elbo(old) - elbo(v)).exp()
        kl = pixel_mean((pairs.x_of(v) - pairs.x_of(old)) ** 2).mean(1)
        found.update(surrogate=elbo(v), kl=kl, clip_fraction=((ratio - 1).abs() > 0.01).double())
        return (0.3 * kl - torch.minimum(ratio * a, ratio.clamp(0.99, 1.01) * a)).mean()

    pairs.assert_loss_is(objective, paper)
    metrics = objective.loss(policy, experience)[1]
    assert 0 < found["clip_fraction"].sum() < 6
    for name, expected in found.items():
        torch.testing.assert_close(metrics[name].double(), expected.detach(), rtol=1e-3, atol=1e-6)


def test_zero_advantages_give_zero_gradient(policy):
    objective = VGRPO(RolloutSpec(steps=2))
    experience = prepare(policy, objective, advantages=torch.zeros(6))
    assert loss_and_gradient(policy, objective, [experience])[1].abs().max() == 0


@pytest.mark.parametrize("space", ["x", "v", "eps"])
def test_naive_elbo_is_the_plain_error_of_its_space(policy, space):
    objective = VGRPO(RolloutSpec(steps=4), num_mc_samples=2, space=space, self_normalise=False)
    experience = prepare(policy, objective)
    pairs = Pairs64(policy, experience)
    with torch.no_grad():
        error = pairs.predict().double() - pairs.target
    expected = pixel_mean((error * {"x": pairs.t, "v": 1.0, "eps": 1 - pairs.t}[space]) ** 2).mean(1)
    np.testing.assert_allclose(objective.loss(policy, experience)[1]["surrogate"].numpy(), expected, rtol=1e-4)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_x_error_on_the_variance_preserving_path(unet_folder, prediction, cap):
    policy = load_copy(UNetPolicy, unet_folder(prediction))
    objective = VGRPO(RolloutSpec("ddim", steps=4), num_mc_samples=2, scale_cap=cap, self_normalise=False)
    experience = prepare(policy, objective)
    pairs = Pairs64(policy, experience)
    shrink = 1.0 if cap is None or prediction != "epsilon" else (cap * pairs.a / pairs.b).clamp(max=1)
    with torch.no_grad():
        error = shrink * (pairs.x_of(pairs.predict().double()) - pairs.x)
    found = objective.loss(policy, experience)[1]["surrogate"].numpy()
    np.testing.assert_allclose(found, pixel_mean(error**2).mean(1), rtol=2e-3)


def test_soft_clip_bounds_the_advantages(policy):
    objective = VGRPO(RolloutSpec(steps=2), soft_clip=0.5)
    torch.testing.assert_close(prepare(policy, objective).advantages, 0.5 * torch.tanh(ADVANTAGES / 0.5))


def test_settings_without_effect_are_errors():
    assert "kl_weight=0.3 has no effect" in VGRPO(kl_weight=0.3).check(SIZES)[0]
    assert VGRPO(kl_weight=0.3).check(replace(SIZES, updates_per_iteration=2)) == []
    assert "clip=0.01 has no effect with updates_per_iteration=1" in VGRPO(clip=0.01).check(SIZES)[0]
    assert VGRPO(clip=0.01).check(replace(SIZES, updates_per_iteration=2)) == []
    assert "reference_guidance=2.0 has no effect without" in VGRPO(reference_guidance=2.0).check(SIZES)[0]
    assert VGRPO(reference_guidance=2.0, kl_weight=0.1, kl_to="reference").check(SIZES) == []
    still = RolloutSpec("flow_sde", shared_noise=True, noise_level=0.0)
    assert (
        "shared_noise=true with noise_level=0.0 makes all images of a group identical" in VGRPO(still).check(SIZES)[0]
    )
