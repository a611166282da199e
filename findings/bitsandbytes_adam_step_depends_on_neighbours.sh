#!/usr/bin/env bash
# bitsandbytes: the step of 8-bit AdamW for a weight depends on the gradients of the weights next to it
#
# One would guess: AdamW8bit takes the steps of AdamW, up to a few percent. As Adam divides by the gradient's size, a
# weight with small gradients moves as far as one with large ones.
#
# What happens (bitsandbytes 0.50.2, torch 2.13.0, on the CPU): both moments are stored in 8 bits, in relation to the
# largest of a block of 256 weights. In each block, every other weight has gradients that are smaller by a factor. How
# far these move in 200 steps, and their largest step, both in relation to AdamW:
#   factor              1       0.1     0.01    0.003    0.001    0.0001
#   moved               1.00    1.00    1.30    0.62     0.22     0.02
#   largest step        1.00    1.02    2.15    0.76     0.69     0.69
# The other weights move as with AdamW in all cases. Weights whose gradient is always 0 move as well, by 0.7% of what
# the others move; with AdamW they stay. Nothing is logged. GPU kernels were not measured here.
#
# Why it matters: 8-bit AdamW is common in full fine-tuning of diffusion networks on one GPU. Where gradients of very
# different size lie next to each other, some weights are trained at 1/50 of the rate that was set, and others at more
# than it, and the block depends on the layout only. GlobalOptimManager can keep single layers in 32 bits.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 bitsandbytes==0.50.2
cat > "$folder/check.py" <<'PY'
import bitsandbytes
import torch

print(f"bitsandbytes {bitsandbytes.__version__}, torch {torch.__version__}")


def train(optimizer_class, factor):
    """Return how far weights with smaller gradients, and the others, move in 200 steps, and the largest small step."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(64, 256))  # 64 blocks
    optimizer = optimizer_class([weight], lr=1e-3, weight_decay=0.0)
    factors = torch.ones(64, 256)
    factors[:, ::2] = factor
    largest = 0.0
    for _ in range(200):
        before = weight.detach().clone()
        weight.grad = (torch.randn(64, 256) + 1) * factors
        optimizer.step()
        largest = max(largest, (weight.detach() - before)[:, ::2].abs().max().item())
    return weight[:, ::2].mean().item(), weight[:, 1::2].mean().item(), largest


moved = {}
for factor in (1, 0.1, 0.01, 0.003, 0.001, 0.0001, 0):
    (small, large, step), (exact, others, exact_step) = (
        train(kind, factor) for kind in (bitsandbytes.optim.AdamW8bit, torch.optim.AdamW))
    moved[factor] = small / others
    print(f"factor {factor}: moved {small / others:.3f} of the others' way (AdamW {exact / others:.3f}), "
          f"largest step {step / exact_step if exact_step else float('nan'):.2f} of AdamW's; "
          f"others {large / others:.3f}")
    assert abs(large / others - 1) < 0.02 and abs(exact / others - (factor > 0)) < 0.02
assert abs(moved[1] - 1) < 0.02 and abs(moved[0.1] - 1) < 0.05
assert moved[0.01] > 1.15 and moved[0.001] < 0.4 and moved[0.0001] < 0.05, "changed: neighbours do not matter"
assert moved[0] > 0.002, "changed: weights without gradient stay"
print("as described: the step depends on the block")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
