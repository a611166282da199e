"""DDPO on eps- and v-networks: diffusers' ancestral DDIM step, and the loss in float64."""

import math

import pytest
import torch
from chain_in_float64 import ADVANTAGES, between, expected_gradient, gaussian, gradient, prepared
from pair_methods import assert_same_gradient, nudge
from policy_copies import load_copy

from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import DDPO
from lit_vgrpo.policies import UNetPolicy

STEPS = 5
KINDS = ["epsilon", "v_prediction"]


def load(unet_folder, prediction, **options):
    return load_copy(UNetPolicy, unet_folder(prediction), **options)


def outputs_of(policy, rollout, guidance):
    chain = rollout.trajectory
    images, steps = chain.log_probs.shape
    cond = rollout.conditioning.select(rollout.rows.repeat_interleave(steps))
    z, t = chain.states[:, :-1].flatten(0, 1), chain.times[:-1].repeat(images)
    return policy(z, t, cond, guidance)


def distributions(policy, rollout, outputs, prediction):
    """Mean and std of each step, from DDIM's formula with eta 1 in float64."""
    abar = torch.cat([torch.ones(1), policy.pipeline.scheduler.alphas_cumprod]).double()
    chain = rollout.trajectory
    steps = chain.log_probs.shape[1]
    k = (chain.times.double() * 1000).round().long()
    found = []
    for row, out in enumerate(outputs.double()):
        i, step = divmod(row, steps)
        z, now, then = chain.states[i, step].double(), abar[k[step]], abar[k[step + 1]]
        a, b = now.sqrt(), (1 - now).sqrt()
        x, eps = ((z - b * out) / a, out) if prediction == "epsilon" else (a * z - b * out, b * z + a * out)
        variance = (1 - then) / (1 - now) * (1 - now / then)
        found.append((then.sqrt() * x + (1 - then - variance).sqrt() * eps, math.sqrt(variance)))
    return found


@pytest.mark.parametrize("prediction", KINDS)
def test_the_chain_is_diffusers_ddim_with_eta_one(unet_folder, prediction):
    policy, guidance = load(unet_folder, prediction), 3.0
    objective = DDPO(RolloutSpec("ddim_sde", STEPS, guidance))
    rollout, _ = prepared(policy, objective)
    chain, scheduler = rollout.trajectory, policy.scheduler("ddim", STEPS)
    assert chain.log_probs.shape == (6, STEPS - 1)
    with torch.no_grad():
        outputs = outputs_of(policy, rollout, guidance).unflatten(0, (6, STEPS - 1))
    for k, timestep in enumerate(scheduler.timesteps[:-1]):
        z = chain.states[:, k]
        mean = scheduler.step(outputs[:, k], timestep, z, eta=1.0, variance_noise=torch.zeros_like(z)).prev_sample
        std = math.sqrt(scheduler._get_variance(timestep, timestep - 1000 // STEPS))
        exact = [gaussian(chain.states[i, k + 1].double(), mean[i].double(), std).item() for i in range(6)]
        torch.testing.assert_close(chain.log_probs[:, k].tolist(), exact, rtol=2e-3, atol=2e-3)
    # The last step goes to the clean latent, without noise.
    with torch.no_grad():
        z, t = chain.states[:, -1], chain.times[-1].expand(6)
        last = policy(z, t, rollout.conditioning.select(rollout.rows), guidance)
    end = scheduler.step(last, scheduler.timesteps[-1], z, eta=1.0, variance_noise=torch.zeros_like(z)).prev_sample
    torch.testing.assert_close(rollout.latents, end, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lora", [None, 2], ids=["full", "lora"])
@pytest.mark.parametrize("prediction", KINDS)
def test_loss_and_gradient_in_float64(unet_folder, prediction, lora):
    policy = load(unet_folder, prediction, lora_rank=lora)
    objective = DDPO(RolloutSpec("ddim_sde", STEPS), kl_weight=0.5)
    rollout, experience = prepared(policy, objective)
    assert objective.loss(policy, experience)[1]["ratio_deviation"].max() < 1e-5
    with torch.no_grad():
        old = outputs_of(policy, rollout, 1.0)
    nudge(policy, size=0.1 if lora else 0.01)
    ends = rollout.trajectory.states[:, 1:].flatten(0, 1).double()
    before = distributions(policy, rollout, old, prediction)
    old_log_probs = torch.stack([gaussian(end, *step) for end, step in zip(ends, before, strict=True)])
    a = ADVANTAGES.double().repeat_interleave(STEPS - 1)

    def ratio_of(steps):
        log_probs = torch.stack([gaussian(end, *step) for end, step in zip(ends, steps, strict=True)])
        return (log_probs - old_log_probs).exp()

    def in_float64(outputs):
        steps = distributions(policy, rollout, outputs, prediction)
        ratio, clip = ratio_of(steps), objective.clip
        loss = -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a).mean()
        pairs = zip(steps, before, strict=True)
        kl = torch.stack([((mean - ref) ** 2).mean() / (2 * std**2) for (mean, std), (ref, _) in pairs])
        return loss + 0.5 * kl.mean()

    outputs = outputs_of(policy, rollout, 1.0)
    objective.clip = between(ratio_of(distributions(policy, rollout, outputs, prediction)))
    expected, direction = expected_gradient(policy, outputs, in_float64)
    loss, metrics = objective.loss(policy, experience)
    assert metrics["clip_fraction"].mean() == pytest.approx(0.5)
    assert loss.item() == pytest.approx(expected, rel=2e-3, abs=2e-4)
    assert_same_gradient(gradient(policy, loss), direction, 1e-2)
