#!/usr/bin/env bash
# Lightning Fabric, accelerate: with float16 and two optimizers, the second one's clipped gradient is unscaled twice
#
# One would guess: after one backward pass through two networks, both may be clipped and then both optimizers stepped.
# Clipping removes the loss scale from the gradients, and the steps know that.
#
# What happens (lightning 2.6.6, accelerate 1.15.0, torch 2.13.0): each optimizer's step() also calls the GradScaler's
# update(), which forgets for all optimizers that their gradients were unscaled. The second optimizer's step divides
# them by the scale again. Change of a weight whose gradient is 0.001 in both networks, with a scale of 65,536 and a
# bound that clips nothing:
#                                                             first network   second network
#   SGD, rate 1:      without clipping                        1.0e-03         1.0e-03
#                     clip, step, clip, step (Fabric)         1.0e-03         1.0e-03
#                     clip both, step both (Fabric)           1.0e-03         1.5e-08
#                     one clip_grad_norm_ (accelerate)        1.0e-03         1.5e-08
#   AdamW, rate 1e-3: clip both, step both (Fabric)           1.0e-03         6.0e-04
#                     the same, gradient 1e-5                 1.0e-03         1.5e-05
# The norms that both return are right, and nothing is logged. bfloat16 and float32 have no scaler, and are right.
#
# Why it matters: a network and a text encoder, or a generator and a discriminator, with one optimizer each. The second
# hardly learns. In accelerate no other order exists: clip_grad_norm_ unscales all optimizers, and a second call before
# the steps raises an error. Use one optimizer with two groups, or bfloat16; in Fabric, clip just before each step.
# accelerate has a scaler on accelerators only; the script sets on the CPU what it sets there.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 lightning==2.6.6 accelerate==1.15.0
cat > "$folder/check.py" <<'PY'
import accelerate
import lightning
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision

print(f"lightning {lightning.__version__}, accelerate {accelerate.__version__}, torch {torch.__version__}")
SCALE = 2.0 ** 16


def build(kind):
    networks = [torch.nn.Linear(4, 1, bias=False) for _ in range(2)]
    for network in networks:
        torch.nn.init.zeros_(network.weight)
    if kind == "SGD":
        return networks, [torch.optim.SGD(network.parameters(), lr=1.0) for network in networks]
    return networks, [torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.0) for network in networks]


def loss_of(networks, gradient):
    """Return a loss of which each weight's gradient is the given one."""
    inputs = torch.ones(2, 4)
    return sum((network(inputs).float() * gradient).mean() for network in networks)


def changes(networks):
    return [network.weight.detach().abs().mean().item() for network in networks]


def fabric(kind, order, gradient=1e-3):
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=MixedPrecision("16-mixed", "cpu", scaler=scaler))
    pairs = [fabric.setup(*pair) for pair in zip(*build(kind))]
    fabric.backward(loss_of([network for network, _ in pairs], gradient))
    norms = []
    if order == "clip both, step both":
        norms = [fabric.clip_gradients(*pair, max_norm=100.0).item() for pair in pairs]
    for network, optimizer in pairs:
        if order == "clip, step, clip, step":
            norms.append(fabric.clip_gradients(network, optimizer, max_norm=100.0).item())
        optimizer.step()
    found = changes([network for network, _ in pairs])
    print(f"Fabric, {kind}, gradient {gradient}, {order}: norms", [round(norm, 7) for norm in norms],
          "changes", *(f"{change:.2e}" for change in found))
    assert all(abs(norm / (2 * gradient) - 1) < 0.01 for norm in norms), "changed: the norms"
    return found


def accelerated(kind, gradient=1e-3):
    accelerator = Accelerator(cpu=True)
    accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=SCALE), True
    accelerator.state._mixed_precision = "fp16"
    networks, optimizers = build(kind)
    networks = [accelerator.prepare_model(network) for network in networks]
    optimizers = [accelerator.prepare_optimizer(optimizer) for optimizer in optimizers]
    accelerator.backward(loss_of(networks, gradient))
    norm = accelerator.clip_grad_norm_([weight for network in networks for weight in network.parameters()], 100.0)
    for optimizer in optimizers:
        optimizer.step()
    found = changes(networks)
    print(f"accelerate, {kind}, gradient {gradient}: norm {norm:.7f} changes", *(f"{change:.2e}" for change in found))
    return found


def near(found, *expected):
    return all(abs(one / other - 1) < 0.03 for one, other in zip(found, expected))


assert near(fabric("SGD", "no clipping"), 1e-3, 1e-3), "changed: without clipping"
assert near(fabric("SGD", "clip, step, clip, step"), 1e-3, 1e-3), "changed: one after the other"
assert near(fabric("SGD", "clip both, step both"), 1e-3, 1e-3 / SCALE), "changed: Fabric"
assert near(fabric("AdamW", "clip both, step both"), 1e-3, 6e-4), "changed: AdamW"
assert near(fabric("AdamW", "clip both, step both", 1e-5), 1e-3, 1.5e-5), "changed: AdamW with a small gradient"
assert near(accelerated("SGD"), 1e-3, 1e-3 / SCALE), "changed: accelerate"
print("as described: the second optimizer's gradient is unscaled twice")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
