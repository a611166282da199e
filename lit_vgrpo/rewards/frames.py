"""Image rewards on selected frames of a video."""

from __future__ import annotations

from typing import Annotated, Any

from torch import Tensor

from lit_vgrpo.core.ranges import Range, checked
from lit_vgrpo.rewards.base import Reward, called
from lit_vgrpo.rewards.function import RewardLike, as_reward


@checked
class Frames(Reward):
    """Mean score of an image reward over some frames of a video; without this, it scores every frame.

    Args:
        reward: The image reward.
        every: Score every n-th frame, starting with the first; null scores only the first.
    """

    takes_videos = True

    def __init__(self, reward: RewardLike, every: Annotated[int, Range(1, 1001)] | None = None) -> None:
        self.reward = as_reward(reward)
        self.combined = [self.reward]
        self.every = every
        self.name, self.concurrent = self.reward.name, self.reward.concurrent
        self.calls_at_once = self.reward.calls_at_once
        self.compares, self.differentiable = self.reward.compares, self.reward.differentiable

    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        scores = called(self.reward, self._chosen(images), prompts, rows)
        self.failure = self.reward.failure
        return scores

    def with_gradient(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        return called(self.reward, self._chosen(images), prompts, rows, self.reward.with_gradient)

    def _chosen(self, videos: Tensor) -> Tensor:
        return videos[:, :: self.every or videos.shape[1]]

    def found_at(self, key: str) -> None:
        super().found_at(key)
        self.reward.found_at(key)

    def prompt_error(self, prompt: str, row: dict[str, Any]) -> str | None:
        return self.reward.prompt_error(prompt, row)

    def take_counts(self) -> dict[str, float]:
        return self.reward.take_counts()
