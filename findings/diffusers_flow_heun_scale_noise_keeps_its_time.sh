#!/usr/bin/env bash
# diffusers: FlowMatchHeunDiscreteScheduler.scale_noise uses the first timestep that it was given for all later calls
#
# One would guess: scale_noise(sample, timestep, noise) mixes both at the noise level of the given timestep, as in
# FlowMatchEulerDiscreteScheduler and as add_noise does in the schedulers for epsilon networks.
#
# What happens (diffusers 0.42.1, torch 2.13.0): the first call looks the timestep up and stores its index; each later
# call uses the stored index. After sampling, the index is that of the end, so that no noise is added at all:
#   noise level of the result at timesteps 1000, 500.5, 1      Euler 1.00 0.50 0.00      Heun 1.00 1.00 1.00
#   the same in a new scheduler in the reverse order           Euler 0.00 0.50 1.00      Heun 0.00 0.00 0.00
#   after three sampled steps                                  Euler 1.00 0.50 0.00      Heun 0.00 0.00 0.00
# No message is logged.
#
# Why it matters: training on the flow-matching error noises each image at a random time. With Heun's scheduler the
# network is told one time and sees the noise of another, and the loss still falls. Compute (1 - t) * image + t * noise.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
image, noise = torch.zeros(1, 1, 8, 8), torch.ones(1, 1, 8, 8)  # so the result is the noise level


def levels(kind, order, sampled=False):
    scheduler = kind()
    scheduler.set_timesteps(3)
    times = sorted(set(scheduler.timesteps.tolist()), reverse=True)
    if sampled:
        sample = noise
        for timestep in scheduler.timesteps:
            sample = scheduler.step(torch.zeros_like(sample), timestep, sample, return_dict=False)[0]
    result = [scheduler.scale_noise(image, torch.tensor([times[i]]), noise).mean().item() for i in order]
    print(f"{kind.__name__}, timesteps {[times[i] for i in order]}{', after sampling' if sampled else ''}:",
          *(f"{level:.2f}" for level in result))
    return [round(level, 1) for level in result]


forward, backward = (0, 1, 2), (2, 1, 0)
euler, heun = FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler
assert levels(euler, forward) == levels(euler, forward, sampled=True) == [1.0, 0.5, 0.0], "changed: Euler"
assert levels(euler, backward) == [0.0, 0.5, 1.0], "changed: Euler"
assert levels(heun, forward) == [1.0, 1.0, 1.0], "changed: Heun looks up every timestep"
assert levels(heun, backward) == [0.0, 0.0, 0.0], "changed: Heun looks up every timestep"
assert levels(heun, forward, sampled=True) == [0.0, 0.0, 0.0], "changed: Heun after sampling"
print("as described: Heun's scale_noise keeps the index of its first call")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
