"""Metrics of every iteration: rewards, policy statistics, costs and times."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.utilities import rank_zero_warn

from lit_vgrpo.core.advantages import mean_score, no_spread_share, small_spread_warning
from lit_vgrpo.core.gather import all_gather, all_gather_objects, image_ranks, sum_over_ranks
from lit_vgrpo.core.records import IterationRecord
from lit_vgrpo.errors import one_line
from lit_vgrpo.policies.meta import flops_per_image
from lit_vgrpo.rollout.scores import copying_warning
from lit_vgrpo.training.trainer_internals import log_row, show_in_bar

if TYPE_CHECKING:
    from lit_vgrpo.module import VGRPOModule


def _passes(module: VGRPOModule) -> tuple[int, int]:
    """Return the images of all training passes so far, over all ranks, without and with a backward pass."""
    counts = module.ledger.training_counts().values()
    return sum(count["without_grad"] for count in counts), sum(count["with_grad"] for count in counts)


class RewardLogger(L.Callback):
    """Logs one row of metrics per iteration: rewards (also by ``source``), ``policy``, ``cost``, ``time`` etc.

    It warns when every group's rewards are equal, so that no step is taken, and when a reward failed. It fails if an
    iteration ended before its last update.
    """

    def __init__(self) -> None:
        self._started = 0.0
        self._warned_of_copies = False
        self._flat = 0  # iterations without a spread
        self._flops: tuple[int, int] | None = None  # per image: a forward pass without and with backward
        self._peak_flops = 0  # of a device, per second
        self._passes = (0, 0)  # before the iteration, likewise

    def setup(self, trainer: L.Trainer, pl_module: VGRPOModule, stage: str) -> None:
        device, policy = trainer.strategy.root_device, pl_module.policy
        if stage != "fit" or device.type != "cuda" or policy.loaded:
            return
        self._peak_flops = get_available_flops(device, policy.dtype) or 0
        try:
            self._flops = flops_per_image(policy) if self._peak_flops else None
        except Exception as error:  # such as shapes that depend on values: a missing metric must not end a run
            rank_zero_warn(f"No model FLOPs utilisation: {one_line(error)}")

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: VGRPOModule, batch: Any, batch_idx: int) -> None:
        self._started = time.perf_counter()
        self._passes = _passes(pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: VGRPOModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        record = pl_module.record
        if record is None or pl_module.iteration is not None:
            return
        if not record.logged:  # else a checkpoint was saved after it
            record.logged = self._row(trainer, pl_module, record)
        log_row(trainer, record.logged)
        if "reward/mean" in record.logged:
            show_in_bar(trainer, "reward", record.logged["reward/mean"])

    def _row(self, trainer: L.Trainer, pl_module: VGRPOModule, record: IterationRecord) -> dict[str, float]:
        """Return the metrics of an iteration over all ranks."""
        seconds = time.perf_counter() - self._started
        local = self._local(record, seconds) | self._utilisation(pl_module, seconds)
        values = sum_over_ranks(torch.tensor([local[name] for name in sorted(local)])) / image_ranks(trainer)[1]
        metrics = dict(zip(sorted(local), values.tolist(), strict=True)) | self._global(pl_module, record)
        if pl_module.objective.needs_reward:
            metrics |= self._rewards(record, pl_module.objective.uses_advantages)
        metrics["cost/images_per_second_per_device"] = metrics["cost/images_per_second"] / trainer.world_size
        peaks = all_gather_objects(pl_module.ledger.memory.by_phase)
        for phase in sorted({phase for rank_peaks in peaks for phase in rank_peaks}):
            metrics[f"memory/{phase}_gb"] = max(rank_peaks.get(phase, 0) for rank_peaks in peaks) / 1e9
        return metrics

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        # Lightning takes any StopIteration, even a callback's, for the end of an iteration.
        record, number = pl_module.record, trainer.current_epoch + 1
        is_over = pl_module.is_resumed if record is None else record.iteration + 1 == number
        if pl_module.iteration is not None or not is_over:
            raise RuntimeError(f"Iteration {number} ended before its last update. Did a callback raise StopIteration?")

    def on_train_end(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        if self._flat > 1:
            rank_zero_warn(f"{self._flat} iterations had no reward spread in any group and took no step.")

    def _local(self, record: IterationRecord, seconds: float) -> dict[str, float]:
        """Return metrics of this rank's images, to be averaged over ranks."""
        values = {f"policy/{name}": value for name, value in record.means().items()}
        metrics: dict[str, float] = {}
        if values:  # one copy from the device for all of them
            device = next(iter(values.values())).device
            metrics = dict(zip(values, torch.stack([v.to(device) for v in values.values()]).tolist(), strict=True))
        metrics["cost/images_per_second"] = record.images / seconds
        metrics |= {f"time/{name}_s": value for name, value in record.seconds.items()}
        metrics["time/iteration_s"] = seconds
        return metrics

    def _utilisation(self, module: VGRPOModule, seconds: float) -> dict[str, float]:
        """Return this iteration's model FLOPs utilisation: its network passes' share of the device's peak."""
        if self._flops is None:
            return {}
        passes = [now - before for now, before in zip(_passes(module), self._passes, strict=True)]
        done = sum(number * cost for number, cost in zip(passes, self._flops, strict=True)) / module.trainer.world_size
        return {"cost/mfu": done / (seconds * self._peak_flops)}

    def _global(self, module: VGRPOModule, record: IterationRecord) -> dict[str, float]:
        """Return metrics that are the same on every rank."""
        metrics = {
            "policy/updates": float(record.updates),
            "cost/passes_per_image": module.ledger.training_passes() / module.ledger.images,
            "cost/images": float(module.ledger.images),
            "cost/train_s": module.ledger.stopwatch.wall_s,
            "cost/cpu_s": module.ledger.stopwatch.cpu_s,
        }
        if (before := record.before_first_step("ratio_deviation")) is not None:
            metrics["policy/ratio_deviation_before_update"] = float(all_gather(before.max()[None]).max())
        metrics |= record.diagnostics
        metrics |= {f"edit/{name}": float(values.nanmean()) for name, values in record.edits.items()}
        if record.edits and not self._warned_of_copies:
            warning = copying_warning(record.edits["copies"], record.iteration + 1)
            self._warned_of_copies = warning is not None
            if warning is not None:
                rank_zero_warn(warning)
        if module.ledger.decoded:
            metrics["cost/decoded_with_gradient"] = float(module.ledger.decoded)
        for phase, count in module.ledger.training_counts().items():
            metrics |= {f"passes/{phase}_{kind}": float(n) for kind, n in count.items() if n}
        return metrics | module.guard.metrics()

    def _rewards(self, record: IterationRecord, uses_advantages: bool) -> dict[str, float]:
        """Return metrics of the rewards over all ranks, and warn if they give no gradient or failed."""
        scored = record.rewards[~record.rewards.isnan()]
        self._flat += not record.has_advantage
        if not record.has_advantage and self._flat == 1:  # the others are counted at the end
            is_solved = record.iteration > 0 and len(scored.unique()) == 1
            rank_zero_warn(
                f"All {len(record.group_ids.unique())} groups have no reward spread at iteration {record.iteration + 1}"
                f", so no step is taken. The reward is constant ({float(scored.mean()):.4g}) within each group."
                + is_solved
                * " If it cannot be higher, the task is solved: end the run with Ctrl-C."
            )
        if uses_advantages and record.has_advantage and record.iteration == 0:
            small = small_spread_warning("The rewards of the first iteration", scored)
            if small is not None:
                rank_zero_warn(small)
        for name, message in record.errors.items():
            failed = f"{record.parts[name]['failed']:.0f} of {record.images} images of iteration {record.iteration + 1}"
            rank_zero_warn(f'Reward "{name}" failed for {failed}: {message}')
        metrics = {
            "reward/mean": mean_score(scored),
            "reward/std": float((scored - scored.mean()).square().mean().sqrt()),  # torch.std warns if there are none
            "reward/no_spread": no_spread_share(record.rewards, record.group_ids),
            "reward/failed": float(record.rewards.isnan().sum()),
        }
        for stage, parts in (("reward", record.parts), ("source", record.sources)):
            for name, values in parts.items():
                metrics |= {f"{stage}/{name}" + ("" if key == "mean" else f"/{key}"): v for key, v in values.items()}
        return metrics
