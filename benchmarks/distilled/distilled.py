"""Distil the tiny pipeline to three steps, and show what training does to such a model.

    D=benchmarks/distilled; python $D/distilled.py make runs/tiny_turbo
    S="--settings published --seeds 3 --iterations 30 --evaluate-every 10 --jobs 1 data.prompts_per_iteration=16"
    T="$S data.heldout_images_per_prompt=8 model.policy.checkpoint=runs/tiny_turbo"
    R="model.objective.rollout.steps=3 model.objective.rollout.solver=euler"
    lightning compare tiny_shapes --methods vgrpo,vgrpo_anchor,nft,awm $T $R --out runs/turbo
    lightning compare tiny_shapes --methods $D/mixgrpo.yaml $T --out runs/turbo_mixgrpo
    python $D/distilled.py table runs/turbo runs/turbo_mixgrpo

The student is trained on pairs of noise and the image that the teacher makes from it in 20 Euler steps. At the three
times of its sampler, it predicts the velocity of the straight line between them (arXiv 2209.03003 and 2309.06380).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from lit_vgrpo import RolloutSpec, SD3Policy
from lit_vgrpo.core.sampling import sample
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.data import read_prompts

TEACHER, PROMPTS = "shipped:assets/tiny_sd3", "shipped:prompts/shapes_all.jsonl"
TEACHER_STEPS, STEPS = 20, 3
PER_PROMPT, BATCH = 32, 96
SHOWN = ("reward", "sharpness", "saturation", "diversity_within_prompts", "distance_to_start")


def teachers_pairs(policy: SD3Policy, prompts: list[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Return each image's prompt number, noise and teacher latents."""
    rows = torch.arange(len(prompts)).repeat(PER_PROMPT)
    noise = policy.prior([torch.Generator().manual_seed(seed) for seed in range(len(rows))])
    spec = RolloutSpec("euler", TEACHER_STEPS)
    latents, _ = sample(policy, policy.encode(prompts), rows, spec, noise, batch_size=256)
    return rows, noise, latents


def distil(folder: Path, updates: int) -> None:
    """Train the student and write its pipeline."""
    policy = SD3Policy(TEACHER, max_sequence_length=1, lora_rank=None)
    policy.load()
    prompts = [row["prompt"] for row in read_prompts(PROMPTS)]
    rows, noise, latents = teachers_pairs(policy, prompts)
    with torch.no_grad():
        texts = policy.encode(prompts)
    times = policy.scheduler_times(policy.scheduler("euler", STEPS))
    optimizer = torch.optim.AdamW(trainable_parameters(policy).values(), lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=updates)
    generator = torch.Generator().manual_seed(0)
    for update in range(updates):
        chosen = torch.randint(len(rows), (BATCH,), generator=generator)
        x, eps = latents[chosen], noise[chosen]
        t = times[torch.arange(BATCH) % STEPS]
        prediction = policy(policy.path.interpolate(x, eps, t), t, texts.select(rows[chosen]))
        loss = (prediction - (eps - x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if update % 100 == 0:
            print(f"update {update}: loss {loss.item():.3f}", flush=True)
    print(policy.save(folder))


def table(folders: list[Path]) -> None:
    """Print each method's held-out numbers: the start, and the end of each seed."""
    lines = []
    for file in sorted(path for folder in folders for path in folder.glob("runs/*/metrics.csv")):
        method, _, seed = file.parent.name.rsplit("-", 2)
        metrics = pd.read_csv(file)
        for name in SHOWN:
            values = metrics[f"heldout/{name}"].dropna()
            lines.append((method, name, seed, values.iloc[0], values.iloc[-1]))
    frame = pd.DataFrame(lines, columns=["method", "metric", "seed", "start", "end"])
    ends = frame.pivot_table(index=["method", "metric"], columns="seed", values="end")
    ends.insert(0, "start", frame.groupby(["method", "metric"])["start"].mean())
    print(ends.round(3).to_csv())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("make", "table"))
    parser.add_argument("folders", nargs="+", type=Path, help="student's folder, or lightning compare's output folders")
    parser.add_argument("--updates", type=int, default=500, help="optimizer steps of the distillation")
    options = parser.parse_args()
    if options.action == "make":
        distil(options.folders[0], options.updates)
    else:
        table(options.folders)
