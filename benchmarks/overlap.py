"""Measure the time saved by scoring images while the next ones are sampled: the same run with and without overlap.

    python benchmarks/overlap.py --out benchmarks/results/overlap.json   # a reward of 0.2 s per 32 images
    python benchmarks/overlap.py --ms 0 --batch-sizes 64
    python benchmarks/overlap.py --recipe tiny_ocr --ms -1 --batch-sizes 16 --out benchmarks/results/overlap_ocr.json

The reward waits, as one on another machine does, and uses no CPU; ``--ms -1`` keeps the recipe's. Runs with and without
overlap take turns in one process. The figures are medians over the iterations after the first and over the runs.
Scores and weights must be the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_vgrpo.launch.build import build
from lit_vgrpo.system.paths import write_atomically

PHASES = ("rollout", "decode", "reward", "reward_overlapped", "prepare")


def waiting(images: Tensor, prompts: list[str], rows: list[dict[str, Any]], ms: float) -> Tensor:
    """Return how much redder than blue images are, after some milliseconds per image."""
    time.sleep(len(prompts) * ms / 1000)
    return images[:, 0].mean((1, 2)) - images[:, 2].mean((1, 2))


class Clock(L.Callback):
    """Seconds of each iteration: in total, of CPU time in all threads, and by phase."""

    def __init__(self) -> None:
        self.iterations: list[dict[str, float]] = []
        self._started = (0.0, 0.0)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._started = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        wall, cpu = time.perf_counter() - self._started[0], time.process_time() - self._started[1]
        phases = {name: pl_module.record.seconds.get(name, 0.0) for name in PHASES}
        updates = wall - sum(phases[name] for name in PHASES if name != "reward_overlapped")
        self.iterations.append({"iteration": wall, "cpu": cpu, **phases, "updates": updates})


def run(options: argparse.Namespace, std: str, batch_size: int, overlap: bool) -> tuple[list[dict[str, float]], Tensor]:
    """Train, and return the iterations after the first, and the weights."""
    clock = Clock()
    settings = [
        f"trainer.max_epochs={options.iterations + 1}",
        *("trainer.callbacks=null", "trainer.enable_progress_bar=false", "data.heldout=null"),
        *(f"model.advantage_std={std}", f"model.rollout_batch_size={batch_size}"),
    ]
    if options.ms >= 0:
        reward = {"python": "overlap:waiting", "concurrent": True, "options": {"ms": options.ms}}
        weighted = {"class_path": "Weighted", "init_args": {"rewards": [reward]}}
        settings.append(f"model.reward={json.dumps(weighted)}")
    with tempfile.TemporaryDirectory() as folder:
        cli = build([options.recipe, *settings, f"run_dir={folder}/run"])
        cli.model.reward.overlap = overlap
        cli.trainer.callbacks.insert(0, clock)
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    weights = [p.detach().flatten() for p in cli.model.policy.parameters() if p.requires_grad]
    return clock.iterations[1:], torch.cat(weights)


def compared(options: argparse.Namespace, std: str, batch_size: int) -> dict[str, Any]:
    """Return the medians of the runs with and without overlap, in seconds, and whether their weights are the same."""
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    weights = []
    for number in range(options.pairs):
        for overlap in (True, False) if number % 2 else (False, True):
            iterations, trained = run(options, std, batch_size, overlap)
            found[overlap] += iterations
            weights.append(trained)
    plain, together = (
        {name: statistics.median(one[name] for one in found[overlap]) for name in found[overlap][0]}
        for overlap in (False, True)
    )
    return {
        "advantage_std": std,
        "rollout_batch_size": batch_size,
        "without": plain,
        "with": together,
        "hidden": max(0.0, together["reward_overlapped"] / (together["reward"] + together["reward_overlapped"])),
        "equal": all(torch.equal(weights[0], other) for other in weights),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="tiny_shapes")
    parser.add_argument("--ms", type=float, default=6.25, help="milliseconds per image; -1 keeps the recipe's reward")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 16], help="rollout_batch_size")
    parser.add_argument("--stds", nargs="+", default=["global", "group"], help="advantage_std")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [compared(options, std, size) for std in options.stds for size in options.batch_sizes]
    print(f"{'std':8}{'batch':>6}  {'overlap':8}{'iteration':>10}{'CPU':>7}{'sampling':>9}{'decode':>7}", end="")
    print(f"{'waiting':>8}{'hidden':>7}{'prepare':>8}{'updates':>8}   (s)")
    for row in found:
        for name in ("without", "with"):
            s = row[name]
            print(f"{row['advantage_std']:8}{row['rollout_batch_size']:>6}  {name:8}", end="")
            print(
                f"{s['iteration']:10.3f}{s['cpu']:7.3f}{s['rollout']:9.3f}{s['decode']:7.3f}{s['reward']:8.3f}", end=""
            )
            print(f"{max(s['reward_overlapped'], 0):7.3f}{s['prepare']:8.3f}{s['updates']:8.3f}")
        ratios = [row["with"][name] / row["without"][name] for name in ("iteration", "cpu")]
        print(
            f"{'':14}  hidden {row['hidden']:.0%}, ratio {ratios[0]:.2f} of wall time, {ratios[1]:.2f} of CPU time, ",
            end="",
        )
        print(f"weights {'the same' if row['equal'] else 'DIFFERENT'}")
    if options.out is not None:
        write_atomically(options.out, json.dumps({**vars(options), "out": None, "found": found}, indent=2) + "\n")
    return 0 if all(row["equal"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
