"""Diversity of the held-out images of one prompt."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lit_vgrpo.callbacks.divergence import finite_mean
from lit_vgrpo.core.gather import rows_of_all_ranks
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.metrics import diversity
from lit_vgrpo.metrics.features import FeatureNetwork, feature_network
from lit_vgrpo.module import VGRPOModule

PIXELS = "pixels"
SIDE = 32


class HeldOutDiversity:
    """Logs ``heldout/diversity``: the mean distance between two images of one prompt, over the held-out prompts.

    With ``pixels``, the distance is the root mean square difference of images in [0, 1], resized to 32 x 32 pixels; it
    measures layout and colour, not content. With a feature network, it is the cosine distance of features.

    Args:
        features: ``pixels``, or a feature network as for :class:`lit_vgrpo.callbacks.FID`.

    Attributes:
        of_prompts: diversity of each prompt at the last evaluation; NaN if fewer than two of its images are finite.
    """

    def __init__(self, features: str = PIXELS) -> None:
        self.network: FeatureNetwork | None = None if features == PIXELS else feature_network(features)
        self.of_prompts: list[float] = []
        self._features: list[Tensor] = []
        self._numbers: list[int] = []

    def check(self, images_per_prompt: int) -> list[str]:
        """Return errors that can be found without loading weights, one line each."""
        errors = [] if self.network is None else self.network.check()
        if images_per_prompt < 2:
            errors.append(
                f"data.heldout_images_per_prompt={images_per_prompt} gives no two images of a prompt to compare. "
                "Set data.heldout_images_per_prompt=4 or more, or leave diversity out."
            )
        return errors

    def start_over(self) -> None:
        """Discard the images of an interrupted evaluation."""
        self._features, self._numbers = [], []

    def update(self, images: Tensor, batch: PromptBatch) -> None:
        """Add a batch of this rank's images, ``(B, 3, H, W)`` in [0, 1]."""
        found = small_pixels(images) if self.network is None else self.network.to(images.device)(images)
        self._features.append(found.cpu())  # non-finite for a non-finite image
        self._numbers += batch.slots

    def compute(self, module: VGRPOModule) -> dict[str, float]:
        """Return the diversity of all ranks' images, the same on every rank, and discard the images."""
        each = module.trainer.datamodule.heldout_images_per_prompt  # type: ignore[attr-defined]
        features = rows_of_all_ranks(torch.cat(self._features))
        prompts = rows_of_all_ranks(torch.tensor(self._numbers) // each).tolist()
        self.start_over()
        sound = features.isfinite().all(1)
        kept = [prompt for prompt, is_sound in zip(prompts, sound.tolist(), strict=True) if is_sound]
        found = diversity(features[sound], kept, "euclidean" if self.network is None else "cosine")
        self.of_prompts = [found.get(prompt, math.nan) for prompt in sorted(set(prompts))]
        return {"heldout/diversity": finite_mean(self.of_prompts)}


def small_pixels(images: Tensor) -> Tensor:
    """Return images ``(B, 3, H, W)`` in [0, 1] as vectors ``(B, 3072)`` whose Euclidean distance is in [0, 1]."""
    small = torch.nn.functional.adaptive_avg_pool2d(images.float(), SIDE).flatten(1)
    return small / small.shape[1] ** 0.5
