#!/usr/bin/env bash
# diffusers: Euler with interpolation_type="log_linear" tells the network the time of another noise level
#
# One would guess: "log_linear" interpolates the sigmas between the training steps in the logarithm. Each timestep stays
# the one of its sigma, as it does with use_exponential_sigmas, which gives the same kind of sequence.
#
# What happens (diffusers 0.42.1, torch 2.13.0): the sigmas become a geometric sequence from the largest to the
# smallest, and the timesteps stay evenly spaced. The sequence has one more value than there are steps, so that the
# last step ends at the smallest sigma, 0.029, and not at 0. Step 16 of 30 of Stable Diffusion's schedule, and mean and
# standard deviation of what is drawn in 300 steps with the exact noise prediction of normal data (0.5, 0.5):
#                               time    sigma trained with it    sigma used    mean    spread
#   linear (the default)        482     1.53                     1.53          0.48    0.50
#   log_linear                  482     1.53                     0.65          0.35    0.46
#   use_exponential_sigmas      206     0.59                     0.59          0.48    0.50
#   use_karras_sigmas           397     1.15                     1.15          0.48    0.50
# The largest ratio of both sigmas is 5.3. More steps do not help. Nothing is logged.
#
# Why it matters: the network is asked about more noise than there is. Whoever compares spacings of sigma by this option
# compares a wrong input with a spacing. The exponential spacing is what it seems to offer.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import numpy as np
import torch
from diffusers import EulerDiscreteScheduler

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
MEAN, SPREAD, STEPS = 0.5, 0.5, (10, 30, 100, 300)
common = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")


def log_sigma_of(scheduler, t):
    training = 0.5 * ((1 - scheduler.alphas_cumprod) / scheduler.alphas_cumprod).double().log().numpy()
    return np.interp(float(t), np.arange(len(training)), training)


def draw(scheduler, steps):
    """Return mean and standard deviation of what is drawn with the exact noise prediction of normal data."""
    scheduler.set_timesteps(steps)
    sample = torch.randn(1, 4, 64, 64, generator=torch.Generator().manual_seed(0)) * float(scheduler.init_noise_sigma)
    for t in scheduler.timesteps:
        given = scheduler.scale_model_input(sample, t).double()
        sigma = np.exp(log_sigma_of(scheduler, t))
        signal, level = 1 / np.sqrt(1 + sigma**2), sigma / np.sqrt(1 + sigma**2)
        noise = level * (given - signal * MEAN) / (signal**2 * SPREAD**2 + level**2)
        sample = scheduler.step(noise.float(), t, sample).prev_sample
    return round(sample.mean().item(), 2), round(sample.std().item(), 2)


results, worst = {}, {}
for name, options in {
    "linear (the default)": {},
    "log_linear": dict(interpolation_type="log_linear"),
    "Karras": dict(use_karras_sigmas=True),
    "exponential": dict(use_exponential_sigmas=True),
}.items():
    scheduler = EulerDiscreteScheduler(**common, **options)
    scheduler.set_timesteps(30)
    told = np.exp([log_sigma_of(scheduler, t) for t in scheduler.timesteps])
    real = scheduler.sigmas[:30].numpy()
    worst[name] = float(np.exp(np.abs(np.log(told / real)).max()))
    results[name] = [draw(EulerDiscreteScheduler(**common, **options), steps) for steps in STEPS]
    print(f"{name}: in step 16 of 30, time {float(scheduler.timesteps[15]):.0f}, trained for sigma {told[15]:.2f}, "
          f"used at sigma {real[15]:.2f}; largest ratio {worst[name]:.2f}")
    print(f"    mean and spread drawn in {STEPS} steps: {results[name]}, of the data: {MEAN, SPREAD}")
for name in results:
    mean, deviation = results[name][-1]
    if name == "log_linear":
        assert worst[name] > 4 and mean < 0.4, "changed: log_linear"
    else:
        assert worst[name] < 1.01 and mean > 0.47 and abs(deviation - SPREAD) < 0.01, f"changed: {name}"
scheduler = EulerDiscreteScheduler(**common, interpolation_type="log_linear")
scheduler.set_timesteps(30)
print(f"log_linear: {len(scheduler.timesteps)} timesteps, {len(scheduler.sigmas)} sigmas, "
      f"so that the last step ends at {scheduler.sigmas[30]:.3f}")
assert len(scheduler.sigmas) == 32, "changed: number of sigmas"
print("as described: with log_linear, the network is told the time of another noise level")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
