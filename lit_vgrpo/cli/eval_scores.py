"""Per-image scores of the held-out images of a run's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pandas as pd
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_vgrpo.callbacks import FID
from lit_vgrpo.core.gather import all_gather_objects, count_ranks_of, image_ranks
from lit_vgrpo.core.snapshots import Snapshot
from lit_vgrpo.data import PromptDataModule
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.data.datasets import HeldOutDataset, LocalSampler, Rows
from lit_vgrpo.errors import UserError
from lit_vgrpo.metrics.features import FeatureNetwork
from lit_vgrpo.module import VGRPOModule
from lit_vgrpo.rewards import Scores, Weighted
from lit_vgrpo.system.process import bar
from lit_vgrpo.training.saved_weights import REFERENCE, SavedWeights, load_policy
from lit_vgrpo.training.strategies import precision_error


@dataclass
class ImageScores:
    """Per-image scores of one set of weights.

    Attributes:
        images: A row per image, sorted by ``image``, its number over all ranks: ``prompt``, ``reward``, the weighted
            sum, and each reward by its name; NaN for failed images.
        errors: Last error of each reward that failed for some image.
        features: Shape ``(N, D)``, NaN for images that are not finite; ``None`` without a feature network.
        distances: Metrics of all images together, such as ``fid@N``.
    """

    images: pd.DataFrame
    errors: dict[str, str] = field(default_factory=dict)
    features: Tensor | None = None
    distances: dict[str, float] = field(default_factory=dict)

    @classmethod
    def joined(cls, shares: list[ImageScores]) -> ImageScores:
        """Join the shares of several batches or ranks."""
        images = pd.concat([share.images for share in shares], ignore_index=True).sort_values("image")
        features = [share.features for share in shares if share.features is not None]
        return cls(
            images=images.reset_index(drop=True),
            errors={name: message for share in shares for name, message in share.errors.items()},
            features=torch.cat(features)[images.index.tolist()] if features else None,
        )


class HeldOutEvaluation(L.LightningModule):
    """Module that scores the held-out images of each set of weights, one set per validation step.

    Args:
        module: The run's module, whose policy, rewards, sampling and seed are used.
        data: The run's data module, for the images per prompt and the batch size.
        variants: The sets of weights by name.
        fids: FID callbacks, updated with the held-out images.
        network: Feature network for the diversity; ``None`` leaves it out.
    """

    def __init__(
        self,
        module: VGRPOModule,
        rows: Rows,
        data: PromptDataModule,
        saved: SavedWeights,
        variants: list[str],
        rewards: Weighted,
        fids: list[FID],
        network: FeatureNetwork | None,
    ) -> None:
        super().__init__()
        self.policy, self.evaluator, self.saved, self.variants = module.policy, module.evaluator, saved, variants
        self.rows, self.data, self.rewards, self.fids, self.feature_network = rows, data, rewards, fids, network
        self.scores: dict[str, ImageScores] = {}

    def configure_model(self) -> None:
        load_policy(self.policy)

    def setup(self, stage: str) -> None:
        count_ranks_of(self.trainer)
        if error := precision_error(self.trainer.strategy):
            raise UserError(error)
        path = self.saved.path
        if len(set(all_gather_objects((str(path), self.saved.progress)))) > 1:
            raise UserError(f"{path} was replaced while the ranks were reading it. Run the evaluation again.")

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
            fid.on_validation_start(self.trainer, self)

    def validation_step(self, batch: str, batch_idx: int) -> None:
        per_prompt, batch_size = self.data.heldout_images_per_prompt, self.data.eval_batch_size
        rank, ranks = image_ranks(self.trainer)
        dataset = HeldOutDataset(self.rows, per_prompt, batch_size, ranks, rank)
        with self._weights(batch), bar(f"Evaluating {batch}", total=dataset.images // ranks) as done:
            share = ImageScores.joined([self._scored(dataset[i], done) for i in range(len(dataset))])
            distances = {name: value for fid in self.fids for name, value in fid.compute(self).items()}
        self.scores[batch] = ImageScores.joined(all_gather_objects(share))
        self.scores[batch].distances = {name.removeprefix("heldout/"): value for name, value in distances.items()}

    def _scored(self, batch: PromptBatch, done: Any) -> ImageScores:
        images = self.evaluator.generate_batch(batch)
        for fid in self.fids:
            fid.update(images, batch)
        scores = Scores.joined([self.rewards.score(images, batch.prompts, batch.rows)])
        features = None if self.feature_network is None else self.feature_network(images).cpu()
        rewards = {name: part.double() for name, part in {"reward": scores.total, **scores.parts}.items()}
        done.update(len(batch.slots))
        table = pd.DataFrame({"prompt": batch.prompts, "image": batch.slots, **rewards})
        return ImageScores(table, scores.errors, features)

    @contextmanager
    def _weights(self, variant: str) -> Iterator[None]:
        if variant == REFERENCE:  # the policy was loaded with these
            yield
            return
        copy = Snapshot(self.policy, device="cpu")
        copy.load_state_dict(self.saved.tensors[variant])
        with copy.swapped_into(self.policy):
            yield
