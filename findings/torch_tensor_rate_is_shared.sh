#!/usr/bin/env bash
# torch: an optimizer whose learning rate is a tensor has one rate for all groups, whatever a scheduler sets for each
#
# One would guess: lr=torch.tensor(1e-3), which is advised for a compiled step and for CUDA graphs, is like lr=1e-3:
# each parameter group has a learning rate of its own, and schedulers change it as they do a number.
#
# What happens (torch 2.13.0): every group that is given no rate holds the very tensor that was passed, and schedulers
# write into it. The rates of two groups after three steps, in units of the first one:
#                                                                  lr=1e-3        lr=torch.tensor(1e-3)
#   LambdaLR(optimizer, [lambda step: 1, lambda step: 0.1**step])  1, 0.001       0.001, 0.001
#   OneCycleLR(optimizer, max_lr=[1e-3, 1e-4], total_steps=10)     0.95, 0.095    0.095, 0.095
#   ReduceLROnPlateau(factor=0.5, patience=0), same value          0.25, 0.25     0.0625, 0.0625
#   group 1 by hand: optimizer.param_groups[1]["lr"] *= 0          1, 0           0, 0
# The last group wins, and ReduceLROnPlateau multiplies once per group. Two optimizers that are built with the same
# tensor share it as well: a schedule of one is the schedule of both. Groups share it still after load_state_dict().
# Nothing is logged.
#
# Why it matters: a policy with a small rate for its first layers, or a generator and a discriminator, train at another
# rate than was set, and ReduceLROnPlateau ends the training early. Give each group a tensor: dict(params=..., lr=...).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > "$folder/check.py" <<'PY'
import copy

import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

print(f"torch {torch.__version__}")


def number():
    return 1e-3


def tensor():
    return torch.tensor(1e-3)


def build(rate, own=False):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(3))]} for _ in range(2)]
    if own:
        for group in groups:
            group["lr"] = rate()
    return torch.optim.AdamW(groups, lr=rate())


def rates(optimizer):
    return [round(float(group["lr"]) / 1e-3, 5) for group in optimizer.param_groups]


def by_scheduler(make, value=None):
    def change(optimizer):
        scheduler = make(optimizer)
        for _ in range(3):
            optimizer.step()
            scheduler.step(*([] if value is None else [value]))
    return change


def by_hand(optimizer):
    optimizer.param_groups[1]["lr"] *= 0  # in place, if it is a tensor


cases = {
    "LambdaLR": by_scheduler(lambda optimizer: LambdaLR(optimizer, [lambda step: 1, lambda step: 0.1**step])),
    "OneCycleLR": by_scheduler(lambda optimizer: OneCycleLR(optimizer, max_lr=[1e-3, 1e-4], total_steps=10)),
    "ReduceLROnPlateau": by_scheduler(lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0), 1.0),
    "by hand": by_hand,
}
expected = {"LambdaLR": [0.001, 0.001], "ReduceLROnPlateau": [0.0625, 0.0625], "by hand": [0, 0]}
for name, change in cases.items():
    found = []
    for rate, own in ((number, False), (tensor, False), (tensor, True)):
        optimizer = build(rate, own)
        change(optimizer)
        found.append(rates(optimizer))
    print(f"{name}: number {found[0]}, tensor {found[1]}, a tensor for each group {found[2]}")
    close = [abs(a - b) < 1e-4 for a, b in zip(found[0], found[2])]
    assert all(close), f"changed: {name} with a tensor for each group"
    assert found[1][0] == found[1][1] and found[1] != found[0], f"changed: {name} with one tensor"
    if name in expected:
        assert all(abs(a - b) < 1e-4 for a, b in zip(found[1], expected[name])), f"changed: {name} with one tensor"

shared = tensor()
first, second = (torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))], lr=shared) for _ in range(2))
LambdaLR(first, lambda step: 0.5)
print(f"a schedule of 0.5 for the first of two optimizers: {rates(first)}, {rates(second)}, the tensor {shared.item()}")
assert rates(first) == rates(second) == [0.5], "changed: two optimizers"

saved, loaded = build(tensor), build(tensor)
loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
assert loaded.param_groups[0]["lr"] is loaded.param_groups[1]["lr"], "changed: load_state_dict"
print("as described: one tensor is the rate of all groups")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
