#!/usr/bin/env bash
# diffusers: UniPC gives NaN with solver_type="bh1", predict_x0=False or lower_order_final=False
#
# One would guess: these are choices between solvers. The documentation recommends solver_type="bh1" for unconditional
# sampling in less than 10 steps. Options that do not go together raise a ValueError, as they do in DPM-Solver.
#
# What happens (diffusers 0.42.1, torch 2.13.0): by default the last noise level is 0 (final_sigmas_type="zero"), and
# each of these options divides by it or multiplies infinity by 0 in the last step. Standard deviation of what UniPC
# draws with the exact noise prediction of normal data (0.5), in 8, 20 and 50 steps:
#   default                          0.387    0.455    0.481
#   solver_type="bh1"                NaN      NaN      NaN
#   predict_x0=False                 NaN      NaN      NaN
#   lower_order_final=False          NaN      NaN      NaN
# With use_flow_sigmas, as Wan and others use UniPC, the first and the last are NaN as well. With
# final_sigmas_type="sigma_min" none is. Nothing is logged. DPMSolverMultistepScheduler raises for its noise form.
#
# Why it matters: images are black, and rewards of them are numbers. The steps before are finite, so that a check of
# latents or log-probabilities on the way finds nothing. If one of these options is needed, set "sigma_min".
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import numpy as np
import torch
from diffusers import DPMSolverMultistepScheduler, UniPCMultistepScheduler

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
MEAN, SPREAD = 0.5, 0.5  # the data: independent normal numbers, whose exact noise prediction is known


def noise(sample, signal, level):
    return level * (sample - signal * MEAN) / (signal**2 * SPREAD**2 + level**2)


def spread(scheduler, steps, flow=False):
    """Return the standard deviation of what the scheduler draws with the exact model of the data."""
    scheduler.set_timesteps(steps)
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(1, 4, 32, 32, generator=generator) * float(scheduler.init_noise_sigma)
    log_sigmas = 0.5 * ((1 - scheduler.alphas_cumprod) / scheduler.alphas_cumprod).double().log().numpy()
    for t in scheduler.timesteps:
        assert sample.isfinite().all(), "changed: NaN before the last step"
        given = scheduler.scale_model_input(sample, t).double()
        if flow:
            level = float(t) / 1000
            prediction = noise(given, 1 - level, level)
            data = MEAN + (1 - level) * SPREAD**2 * (given - (1 - level) * MEAN) / (
                (1 - level) ** 2 * SPREAD**2 + level**2)
            prediction = prediction - data
        else:
            sigma = np.exp(np.interp(float(t), np.arange(1000), log_sigmas))
            signal = 1 / np.sqrt(1 + sigma**2)
            prediction = noise(given, signal, sigma * signal)
        sample = scheduler.step(prediction.float(), t, sample).prev_sample
    return round(sample.std().item(), 3)


common = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
options = (dict(solver_type="bh1"), dict(predict_x0=False), dict(lower_order_final=False))
found = {}
for name, more, given in (
    ("noise", {}, ({}, *options)),
    ("flow", dict(use_flow_sigmas=True, prediction_type="flow_prediction"), ({}, options[0], options[2])),
    ('noise, final_sigmas_type="sigma_min"', dict(final_sigmas_type="sigma_min"), options),
):
    for option in given:
        values = found[name, str(option)] = [
            spread(UniPCMultistepScheduler(**common, **more, **option), steps, name == "flow") for steps in (8, 20, 50)]
        print(f"{name}, {option}: {values} of {SPREAD} in 8, 20 and 50 steps")
for (name, option), values in found.items():
    fails = option != "{}" and "sigma_min" not in name
    assert [bool(np.isnan(value)) for value in values] == [fails] * 3, f"changed: {name}, {option}"
try:
    DPMSolverMultistepScheduler(algorithm_type="dpmsolver")
except ValueError as error:
    print("DPMSolverMultistepScheduler, of the noise form:", error)
else:
    raise AssertionError("changed: DPMSolverMultistepScheduler takes the noise form with a last sigma of 0")
print("as described: three of UniPC's options give NaN")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
