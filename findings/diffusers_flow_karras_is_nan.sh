#!/usr/bin/env bash
# diffusers: DPM-Solver, DEIS and SASolver of flow models give NaN with Karras, exponential or beta sigmas
#
# One would guess: use_karras_sigmas and its relatives space the noise levels of any schedule. With use_flow_sigmas they
# space those of the flow, from 1 to 0, as in FlowMatchEulerDiscreteScheduler, or the pair raises.
#
# What happens (diffusers 0.42.1, torch 2.13.0): the spacing is that of the noise schedule that a flow does not have.
# The first sigma is 157, its signal 1 - sigma is negative, and the logarithm of that is NaN from the first step on.
# 30 steps with the exact velocity of normal data of standard deviation 0.5:
#                                       no option    Karras    exponential    beta
#   DPMSolverMultistep                  0.50         NaN       NaN            NaN
#   DPMSolverSinglestep                 0.49         NaN       NaN            NaN
#   DEISMultistep                       0.48         NaN       NaN            NaN
#   SASolver                            0.50         NaN       NaN            NaN
#   UniPCMultistep                      0.50         0.51      NaN            NaN
#   FlowMatchEulerDiscrete              0.47         0.46      0.45           0.47
# (use_flow_sigmas and prediction_type="flow_prediction" in the first five.) Nothing is logged.
#
# Why it matters: "DPM++ 2M Karras" is a habit from Stable Diffusion, and from_config carries the option over from one
# scheduler to the next. The pipeline returns black images or videos, and rewards of them are numbers.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 scipy==1.17.1
cat > "$folder/check.py" <<'PY'
import inspect
import warnings

import diffusers
import torch

warnings.simplefilter("ignore")
print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
MEAN, SPREAD, STEPS = 0.5, 0.5, 30  # the data: independent normal numbers, whose exact velocity is known
SPACINGS = (None, "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")


def velocity(sample, level):
    signal, sample = 1 - level, sample.double()
    variance = signal**2 * SPREAD**2 + level**2
    noise = level * (sample - signal * MEAN) / variance
    data = MEAN + signal * SPREAD**2 * (sample - signal * MEAN) / variance
    return (noise - data).float()


def draw(scheduler):
    """Return the largest sigma, the step after which numbers are not finite, and the spread at the end."""
    scheduler.set_timesteps(STEPS)
    sample = torch.randn(1, 4, 32, 32, generator=torch.Generator().manual_seed(0))
    broken = None
    for step, t in enumerate(scheduler.timesteps, 1):
        sample = scheduler.step(velocity(sample, float(t) / 1000), t, sample).prev_sample
        if broken is None and not sample.isfinite().all():
            broken = step
    return round(scheduler.sigmas[0].item(), 2), broken, round(sample.std().item(), 3)


torch.manual_seed(0)
results = {}
for name in ("DPMSolverMultistep", "DPMSolverSinglestep", "DEISMultistep", "SASolver", "UniPCMultistep",
             "FlowMatchEulerDiscrete"):
    kind = getattr(diffusers, f"{name}Scheduler")
    flow = {} if name.startswith("Flow") else dict(use_flow_sigmas=True, prediction_type="flow_prediction")
    for spacing in SPACINGS:
        if spacing is None or spacing in inspect.signature(kind.__init__).parameters:
            results[name, spacing] = draw(kind(**flow, **({spacing: True} if spacing else {})))
            largest, broken, spread = results[name, spacing]
            print(f"{name}, {spacing or 'no option'}: first sigma {largest}, spread {spread} of {SPREAD}",
                  f"not finite after step {broken}" if broken else "")
for (name, spacing), (largest, broken, spread) in results.items():
    works = spacing is None or name.startswith("Flow") or (name, spacing) == ("UniPCMultistep", "use_karras_sigmas")
    assert (broken is None) == works, f"changed: {name}, {spacing}"
    assert 0.4 < spread < 0.6 if works else broken == 1 and largest > 100, f"changed: {name}, {spacing}"
print("as described: most solvers of flow models give NaN with these spacings")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
