"""An alarm for reward hacking."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_vgrpo.callbacks.collapse import StopsRun
from lit_vgrpo.core.ranges import PositiveInt, checked
from lit_vgrpo.report.verdict import listed, signs
from lit_vgrpo.training.checkpoint import DISTANCES, TRAINED, UNTRAINED

if TYPE_CHECKING:
    from lit_vgrpo.module import VGRPOModule

Action = Literal["warn", "stop"]
IMAGES = "images"
MIN_CHANGE, STANDARD_ERRORS = 0.02, 2.0
"""Changes below this share of the previous value, or below this many standard errors, count as noise."""


@checked
class RewardHackAlarm(StopsRun):
    """Alarm for a trained reward that rises while the images degenerate or an untrained reward falls.

    At every held-out evaluation, while ``heldout/reward`` rises, it checks the images and an untrained reward:

    - Images are compared with those at the start: whether images of different prompts became alike (diversity across
      prompts), blurred or noisy (sharpness), faded or oversaturated (saturation). The limits are those of the report's
      "Did it cheat?". This needs no network and no other reward.
    - An untrained reward is compared with the evaluation where it was highest. A change of a score counts if it exceeds
      both a share of the baseline and two standard errors of the per-image differences.

    Training images are not comparable, since their prompts change. Each divergence is reported once.

    Args:
        metric: The held-out metric that must not fall while ``heldout/reward`` rises, if it is measured; null compares
            only the images.
        patience: Consecutive evaluations.
        action: Warn and continue, or stop the run.

    Attributes:
        warnings: The warnings so far, which ``summary.json`` and the report repeat.

    Raises:
        ValueError: A number or action is invalid, or the metric is the trained reward, FID or KID.
    """

    def __init__(self, metric: str | None = UNTRAINED, patience: PositiveInt = 2, action: Action = "warn") -> None:
        if metric == TRAINED:
            raise ValueError(f"metric={metric} is the trained reward. Use {UNTRAINED}.")
        if (metric or "").startswith(DISTANCES):
            raise ValueError(f"metric={metric} is better when lower. Use a reward such as {UNTRAINED}.")
        self.patience, self.action = patience, action
        self.watches = {name: Divergence() for name in (IMAGES, metric) if name is not None}
        self.warnings: list[str] = []
        self._start_over()

    def _start_over(self, fingerprint: int = 0) -> None:
        self.fingerprint = fingerprint  # of the last evaluation
        for watch in self.watches.values():
            watch.reference, watch.in_a_row = None, 0

    def setup(self, trainer: L.Trainer, pl_module: VGRPOModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and trainer.global_step == 0:  # before a checkpoint is restored
            self.warnings = []
            self._start_over()

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}{list(self.watches)}"

    @property
    def is_on(self) -> bool:
        """``True`` while a divergence lasts."""
        return any(watch.in_a_row >= self.patience for watch in self.watches.values())

    def on_train_start(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        self._judge(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        self._judge(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        watches = {name: (watch.in_a_row, *(watch.reference or ())) for name, watch in self.watches.items()}
        return {"watches": watches, "fingerprint": self.fingerprint, "warnings": self.warnings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.fingerprint, self.warnings = state_dict["fingerprint"], state_dict["warnings"]
        for name, watch in self.watches.items():
            watch.in_a_row, *reference = state_dict["watches"][name]
            watch.reference = Measurement(*reference) if reference else None

    def _judge(self, trainer: L.Trainer, module: VGRPOModule) -> None:
        if not (evaluations := self.news(trainer, module)):
            return
        if evaluations[-1].fingerprint != self.fingerprint:
            self._start_over(evaluations[-1].fingerprint)
        image_signs = signs(evaluations[0].metrics, evaluations[-1].metrics)
        warnings = []
        for name, watch in self.watches.items():
            if name == IMAGES:
                watched = torch.tensor([-float(bool(image_signs))])
            elif name in module.evaluator.latest:
                watched = _values(module, name)
            else:
                if name != UNTRAINED:
                    rank_zero_warn(f"No evaluation measured {name}, which RewardHackAlarm needs.")
                continue
            now = Measurement(module.evaluator.history[-1].iteration, _values(module, TRAINED), watched)
            before, count = watch.reference, watch.in_a_row
            if not count < watch.add(now) == self.patience or before is None:  # warn once
                continue
            fell = f"{name} fell from {before.watched.nanmean():.4g} to {now.watched.nanmean():.4g}"
            warnings.append(
                f"Reward hacking? Since iteration {before.iteration} {TRAINED} rose from "
                f"{before.trained.nanmean():.4g} to {now.trained.nanmean():.4g}, and "
                f"{listed(image_signs) if name == IMAGES else fell}, for {self.patience} evaluations in a row."
            )
        warnings = trainer.strategy.broadcast(warnings)  # rank 0 decides for all
        self.warnings += warnings
        if warnings and self.action == "stop":
            self.end_run(trainer, "reward hacking", " ".join(warnings))
        elif warnings:
            advice = "Look at the samples, or raise model.objective.kl_weight (V-GRPO: with kl_to=reference)."
            rank_zero_warn(f"{' '.join(warnings)} {advice}")


def _values(module: VGRPOModule, name: str) -> Tensor:
    """Return a held-out metric per image, or its mean if it is defined only for the whole set."""
    values = module.evaluator.per_image(name)
    return torch.tensor([module.evaluator.latest[name]]) if values is None else values


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
    from the same noise.
    """

    def __init__(self) -> None:
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
        diverges = _rose(best.trained, now.trained) and _rose(-best.watched, -now.watched)
        self.in_a_row = self.in_a_row + 1 if diverges else 0
        return self.in_a_row


def _rose(before: Tensor, after: Tensor) -> bool:
    """Return whether paired values rose by a share of their size and by two standard errors of their differences."""
    differences = (after - before).double()
    differences = differences[differences.isfinite()]
    error = float(differences.std()) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    needed = max(MIN_CHANGE * abs(float(before.nanmean())), STANDARD_ERRORS * error)
    return len(differences) > 0 and float(differences.mean()) > needed
