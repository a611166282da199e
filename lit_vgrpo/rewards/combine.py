"""Several rewards as one, with the failures kept apart."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lit_vgrpo.rewards.base import Reward, RewardError, to_uint8

# would fall on another metric's key, such as reward/mean or heldout/reward
RESERVED_NAMES = frozenset({"mean", "std", "no_spread", "failed", "reward"})


@dataclass
class RewardBatch:
    """The scores of a batch.

    Args:
        total: shape ``(B,)``, float32: the weighted sum; NaN where a part of non-zero weight failed.
        parts: each reward's own scores by name, shape ``(B,)``, float32, NaN where it failed.
        ok: shape ``(B,)``, bool: where ``total`` is a number.
        errors: the last failure of each reward that failed somewhere.
    """

    total: Tensor
    parts: dict[str, Tensor]
    ok: Tensor
    errors: dict[str, str] = field(default_factory=dict)

    @classmethod
    def joined(cls, batches: list[RewardBatch]) -> RewardBatch:
        """Several batches of the same rewards as one, on the CPU."""
        return cls(
            total=torch.cat([batch.total.cpu() for batch in batches]),
            parts={name: torch.cat([batch.parts[name].cpu() for batch in batches]) for name in batches[0].parts},
            ok=torch.cat([batch.ok.cpu() for batch in batches]),
            errors={name: message for batch in batches for name, message in batch.errors.items()},
        )


class Weighted(Reward):
    """A weighted sum of rewards.

    Args:
        rewards: at least one.
        weights: one for each reward, not all zero; None for the mean. A reward of weight 0 is only logged.

    Raises:
        ValueError: no rewards, or weights that do not fit them.
        TypeError: something that is no :class:`Reward`.
    """

    name = "weighted"

    def __init__(self, rewards: list[Reward], weights: list[float] | None = None) -> None:
        if not rewards:
            raise ValueError("rewards=[] leaves nothing to score with. Give at least one reward.")
        for reward in rewards:
            if not isinstance(reward, Reward):
                raise TypeError(
                    f"{type(reward).__name__} is not a reward. Subclass lit_vgrpo.rewards.Reward and define __call__."
                )
        if weights is None:
            weights = [1 / len(rewards)] * len(rewards)
        if len(weights) != len(rewards):
            raise ValueError(
                f"weights={weights} does not fit {len(rewards)} rewards. Give one weight each, or null for the mean."
            )
        if not all(math.isfinite(weight) for weight in weights) or not any(weights):
            raise ValueError(f"weights={weights} cannot be summed. Use finite weights, at least one of them not 0.")
        self.rewards = list(rewards)
        self.weights = [float(weight) for weight in weights]
        self.part_names = _unique_names(self.rewards)

    @property
    def weight_of(self) -> dict[str, float]:
        """Each part's weight by its name."""
        return dict(zip(self.part_names, self.weights, strict=True))

    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        return self.score(images, prompts, rows).total

    def check(self) -> list[str]:
        return [fault for reward in self.rewards for fault in reward.check()]

    def load(self) -> None:
        for reward in self.rewards:
            reward.load()

    @torch.no_grad()
    def score(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> RewardBatch:
        """Score a batch with every reward.

        Images are rounded to uint8 once, before all rewards. Where a reward raises, its images are tried again one by
        one, so that only those that fail are lost. An image with NaN or infinite pixels fails everywhere.

        Args:
            images: shape ``(B, 3, H, W)``, float in [0, 1].
            prompts: the B prompts.
            rows: the B rows.

        Raises:
            RewardError: a reward returned something else than ``(B,)`` float32.
            ValueError: images, prompts and rows differ in number or shape.
        """
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images have the shape {tuple(images.shape)}. Rewards take (B, 3, H, W).")
        if not len(images) == len(prompts) == len(rows):
            raise ValueError(
                f"{len(images)} images, {len(prompts)} prompts and {len(rows)} rows. Give one of each for every image."
            )
        self.load()
        sound = images.isfinite().flatten(1).all(1).cpu()
        keep = [index for index, is_sound in enumerate(sound.tolist()) if is_sound]
        rounded = to_uint8(images[keep]).float() / 255
        total = torch.zeros(len(images), device=images.device)
        parts: dict[str, Tensor] = {}
        errors: dict[str, str] = {}
        for name, reward, weight in zip(self.part_names, self.rewards, self.weights, strict=True):
            part = torch.full((len(images),), math.nan, device=images.device)
            if len(keep) < len(images):
                errors[name] = f"{len(images) - len(keep)} of {len(images)} images hold NaN or infinite pixels"
            if keep:
                scores, error = _score(reward, rounded, [prompts[i] for i in keep], [rows[i] for i in keep])
                part[keep] = scores.to(part.device)
                if error is not None:
                    errors[name] = error
            parts[name] = part
            if weight:
                total = total + weight * part
        ok = total.isfinite()
        return RewardBatch(total.masked_fill(~ok, math.nan), parts, ok, errors)


def as_weighted(reward: Reward) -> Weighted:
    """A reward as a :class:`Weighted` of one; a ``Weighted`` as it is."""
    return reward if isinstance(reward, Weighted) else Weighted([reward])


def _score(reward: Reward, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> tuple[Tensor, str | None]:
    try:
        returned = reward(images, prompts, rows)
    except (MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        if len(images) == 1:
            return torch.full((1,), math.nan), _message(error)
        singles = [_score(reward, images[i : i + 1], prompts[i : i + 1], rows[i : i + 1]) for i in range(len(images))]
        messages = [message for _, message in singles if message is not None]
        return torch.cat([scores for scores, _ in singles]), messages[-1] if messages else None
    scores = _checked(reward, returned, len(images))
    bad = ~scores.isfinite()
    if not bad.any():
        return scores, None
    values = "NaN" if scores[bad].isnan().all() else "infinite or NaN scores"
    return scores.masked_fill(bad, math.nan), f"returned {values} for {int(bad.sum())} of {len(images)} images"


def _checked(reward: Reward, scores: object, batch: int) -> Tensor:
    if not isinstance(scores, Tensor):
        raise RewardError(
            f'Reward "{reward.name}" returned a {type(scores).__name__}. Return a float32 tensor of shape ({batch},).'
        )
    if tuple(scores.shape) != (batch,):
        raise RewardError(
            f'Reward "{reward.name}" returned the shape {tuple(scores.shape)} for {batch} images. '
            f"Return one score for each image, shape ({batch},)."
        )
    if scores.dtype != torch.float32:
        raise RewardError(f'Reward "{reward.name}" returned {scores.dtype}. Return float32: scores.float().')
    return scores.detach().cpu()


def _message(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, RewardError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _unique_names(rewards: list[Reward]) -> list[str]:
    names: list[str] = []
    for reward in rewards:
        base = getattr(reward, "name", "")
        if not isinstance(base, str) or not base:
            raise ValueError(f"{type(reward).__name__} has no name. Set its attribute name, the key of its score.")
        name, number = base, 2
        while name in names or name in RESERVED_NAMES:
            name, number = f"{base}_{number}", number + 1
        names.append(name)
    return names
