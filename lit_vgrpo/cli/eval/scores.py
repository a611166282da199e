"""Per-image scores of the held-out images of a run's weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from lit_vgrpo.callbacks import FID
from lit_vgrpo.core.gather import objects_of_all_ranks
from lit_vgrpo.core.snapshots import Snapshot
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.data.datasets import HeldOutDataset, Rows
from lit_vgrpo.data.sampler import LocalSampler
from lit_vgrpo.errors import UserError
from lit_vgrpo.metrics.features import FeatureNetwork
from lit_vgrpo.module import VGRPOModule
from lit_vgrpo.objectives import VGRPO
from lit_vgrpo.rewards import Scores
from lit_vgrpo.training.saved_weights import REFERENCE, SavedWeights


@dataclass
class ImageScores:
    """Per-image scores of one set of weights, sorted by image number.

    Args:
        image_ids: numbers of the images, unique over all ranks.
        prompts: one prompt per image.
        total: weighted sum of the rewards, shape ``(N,)``, float32; NaN for failed images.
        parts: scores of each reward, shape ``(N,)``; NaN for failed images.
        errors: last error of each reward that failed for some image.
        features: shape ``(N, D)``, NaN for images that are not finite; ``None`` without a feature network.
        distances: metrics of all images together, such as ``fid@N``.
    """

    image_ids: list[int]
    prompts: list[str]
    total: Tensor
    parts: dict[str, Tensor]
    errors: dict[str, str]
    features: Tensor | None = None
    distances: dict[str, float] = field(default_factory=dict)

    @classmethod
    def joined(cls, shares: list[ImageScores]) -> ImageScores:
        """Join the shares of several batches or ranks, sorted by image number."""
        ids = [number for share in shares for number in share.image_ids]
        prompts = [prompt for share in shares for prompt in share.prompts]
        order = sorted(range(len(ids)), key=ids.__getitem__)
        features = [share.features for share in shares if share.features is not None]
        return cls(
            image_ids=[ids[i] for i in order],
            prompts=[prompts[i] for i in order],
            total=torch.cat([share.total for share in shares])[order],
            parts={name: torch.cat([share.parts[name] for share in shares])[order] for name in shares[0].parts},
            errors={name: message for share in shares for name, message in share.errors.items()},
            features=torch.cat(features)[order] if features else None,
        )


class HeldOutEvaluation(VGRPOModule):
    """Module that scores the held-out images of each set of weights, one set per validation step.

    Args:
        module: the run's module, whose policy, rewards, sampling and seed are used.
        rows: the held-out prompts.
        images_per_prompt: images per prompt.
        batch_size: images per batch and rank, at most.
        saved: the checkpoint.
        variants: the sets of weights by name.
        fids: FID callbacks, fed with the held-out images.
        network: feature network for the diversity; ``None`` leaves it out.
    """

    def __init__(
        self,
        module: VGRPOModule,
        rows: Rows,
        images_per_prompt: int,
        batch_size: int,
        saved: SavedWeights,
        variants: list[str],
        fids: list[FID],
        network: FeatureNetwork | None,
    ) -> None:
        spec = module.evaluation or module.objective.rollout_spec(0).as_ode()
        # VGRPO keeps no copies of the weights, which other objectives may, and which an evaluation does not need.
        super().__init__(
            module.policy,
            VGRPO(spec),
            module.reward,
            heldout_reward=module.heldout_reward,
            evaluation=spec,
            rollout_batch_size=module.rollout_batch_size,
            seed=module.seed,
        )
        self.rows = rows
        self.images_per_prompt = images_per_prompt
        self.batch_size = batch_size
        self.saved = saved
        self.variants = variants
        self.fids = fids
        self.feature_network = network
        self.scores: dict[str, ImageScores] = {}

    def setup(self, stage: str) -> None:
        own = str(self.saved.path), self.saved.progress
        if len(set(objects_of_all_ranks(own))) > 1:
            raise UserError(f"{self.saved.path} was replaced while the ranks read it. Run the evaluation again.")

    def val_dataloader(self) -> DataLoader[str]:
        variants: Any = self.variants  # a list has all that a loader asks of a dataset
        return DataLoader(variants, batch_size=None, sampler=LocalSampler(variants))

    def on_validation_start(self) -> None:
        for variant in self.variants:
            if variant != REFERENCE:
                self.saved.refuse_misfit(variant, self.policy)
        if self.feature_network is not None:
            self.feature_network.to(self.device)
        for fid in self.fids:
            try:
                fid.on_validation_start(self.trainer, self)
            except ValueError as error:
                raise UserError(str(error)) from error

    def validation_step(self, batch: str, batch_idx: int) -> None:  # type: ignore[override]
        with self._weights(batch):
            own = ImageScores.joined([self._scored(images) for images in self._batches(batch)])
            distances = {name: value for fid in self.fids for name, value in fid.compute(self).items()}
        self.scores[batch] = ImageScores.joined(objects_of_all_ranks(own))
        self.scores[batch].distances = {name.removeprefix("heldout/"): value for name, value in distances.items()}

    def on_validation_epoch_end(self) -> None:
        """Nothing to log: the scores are the result."""

    def _batches(self, variant: str) -> Iterator[PromptBatch]:
        dataset = HeldOutDataset(
            self.rows, self.images_per_prompt, self.batch_size, self.trainer.world_size, self.global_rank
        )
        quiet = not (self.trainer.is_global_zero and sys.stderr.isatty())
        yield from tqdm((dataset[i] for i in range(len(dataset))), variant, len(dataset), leave=False, disable=quiet)

    def _scored(self, batch: PromptBatch) -> ImageScores:
        images = self.generate_batch(batch)
        for fid in self.fids:
            fid.update(images, batch)
        scores = Scores.joined([self.observed.score(images, batch.prompts, batch.rows)])
        features = None if self.feature_network is None else self.feature_network(images).cpu()
        return ImageScores(batch.slots, batch.prompts, scores.total, scores.parts, scores.errors, features)

    @contextmanager
    def _weights(self, variant: str) -> Iterator[None]:
        if variant == REFERENCE:  # what the policy was loaded with
            yield
            return
        copy = Snapshot(self.policy, device="cpu")
        copy.load_state_dict(self.saved.tensors[variant])
        with copy.swapped_into(self.policy):
            yield
