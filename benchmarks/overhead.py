"""Where the seconds of an iteration go: the network's own passes, and everything else.

    python benchmarks/overhead.py                       # tiny_shapes, 10 iterations
    python benchmarks/overhead.py tiny_unet 20 data.group_size=32

Prints a table, as wall time and as this process's CPU time, and writes ``overhead.json``. The first iteration warms up
and is left out. On a machine that others use too, only the CPU time says something.
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
from torch import Tensor

from lit_vgrpo.callbacks.summary import peak_memory_bytes
from lit_vgrpo.launch.build import build


def now() -> Tensor:
    """Wall and CPU time in seconds."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)


class Stopwatch(L.Callback):
    """Times the denoising network's forward and backward passes, and the rest of each iteration by name."""

    def __init__(self) -> None:
        self.iterations: list[dict[str, Tensor]] = []
        self._spent: dict[str, Tensor] = defaultdict(_nothing)
        self._marks: dict[str, Tensor] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        network = pl_module.policy.network
        network.register_forward_pre_hook(lambda *_: self._start("network"))
        network.register_forward_hook(lambda *_: self._stop("network", f"forward, {pl_module.ledger.current_phase}"))
        self._time_calls(pl_module.policy, "decode", "decode")
        self._time_calls(pl_module.scores.queue, "put", "reward")
        self._time_calls(pl_module.scores.queue, "take", "reward")

    def _time_calls(self, owner: Any, name: str, phase: str) -> None:
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._start(phase)
            try:
                return call(*args, **kwargs)
            finally:
                self._stop(phase, phase)

        setattr(owner, name, timed)

    def _start(self, mark: str) -> None:
        self._marks[mark] = now()

    def _stop(self, mark: str, name: str) -> None:
        self._spent[name] += now() - self._marks[mark]

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch.is_first:
            self._spent = defaultdict(_nothing)
            self._start("iteration")

    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: Any) -> None:
        self._start("backward")

    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._stop("backward", "backward")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not batch.is_last:
            return
        self._stop("iteration", "iteration")
        self.iterations.append(dict(self._spent))


def _nothing() -> Tensor:
    return torch.zeros(2, dtype=torch.float64)


def _table(iterations: list[dict[str, Tensor]], clock: int) -> tuple[dict[str, float], float, float]:
    """Return seconds an iteration by phase (medians), in all, and the share outside the network's passes."""
    medians = {name: statistics.median(float(spent[name][clock]) for spent in iterations) for name in iterations[0]}
    total = medians.pop("iteration")
    network = sum(value for name, value in medians.items() if "ward" in name and name != "reward")
    return {**medians, "everything else": total - sum(medians.values())}, total, 1 - network / total


def measure(recipe: str, iterations: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Seconds an iteration by phase (medians), the share outside the network, and the peak of memory in bytes."""
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        options = [f"trainer.max_epochs={iterations + 1}", "data.heldout=null", f"run_dir={folder}/run"]
        cli = build([recipe, *overrides, *options])
        # Only the training itself: no pictures, no export.
        cli.trainer.callbacks = [c for c in cli.trainer.callbacks if type(c).__name__ not in ("SampleGrid", "Export")]
        cli.trainer.callbacks.insert(0, watch)
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    wall, cpu = (_table(watch.iterations[1:], clock) for clock in (0, 1))
    return {
        "recipe": recipe,
        "overrides": list(overrides),
        "seconds": wall[0],
        "iteration": wall[1],
        "outside": wall[2],
        "cpu": {"seconds": cpu[0], "iteration": cpu[1], "outside": cpu[2]},
        "peak_memory_bytes": peak_memory_bytes(cli.trainer.strategy.root_device),
    }


def main(recipe: str = "tiny_shapes", iterations: str = "10", *overrides: str) -> None:
    result = measure(recipe, int(iterations), overrides)
    wall, cpu = result, result["cpu"]
    width = max(map(len, wall["seconds"]))
    print(f"{'':<{width}}       wall                CPU")
    for name, seconds in wall["seconds"].items():
        of_cpu = cpu["seconds"][name]
        shares = seconds / wall["iteration"], of_cpu / cpu["iteration"]
        print(f"{name:<{width}}  {seconds:7.3f} s  {shares[0]:6.1%}  {of_cpu:7.3f} s  {shares[1]:6.1%}")
    print(f"{'iteration':<{width}}  {wall['iteration']:7.3f} s          {cpu['iteration']:7.3f} s")
    print(f"outside the network's own passes: {wall['outside']:.1%} of wall time, {cpu['outside']:.1%} of CPU time")
    Path("overhead.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
