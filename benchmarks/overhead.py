"""Where the seconds of an iteration go: the network's own passes, and everything else.

    python benchmarks/overhead.py                       # tiny_shapes, 10 iterations
    python benchmarks/overhead.py tiny_unet 20 data.group_size=32

Prints a table and writes ``overhead.json`` beside the run's other files. The first iteration warms up and is left out.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lit_vgrpo.callbacks.summary import peak_memory_bytes
from lit_vgrpo.commands.run import build


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Stopwatch(L.Callback):
    """Times the denoising network's forward and backward passes, and the rest of each iteration by name."""

    def __init__(self) -> None:
        self.iterations: list[dict[str, float]] = []
        self._spent: dict[str, float] = defaultdict(float)
        self._marks: dict[str, float] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        network = pl_module.policy.network
        network.register_forward_pre_hook(lambda *_: self._start("network"))
        network.register_forward_hook(lambda *_: self._stop("network", f"forward, {pl_module.ledger._phase}"))

    def _start(self, mark: str) -> None:
        self._marks[mark] = now()

    def _stop(self, mark: str, name: str) -> None:
        self._spent[name] += now() - self._marks[mark]

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch.is_first:
            self._spent = defaultdict(float)
            self._start("iteration")

    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: Any) -> None:
        self._start("backward")

    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._stop("backward", "backward")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not batch.is_last:
            return
        self._stop("iteration", "iteration")
        for name in ("decode", "reward"):
            self._spent[name] = pl_module.record.seconds.get(name, 0.0)
        self.iterations.append(dict(self._spent))


def measure(recipe: str, iterations: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Seconds an iteration by phase (medians), those outside the network's passes, and the peak of memory in bytes."""
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        options = [f"trainer.max_epochs={iterations + 1}", "data.heldout=null", f"run_dir={folder}/run"]
        cli = build([recipe, *overrides, *options])
        # Only the training itself: no pictures, no export.
        cli.trainer.callbacks = [c for c in cli.trainer.callbacks if type(c).__name__ not in ("SampleGrid", "Export")]
        cli.trainer.callbacks.insert(0, watch)
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    counted = watch.iterations[1:]
    medians = {name: statistics.median(spent[name] for spent in counted) for name in counted[0]}
    total = medians.pop("iteration")
    network = sum(value for name, value in medians.items() if "ward" in name and name != "reward")
    return {
        "recipe": recipe,
        "overrides": list(overrides),
        "seconds": {**medians, "everything else": total - sum(medians.values())},
        "iteration": total,
        "outside": 1 - network / total,
        "peak_memory_bytes": peak_memory_bytes(cli.trainer.strategy.root_device),
    }


def main(recipe: str = "tiny_shapes", iterations: str = "10", *overrides: str) -> None:
    result = measure(recipe, int(iterations), overrides)
    rows, total = result["seconds"], result["iteration"]
    width = max(map(len, rows))
    for name, seconds in rows.items():
        print(f"{name:<{width}}  {seconds:7.3f} s  {seconds / total:6.1%}")
    print(f"{'iteration':<{width}}  {total:7.3f} s\noutside the network's own passes: {result['outside']:.1%}")
    Path("overhead.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
