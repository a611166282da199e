"""Scores on a benchmark's prompts while a run trains."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor

from lit_vgrpo.core.gather import image_ranks
from lit_vgrpo.core.ranges import Count, checked
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.data.benchmark import read_benchmark
from lit_vgrpo.data.benchmark_prompts import TASK, read_rows
from lit_vgrpo.data.datasets import HeldOutDataset
from lit_vgrpo.system.paths import resolve_path
from lit_vgrpo.training.evaluation import Evaluator
from lit_vgrpo.training.trainer_internals import callbacks_of

if TYPE_CHECKING:
    from lit_vgrpo.module import VGRPOModule


@checked
class Benchmark(L.Callback):
    """Logs ``heldout/NAME/overall`` and ``heldout/NAME/TASK`` of a subset of a benchmark at every held-out evaluation.

    The images have the size and sampling settings of the run's evaluation, start from the same noise every time, and
    are generated with EMA weights if there are any, one for each prompt. Compare the values only within a run; for
    values comparable to a paper's, use ``lightning eval RUN --benchmark NAME``.

    Args:
        name: A shipped benchmark, or a YAML file in the same format.
        prompts: Number of prompts, taken from the tasks in turn.
        prompt_file: Local copy of the prompt file, or a folder of several; null uses the hub's cache.
        pictures: Folder of the pictures that the benchmark edits.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(
        self, name: str, prompts: Count = 64, prompt_file: str | None = None, pictures: str | None = None
    ) -> None:
        self.benchmark = read_benchmark(name).model_copy(update={"limit": prompts})
        self.prompt_file, self.pictures = prompt_file, pictures
        self._evaluator: Evaluator | None = None

    def setup(self, trainer: L.Trainer, pl_module: VGRPOModule, stage: str) -> None:
        name = self.benchmark.name
        if any(other is not self and other.benchmark.name == name for other in callbacks_of(trainer, Benchmark)):
            raise ValueError(f"Two Benchmark callbacks log heldout/{name}. Remove one from trainer.callbacks.")
        if self in pl_module.evaluator.observers:
            return
        benchmark = self.benchmark
        if benchmark.prompts.picture is not None and pl_module.policy.image_size is not None:
            height, width = pl_module.policy.image_size
            benchmark = benchmark.model_copy(update={"height": height, "width": width})
        places = [None if text is None else resolve_path(text) for text in (self.prompt_file, self.pictures)]
        self.rows = read_rows(benchmark, *places)
        self.reward = benchmark.build_reward()
        for error in self.reward.check():
            raise ValueError(error)
        pl_module.evaluator.observers.append(self)

    def update(self, images: Tensor, batch: PromptBatch) -> None:
        """Do nothing: the benchmark samples other images."""

    def compute(self, module: VGRPOModule) -> dict[str, float]:
        """Return the means over all ranks' images, the same on every rank; called in every held-out evaluation."""
        run, trainer = module.evaluator, module.trainer
        if self._evaluator is None or self._evaluator.ledger is not run.ledger:  # of another module
            options: dict[str, Any] = {"spec": run.spec, "batch_size": run.batch_size, "ledger": run.ledger}
            self._evaluator = Evaluator(run.policy, self.reward, seed=0, **options)
            self._evaluator.observers.clear()
        self._evaluator.start_over()
        size = trainer.datamodule.eval_batch_size  # type: ignore[attr-defined]
        rank, ranks = image_ranks(trainer)
        share = HeldOutDataset(self.rows, 1, size, ranks, rank)
        for index in range(len(share)):
            self._evaluator.add(share[index])
        self._evaluator.means(module)
        tasks = [row[TASK] for row in self.rows]
        scorer, names = self.reward.part_names[0], list(dict.fromkeys(tasks))  # of the first scorer
        values = self._evaluator.per_image(f"heldout/{scorer}")
        assert values is not None
        task_means = [values[torch.tensor([own == name for own in tasks])].nanmean() for name in names]
        overall = torch.stack(task_means).mean() if self.benchmark.mean_of == "tasks" else values.nanmean()
        means = dict(zip(("overall", *names), map(float, (overall, *task_means)), strict=True))
        scale, prefix = self.benchmark.scale.get(scorer, 1.0), f"heldout/{self.benchmark.name}"
        return {f"{prefix}/{task}": scale * value for task, value in means.items() if math.isfinite(value)}
