#!/usr/bin/env bash
# torch: a checkpoint of an Adam that has not stepped yet makes its next steps smaller
#
# One would guess: torch.distributed.checkpoint.state_dict.get_optimizer_state_dict reads the optimizer's state, and a
# run trains the same whether or not a checkpoint was written before its first step.
#
# What happens (torch 2.13.0): for an optimizer without state, the function makes one by a real step with zero
# gradients and learning rate 0. The weights stay, but Adam's counter is then 1 and its averages are zero, so the bias
# correction is off by one step from then on. Movement of the weights relative to a run that wrote no checkpoint:
#   step         1      2      3      4
#   AdamW      0.745  0.862  0.911  0.941
#   Adamax     0.526  0.707  0.788  0.843
#   ASGD       0.000  1.004  1.005  1.009
#   Adafactor  1.072  1.085  1.022  1.065
#   SGD, RMSprop, Adagrad, Muon: 1 at each step
# get_state_dict does the same, and so does Lightning's ModelParallelStrategy, which calls get_optimizer_state_dict to
# save. Nothing is logged. A checkpoint written before the first step holds "step" = 1, so resuming keeps the effect.
#
# Why it matters: a checkpoint at step 0, a test of saving, or an optimizer that waits while another one trains (a
# policy while its critic warms up) changes the run. Two runs of one seed differ from the first step, and a test of
# resuming from step 0 compares the wrong trajectories.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0
cat > "$folder/check.py" <<'PY'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

print(f"torch {torch.__version__}")


def movements(kind, saves):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-2)
    start = model.weight.detach().clone()
    if saves:
        get_optimizer_state_dict(model, optimizer)
        assert torch.equal(model.weight, start) and model.weight.grad is None
        if kind == "AdamW":
            print("AdamW's counter after get_optimizer_state_dict:", optimizer.state[model.weight]["step"].item())
    moved = []
    for step in range(4):
        before = model.weight.detach().clone()
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        moved.append((model.weight.detach() - before).norm())
    return torch.stack(moved)


ratios = {}
for kind in ("AdamW", "Adamax", "ASGD", "Adafactor", "SGD", "RMSprop", "Adagrad", "Muon"):
    ratios[kind] = movements(kind, True) / movements(kind, False)
    print(f"{kind:10}", *(f"{ratio:.3f}" for ratio in ratios[kind].tolist()))
assert 0.70 < ratios["AdamW"][0] < 0.80 and ratios["AdamW"][3] < 0.97, "changed: AdamW steps as if nothing was read"
assert ratios["Adamax"][0] < 0.6 and ratios["ASGD"][0] < 0.01, "changed: Adamax or ASGD"
for kind in ("SGD", "RMSprop", "Adagrad", "Muon"):
    assert torch.allclose(ratios[kind], torch.ones(4)), f"changed: {kind}"
print("as described: reading the state of a new Adam makes its first steps smaller")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
