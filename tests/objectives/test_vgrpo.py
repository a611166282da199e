"""V-GRPO against arithmetic in float64, on a small real pipeline."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from pair_methods import ADVANTAGES, GROUP, Pairs64, loss_and_gradient, pixel_mean, prepare
from policy_copies import load_copy

from lit_vgrpo.core.records import PassLedger
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import VGRPO, clipped_surrogate
from lit_vgrpo.policies import UNetPolicy

SIZES = Sizes(prompts_per_iteration=2, group_size=GROUP, micro_batch_size=6)


def prepared(policy, objective, **options):
    objective.setup(policy)
    return prepare(policy, objective, **options)


def nudge(policy, size=0.05):
    with torch.no_grad():
        for index, parameter in enumerate(trainable_parameters(policy).values()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
            parameter.add_(size * noise)


def in_float64(policy, experience):
    """l_ij from the paper's definition, in float64 but for the network, and the estimates of the clean latents."""
    pairs = Pairs64(policy, experience)
    with torch.no_grad():
        estimates = pairs.x_of(pairs.predict().double())
    error = estimates - pairs.x
    return (pixel_mean(error**2) / pixel_mean(error.abs())).numpy(), estimates.numpy()


def test_clipped_surrogate_equals_the_formula():
    log_ratio = torch.tensor([0.0, 0.2, 0.2, -0.2, -0.2])
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0])
    ratio, a = np.exp(log_ratio.double().numpy()), advantages.double().numpy()
    expected = np.minimum(ratio * a, np.clip(ratio, 0.9, 1.1) * a)
    np.testing.assert_allclose(clipped_surrogate(log_ratio, advantages, 0.1).numpy(), expected, rtol=1e-6)
    np.testing.assert_allclose(clipped_surrogate(log_ratio, advantages, None).numpy(), ratio * a, rtol=1e-6)


def test_loss_equals_the_paper_in_float64(policy):
    objective = VGRPO(RolloutSpec(steps=4), num_mc_samples=3, clip=0.05, kl_weight=0.3)
    experience = prepared(policy, objective, updates=2)
    old, old_estimates = in_float64(policy, experience)
    nudge(policy)
    new, estimates = in_float64(policy, experience)
    ratio = np.exp(old.mean(1) - new.mean(1))
    a = ADVANTAGES.double().numpy()
    gain = np.minimum(ratio * a, np.clip(ratio, 0.95, 1.05) * a)
    kl = ((estimates - old_estimates) ** 2).mean((2, 3, 4)).mean(1)
    expected = -(gain - 0.3 * kl).mean()
    loss, metrics = objective.loss(policy, experience)
    assert np.abs(ratio - 1).max() > 0.01
    assert loss.item() == pytest.approx(expected, rel=2e-4)
    np.testing.assert_allclose(metrics["surrogate"].numpy(), new.mean(1), rtol=1e-4)
    np.testing.assert_allclose(metrics["kl"].numpy(), kl, rtol=1e-3)
    assert metrics["clip_fraction"].tolist() == (np.abs(ratio - 1) > 0.05).astype(float).tolist()


def test_ratio_is_one_before_any_update(policy):
    experience = prepared(policy, VGRPO(RolloutSpec(steps=2)), updates=2, micro_batch_size=2)
    for micro in experience.micro_batches(2):
        _, metrics = VGRPO().loss(policy, micro)
        assert metrics["ratio_deviation"].max() == 0


def gradients(policy, objective, experience, micro_batch_size=6):
    return loss_and_gradient(policy, objective, experience.micro_batches(micro_batch_size))[1]


def test_the_on_policy_shortcut_has_the_same_gradient_and_no_old_passes(policy):
    objective, ledger = VGRPO(RolloutSpec(steps=2), num_mc_samples=2), PassLedger()
    ledger.attach(policy.network)
    short = prepared(policy, objective, updates=1, ledger=ledger)
    assert "old" not in ledger.counts
    full = prepared(policy, objective, updates=2, ledger=ledger)
    assert ledger.counts["old"] == {"with_grad": 0, "without_grad": 12}
    torch.testing.assert_close(
        gradients(policy, objective, short), gradients(policy, objective, full), rtol=1e-5, atol=1e-8
    )


def test_micro_batches_do_not_change_the_gradient(policy):
    objective = VGRPO(RolloutSpec(steps=2), num_mc_samples=2)
    experience = prepared(policy, objective)
    whole, cut = (gradients(policy, objective, experience, size) for size in (6, 2))
    torch.testing.assert_close(whole, cut, rtol=1e-4, atol=1e-7)


def test_zero_advantages_give_zero_gradient(policy):
    objective = VGRPO(RolloutSpec(steps=2))
    experience = prepared(policy, objective)
    experience.advantages = torch.zeros(6)
    assert gradients(policy, objective, experience).abs().max() == 0


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


def test_an_update_makes_good_images_likelier_and_bad_ones_less(policy):
    objective = VGRPO(RolloutSpec(steps=4), num_mc_samples=4)
    experience = prepared(policy, objective)
    before = objective.loss(policy, experience)[1]["surrogate"]
    optimizer = torch.optim.SGD(trainable_parameters(policy).values(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        objective.loss(policy, experience)[0].backward()
        optimizer.step()
    after = objective.loss(policy, experience)[1]["surrogate"]
    assert ((before - after) * ADVANTAGES).sum() > 0


def test_settings_without_effect_are_errors():
    assert "kl_weight=0.3 has no effect" in VGRPO(kl_weight=0.3).check(SIZES)[0]
    assert VGRPO(kl_weight=0.3).check(replace(SIZES, updates_per_iteration=2)) == []
