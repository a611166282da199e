#!/usr/bin/env bash
# peft: a new HRA adapter with apply_GS=True scrambles the network or gives NaN, where one without is the base network
#
# One would guess: a new adapter changes nothing with either value of apply_GS, which "applies Gram-Schmidt
# orthogonalization" to the vectors of the reflections.
#
# What happens (peft 0.21.2, torch 2.13.0): HRA starts with pairs of equal vectors, so that two reflections cancel. Of
# two equal vectors, Gram-Schmidt leaves the rounding error of the second, which is then made a unit vector. A linear
# layer with 64 features and a new adapter of rank 8 (a new adapter should change nothing, and 1.4 is the change to an
# unrelated output):
#                                   change of the output    norm of the gradient
#   apply_GS=False                  0.000                   50
#   apply_GS=True, seeds 0 and 2    1.1 and 0.7             4e9 and 1e9
#   apply_GS=True, seed 1           NaN                     NaN
# It is NaN where the second vector cancels exactly. The product is not orthogonal either: W @ W.T differs from 1 by up
# to 0.87. Nothing is logged. init_weights=False gives an orthogonal matrix that is far from 1.
#
# Why it matters: training starts from a broken network, and a reward or a KL penalty against the base hides it as bad
# hyperparameters. Compare a new adapter's output with the base network's, and leave apply_GS at False.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import math

import peft
import torch
from peft import HRAConfig, get_peft_model
from torch import nn

print(f"peft {peft.__version__}, torch {torch.__version__}")


def new(seed, **options):
    """Return the change of the output by a new adapter, its gradient, and how far it is from an orthogonal matrix."""
    torch.manual_seed(seed)
    network, inputs = nn.Sequential(nn.Linear(64, 64)), torch.randn(5, 64)
    base = network(inputs)
    model = get_peft_model(network, HRAConfig(r=8, target_modules=["0"], **options))
    output = model(inputs)
    output.square().sum().backward()
    gradient = model.base_model.model[0].hra_u["default"].grad.norm().item()
    rotation = model.base_model.model[0].get_delta_weight("default")
    deviation = (rotation @ rotation.T - torch.eye(64)).abs().max().item()
    return ((output - base).norm() / base.norm()).item(), gradient, deviation


names, broken = ("change of the output", "gradient", "deviation from orthogonal"), []
for seed in range(3):
    for options in ({}, {"apply_GS": True}, {"apply_GS": True, "init_weights": False}):
        values = new(seed, **options)
        print(seed, options, ", ".join(f"{name} {value:.3g}" for name, value in zip(names, values)))
        if not options:
            assert values[0] < 1e-5 and values[1] < 1000 and values[2] < 1e-5
        elif len(options) == 1:
            broken.append(math.isnan(values[0]) or values[0] > 0.2 and values[1] > 1e6)
        else:
            assert values[0] > 0.2 and values[2] < 1e-5
assert all(broken), "changed: a new adapter with apply_GS is the base network"
print("as described: Gram-Schmidt of equal vectors scrambles the network")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
