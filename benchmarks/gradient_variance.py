"""Variance of V-GRPO's gradient per forward-pass equivalent, at SD 3.5's latent size.

    python benchmarks/gradient_variance.py

The network is a small SD3, first trained on flow matching for ``--pretrain`` steps, so that its predictions depend on
the noisy latent. An image is a Gaussian latent of shape (16, 64, 64) with a smooth part; those of a group have
correlation 0.5. Its reward is the smooth part's projection on a fixed direction, plus half as much noise.

Each row is a setting of V-GRPO with ``sd3_pickscore_fast``'s times and group size. A draw is a new group with new
pairs, so that its spread includes that of images and rewards. Columns:

- equivalents of a group: sampling and training passes, those with gradient counted three times;
- groups to a signal-to-noise ratio of 1: the gradient's variance over its squared mean, both summed over the weights;
- the product, in thousand equivalents: the cost of a gradient whose noise is as long as its mean (less is better),
  with its standard error over ten parts of the draws left out in turn;
- cosine of the mean gradient with that of the first row, whose pairs are drawn for each image.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from shared_passes import CORRELATION, GROUP, SHAPE, small_network
from torch import Tensor, nn

from lit_vgrpo import VGRPO
from lit_vgrpo.core.probability_paths import RectifiedFlow
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.types import Conditioning, Rollout, RolloutSpec
from lit_vgrpo.objectives.base import PrepareContext
from lit_vgrpo.objectives.gradient_noise import GradientNoise

STEPS = 10
SETTINGS: dict[str, dict[str, Any]] = {
    "4 pairs of each image's own": {"share_pairs": "none"},
    "1 pair": {"num_mc_samples": 1},
    "2 pairs": {"num_mc_samples": 2},
    "4 pairs": {},
    "8 pairs": {"num_mc_samples": 8},
    "4 pairs, not stratified": {"stratify": False},
    "4 pairs, antithetic": {"antithetic": True},
    "1 pair, pure noise shared": {"num_mc_samples": 1, "share_passes": "pure_noise"},
    "2 pairs, pure noise shared (sd3_pickscore_fast)": {"num_mc_samples": 2, "share_passes": "pure_noise"},
    "4 pairs, pure noise shared": {"share_passes": "pure_noise"},
    "8 pairs, pure noise shared": {"num_mc_samples": 8, "share_passes": "pure_noise"},
    "2 pairs, all shared": {"num_mc_samples": 2, "share_passes": "group"},
    "4 pairs, all shared": {"share_passes": "group"},
    "8 pairs, all shared": {"num_mc_samples": 8, "share_passes": "group"},
    "4 pairs, noisiest 5 times": {"noisiest": 5},
    "4 pairs, pure noise shared, noisiest 3 below": {"share_passes": "pure_noise", "noisiest": 3},
    "4 pairs, the 12 images of extreme reward": {"trained": 12},
    "4 pairs, pure noise shared, the 12 of extreme reward": {"trained": 12, "share_passes": "pure_noise"},
    "4 pairs, pure noise shared, the 6 of extreme reward": {"trained": 6, "share_passes": "pure_noise"},
}


class Network(nn.Module):
    """A small SD3 transformer with the part of a policy that objectives use."""

    embeds_guidance = False
    path_kind = "flow"

    def __init__(self) -> None:
        super().__init__()
        self.path = RectifiedFlow()
        self.device = torch.device("cpu")
        self.network = small_network(patch_size=8)

    def forward(self, z: Tensor, t: Tensor, cond: Conditioning, guidance: float = 1.0) -> Tensor:
        return self.network(z, cond.tensors["tokens"], cond.tensors["pooled"], 1000 * t)[0]


def smooth(count: int, generator: torch.Generator) -> Tensor:
    """Return ``(count, 16, 64, 64)`` Gaussian fields of standard deviation 1 that vary over half the image."""
    coarse = torch.randn(count, 16, 2, 2, generator=generator)
    fields = nn.functional.interpolate(coarse, SHAPE[1:], mode="bilinear", align_corners=False)
    return fields / fields.std()


def draw_group(generator: torch.Generator, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Return a group's images ``(24, 16, 64, 64)`` and rewards ``(24,)``."""
    own, common = (0.8 * smooth(n, generator) + 0.6 * torch.randn(n, *SHAPE, generator=generator) for n in (GROUP, 1))
    images = math.sqrt(CORRELATION) * common + math.sqrt(1 - CORRELATION) * own
    seen = (images * direction).flatten(1).mean(dim=1)
    return images, seen / seen.std() + 0.5 * torch.randn(GROUP, generator=generator)


def pretrain(policy: Network, cond: Conditioning, steps: int) -> None:
    """Train the network on flow matching."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    for _ in range(steps):
        x, noise = draw_group(generator, torch.ones(SHAPE))[0][:12], torch.randn(12, *SHAPE, generator=generator)
        t = torch.rand(12, generator=generator)
        z = policy.path.interpolate(x, noise, t)
        loss = (policy(z, t, cond.expand(12)) - policy.path.target(x, noise, t)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def cost(objective: VGRPO, trained: int) -> int:
    """Return a group's forward-pass equivalents."""
    passes = objective.passes_per_image(Sizes(1, trained, micro_batch_size=trained))
    return round(GROUP * passes["rollout"] + 3 * trained * passes["update"])


def gradient(policy: Network, objective: VGRPO, rollout: Rollout, rewards: Tensor, trained: int) -> Tensor:
    """Return the gradient of the loss's mean over the trained images."""
    keep = torch.arange(GROUP)
    if trained < GROUP:  # half from each end, PODS's choice of largest variance
        order = rewards.argsort()
        keep = torch.cat([order[: trained // 2], order[-(trained // 2) :]]).sort().values
    advantages = rewards[keep] - rewards[keep].mean()
    advantages = advantages / advantages.std(correction=0)
    kept = replace(
        rollout,
        latents=rollout.latents[keep],
        rows=rollout.rows[keep],
        group_ids=rollout.group_ids[keep],
        image_ids=rollout.image_ids[keep],
    )
    experience = objective.prepare(PrepareContext(policy, kept, advantages, micro_batch_size=trained))  # type: ignore[arg-type]
    objective.before_update(policy, [experience])  # type: ignore[arg-type]
    loss = objective.loss(policy, experience)[0]  # type: ignore[arg-type]
    parts = torch.autograd.grad(loss.mean(), list(policy.parameters()), allow_unused=True)
    return torch.cat([part.flatten() for part in parts if part is not None])


def groups_to_unit_snr(draws: Tensor) -> float:
    """Return the variance of ``(R, K)`` draws over their squared mean, both unbiased and summed over K."""
    noise = GradientNoise()
    for draw in draws:
        noise.add([draw])
    return noise.snr() ** -2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=120, help="groups per setting")
    parser.add_argument("--pretrain", type=int, default=400, help="steps of flow matching")
    options = parser.parse_args()
    torch.manual_seed(0)
    policy = Network()
    cond = Conditioning({"tokens": torch.randn(1, 4, 32), "pooled": torch.randn(1, 32)})
    pretrain(policy, cond, options.pretrain)
    direction = smooth(1, torch.Generator().manual_seed(2))[0]
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(STEPS)
    ids = torch.arange(GROUP)
    first = None
    print("| setting | equivalents | groups to SNR 1 | thousand equivalents | cosine |\n|---|--:|--:|--:|--:|")
    for name, setting in SETTINGS.items():
        options_of = {key: value for key, value in setting.items() if key != "trained"}
        objective, trained = VGRPO(RolloutSpec("dpm++", STEPS), **options_of), setting.get("trained", GROUP)
        drawn = []
        for draw in range(options.draws):
            images, rewards = draw_group(torch.Generator().manual_seed(1000 + draw), direction)
            rollout = Rollout(
                latents=images,
                conditioning=cond,
                rows=torch.zeros(GROUP, dtype=torch.int64),
                group_ids=torch.zeros(GROUP, dtype=torch.int64),
                image_ids=ids,
                schedule=scheduler.sigmas[:-1],
                seed=0,
                iteration=draw,
                group_size=GROUP,
            )
            drawn.append(gradient(policy, objective, rollout, rewards, trained))
        table = torch.stack(drawn)
        equivalents, groups = cost(objective, trained), groups_to_unit_snr(table)
        first = table.mean(dim=0) if first is None else first
        parts = [groups_to_unit_snr(torch.cat([*table.chunk(10)[:k], *table.chunk(10)[k + 1 :]])) for k in range(10)]
        error = torch.tensor(parts).std(correction=0).item() * 9**0.5 * equivalents / 1000
        cosine = nn.functional.cosine_similarity(first, table.mean(dim=0), dim=0).item()
        price = f"{groups * equivalents / 1000:.2f} ± {error:.2f}"
        print(f"| {name} | {equivalents} | {groups:.1f} | {price} | {cosine:.3f} |", flush=True)


if __name__ == "__main__":
    main()
