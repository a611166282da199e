#!/usr/bin/env bash
# torch: within one autocast block, a network keeps its weights of the first pass, whatever is loaded or trained
#
# One would guess: autocast changes the precision of the operations; a network whose weights have changed computes with
# the changed weights.
#
# What happens (torch 2.13.0): autocast keeps the 16-bit copy of each trainable float32 weight until the outermost block
# ends, and does not look at the weight again. Optimizer steps, load_state_dict and in-place changes have no effect in
# the block, also under no_grad. Loss at three SGD steps on the same batch:
#   one block per step                          2.177  0.713  0.298
#   one block around the three steps            2.177  2.177  2.177
#   the same with cache_enabled=False           2.177  0.713  0.298
# accelerator.autocast() of accelerate 1.15.0 does the same. Frozen weights are not kept. Nothing is logged. Lightning
# switches the cache off.
#
# Why it matters: a rollout that draws with the weights of the average or of the old policy, and then with the current
# ones, or an update of several steps, is easily put into one block. The pictures are then those of the first weights,
# ratios to the old policy are exactly 1, and each step repeats the first gradient.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 accelerate==1.15.0
cat > "$folder/check.py" <<'PY'
from contextlib import nullcontext

import accelerate
import torch

print(f"torch {torch.__version__}, accelerate {accelerate.__version__}")
torch.manual_seed(0)
start, inputs = torch.randn(4, 4) / 2, torch.randn(2, 4)
accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")


def build(is_trainable=True):
    layer = torch.nn.Linear(4, 4, bias=False).requires_grad_(is_trainable)
    layer.load_state_dict({"weight": start})
    return layer


def autocast(**options):
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


def train(around, each):
    layer, losses = build(), []
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.2)
    with around:
        for _ in range(3):
            with each():
                loss = layer(inputs).float().square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(round(loss.item(), 3))
    return losses


right = train(nullcontext(), autocast)
cases = {"one block": (autocast(), True), "one block with cache_enabled=False": (autocast(cache_enabled=False), False),
         "accelerator.autocast()": (accelerator.autocast(), True)}
for name, (context, keeps) in cases.items():
    losses = train(context, nullcontext)
    print(f"losses of three steps in {name}: {losses}, with a block per step: {right}")
    assert losses == (right[:1] * 3 if keeps else right), f"changed: {name}"

for is_trainable in (True, False):
    for has_gradients in (True, False):
        layer = build(is_trainable)
        with torch.set_grad_enabled(has_gradients), autocast():
            before = layer(inputs)
            layer.load_state_dict({"weight": torch.zeros(4, 4)})
            after = layer(inputs)
        print(f"trainable {is_trainable}, gradients {has_gradients}: the output after loading zeros is "
              f"{'the old one' if torch.equal(before, after) else 'zero'}")
        assert torch.equal(before, after) == is_trainable, "changed"
        assert is_trainable or not after.any()
print("as described: the weights of the first pass stay")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
