#!/usr/bin/env bash
# prodigyopt, torch: a parameter group whose learning rate is set to 0 keeps moving, without end
#
# One would guess: learning rate 0 freezes a group, as in torch's optimizers. Prodigy allows no other difference: its
# error for groups of different rates says that this "is only supported for values of 0".
#
# What happens (prodigyopt 1.1.2, torch 2.13.0): at rate 0 a group's gradients are no longer read, but its last update
# is applied again in every step, with the rate of the other groups. Both groups minimise (w - 5) ** 2 from w = 1 for
# 300 steps; torch's LambdaLR sets the second rate to 0 at step 30:
#                                                    second weight at step 30     60       300
#   AdamW                                                         3.15           3.15      3.15
#   Prodigy                                                       6.69         -26.45   -291.61
#   Prodigy, with .grad set to None                               6.69           6.69      6.69
# A group at rate 0 from the first step on is moved too, in two cases. With weight_decay=0.1 it decays from 1 to 3e-32,
# and with beta1=0 it becomes NaN. Nothing is logged.
#
# Why it matters: Prodigy is popular for LoRAs, where the text encoder or a new token is often stopped before the
# denoiser. diffusers' advanced training script for SDXL offers Prodigy, and stops text encoders by setting the rates of
# their groups to 0. The stopped part then drifts away while the rest is trained with it. Freeze its parameters and set
# their .grad to None instead.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6 prodigyopt==1.1.2
cat > "$folder/check.py" <<'PY'
from importlib.metadata import version

import torch
from prodigyopt import Prodigy
from torch.optim.lr_scheduler import LambdaLR

print(f"prodigyopt {version('prodigyopt')}, torch {torch.__version__}")
STOP, STEPS = 30, 300


def train(make, rate, drops_gradients=False):
    """Return the weights of both groups before each step and at the end."""
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = make([{"params": [weight]} for weight in weights])
    scheduler = LambdaLR(optimizer, [lambda step: 1.0, rate])
    seen = []
    for _ in range(STEPS):
        seen.append([weight.item() for weight in weights])
        optimizer.zero_grad()
        sum((weight - 5).square().sum() for weight in weights).backward()
        if drops_gradients and optimizer.param_groups[1]["lr"] == 0:
            weights[1].grad = None
        optimizer.step()
        scheduler.step()
    return [*seen, [weight.item() for weight in weights]]


def stops(step):
    return float(step < STOP)


def never(step):
    return 0.0


def show(name, seen):
    first, second = zip(*seen)
    print(f"{name}: second weight {second[STOP]:.4f}, {second[2 * STOP]:.4f}, {second[-1]:.4g}, first {first[-1]:.4f}")
    return first, second


_, adamw = show("AdamW", train(lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1), stops))
assert adamw[STOP] == adamw[-1] and 3 < adamw[-1] < 5
first, moved = show("Prodigy", train(Prodigy, stops))
assert abs(first[-1] - 5) < 0.01
assert moved[STOP] > 6 and moved[2 * STOP] < -20 and moved[-1] < -200, "changed: the group stays"
changes = {round(after - before, 2) for before, after in zip(moved[100:], moved[101:])}
print("changes of the second weight per step after step 100:", changes)
assert len(changes) <= 2, "changed: not one update again and again"
_, dropped = show("Prodigy without gradients", train(Prodigy, stops, drops_gradients=True))
assert dropped[STOP] == dropped[-1]

_, still = show("Prodigy, rate 0 from the start", train(Prodigy, never))
assert still[-1] == 1
_, decayed = show("with weight decay", train(lambda groups: Prodigy(groups, weight_decay=0.1), never))
assert 0 <= decayed[-1] < 1e-20, "changed: weight decay"
_, broken = show("with beta1=0", train(lambda groups: Prodigy(groups, betas=(0.0, 0.999)), never))
assert broken[-1] != broken[-1], "changed: beta1=0"
print("as described: a group at rate 0 moves")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
