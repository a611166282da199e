#!/usr/bin/env bash
# diffusers: the loss weight "sigma_sqrt" is sigma ** -2, and one noise level of 1,000 gets most of it
#
# One would guess: compute_loss_weighting_for_sd3("sigma_sqrt", sigmas), which the training scripts of flow models
# offer beside "cosmap" and "none", weighs the loss by the square root of the noise level, which is between 0 and 1.
#
# What happens (diffusers 0.42.1, torch 2.13.0), for the 1,000 noise levels of FlowMatchEulerDiscreteScheduler:
#   weight at level 0.25: 16 instead of 0.5, so that it grows towards the clean image
#   level 0.001 alone has 61 % of the sum of all weights, and the ten lowest levels together 94 %
#   with shift 3, level 0.003 has 60 %
#   "cosmap" never exceeds 1.3
#
# Why it matters: with uniform times the gradient of a batch is nearly that of the sample whose time is the lowest, so
# a larger batch hardly averages, and coarse structure, which high noise levels decide, is hardly trained. The loss
# itself falls as usual. The weight undoes the factor sigma of an x0 loss made from a velocity; on a velocity loss, use
# "none" or "cosmap".
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_loss_weighting_for_sd3

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
quarter = compute_loss_weighting_for_sd3("sigma_sqrt", torch.tensor([0.25])).item()
shares = {}
for shift in (1.0, 3.0):
    levels = FlowMatchEulerDiscreteScheduler(shift=shift).sigmas.double()
    weights = compute_loss_weighting_for_sd3("sigma_sqrt", levels)
    order = weights[levels.argsort()] / weights.sum()
    shares[shift] = (order[0].item(), order[:10].sum().item())
    print(f"shift {shift:g}: level {levels.min():.3f} has {shares[shift][0]:.0%}, the ten lowest {shares[shift][1]:.0%}")
most = compute_loss_weighting_for_sd3("cosmap", torch.linspace(0, 1, 1001)).max().item()
print(f"weight at 0.25: {quarter:g}; largest of cosmap: {most:.2f}")
assert abs(quarter - 16) < 1e-4, "changed: the weight is not the inverse square"
assert 0.5 < shares[1.0][0] < 0.7 and shares[1.0][1] > 0.9, "changed: the lowest levels do not dominate"
assert most < 1.3, "changed: cosmap has larger weights"
print("as described")
PY
"$folder/venv/bin/python" "$folder/check.py"
