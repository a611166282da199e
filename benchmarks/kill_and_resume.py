"""Kill a run again and again, resume it each time, and hold its end against that of a run nobody disturbed.

    python benchmarks/kill_and_resume.py                                # 20 kills of tiny_shapes at a small size
    python benchmarks/kill_and_resume.py --kills 5 --seed 3 --recipe my.yaml trainer.max_epochs=40

The moments are drawn from the seed: a quarter of them while the command starts, a quarter while it loads, the rest
while it trains, spread over the whole run.
Prints a table and writes ``kill_and_resume.json`` beside the runs. The status is 0 when weights, average, optimizer and
logged rewards are equal bit for bit.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

SMALL = [
    "trainer.max_epochs=40",
    "trainer.check_val_every_n_epoch=10",
    "trainer.callbacks=[{class_path: EMA}, {class_path: RunCheckpoint, init_args: {every_n_iterations: 1}}]",
    "data.prompts_per_iteration=2",
    "data.group_size=4",
    "data.micro_batch_size=4",
    "data.updates_per_iteration=2",
    "data.heldout_limit=2",
    "data.heldout_images_per_prompt=1",
]
STARTED = "Run folder:"
PHASES = ("starting", "loading", "training", "training")
TIMED = ("time/", "memory/", "cost/images_per_second", "cost/mfu", "cost/train_s", "cost/cpu_s")
TIMED_ENDING = "/seconds_per_image"


@dataclass
class Kill:
    """One ``kill -9``: when it came, and how far the run was saved then."""

    phase: str
    delay_s: float
    landed: bool
    iterations_saved: int


@dataclass
class Pace:
    """Seconds that the undisturbed run took to start, to load and make its first iteration, and for each later one."""

    start_s: float
    load_s: float
    iteration_s: float


class Command:
    """``lightning run`` in a process group of its own, so that all its ranks can be killed at once."""

    def __init__(self, recipe: str, folder: Path, overrides: list[str], resume: bool) -> None:
        words = [recipe, f"run_dir={folder}", *overrides, *(["--resume"] if resume else [])]
        self.born = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lit_vgrpo", "run", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.started = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith(STARTED):
                self.started.set()
        self.started.set()

    def kill(self) -> bool:
        """Kill the run; return True if it was still running."""
        running = self.process.poll() is None
        if running:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        return running

    def finish(self) -> None:
        """Wait for its end.

        Raises:
            SystemExit: it failed.
        """
        code = self.process.wait()
        self._reader.join()
        if code != 0:
            raise SystemExit("\n".join([*self.lines, f"The run ended with exit status {code}."]))


def iterations_saved(folder: Path) -> int:
    """Iterations in the newest checkpoint; 0 without one. The draft of a killed process is none."""
    files = sorted((folder / "checkpoints").glob("[!.w]*.ckpt"), key=lambda path: path.stat().st_mtime)
    if not files:
        return 0
    loops = torch.load(files[-1], weights_only=True, mmap=True)["loops"]["fit_loop"]
    return int(loops["epoch_progress"]["current"]["processed"])


def iterations_logged(folder: Path) -> int:
    """Iterations in the table; cheap enough to ask often."""
    try:
        with (folder / "metrics.csv").open() as file:
            return max(
                (int(row["epoch"] or -1) + 1 for row in csv.DictReader(file) if row.get("reward/mean")), default=0
            )
    except (OSError, KeyError, ValueError, TypeError):  # not there yet, or just being replaced
        return 0


def wait_for(command: Command, folder: Path, iterations: int) -> None:
    while iterations_logged(folder) < iterations and command.process.poll() is None:
        time.sleep(0.05)


def kill_again_and_again(args: argparse.Namespace, folder: Path, iterations: int, pace: Pace) -> list[Kill]:
    """Start with ``--resume`` and kill, as often as asked; the last run is left to finish."""
    draw = random.Random(args.seed)
    kills: list[Kill] = []
    for number in range(args.kills):
        phase = draw.choice(PHASES)
        saved = iterations_saved(folder)
        command = Command(args.recipe, folder, args.overrides, resume=True)
        longest = {"starting": pace.start_s, "loading": pace.load_s, "training": pace.iteration_s}[phase]
        if phase != "starting":
            command.started.wait()
        if phase == "training":
            # Twice an equal share of what is left, at most, so that the kills reach over the whole run.
            left = iterations - 3 - saved
            wait_for(command, folder, saved + draw.randint(0, max(0, 2 * left // (args.kills - number + 1))))
        delay = draw.uniform(0, longest)
        time.sleep(delay)
        landed = command.kill()
        kills.append(Kill(phase, round(delay, 2), landed, iterations_saved(folder)))
        print(f"kill {number + 1:>3}  {phase:<8} {kills[-1].iterations_saved:>4} iterations saved", flush=True)
        if not landed:
            print("\n".join(command.lines[-5:]))
            break
    Command(args.recipe, folder, args.overrides, resume=True).finish()
    return kills


def differences(whole: Path, killed: Path, kills: int) -> list[str]:
    """Return the differences between the ends of two runs; each kill may cost a row of the table."""
    ends = [torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True) for folder in (whole, killed)]
    found = []
    for key in ("global_step", "state_dict", "optimizer_states", "lr_schedulers"):
        found += _unequal(key, *(end[key] for end in ends))
    found += _unequal("objective", *(end["lit_vgrpo"]["objective"] for end in ends))
    average = next(key for key in ends[0]["callbacks"] if key.startswith("EMA"))
    found += _unequal("average", *(end["callbacks"][average] for end in ends))
    rows, left = (_logged(folder / "metrics.csv") for folder in (whole, killed))
    kept = [row for row in rows if row in left]
    if len(rows) - len(kept) > kills:
        found.append(f"metrics.csv ({len(rows) - len(kept)} rows missing after {kills} kills)")
    return found + _unequal("metrics.csv", kept, left)


def _unequal(name: str, first: Any, second: Any) -> list[str]:
    if isinstance(first, torch.Tensor):
        same = isinstance(second, torch.Tensor) and torch.equal(first, second)
        return [] if same else [name]
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return [error for key in first for error in _unequal(f"{name}.{key}", first[key], second[key])]
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [error for number, pair in pairs for error in _unequal(f"{name}[{number}]", *pair)]
    if isinstance(first, list) and isinstance(second, list):
        return [f"{name} ({len(second)} rows, not {len(first)})"]
    return [] if first == second else [name]


def _logged(path: Path) -> list[dict[str, str]]:
    """The table without what differs between two equal runs: times and memory."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not k.startswith(TIMED) and not k.endswith(TIMED_ENDING)} for row in rows]


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipe", default="tiny_shapes")
    parser.add_argument("--out", type=Path, default=None, help="a new folder for the runs; a temporary one by default")
    args, overrides = parser.parse_known_args(words)
    args.overrides = [*SMALL, *overrides] if args.recipe == "tiny_shapes" else overrides
    return args


def main() -> int:
    args = parse()
    out = args.out or Path(tempfile.mkdtemp(prefix="kill_and_resume-"))
    begun = time.monotonic()
    whole = Command(args.recipe, out / "whole", args.overrides, resume=False)
    whole.started.wait()
    marks = [whole.born, time.monotonic()]
    wait_for(whole, out / "whole", 1)
    marks.append(time.monotonic())
    whole.finish()
    iterations = iterations_saved(out / "whole")
    start_s, load_s = marks[1] - marks[0], marks[2] - marks[1]
    pace = Pace(start_s, load_s, (time.monotonic() - marks[2]) / max(1, iterations - 1))
    print(
        f"undisturbed: {start_s:.1f} s to start, {load_s:.1f} s to load, {pace.iteration_s:.2f} s an iteration",
        flush=True,
    )
    kills = kill_again_and_again(args, out / "killed", iterations, pace)
    found = differences(out / "whole", out / "killed", len(kills))
    landed = sum(kill.landed for kill in kills)
    result = {
        "recipe": args.recipe,
        "overrides": args.overrides,
        "seed": args.seed,
        "kills": landed,
        "while": {phase: sum(kill.phase == phase for kill in kills) for phase in dict.fromkeys(PHASES)},
        "iterations": iterations,
        "differences": found,
        "seconds": round(time.monotonic() - begun, 1),
        "each": [asdict(kill) for kill in kills],
    }
    (out / "kill_and_resume.json").write_text(json.dumps(result, indent=2) + "\n")
    verdict = "equal bit for bit" if not found else f"{len(found)} differences, e.g. {', '.join(found[:3])}"
    print(f"{landed} kills, {result['while']}; {result['seconds']} s in all: {verdict}")
    print(f"Everything is in {out}")
    if landed < args.kills:
        print(f"The run was over after {landed} kills of {args.kills}. Make it longer.", file=sys.stderr)
    return 0 if not found and landed == args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
