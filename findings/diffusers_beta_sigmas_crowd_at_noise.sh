#!/usr/bin/env bash
# diffusers: use_beta_sigmas spends half of its steps above time 900, and at 50 steps DPM-Solver, DEIS and UniPC raise
#
# One would guess: use_beta_sigmas=True, "proposed in Beta Sampling is All You Need", takes times from a beta
# distribution, which is dense at the first and at the last times.
#
# What happens (diffusers 0.42.1, torch 2.13.0): the distribution is put on the noise levels, which reach from 0.03 to
# 14.6 in Stable Diffusion. Dense at high noise and sparse at low noise is what remains in times. Of 20 steps:
#                                  900 and above     below 200
#   evenly spaced                  2                 3
#   use_karras_sigmas              3                 8
#   use_beta_sigmas                9                 2
#   beta distribution of times     4                 5
# Data of mean 1 and standard deviation 0.5, an exact network, 20 steps; standard deviation of the result:
#                            evenly spaced   Karras   use_beta_sigmas   beta, times given
#   DPM-Solver++ (2M)        0.45            0.50     0.58              0.49
#   UniPC                    0.45            0.50     0.58
#   KDPM2 ancestral          0.55            0.52     0.66
#   SASolver                 0.48            0.52     1.37
# From 32 steps on, the two highest levels are rounded to one time. The scheduler takes the second of them for the
# first, runs one step ahead, and at the last step raises IndexError (DPM-Solver, DEIS) or AssertionError (UniPC,
# SASolver). SDXL's pipeline takes 50 steps by default. set_begin_index(0) before the first step avoids this error.
# In flow models, whose noise level is the time, it is as in the paper. Nothing is logged.
#
# Why it matters: a comparison of schedules with few steps, as in rollouts, finds beta sampling bad. Give the times, as
# below, to schedulers that take timesteps.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 scipy==1.17.1
cat > "$folder/check.py" <<'PY'
import diffusers
import numpy as np
import scipy.stats
import torch
from diffusers import (
    DEISMultistepScheduler, DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler,
    KDPM2AncestralDiscreteScheduler, SASolverScheduler, UniPCMultistepScheduler,
)

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
MEAN, STD = 1.0, 0.5
KARRAS, BETA = dict(use_karras_sigmas=True), dict(use_beta_sigmas=True)
given = np.round(999 * scipy.stats.beta.ppf(1 - np.linspace(0, 1, 20, endpoint=False), 0.6, 0.6)).astype(int).tolist()


def build(kind, **options):
    return kind(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, **options)


def exact(scheduler, latents, time):
    """Return the noise that the best network predicts, for a time that may lie between two training times."""
    levels = ((1 - scheduler.alphas_cumprod) / scheduler.alphas_cumprod).sqrt().log().double()
    position = torch.as_tensor(float(time), dtype=torch.double)
    low = int(position)
    level = torch.lerp(levels[low], levels[min(low + 1, 999)], position - low).exp()
    share = 1 / (1 + level**2).sqrt()
    clean = MEAN + share * STD**2 / (share**2 * STD**2 + (share * level) ** 2) * (latents - share * MEAN)
    return ((latents - share * clean) / (share * level)).float()


def sample(kind, steps, options, begin=None, **arguments):
    scheduler, generator = build(kind, **options), torch.Generator().manual_seed(0)
    scheduler.set_timesteps(**arguments or dict(num_inference_steps=steps))
    if begin is not None:
        scheduler.set_begin_index(begin)
    latents = scheduler.init_noise_sigma * torch.randn(1, 1, 50, 100, generator=generator)
    noise = {} if kind is UniPCMultistepScheduler or kind is DEISMultistepScheduler else dict(generator=generator)
    for time in scheduler.timesteps:
        predicted = exact(scheduler, scheduler.scale_model_input(latents, time), time)
        latents = scheduler.step(predicted, time, latents, **noise, return_dict=False)[0]
    return latents.std().item()


counts = {}
for name, options in (("even", {}), ("Karras", KARRAS), ("beta", BETA)):
    scheduler = build(DPMSolverMultistepScheduler, **options)
    scheduler.set_timesteps(20)
    counts[name] = scheduler.timesteps
counts["given"] = torch.tensor(given)
for name, times in counts.items():
    counts[name] = ((times >= 900).sum().item(), (times < 200).sum().item())
    print(f"{name}: {counts[name][0]} of 20 times are 900 and above, {counts[name][1]} below 200")
assert counts == dict(even=(2, 3), Karras=(3, 8), beta=(9, 2), given=(4, 5)), "changed: the times"

for kind in (DPMSolverMultistepScheduler, UniPCMultistepScheduler, KDPM2AncestralDiscreteScheduler, SASolverScheduler):
    even, karras, beta = (sample(kind, 20, options) for options in ({}, KARRAS, BETA))
    print(f"{kind.__name__}: standard deviation {even:.2f} evenly spaced, {karras:.2f} Karras, {beta:.2f} beta")
    assert max(abs(even - STD), abs(karras - STD)) < 0.06 and beta > 0.56, f"changed: {kind.__name__}"
right = sample(DPMSolverMultistepScheduler, None, {}, timesteps=given)
print(f"DPMSolverMultistepScheduler with given times: {right:.2f}")
assert abs(right - STD) < 0.06, "changed: given times"

for kind in (DPMSolverMultistepScheduler, DEISMultistepScheduler, UniPCMultistepScheduler, SASolverScheduler):
    try:
        raise SystemExit(f"changed: {kind.__name__} takes 50 steps: {sample(kind, 50, BETA):.2f}")
    except (AssertionError, IndexError) as error:
        print(f"{kind.__name__}, 50 steps: {type(error).__name__}")
starts = []
for steps in (31, 32):
    scheduler = build(DPMSolverMultistepScheduler, **BETA)
    scheduler.set_timesteps(steps)
    starts.append(scheduler.timesteps[:2].tolist())
assert starts == [[998, 997], [998, 998]], "changed: the number of steps from which a time is repeated"
started = sample(DPMSolverMultistepScheduler, 50, BETA, begin=0)
print(f"DPMSolverMultistepScheduler, 50 steps, set_begin_index(0): {started:.2f}")
assert abs(started - STD) < 0.06, "changed: set_begin_index(0)"
flow = FlowMatchEulerDiscreteScheduler(**BETA)
flow.set_timesteps(20)
assert (flow.timesteps < 200).sum() >= 5, "changed: flow models"
print("as described: the beta distribution is one of noise levels")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
