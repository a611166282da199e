#!/usr/bin/env bash
# diffusers: add_noise of bfloat16 latents adds no noise at the first times of DDPM, DDIM, LCM and their relatives
#
# One would guess: bfloat16 has a relative precision of 0.4%, so that the noise added to bfloat16 latents has the
# right size to within that, at every time, as it has with the Euler and DPM-Solver schedulers.
#
# What happens (diffusers 0.42.1, torch 2.13.0): DDPM, DDIM, PNDM, LCM and TCD round the signal's share
# alphas_cumprod to the latents' type first, and take 1 - alphas_cumprod of what is left. Near 1, bfloat16 numbers are
# 0.0039 apart. Of 1,000 times, the number without any noise, the number where the noise is off by more than 10%, and
# the largest error:
#                                  bfloat16           float16
#   Stable Diffusion's betas       2, 5,  100%        0, 0, 7%
#   DDPM's default betas          10, 19, 100%        2, 4, 100%
#   Euler, DPM-Solver, flow        0, 0,  0.9%        0, 0, 0.1%
# With Stable Diffusion's betas in bfloat16, times 0 to 7 get 0, 0, 1.23, 1.07, 0.95, 0.87, 1.14, 1.06 of their noise.
# get_velocity rounds the same way: at times 0 and 1 its target does not contain the image. Nothing is logged.
#
# Why it matters: diffusers' training scripts call add_noise on latents of the autoencoder's type. In bfloat16 they then
# ask the network at the first times to find noise that is not in its input. A loss, a likelihood or a target measured
# at a small time is that of another noise level. Call add_noise and get_velocity in float32.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import (
    DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler,
    LCMScheduler, PNDMScheduler, TCDScheduler,
)

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
stable_diffusion = dict(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)


def noise(scheduler, dtype):
    """Noise left of ones that are added to zeros, at each of 1,000 times."""
    times = torch.arange(1000)
    if isinstance(scheduler, DPMSolverMultistepScheduler):
        scheduler.set_timesteps(1000)
    if not hasattr(scheduler, "alphas_cumprod") or hasattr(scheduler, "sigmas"):
        times = scheduler.timesteps
    add = getattr(scheduler, "add_noise", None)
    zeros, ones = torch.zeros(1000, 1, dtype=dtype), torch.ones(1000, 1, dtype=dtype)
    return (add(zeros, ones, times) if add else scheduler.scale_noise(zeros, times, ones))[:, 0].double()


def errors(scheduler, dtype):
    got, right = noise(scheduler, dtype), noise(scheduler, torch.float32)
    off = (got / right - 1).abs()
    return (got == 0).sum().item(), (off > 0.1).sum().item(), round(off.max().item(), 3)


for name, betas, expected in (
    ("Stable Diffusion's betas", stable_diffusion, [(2, 5, 1.0), (0, 0, 0.073)]),
    ("default betas", dict(beta_schedule="linear", beta_start=0.0001, beta_end=0.02), [(10, 19, 1.0), (2, 4, 1.0)]),
):
    for kind in (DDPMScheduler, DDIMScheduler, PNDMScheduler, LCMScheduler, TCDScheduler):
        found = [errors(kind(**betas), dtype) for dtype in (torch.bfloat16, torch.float16)]
        print(f"{name:25} {kind.__name__:32} no noise, off by 10%, error: bfloat16 {found[0]}, float16 {found[1]}")
        assert found == expected, f"changed: {kind.__name__}"
for scheduler in (EulerDiscreteScheduler(**stable_diffusion), DPMSolverMultistepScheduler(**stable_diffusion),
                  FlowMatchEulerDiscreteScheduler()):
    found = [errors(scheduler, dtype) for dtype in (torch.bfloat16, torch.float16)]
    print(f"{'':25} {type(scheduler).__name__:32} no noise, off by 10%, error: bfloat16 {found[0]}, float16 {found[1]}")
    assert found[0][:2] == found[1][:2] == (0, 0) and found[0][2] < 0.01 and found[1][2] < 0.002

scheduler = DDPMScheduler(**stable_diffusion)
ratios = (noise(scheduler, torch.bfloat16) / noise(scheduler, torch.float32))[:8]
print("noise at times 0 to 7, of what it should be:", [round(ratio.item(), 2) for ratio in ratios])
image, nothing = torch.ones(8, 1, dtype=torch.bfloat16), torch.zeros(8, 1, dtype=torch.bfloat16)
velocity = scheduler.get_velocity(image, nothing, torch.arange(8))[:, 0]
print("image in the velocity at times 0 to 7:", [round(value.item(), 4) for value in velocity])
assert ratios[:2].tolist() == [0, 0] and velocity[:2].tolist() == [0, 0] and velocity[2:].max() < 0, "changed"
print("as described: in 16 bits, noise is missing at the first times")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
