#!/usr/bin/env bash
# diffusers: FlowMatchEulerDiscreteScheduler shifts sigmas that the caller gives, but not the timesteps given with
# them
#
# One would guess: set_timesteps(sigmas=..., timesteps=...) uses both as given; that is what "custom" means, and the
# scheduler's own warning recommends passing both in order to control them separately.
#
# What happens (diffusers 0.42.1, torch 2.13.0), with shift=3:
#   set_timesteps(sigmas=[1.0, 0.5]):                          sigmas 1.00 0.75 0, timesteps 1000 750
#   set_timesteps(sigmas=[1.0, 0.5], timesteps=[1000, 500]):   sigmas 1.00 0.75 0, timesteps 1000 500
# In the second call the network is told 500 while the sample has the noise level 0.75. And a schedule that is read
# from one scheduler and given to another is shifted twice: 0.75 becomes 0.90. Nothing is logged.
#
# Why it matters: samplers for reinforcement learning choose their own times (few steps, a window with noise). A
# schedule computed with the shift already in it, as the papers write it, is not the one that is run. With both lists
# given the network gets a wrong time at each step. Build the scheduler with shift=1 for sigmas of your own.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")


def grid(**given):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(**given)
    sigmas, timesteps = [round(v, 4) for v in scheduler.sigmas.tolist()], scheduler.timesteps.tolist()
    print(f"given {given}: sigmas {sigmas}, timesteps {[round(t, 1) for t in timesteps]}")
    return sigmas, timesteps


once, _ = grid(sigmas=[1.0, 0.5])
assert once == [1.0, 0.75, 0.0], "changed: given sigmas are used as they are"
both, timesteps = grid(sigmas=[1.0, 0.5], timesteps=[1000.0, 500.0])
assert both == [1.0, 0.75, 0.0] and timesteps == [1000.0, 500.0], "changed: sigmas and timesteps agree"
twice, _ = grid(sigmas=once[:-1])
assert twice == [1.0, 0.9, 0.0], "changed"
print("as described: given sigmas are shifted, given timesteps are not")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
