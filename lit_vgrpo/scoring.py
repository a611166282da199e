"""From latents to scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lit_vgrpo.policies.base import Policy
from lit_vgrpo.record import timed
from lit_vgrpo.rewards import RewardBatch
from lit_vgrpo.rewards.combine import Weighted


def decode_and_score(
    policy: Policy,
    reward: Weighted,
    latents: Tensor,
    prompts: Sequence[str],
    rows: Sequence[dict[str, Any]],
    seconds: dict[str, float],
) -> RewardBatch:
    """Score images one decoded batch at a time, so that pixels never exist for all of them.

    Args:
        latents: ``(B, C, h, w)``.
        prompts: one an image; so are ``rows``.
        seconds: the wall time of ``decode`` and ``reward`` is added here.
    """
    scored = []
    for start in range(0, len(latents), policy.decode_batch_size):
        part = slice(start, start + policy.decode_batch_size)
        with timed(seconds, "decode"):
            images = policy.decode(latents[part])
        with timed(seconds, "reward"):
            scored.append(reward.score(images, list(prompts[part]), list(rows[part])))
    return RewardBatch.joined(scored)
