"""Measure the time saved by scoring images while the next ones are made: the same run with and without overlap.

    python benchmarks/overlap.py                              # 5 pairs of runs, about 4 minutes on 2 cores
    python benchmarks/overlap.py --pairs 2 --ms 5 --out overlap.json

The tiny task is trained on a reward behind ``lightning serve-reward`` that takes some milliseconds an image, as one on
another machine does. Runs with and without overlap take turns; the ratio of each pair is what counts. Scores and
weights must be the same.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lit_vgrpo.system.paths import write_atomically
from lit_vgrpo.training.checkpoint_file import read

MODULE = """
import time

def waiting(images, prompts, rows, ms):
    time.sleep(len(prompts) * ms / 1000)
    return images[:, 0].mean((1, 2)) - images[:, 2].mean((1, 2))
"""
SETTINGS = [
    "trainer.max_epochs=4",
    "trainer.callbacks=null",
    "trainer.enable_progress_bar=false",
    "data.heldout=null",
    "model.policy.decode_batch_size=16",
    "model.rollout_batch_size=16",
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(folder: Path, url: str, overlap: bool) -> dict[str, float]:
    """Train, and read the means of the iterations after the first off the metrics."""
    http = {
        "class_path": "HTTPReward",
        "init_args": {"url": url, "batch_size": 8, "connection": {"max_connections": 1}},
    }
    reward = {"class_path": "Weighted", "init_args": {"rewards": [http], "overlap": overlap}}
    command = [sys.executable, "-m", "lit_vgrpo", "run", "tiny_shapes", f"run_dir={folder}", *SETTINGS]
    subprocess.run([*command, f"model.reward={json.dumps(reward)}"], check=True, stdout=subprocess.DEVNULL)
    with (folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["time/iteration_s"]][1:]
    names = ("iteration_s", "rollout_s", "reward_s", "reward_overlapped_s")
    found = {name: statistics.fmean(float(row[f"time/{name}"]) for row in rows) for name in names}
    return {**found, "reward_mean": float(rows[-1]["reward/mean"])}


def same_weights(one: Path, other: Path) -> bool:
    states = [read(folder / "checkpoints" / "last.ckpt")["state_dict"] for folder in (one, other)]
    return all(bool((states[0][name] == states[1][name]).all()) for name in states[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ms", type=float, default=20.0, help="milliseconds the reward takes for an image")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/overlap.json"))
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as text:
        folder, port = Path(text), free_port()
        (folder / "waiting_reward.py").write_text(MODULE)
        words = ["python:waiting_reward:waiting", f"options={json.dumps({'ms': options.ms})}", f"--port={port}"]
        server = subprocess.Popen(
            [sys.executable, "-m", "lit_vgrpo", "serve-reward", *words, "--batch-size=8"], cwd=folder,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert server.stdout is not None
            print(server.stdout.readline().strip())
            pairs = [pair(folder, f"http://127.0.0.1:{port}/score", number) for number in range(options.pairs)]
        finally:
            server.terminate()
            server.wait(20)
    return report(pairs, options)


def pair(folder: Path, url: str, number: int) -> dict[str, Any]:
    runs = {}
    for overlap in (True, False) if number % 2 else (False, True):
        name = "overlap" if overlap else "one after the other"
        runs[name] = run(folder / f"{number}-{overlap}", url, overlap)
    equal = same_weights(folder / f"{number}-True", folder / f"{number}-False")
    return {
        **runs,
        "ratio": runs["overlap"]["iteration_s"] / runs["one after the other"]["iteration_s"],
        "equal": equal,
    }


def report(pairs: list[dict[str, Any]], options: argparse.Namespace) -> int:
    print(
        f"{'':20} {'iteration':>10} {'rollout':>8} {'waiting for rewards':>20} {'scored meanwhile':>17}   (s, medians)"
    )
    for name in ("one after the other", "overlap"):
        values = [statistics.median(found[name][key] for found in pairs) for key in list(pairs[0][name])[:4]]
        print(f"{name:20} {values[0]:10.2f} {values[1]:8.2f} {values[2]:20.2f} {values[3]:17.2f}")
    ratios = [found["ratio"] for found in pairs]
    print(f"ratio of an iteration: median {statistics.median(ratios):.3f} of {', '.join(f'{r:.3f}' for r in ratios)}")
    equal = all(found["equal"] for found in pairs)
    print(
        f"weights after {SETTINGS[0].partition('=')[2]} iterations: {'the same, bit for bit' if equal else 'DIFFERENT'}"
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.out, json.dumps({"ms": options.ms, "pairs": pairs}, indent=2) + "\n")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
