"""Compares on-policy distillation with the weighted sum and the cascade on the tiny task.

    python benchmarks/opd.py --seeds 0 1 2

Trains, per seed: three teachers, each on one check of all prompts; the student of ``tiny_opd``, where each prompt has
one teacher; a student where each prompt has all teachers in turn; V-GRPO on both sets of prompts; and the cascade:
colour, then shape, then place. All train the same LoRA from the same start. Writes ``benchmarks/results/opd.csv``: each
check on the held-out prompts that it belongs to, and their mean (``own``).
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pandas as pd

from lit_vgrpo.cli.main import main

RESULTS = Path(__file__).parent / "results" / "opd.csv"
TASKS = ("colour", "shape", "place")
PROMPTS = "shipped:prompts/shapes"
VGRPO = [
    *("tiny_shapes", "model.policy.lora_rank=16", "model.optimizer.lr=3e-3", "model.untrained_reward=ShapesReward"),
    f"data.heldout={PROMPTS}_tasks_heldout.jsonl",
]
ALL = "model.reward.init_args.weights=[1, 1, 1]"
MIXED = ", ".join(f'{{path: "{PROMPTS}_train.jsonl", teacher: {task}}}' for task in TASKS)
TEACHER, STUDENT, SUM = 24, 30, 60
"""Iterations."""


def only(task: str) -> str:
    """Return the override that trains on one check; the others stay in the evaluation."""
    return f"model.reward.init_args.weights={[1.0 if task == other else 1e-9 for other in TASKS]}"


def train(out: Path, name: str, seed: int, iterations: int, *words: str) -> Path:
    """Run a recipe if its folder has no result yet, and return the folder."""
    folder = out / f"{name}-{seed}"
    if not (folder / "summary.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        ends = [f"trainer.max_epochs={iterations}", f"trainer.check_val_every_n_epoch={iterations}"]
        callbacks = "trainer.callbacks=[{class_path: EMA, init_args: {decay: 0.9}}, Export]"
        quiet = ["model.evaluate_at_start=false", "trainer.enable_progress_bar=false", callbacks]
        if main(["run", *words, f"run_dir={folder}", f"seed_everything={seed}", *ends, *quiet]):
            raise SystemExit(f"{folder} failed")
    return folder


def compare(out: Path, seed: int) -> list[tuple[str, Path, list[Path]]]:
    """Return each method's name, its run, and the runs before it that it needs."""
    teachers = [train(out, task, seed, TEACHER, *VGRPO, only(task)) for task in TASKS]
    named = ", ".join(f"{task}: {folder}/export" for task, folder in zip(TASKS, teachers, strict=True))
    student = ["tiny_opd", f"model.objective.init_args.teachers={{{named}}}"]
    routed = train(out, "student", seed, STUDENT, *student)
    mixed = train(out, "mixed", seed, STUDENT, *student, f"data.train=[{MIXED}]")
    by_row = train(out, "sum_by_row", seed, SUM, *VGRPO, ALL, f"data.train={PROMPTS}_tasks_train.jsonl")
    whole = train(out, "sum", seed, SUM, *VGRPO, ALL)
    stages = teachers[:1]
    for task in TASKS[1:]:
        start = f"model.policy.start_from={stages[-1]}"
        stages.append(train(out, f"cascade_{task}", seed, TEACHER, *VGRPO, only(task), start))
    return [
        *((f"teacher for {task}", folder, []) for task, folder in zip(TASKS, teachers, strict=True)),
        ("OPD, one teacher per prompt", routed, teachers),
        ("OPD, all teachers for each prompt", mixed, teachers),
        ("weighted sum, one check per prompt", by_row, []),
        ("weighted sum, all checks for each prompt", whole, []),
        ("cascade", stages[-1], stages[:-1]),
    ]


def row_of(method: str, seed: int, folder: Path, before: list[Path]) -> dict[str, float | str]:
    """Return a method's row: its last evaluation, and its costs with those of the runs before it."""
    last, *others = (json.loads((path / "summary.json").read_text()) for path in (folder, *before))
    parts, ends = last["reward_parts_end"], [run["evaluations"][-1] for run in (last, *others)]
    scores = {"own": sum(parts[task] for task in TASKS) / len(TASKS), **{task: parts[task] for task in TASKS}}
    costs = {
        "kequivalents": sum(end["forward_equivalents"] for end in ends) / 1000,
        "cpu_s": sum(end["cpu_seconds"] for end in ends),
    }
    rounded = {name: round(value, 3) for name, value in scores.items()}
    return {"method": method, "seed": seed, **rounded, **{name: round(value, 1) for name, value in costs.items()}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/opd"))
    asked = parser.parse_args()
    rows = [row_of(name, seed, *runs) for seed in asked.seeds for name, *runs in compare(asked.out.resolve(), seed)]
    table = pd.DataFrame(rows)
    table.to_csv(RESULTS, index=False, lineterminator="\n")
    print(table.groupby("method", sort=False).mean(numeric_only=True).round(3).to_string())
