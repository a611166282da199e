#!/usr/bin/env bash
# torch: a warm-up built after the optimizer's state was loaded keeps the rate at the warm-up's first one to the end
#
# One would guess: on resume, the optimizer and its scheduler may be restored one after the other, in either order. Both
# state dicts hold the learning rate, and a loaded scheduler knows its step.
#
# What happens (torch 2.13.0): building a scheduler sets the optimizer's rate to that of step 0. Its load_state_dict
# does not set it back, and most schedulers multiply the rate that they find in each step. Rates of steps 5 to 8 of a
# run that was stopped at step 5, with a warm-up from 0.1 in 4 steps, where optimizer.load_state_dict comes first:
#                                           run through                   resumed
#   LinearLR                                1.00  1.00  1.00  1.00        0.10  0.10  0.10  0.10
#   SequentialLR(LinearLR, Cosine...)       0.96  0.85  0.69  0.50        0.10  0.09  0.07  0.05
#   SequentialLR(ConstantLR, StepLR)        1.00  1.00  0.10  0.10        0.10  0.10  0.01  0.01
#   LambdaLR, OneCycleLR                                                  wrong in the first step only
#   CosineAnnealingLR without a warm-up                                   right
# All are right if the scheduler is built first. After loading, scheduler.get_last_lr() returns the right rate. A
# warning in the documentation of Optimizer.load_state_dict says that the order matters.
#
# Why it matters: linear warm-up is common in training of diffusion models, and a loop may well build its scheduler
# last, when the number of steps is known. The rest of a resumed run then trains at a tenth of the rate, or at the
# start_factor of the warm-up. Nothing is logged.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0
cat > "$folder/check.py" <<'PY'
import copy

import torch
from torch.optim.lr_scheduler import (
    ConstantLR, CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR, StepLR,
)

print(f"torch {torch.__version__}")
STOP, END = 5, 9


def optimizer():
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def warm(optimizer):
    return LinearLR(optimizer, 0.1, total_iters=4)


SCHEDULERS = {
    "LinearLR": warm,
    "LinearLR, cosine": lambda o: SequentialLR(o, [warm(o), CosineAnnealingLR(o, 8)], [4]),
    "ConstantLR, StepLR": lambda o: SequentialLR(o, [ConstantLR(o, 0.1, total_iters=4), StepLR(o, 3)], [4]),
    "LambdaLR": lambda o: LambdaLR(o, lambda step: min(1.0, 0.1 + step * 0.225)),
    "OneCycleLR": lambda o: OneCycleLR(o, 1.0, total_steps=20),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 8),
}


def rates(build, order):
    """Return the rates of all steps, and what the scheduler says after loading; order None runs through."""
    one = optimizer()
    scheduler = build(one)
    found, said = [], None
    for step in range(END):
        if step == STOP and order:
            saved = copy.deepcopy((one.state_dict(), scheduler.state_dict()))
            one = optimizer()
            if order == "scheduler built first":
                scheduler = build(one)
                one.load_state_dict(saved[0])
            else:
                one.load_state_dict(saved[0])
                scheduler = build(one)
            scheduler.load_state_dict(saved[1])
            said = scheduler.get_last_lr()[0]
        found.append(one.param_groups[0]["lr"])
        one.step()
        scheduler.step()
    return torch.tensor(found[STOP:]), said


for name, build in SCHEDULERS.items():
    through, _ = rates(build, None)
    right, _ = rates(build, "scheduler built first")
    resumed, said = rates(build, "optimizer loaded first")
    print(f"{name:20} through {[round(rate, 3) for rate in through.tolist()]}, "
          f"resumed {[round(rate, 3) for rate in resumed.tolist()]}, get_last_lr after loading {said:.2f}")
    assert torch.allclose(right, through)
    assert abs(said - through[0]) < 1e-6, "changed: get_last_lr"
    if name in ("LambdaLR", "OneCycleLR"):
        assert resumed[0] < 0.2 * through[0] and torch.allclose(resumed[1:], through[1:]), f"changed: {name}"
    elif name == "CosineAnnealingLR":
        assert torch.allclose(resumed, through)
    else:
        assert (resumed < 0.11 * through).all(), f"changed: {name}"
print("as described: the rate stays low")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
