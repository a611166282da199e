#!/usr/bin/env bash
# torchdiffeq: with a bfloat16 state, Euler's times are rounded to bfloat16, and half of 1,000 steps have length 0
#
# One would guess: odeint(velocity, noise, torch.linspace(0, 1, 1001), method="euler") makes steps of 0.001 at the times
# that it is given, and only the state is bfloat16 if the noise is.
#
# What happens (torchdiffeq 0.2.5, torch 2.13.0): the fixed-step solvers cast the times to the type of the state, before
# they compute the steps' lengths. Steps from 0 to 1, their shortest and longest one in multiples of the mean, and the
# distinct times that the velocity is computed at:
#                       float32 state                         bfloat16 state
#   steps        times   shortest   longest      times   shortest   longest   length 0
#      50           50     1.00       1.00          50     0.98       1.17         0
#     200          200     1.00       1.00         200     0.78       1.56         0
#     500          500     1.00       1.00         378     0          1.95       122
#   1,000        1,000     1.00       1.00         507     0          3.91       494
# options=dict(step_size=...) gives the same numbers of times. Nothing is logged.
#
# Why it matters: flow models are often sampled with odeint in the network's own type. With many steps up to half of
# the passes change nothing, and others are up to four times too long. The network is told rounded times, too. Keep the
# state in float32 and cast it inside the velocity.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 torchdiffeq==0.2.5
cat > "$folder/check.py" <<'PY'
from importlib.metadata import version

import torch
from torchdiffeq import odeint

print(f"torchdiffeq {version('torchdiffeq')}, torch {torch.__version__}")


def asked(dtype, grid, **options):
    """Return the times that the velocity is computed at."""
    times = []

    def velocity(time, state):
        times.append(time.item())
        return torch.ones_like(state)

    odeint(velocity, torch.zeros(1, dtype=dtype), grid, method="euler", **options)
    return times


def measure(dtype, steps):
    times = asked(dtype, torch.linspace(0, 1, steps + 1))
    by_size = asked(dtype, torch.tensor([0.0, 1.0]), options=dict(step_size=1 / steps))
    assert len(times) == len(by_size) == steps
    assert len(set(times)) == len(set(by_size)), "changed: step_size"
    lengths = torch.tensor([*times, 1.0]).diff()
    found = (len(set(times)), round(lengths.min().item() * steps, 2), round(lengths.max().item() * steps, 2),
             int((lengths == 0).sum()))
    print(f"{str(dtype):15} {steps:4} steps: {found[0]} times, lengths {found[1]} to {found[2]}, zero {found[3]}")
    return found


expected = {50: (50, 0.98, 1.17, 0), 200: (200, 0.78, 1.56, 0), 500: (378, 0.0, 1.95, 122),
            1000: (507, 0.0, 3.91, 494)}
for steps, rounded in expected.items():
    assert measure(torch.float32, steps) == (steps, 1.0, 1.0, 0)
    assert measure(torch.bfloat16, steps) == rounded, "changed: bfloat16"
print("as described: the times are rounded")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
