#!/usr/bin/env bash
# accelerate: after load_state in mid-epoch, skip_first_batches skips other samples than those that were trained on
#
# One would guess: with save_state in the middle of an epoch, and load_state and skip_first_batches in a new process, as
# the documentation's page on checkpointing shows it, training goes on with the samples that are left.
#
# What happens (accelerate 1.15.0, torch 2.13.0): save_state stores the state of the random numbers as it is after the
# epoch's order was drawn. The resumed epoch draws a new order from it and skips the beginning of that. An epoch of
# 1,000 shuffled samples in batches of 10, stopped after 50 batches; samples that the epoch has seen in the end:
#                                                     once      twice     never
#   one process through                               1,000     0         0
#   resumed                                           about 500  250       250
#   resumed, use_seedable_sampler=True                1,000     0         0
# All three call set_epoch on the loader before each epoch. Nothing is logged.
#
# Why it matters: an epoch over a large image set takes days, and most resumes happen in the middle of one. Some images
# are then seen twice and some not at all, and a resumed run is not the run that would have gone on. Pass
# DataLoaderConfiguration(use_seedable_sampler=True) and call set_epoch.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 accelerate==1.15.0
cat > "$folder/check.py" <<'PY'
import subprocess
import sys
from collections import Counter
from pathlib import Path

import accelerate
import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

COUNT, SIZE, STOP = 1000, 10, 50


def train(folder, seedable, phase):
    """Train the second epoch, "through" or up to a stop ("first") or from there ("rest"); return what was seen."""
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
    set_seed(0)
    loader = accelerator.prepare(DataLoader(torch.arange(COUNT), batch_size=SIZE, shuffle=True))
    if phase == "rest":
        accelerator.load_state(folder)
    else:
        loader.set_epoch(0)
        for _ in loader:
            pass
    loader.set_epoch(1)
    seen = []
    for index, batch in enumerate(skip_first_batches(loader, STOP) if phase == "rest" else loader):
        seen += batch.tolist()
        if phase == "first" and index + 1 == STOP:
            accelerator.save_state(folder)
            break
    return seen


if len(sys.argv) > 2:  # a process of its own for each part, as in a resumed run
    print(*train(sys.argv[1], sys.argv[2] == "True", sys.argv[3]))
    raise SystemExit

print(f"accelerate {accelerate.__version__}, torch {torch.__version__}")


def seen(seedable, *phases):
    folder = Path(sys.argv[1], f"state-{seedable}")
    samples = []
    for phase in phases:
        done = subprocess.run([sys.executable, "-W", "ignore", __file__, str(folder), str(seedable), phase],
                              check=True, capture_output=True, text=True)
        samples += done.stdout.split()
    times = Counter(Counter(samples).values())
    result = times[1], times[2], COUNT - times[1] - times[2]
    print(f"use_seedable_sampler={seedable}, {' and '.join(phases):14}: once {result[0]}, twice {result[1]}, "
          f"never {result[2]}")
    return result


assert seen(False, "through") == (COUNT, 0, 0)
once, twice, never = seen(False, "first", "rest")
assert twice == never and 200 < never < 300, "changed: the resumed epoch"
assert seen(True, "through") == seen(True, "first", "rest") == (COUNT, 0, 0)
print("as described: other samples are skipped")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
