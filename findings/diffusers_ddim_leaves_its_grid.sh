#!/usr/bin/env bash
# diffusers: DDIMScheduler with "linspace" or "trailing" spacing steps past its own timesteps
#
# One would guess: a DDIM step from timesteps[i] arrives at the noise level of timesteps[i + 1], whatever the spacing.
#
# What happens (diffusers 0.42.1, torch 2.13.0): the step always goes down by num_train_timesteps // steps, while the
# grid is spaced by (num_train_timesteps - 1) / (steps - 1) for "linspace" and by num_train_timesteps / steps for
# "trailing". So the sample has another noise level than the network is told at the next step. Noise that is present
# after a step, relative to the noise of the next timestep, largest over the grid (Stable Diffusion's betas, eta = 0):
#   linspace, 10 steps (999, 888, 777, ...): 251 % too much      30 steps: 42 %
#   trailing, 10 steps: 0 %                                      30 steps: 2 %      600 steps: 16 %
#   leading,  10, 30, 600 steps: 0 %
# Nothing is logged.
#
# Why it matters: DDPO and its followers sample with DDIM and few steps, where the mismatch is largest. The transition
# densities are those of a chain whose network gets the wrong time, so results do not carry over to another sampler
# with the same timesteps. Use "leading", or "trailing" with a number of steps that divides num_train_timesteps.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import DDIMScheduler

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")


def excess(spacing, steps):
    scheduler = DDIMScheduler(timestep_spacing=spacing, beta_schedule="scaled_linear", beta_start=0.00085,
                              beta_end=0.012, clip_sample=False, set_alpha_to_one=False, steps_offset=1)
    scheduler.set_timesteps(steps)
    noise_level = (1 - scheduler.alphas_cumprod.double()).sqrt()
    grid, noise, worst = scheduler.timesteps, torch.ones(1, dtype=torch.float64), 0.0
    for now, following in zip(grid[:-1], grid[1:], strict=True):
        # the data are zero and the network is perfect: the sample is noise_level x noise, before and after the step
        after = scheduler.step(noise, now, noise_level[now] * noise, eta=0.0).prev_sample
        worst = max(worst, abs(after.item() / noise_level[following].item() - 1))
    print(f"{spacing}, {steps} steps {grid[:3].tolist()}: noise differs from the grid's by up to {100 * worst:.1f} %")
    return worst


assert excess("linspace", 10) > 1 and excess("linspace", 30) > 0.3, "changed: linspace stays on its grid"
assert excess("trailing", 30) > 0.01 and excess("trailing", 600) > 0.1, "changed: trailing stays on its grid"
assert excess("trailing", 10) < 1e-4
assert max(excess("leading", n) for n in (10, 30, 600)) < 1e-4
print("as described: linspace and trailing leave the grid")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
