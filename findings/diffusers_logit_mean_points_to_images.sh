#!/usr/bin/env bash
# diffusers: a positive logit_mean trains on less noise, not on more as in the paper that the function follows
#
# One would guess: compute_density_for_timestep_sampling("logit_normal", logit_mean=m) draws times as in the paper of
# Stable Diffusion 3, which its docstring names: a positive m prefers noise, at time 1, and a negative m images, at 0.
#
# What happens (diffusers 0.42.1, torch 2.13.0): the training examples take the number as a position in
# scheduler.timesteps, as timesteps[(u * 1000).long()]. That list starts with noise. Mean noise level of 100,000 times:
#   logit_mean                                  -1       -0.5     0        0.5      1
#   paper                                       0.30     0.40     0.50     0.60     0.70
#   training examples                           0.70     0.60     0.50     0.40     0.30
#   the same, scheduler with shift=3            0.86     0.79     0.71     0.62     0.52
# The default of the examples, 0, and the schemes "none" and "mode" are symmetric, so that nothing is seen there.
#
# Why it matters: logit_mean is set to train layout (noise) or detail (images), and values are taken from papers, and
# from trainers that use the number as the noise level. They have the opposite effect, and the loss does not tell.
# Change the sign, or use the number itself as the noise level.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
MEANS = (-1.0, -0.5, 0.0, 0.5, 1.0)


def levels(scheduler, scheme, mean=None, mode_scale=None):
    """Return the mean noise level, as diffusers' training examples draw it."""
    torch.manual_seed(0)
    u = compute_density_for_timestep_sampling(scheme, 100_000, logit_mean=mean, logit_std=1.0, mode_scale=mode_scale)
    times = scheduler.timesteps[(u * scheduler.config.num_train_timesteps).long()]
    levels = times / scheduler.config.num_train_timesteps  # the noise level of a flow model's time
    latents, noise = torch.zeros(3, 1), torch.ones(3, 1)
    assert torch.allclose(scheduler.scale_noise(latents, times[:3], noise)[:, 0], levels[:3], atol=1e-6)
    return round(levels.mean().item(), 2)


plain, shifted = FlowMatchEulerDiscreteScheduler(), FlowMatchEulerDiscreteScheduler(shift=3.0)
torch.manual_seed(0)
paper = [round(torch.sigmoid(mean + torch.randn(100_000)).mean().item(), 2) for mean in MEANS]
drawn = [levels(plain, "logit_normal", mean) for mean in MEANS]
drawn_shifted = [levels(shifted, "logit_normal", mean) for mean in MEANS]
print("logit_mean                 ", MEANS)
print("noise level in the paper   ", paper)
print("in the training examples   ", drawn)
print("the same, shift=3          ", drawn_shifted)
others = [levels(plain, "none"), levels(plain, "mode", mode_scale=1.29)]
print('"none" and "mode"          ', others)
assert paper == sorted(paper) and paper[-1] > 0.65
assert drawn == sorted(drawn, reverse=True) and drawn[-1] < 0.35, "changed: a positive mean gives more noise"
assert drawn_shifted == sorted(drawn_shifted, reverse=True), "changed: with shift"
assert all(abs(level - 0.5) < 0.02 for level in (*others, drawn[2]))
print("as described: a positive logit_mean gives less noise")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
