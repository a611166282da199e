"""V-GRPO against arithmetic in float64, on a small real pipeline."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from chain_in_float64 import nudge
from pair_methods import ADVANTAGES, GROUP, Pairs64, loss_and_gradient, pixel_mean, prepare
from policy_copies import load_copy

from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import VGRPO
from lit_vgrpo.policies import UNetPolicy

SIZES = Sizes(prompts_per_iteration=2, group_size=GROUP, micro_batch_size=6)


def prepared(policy, objective, **options):
    objective.setup(policy)
    return prepare(policy, objective, **options)


def in_float64(policy, experience):
    """l_ij from the paper's definition, in float64 but for the network, and the estimates of the clean latents."""
    pairs = Pairs64(policy, experience)
    with torch.no_grad():
        estimates = pairs.x_of(pairs.predict().double())
    error = estimates - pairs.x
    return (pixel_mean(error**2) / pixel_mean(error.abs())).numpy(), estimates.numpy()


def test_loss_equals_the_paper_in_float64(policy):
    objective = VGRPO(RolloutSpec(steps=4), num_mc_samples=3, clip=0.01, kl_weight=0.3)
    experience = prepared(policy, objective, updates=2)
    assert objective.loss(policy, experience)[1]["ratio_deviation"].max() == 0
    old, old_estimates = in_float64(policy, experience)
    nudge(policy, 0.05)
    new, estimates = in_float64(policy, experience)
    ratio = np.exp(old.mean(1) - new.mean(1))
    a = ADVANTAGES.double().numpy()
    gain = np.minimum(ratio * a, np.clip(ratio, 0.99, 1.01) * a)
    kl = ((estimates - old_estimates) ** 2).mean((2, 3, 4)).mean(1)
    expected = -(gain - 0.3 * kl).mean()
    loss, metrics = objective.loss(policy, experience)
    outside = np.abs(ratio - 1) > 0.01
    assert 0 < outside.sum() < 6
    assert loss.item() == pytest.approx(expected, rel=2e-4)
    np.testing.assert_allclose(metrics["surrogate"].numpy(), new.mean(1), rtol=1e-4)
    np.testing.assert_allclose(metrics["kl"].numpy(), kl, rtol=1e-3)
    assert metrics["clip_fraction"].tolist() == outside.astype(float).tolist()


def test_zero_advantages_give_zero_gradient(policy):
    objective = VGRPO(RolloutSpec(steps=2))
    experience = prepared(policy, objective, advantages=torch.zeros(6))
    assert loss_and_gradient(policy, objective, [experience])[1].abs().max() == 0


@pytest.mark.parametrize("space", ["x", "v", "eps"])
def test_naive_elbo_is_the_plain_error_of_its_space(policy, space):
    objective = VGRPO(RolloutSpec(steps=4), num_mc_samples=2, space=space, self_normalise=False)
    experience = prepared(policy, objective)
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
    experience = prepared(policy, objective)
    pairs = Pairs64(policy, experience)
    shrink = 1.0 if cap is None or prediction != "epsilon" else (cap * pairs.a / pairs.b).clamp(max=1)
    with torch.no_grad():
        error = shrink * (pairs.x_of(pairs.predict().double()) - pairs.x)
    found = objective.loss(policy, experience)[1]["surrogate"].numpy()
    np.testing.assert_allclose(found, pixel_mean(error**2).mean(1), rtol=2e-3)


def test_soft_clip_bounds_the_advantages(policy):
    objective = VGRPO(RolloutSpec(steps=2), soft_clip=0.5)
    torch.testing.assert_close(prepared(policy, objective).advantages, 0.5 * torch.tanh(ADVANTAGES / 0.5))


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
