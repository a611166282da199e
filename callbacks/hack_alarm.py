"""An alarm for reward hacking."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_vgrpo.callbacks.collapse import StopsRun
from lit_vgrpo.core.gather import raise_together
from lit_vgrpo.core.ranges import PositiveInt, Range, checked
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.data.module import PromptDataModule
from lit_vgrpo.metrics import KeptFeatures, diversity, feature_network
from lit_vgrpo.training.checkpoint import TRAINED, UNTRAINED

if TYPE_CHECKING:
    from lit_vgrpo.module import VGRPOModule

Action = Literal["warn", "stop"]
DIVERSITY, PIXELS = "heldout/diversity", "pixels"
SIDE = 32
STANDARD_ERRORS = 2.0
"""Changes below this many standard errors count as noise."""


@checked
class RewardHackAlarm(StopsRun):
    """Warns or stops when the trained reward rises while an untrained score falls.

    After every evaluation the trained reward is compared with an untrained one, or with the diversity of each prompt's
    images, on the same held-out images. (Training images are not comparable, since their prompts change.) The baseline
    is the evaluation where the untrained score was highest. A change counts if it exceeds both a share of the baseline
    and two standard errors of the per-image differences. The warning is given once, until the divergence ends.

    Args:
        metric: The held-out metric that must not fall while ``heldout/reward`` rises; null uses only diversity.
        patience: Consecutive evaluations.
        min_change: Minimum rise and fall, as a share of the previous value.
        diversity: ``pixels``, or a feature network as for FID; null leaves it out. See ``HeldOutDiversity``.
        min_diversity_drop: Minimum fall of the diversity, as a share; large, since learning to follow a prompt also
            makes its images more alike.
        action: Warn and continue, or stop the run.

    Raises:
        ValueError: A number or action is invalid, or there is nothing to compare.
    """

    def __init__(
        self,
        metric: str | None = UNTRAINED,
        patience: PositiveInt = 3,
        min_change: Annotated[float, Range(least=0, below=1)] = 0.02,
        diversity: str | None = None,
        min_diversity_drop: Annotated[float, Range(least=0, below=1)] = 0.5,
        action: Action = "warn",
    ) -> None:
        super().__init__()
        if metric == TRAINED:
            raise ValueError(f"metric={metric} is the trained reward. Use {UNTRAINED}.")
        if metric is None and diversity is None:
            raise ValueError(f"metric=null leaves nothing to compare. Use {UNTRAINED}, or diversity=pixels.")
        self.metric = metric
        self.patience = patience
        self.action = action
        self.diversity = None if diversity is None else HeldOutDiversity(diversity)
        self.watches: dict[str, Divergence] = {}
        if metric is not None:
            self.watches[metric] = Divergence(min_change, min_change)
        if diversity is not None:
            self.watches[DIVERSITY] = Divergence(min_change, min_diversity_drop)

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}{list(self.watches)}"

    def check(self, module: VGRPOModule, data: PromptDataModule) -> list[str]:
        """Return errors that can be found without loading weights, one line each."""
        errors = []
        if not data.has_heldout:
            errors.append("RewardHackAlarm needs held-out images, and there are none. Set data.heldout.")
        if self.metric == UNTRAINED and module.evaluator.untrained is None and self.diversity is None:
            errors.append(
                "RewardHackAlarm needs a reward that is not trained on. "
                "Add model.heldout_reward, such as PickScore, or the alarm's diversity=pixels."
            )
        return errors if self.diversity is None else [*errors, *self.diversity.check(data.heldout_images_per_prompt)]

    def setup(self, trainer: L.Trainer, pl_module: VGRPOModule, stage: str) -> None:
        errors = self.check(pl_module, trainer.datamodule)  # type: ignore[attr-defined]
        raise_together(ValueError(errors[0]) if errors else None)
        if self.diversity is not None and self.diversity not in pl_module.evaluator.observers:
            pl_module.evaluator.observers.append(self.diversity)

    def on_train_start(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        self._judge(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        if self.diversity is not None:
            self.diversity.start_over()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        self._judge(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {name: (watch.in_a_row, *(watch.reference or ())) for name, watch in self.watches.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, watch in self.watches.items():
            watch.in_a_row, *reference = state_dict[name]
            watch.reference = Measurement(*reference) if reference else None

    def _judge(self, trainer: L.Trainer, module: VGRPOModule) -> None:
        if not self.newest.is_new(module.evaluator.step, trainer.global_step):
            return
        warnings = []
        for name, watch in self.watches.items():
            if name not in module.evaluator.latest:
                if name != UNTRAINED:
                    rank_zero_warn(f"No evaluation measured {name}, which RewardHackAlarm needs.")
                continue
            watched = _values(module, name)
            if name == DIVERSITY and self.diversity is not None:
                watched = self.diversity.of_prompts
            now = Measurement(module.evaluator.history[-1].iteration, _values(module, TRAINED), watched)
            before = watch.reference
            if watch.add(now) == self.patience and before is not None:  # warn once
                warnings.append(
                    f"Reward hacking? Since iteration {before.iteration} {TRAINED} rose from "
                    f"{before.trained.nanmean():.4g} to {now.trained.nanmean():.4g} while {name} fell from "
                    f"{before.watched.nanmean():.4g} to {now.watched.nanmean():.4g}, down for {self.patience} "
                    "evaluations in a row."
                )
        warnings = trainer.strategy.broadcast(warnings)  # rank 0 decides for all
        if warnings and self.action == "stop":
            self.end_run(trainer, "reward hacking", " ".join(warnings))
        elif warnings:
            advice = "Look at the samples, or raise model.objective.kl_weight (V-GRPO: with kl_to=reference)."
            rank_zero_warn(f"{' '.join(warnings)} {advice}")


def _values(module: VGRPOModule, name: str) -> Tensor:
    """Return a held-out metric per image, or its mean if it is defined only for the whole set."""
    of_images = module.evaluator.of_images(name)
    return torch.tensor([module.evaluator.latest[name]]) if of_images is None else of_images


class Measurement(NamedTuple):
    """One evaluation: finished iterations, and values ``(N,)`` of the trained and of the watched score.

    There is one value per image or prompt, NaN if missing, or only the mean.
    """

    iteration: int
    trained: Tensor
    watched: Tensor


class Divergence:
    """Counter of consecutive evaluations with the trained score up and the watched score down.

    Both are compared value by value with the evaluation where the watched score was highest, since images always start
    from the same noise. A change counts if it exceeds both a share of the previous value and, if there are several
    values, two standard errors.

    Args:
        min_rise: Minimum rise of the trained score, as a share of its absolute value.
        min_drop: Minimum fall of the watched score, likewise.
    """

    def __init__(self, min_rise: float, min_drop: float) -> None:
        self.min_rise = min_rise
        self.min_drop = min_drop
        self.reference: Measurement | None = None
        self.in_a_row = 0

    def add(self, now: Measurement) -> int:
        """Add an evaluation and return the number of consecutive diverging ones."""
        if now.watched.isnan().all() or now.trained.isnan().all():
            return self.in_a_row  # no information
        best = self.reference
        # The held-out prompts may change when a run resumes; then values no longer correspond.
        is_alike = best is not None and [x.shape for x in best[1:]] == [x.shape for x in now[1:]]
        if best is None or not is_alike or now.watched.nanmean() > best.watched.nanmean():
            self.reference, self.in_a_row = now, 0
            return 0
        up = _rose(best.trained, now.trained, self.min_rise)
        down = _rose(-best.watched, -now.watched, self.min_drop)
        self.in_a_row = self.in_a_row + 1 if up and down else 0
        return self.in_a_row


def _rose(before: Tensor, after: Tensor, share: float) -> bool:
    """Return whether paired values rose by a share of their size and by two standard errors of their differences."""
    differences = (after - before).double()
    differences = differences[differences.isfinite()]
    error = float(differences.std()) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    needed = max(share * abs(float(before.nanmean())), STANDARD_ERRORS * error)
    return len(differences) > 0 and float(differences.mean()) > needed


class HeldOutDiversity:
    """Logs ``heldout/diversity``: the mean distance between two images of one prompt, over the held-out prompts.

    With ``pixels``, the distance is the root mean square difference of images in [0, 1], resized to 32 x 32 pixels; it
    measures layout and colour, not content. With a feature network, it is the cosine distance of features.

    Args:
        features: ``pixels``, or a feature network as for :class:`lit_vgrpo.callbacks.FID`.

    Attributes:
        of_prompts: Diversity of each prompt at the last evaluation; NaN if fewer than two of its images are finite.
    """

    def __init__(self, features: str = PIXELS) -> None:
        self.network = None if features == PIXELS else feature_network(features)
        self.of_prompts = torch.zeros(0)
        self.start_over()

    def check(self, images_per_prompt: int) -> list[str]:
        """Return errors that can be found without loading weights, one line each."""
        errors = [] if self.network is None else self.network.check()
        if images_per_prompt < 2:
            errors.append("The diversity needs several images. Set data.heldout_images_per_prompt=4 or more.")
        return errors

    def start_over(self) -> None:
        """Discard the images of an interrupted evaluation."""
        self._kept: KeptFeatures | None = None

    def update(self, images: Tensor, batch: PromptBatch) -> None:
        """Add a batch of this rank's images, ``(B, 3, H, W)`` in [0, 1]."""
        found = small_pixels(images) if self.network is None else self.network.to(images.device)(images)
        self._kept = self._kept or KeptFeatures(found.shape[1])
        self._kept.add(found, batch.slots)  # non-finite for a non-finite image

    def compute(self, module: Any) -> dict[str, float]:
        """Return the diversity of all ranks' images, the same on every rank, and discard the images."""
        assert self._kept is not None
        features = self._kept.gathered()
        self.start_over()
        prompts = torch.arange(len(features)) // module.trainer.datamodule.heldout_images_per_prompt
        is_finite = features.isfinite().all(1)
        found = diversity(
            features[is_finite], prompts[is_finite].tolist(), "euclidean" if self.network is None else "cosine"
        )
        self.of_prompts = torch.tensor([found.get(prompt, torch.nan) for prompt in prompts.unique().tolist()])
        return {DIVERSITY: float(self.of_prompts.nanmean())}


def small_pixels(images: Tensor) -> Tensor:
    """Return images ``(B, 3, H, W)`` in [0, 1] as vectors ``(B, 3072)`` whose Euclidean distance is in [0, 1]."""
    small = torch.nn.functional.adaptive_avg_pool2d(images.float(), SIDE).flatten(1)
    return small / small.shape[1] ** 0.5
