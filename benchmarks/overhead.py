"""Measure where an iteration's time goes: the network, decoding, rewards, the optimizer, and everything else.

    python benchmarks/overhead.py                       # tiny_shapes, 30 iterations
    python benchmarks/overhead.py tiny_unet 20 data.group_size=32
    python benchmarks/overhead.py tiny_shapes 30 --out benchmarks/results/overhead.json

An iteration lasts from the start of one epoch to the start of the next: loggers, checkpoints, the EMA and Lightning's
loops are included. Evaluations, sample grids and the report, whose frequency the recipe sets, are listed separately.
The figures are means over iterations, without the first, which warms up. A phase's CPU time is that of the main
thread; the work of other threads, such as rewards that overlap with sampling, has a separate row. On a shared machine,
only the CPU time is meaningful.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_vgrpo.callbacks import Report, SampleGrid
from lit_vgrpo.callbacks.summary import peak_memory_bytes
from lit_vgrpo.launch.build import build
from lit_vgrpo.system.paths import write_atomically
from lit_vgrpo.training.checkpoint import RunCheckpoint

APART = ("evaluation", "sample grid", "report")
"""Phases that are not part of an iteration."""
REST, OTHER_THREADS = "everything else", "other threads"


def now() -> Tensor:
    """Wall time and this thread's CPU time in seconds."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return torch.tensor([time.perf_counter(), time.thread_time()], dtype=torch.float64)


class Stopwatch(L.Callback):
    """Divides an iteration's time among phases; within nested phases, the time is that of the innermost.

    Attributes:
        iterations: By phase, wall and CPU time of each iteration.
    """

    def __init__(self) -> None:
        self.iterations: list[dict[str, Tensor]] = []
        self._spent: dict[str, Tensor] = {}
        self._open: list[str] = []
        self._since, self._of_process = now(), time.process_time()

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        policy = pl_module.policy
        policy.network.register_forward_pre_hook(lambda *_: self._enter(f"forward, {pl_module.ledger.current_phase}"))
        policy.network.register_forward_hook(lambda *_: self._leave())
        for optimizer in trainer.optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._enter("optimizer step"))
            optimizer.register_step_post_hook(lambda *_: self._leave())
        self._time_calls(policy, "decode", "decode")
        self._time_calls(policy, "encode", "text encoders")
        self._time_calls(pl_module.objective, "prepare", "pairs and losses")
        self._time_calls(pl_module.objective, "loss", "pairs and losses")
        self._time_calls(pl_module, "backward", "backward")
        if pl_module.scores.queue is not None:
            self._time_calls(pl_module.scores.queue, "put", "reward")
            self._time_calls(pl_module.scores.queue, "take", "reward")
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, SampleGrid):
                self._time_calls(callback, "on_train_epoch_end", "sample grid")
            if isinstance(callback, Report):
                self._time_calls(callback, "on_train_epoch_start", "report")
            if isinstance(callback, RunCheckpoint):
                self._time_calls(callback, "on_train_epoch_end", "checkpoint")

    def _time_calls(self, owner: Any, name: str, phase: str) -> None:
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._enter(phase)
            try:
                return call(*args, **kwargs)
            finally:
                self._leave()

        setattr(owner, name, timed)

    def _enter(self, phase: str) -> None:
        self._charge()
        self._open.append(phase)

    def _leave(self) -> None:
        self._charge()
        self._open.pop()

    def _charge(self) -> None:
        """Add the time since the last call to the innermost phase, or to a phase of ``APART`` that contains it."""
        ends = now()
        phase = next((p for p in self._open if p in APART), self._open[-1] if self._open else REST)
        self._spent[phase] = self._spent.get(phase, torch.zeros(2, dtype=torch.float64)) + ends - self._since
        self._since = ends

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._end_iteration()

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._end_iteration()

    def _end_iteration(self) -> None:
        self._charge()
        of_threads = time.process_time() - self._of_process - float(sum(s[1] for s in self._spent.values()))
        self._spent[OTHER_THREADS] = torch.tensor([0.0, max(of_threads, 0.0)], dtype=torch.float64)
        self.iterations.append(self._spent)
        self._spent, self._of_process = {}, time.process_time()

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._enter("evaluation")

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._leave()


def _table(iterations: list[dict[str, Tensor]], clock: int) -> dict[str, Any]:
    """Return mean seconds per iteration by phase and in total, those of ``APART``, and shares outside of phases."""
    totals = Counter[str]()
    for spent in iterations:
        totals.update({name: float(seconds[clock]) for name, seconds in spent.items()})
    seconds = {name: value / len(iterations) for name, value in totals.items()}
    apart = {name: seconds.pop(name, 0.0) for name in APART}
    rest = {name: seconds.pop(name, 0.0) for name in (REST, OTHER_THREADS)}
    total = sum(seconds.values()) + sum(rest.values())
    network = sum(value for name, value in seconds.items() if name.startswith(("forward", "backward", "text")))
    known = network + seconds.get("decode", 0.0) + seconds.get("reward", 0.0) + rest[OTHER_THREADS]
    return {
        "seconds": seconds | rest,
        "iteration": total,
        "apart": apart,
        "outside": 1 - network / total,
        "overhead": 1 - known / total,
    }


def measure(recipe: str, iterations: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Return seconds per iteration by phase, the shares outside the network, and the peaks of memory in bytes."""
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        cli = build([recipe, *overrides, f"trainer.max_epochs={iterations + 1}", f"run_dir={folder}/run"])
        cli.trainer.callbacks.insert(0, watch)
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    measured = watch.iterations[2:]  # the time before the first iteration, and the first
    return {
        "recipe": recipe,
        "overrides": list(overrides),
        **_table(measured, 0),
        "cpu": _table(measured, 1),
        "peak_by_phase": dict(cli.model.ledger.memory.by_phase),
        "peak_memory_bytes": peak_memory_bytes(cli.trainer.strategy.root_device, cli.model.ledger.memory),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", default="tiny_shapes")
    parser.add_argument("iterations", nargs="?", type=int, default=30)
    parser.add_argument("overrides", nargs="*", help="options of the recipe")
    parser.add_argument("--out", type=Path, help="also write the figures to this file, as JSON")
    options = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    wall = measure(options.recipe, options.iterations, options.overrides)
    cpu = wall["cpu"]
    width = max(map(len, wall["seconds"]))
    print(f"{'':<{width}}         wall                 CPU")
    for name, seconds in wall["seconds"].items():
        of_cpu = cpu["seconds"][name]
        shares = seconds / wall["iteration"], of_cpu / cpu["iteration"]
        print(f"{name:<{width}}  {1e3 * seconds:7.1f} ms  {shares[0]:6.1%}  {1e3 * of_cpu:7.1f} ms  {shares[1]:6.1%}")
    print(f"{'iteration':<{width}}  {1e3 * wall['iteration']:7.1f} ms          {1e3 * cpu['iteration']:7.1f} ms")
    for name, seconds in wall["apart"].items():
        print(f"{name + ', apart':<{width}}  {1e3 * seconds:7.1f} ms          {1e3 * cpu['apart'][name]:7.1f} ms")
    for text, key in (("the network's passes", "outside"), ("network, decoding and rewards", "overhead")):
        print(f"outside {text}: {wall[key]:.1%} of wall time, {cpu[key]:.1%} of CPU time")
    if options.out is not None:
        write_atomically(options.out, json.dumps(wall, indent=2) + "\n")


if __name__ == "__main__":
    main()
