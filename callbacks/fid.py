"""FID and KID of the held-out images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_vgrpo import metrics
from lit_vgrpo.core.gather import raise_together
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.training.trainer_internals import callbacks_of

if TYPE_CHECKING:
    from lit_vgrpo.module import VGRPOModule


@dataclass(eq=False)
class FID(L.Callback):
    """Logs ``heldout/fid@N`` and ``heldout/kid@N`` of N held-out images, with EMA weights if there are any.

    Each rank sums the features of its images in float64, so the result does not depend on the number of ranks. Both
    distances depend on N: compare only equal N. Images that are not finite are left out.

    Args:
        reference: Folder of real images, or the ``.npz`` file of their statistics that
            ``python -m lit_vgrpo.metrics`` writes.
        features: ``inception`` (clean-fid's), a TorchScript file, or a folder or hub name of a vision model of
            transformers.
        kid: Log KID too, which keeps the features of all images on every rank: 8 kB per image with Inception.
    """

    reference: str
    features: str = "inception"
    kid: bool = False

    def __post_init__(self) -> None:
        self.network = metrics.feature_network(self.features)
        self._statistics: metrics.Reference | None = None
        self._sums: tuple[metrics.FeatureMoments, metrics.KeptFeatures] | None = None

    def check(self) -> list[str]:
        """Return errors that can be found without loading weights, one line each."""
        return [*self.network.check(), *metrics.reference_errors(self.reference)]

    def setup(self, trainer: L.Trainer, pl_module: VGRPOModule, stage: str) -> None:
        errors = self.check()
        if pl_module.policy.num_frames is not None:
            errors.append("FID compares images, but the policy makes videos. Remove it from trainer.callbacks.")
        if not getattr(getattr(trainer, "datamodule", None), "has_heldout", False):
            errors.append("FID needs held-out prompts. Set data.heldout.")
        if any(other is not self for other in callbacks_of(trainer, FID)):
            errors.append("Two FID callbacks log the same metric. Remove one from trainer.callbacks.")
        # a file may be missing on one machine only, but all ranks must stop
        raise_together(ValueError(errors[0]) if errors else None)
        if self not in pl_module.evaluator.observers:
            pl_module.evaluator.observers.append(self)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._prepare(pl_module)

    on_validation_start = on_test_start = on_fit_start

    def start_over(self) -> None:
        """Discard the images of an interrupted evaluation."""
        self._sums = None

    def update(self, images: Tensor, batch: PromptBatch) -> None:
        """Add a batch of this rank's held-out images, ``(B, 3, H, W)`` in [0, 1], without those that are not finite."""
        features = self.network(images)
        is_finite = features.isfinite().all(dim=1)
        features, slots = features[is_finite], torch.tensor(batch.slots)[is_finite.cpu()].tolist()
        if self._sums is None:  # not before: tensors of Lightning's inference mode cannot be updated outside it
            self._sums = metrics.FeatureMoments(self.network.dimension), metrics.KeptFeatures(self.network.dimension)
        moments, kept = self._sums
        moments.update(features)
        if self.kid:
            kept.add(features, slots)

    def compute(self, module: L.LightningModule) -> dict[str, float]:
        """Return the distances of this evaluation's images, the same on every rank."""
        reference = self._prepare(module)
        assert self._sums is not None
        (moments, kept), self._sums = self._sums, None
        moments.add_up_ranks()
        count, dimension = moments.count, self.network.dimension
        if count <= dimension:
            rank_zero_warn(f"FID of {count} images with {dimension} features is biased upwards. Use kid=true.")
        distance = metrics.frechet_distance(*moments.mean_and_cov(), reference.mean, reference.cov)
        values = {f"heldout/fid@{count}": distance}
        if self.kid:
            assert reference.features is not None
            device = module.device if module.device.type == "cuda" else torch.device("cpu")  # MPS has no float64
            values[f"heldout/kid@{count}"] = metrics.kernel_distance(kept.gathered().to(device), reference.features)
        return values

    def _prepare(self, module: L.LightningModule) -> metrics.Reference:
        """Load the network and the reference once, on all ranks together."""
        if self._statistics is None:
            self.network.to(module.device)
            self._statistics = metrics.reference_statistics(self.reference, self.network, keep_features=self.kid)
        return self._statistics
