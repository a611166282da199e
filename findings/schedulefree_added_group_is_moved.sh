#!/usr/bin/env bash
# schedulefree, torch: weights added with add_param_group() are not averaged by eval(), and the next train() moves them
#
# One would guess: a group that is added while the optimizer is in train mode is in train mode too. optimizer.eval()
# puts the averaged weights in place, and optimizer.train() takes them out again, so that validating changes nothing.
#
# What happens (schedulefree 1.4.1, torch 2.13.0): the mode is stored in each group, and an added group starts in eval
# mode. step() looks at the first group only, and trains all. The first eval() then leaves the added group alone, and
# the next train() moves it a second time, by a tenth of the way to the raw weights z. Two equal weights with the same
# noisy gradients, 100 steps, then eval() and train():
#   group                        change by eval()    by train()    left after both
#   from the start               0.176               0.176         0.000
#   added after train()          0.000               0.159         0.159
#   added, then train() again    0.176               0.176         0.000
# From the second time on, the added group is treated as the others are. Nothing is logged.
#
# Why it matters: layers that are unfrozen during training are added as a group, as Lightning's BaseFinetuning does. The
# first validation, and a checkpoint written in it, have them without the average, and a run with validation gets other
# weights than a run without. Call optimizer.train() again after add_param_group(), before the next step.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6 schedulefree==1.4.1
cat > "$folder/check.py" <<'PY'
from importlib.metadata import version

import torch
from schedulefree import AdamWScheduleFree, RAdamScheduleFree, SGDScheduleFree

print(f"schedulefree {version('schedulefree')}, torch {torch.__version__}")
KINDS = {
    "AdamW": lambda group: AdamWScheduleFree(group, lr=0.05),
    "RAdam": lambda group: RAdamScheduleFree(group, lr=0.05),
    "SGD": lambda group: SGDScheduleFree(group, lr=0.05),
}


def changes(make, added, again=False):
    """Return by how much eval() and train() move the second weight, and how far it is from where it was."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.zeros(8)) for _ in range(2)]
    target = torch.randn(8)
    optimizer = make([weights[0]])
    if added:
        optimizer.train()
    optimizer.add_param_group({"params": [weights[1]]})
    if not added or again:
        optimizer.train()
    for _ in range(100):
        optimizer.zero_grad()
        noisy = target + torch.randn(8)
        sum((weight - noisy).square().sum() for weight in weights).backward()
        optimizer.step()
    trained = weights[1].detach().clone()
    assert torch.equal(weights[0], trained)
    found = []
    for _ in range(2):
        optimizer.eval()
        evaluated = weights[1].detach().clone()
        optimizer.train()
        found += [(evaluated - trained).norm().item(), (weights[1] - evaluated).norm().item(),
                  (weights[1] - trained).norm().item()]
        trained = weights[1].detach().clone()
    return found


for kind, make in KINDS.items():
    usual, late, again = changes(make, False), changes(make, True), changes(make, True, again=True)
    for name, found in (("from the start", usual), ("added after train()", late), ("added, train() again", again)):
        print(f"{kind}, {name}: eval() changes it by {found[0]:.3f}, train() {found[1]:.3f}, both {found[2]:.3f}; "
              f"the second time {found[3]:.3f}, {found[4]:.3f}, {found[5]:.3f}")
    assert usual[0] > 0.01 and usual[2] < 1e-5 and again[2] < 1e-5, f"changed: {kind}, a group from the start"
    assert late[0] == 0 and late[2] > 0.5 * usual[0], f"changed: {kind}, an added group is in train mode"
    assert late[3] > 0.01 and late[5] < 1e-5, f"changed: {kind}, the second validation"
print("as described: the first validation moves an added group")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
