#!/usr/bin/env bash
# diffusers: EDMEulerScheduler takes given sigmas for positions in its schedule, and gives negative noise levels and NaN
#
# One would guess: set_timesteps(sigmas=torch.tensor([80.0, 20.0, 5.0, 1.0, 0.2])) denoises through these noise levels.
# The argument is documented as "Custom sigmas to use for the denoising process", and other schedulers do so.
#
# What happens (diffusers 0.42.1, torch 2.13.0): with sigma_schedule="karras", each given number is taken for a place
# between the first level (0) and the last (1). With "exponential", the numbers are ignored, and only how many there are
# counts. The scheduler's sigmas for the call above:
#   asked for         80       20        5        1        0.2    0
#   "karras"          -2.6e14  -1.1e10   -1.4e5   0.002    24.4   0     (times nan, nan, nan, -1.55, 0.80)
#   "exponential"     80       5.66      0.4      0.028    0.002  0
#   EulerDiscrete     80       20        5        1        0.2    0
# Levels within [0, 1], such as 1, 0.5 and 0.25, give no NaN, but the rising levels 0.002, 2.5 and 17.5. Nothing is
# logged.
#
# Why it matters: a schedule that was searched for, or one from a paper, becomes another one without a word, and what is
# compared are not these schedules. With levels below 1, the sampler adds noise in each step. For "karras", turn levels
# into positions: (80 ** (1 / 7) - level ** (1 / 7)) / (80 ** (1 / 7) - 0.002 ** (1 / 7)).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import EDMEulerScheduler, EulerDiscreteScheduler

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
asked = torch.tensor([80.0, 20.0, 5.0, 1.0, 0.2])
low = torch.tensor([1.0, 0.5, 0.25])
karras, exponential = (EDMEulerScheduler(sigma_schedule=kind) for kind in ("karras", "exponential"))


def levels(scheduler, sigmas, name):
    scheduler.set_timesteps(sigmas=sigmas)
    found = scheduler.sigmas.tolist()
    print(f"{name}, {[round(x, 3) for x in sigmas.tolist()]}: sigmas {[float(f'{x:.3g}') for x in found]}, "
          f"timesteps {[round(x, 2) for x in scheduler.timesteps.tolist()]}")
    return found


euler = EulerDiscreteScheduler(timestep_type="continuous", prediction_type="v_prediction")
euler.set_timesteps(sigmas=[*asked.tolist(), 0.0])
assert torch.allclose(euler.sigmas, torch.cat([asked, torch.zeros(1)])), "changed: EulerDiscreteScheduler"
print("EulerDiscreteScheduler:", euler.sigmas.tolist())
found = levels(karras, asked, "karras")
assert max(found[:3]) < -1e5 and karras.timesteps[:3].isnan().all(), "changed: karras"
assert levels(exponential, asked, "exponential") == levels(exponential, low.repeat(2)[:5], "exponential"), (
    "changed: exponential reads sigmas")
assert abs(exponential.sigmas[1].item() - 80 * (0.002 / 80) ** 0.25) < 1e-3, "changed: exponential"
found = levels(karras, low, "karras")
assert found[0] < found[1] < found[2] and abs(found[2] - 17.5) < 0.1, "changed: low levels"
first, last = 80 ** (1 / 7), 0.002 ** (1 / 7)
positions = (first - asked.double() ** (1 / 7)) / (first - last)
found = levels(karras, positions, "karras, positions of these levels")
assert torch.allclose(torch.tensor(found), torch.cat([asked, torch.zeros(1)]), rtol=1e-4), "changed: the cure"
karras.set_timesteps(5)
assert karras.sigmas[0] == 80 and karras.sigmas.isfinite().all(), "changed: a number of steps"
print("as described: sigmas are taken for positions, or not read at all")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
