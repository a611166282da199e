#!/usr/bin/env bash
# torch, diffusers: with gradient checkpointing, functional_call gives gradients that are partly those of other weights
#
# One would guess: functional_call(network, weights, ...) computes with the given weights, and gradient checkpointing
# changes memory and time only.
#
# What happens (torch 2.13.0, diffusers 0.42.1): the weights are put in for the forward pass and taken out when it ends.
# In the backward pass, checkpointed blocks are computed again, with the network's own weights. Gradient of a loss with
# respect to the given weights, compared to that without checkpointing; in the blocks, and in the layers before them:
#   given weights                              cosine, blocks    relative error, blocks    relative error, before
#   the network's own                          1.00              0                         0
#   own, moved by 10% of their norm            0.99              0.17                      0.05
#   those of another seed                      0.03              1.43                      0.55
#   the same, gradient taken inside the call   1.00              0                         0
# The output is the same in all cases. No error or warning is given.
#
# Why it matters: functional_call is the way to take gradients at other weights than a network's own: at a moving
# average, after a trial step (meta-learning), or at weights that a hypernetwork makes. With checkpointing on, as large
# diffusion networks need it, these gradients are wrong. Take the gradient within the call.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import SD3Transformer2DModel
from torch.func import functional_call

print(f"torch {torch.__version__}, diffusers {diffusers.__version__}")


def build(seed):
    torch.manual_seed(seed)
    return SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4)


class Gradients(torch.nn.Module):
    """Return gradients of the loss, so that functional_call contains the backward pass."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self):
        return torch.autograd.grad(loss(self.network(**inputs).sample), list(self.parameters()), allow_unused=True)


def loss(output):
    return (output - target).square().mean()


network = build(0)
torch.manual_seed(1)
target = torch.randn(2, 4, 8, 8)
inputs = dict(hidden_states=torch.randn(2, 4, 8, 8), encoder_hidden_states=torch.randn(2, 3, 16),
              pooled_projections=torch.randn(2, 16), timestep=torch.tensor([500, 100]))


def run(given, checkpointed, inside=False):
    """Return the output, and the gradients in the blocks and in the layers before them."""
    network.train()
    (network.enable_gradient_checkpointing if checkpointed else network.disable_gradient_checkpointing)()
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in given.items()}
    output = functional_call(network, weights, (), inputs).sample
    if inside:
        found = functional_call(Gradients(network), {f"network.{name}": weights[name] for name in weights}, ())
    else:
        found = torch.autograd.grad(loss(output), list(weights.values()), allow_unused=True)
    blocks, before = [], []
    for name, gradient in zip(weights, found):
        if gradient is not None and not name.startswith(("norm_out", "proj_out")):
            (blocks if name.startswith("transformer_blocks") else before).append(gradient.flatten())
    return output.detach(), torch.cat(blocks), torch.cat(before)


def far(first, second):
    return ((first - second).norm() / second.norm()).item()


own = dict(network.named_parameters())
moved = {}
for name, weight in own.items():
    step = torch.randn_like(weight)
    moved[name] = weight + 0.1 * step * weight.norm() / step.norm()
other = dict(build(2).named_parameters())
results = {}
for name, given, inside in (("own", own, False), ("moved", moved, False), ("other", other, False),
                            ("other, inside", other, True)):
    output, blocks, before = run(given, False)
    output_2, blocks_2, before_2 = run(given, True, inside)
    assert torch.allclose(output, output_2, atol=1e-6)
    cosine = torch.cosine_similarity(blocks, blocks_2, dim=0).item()
    results[name] = cosine, far(blocks_2, blocks), far(before_2, before)
    print(f"{name:15} cosine in the blocks {cosine:.2f}, error there {results[name][1]:.2f}, "
          f"before them {results[name][2]:.2f}")
assert max(results["own"][1:]) < 1e-4 and max(results["other, inside"][1:]) < 1e-4
assert results["moved"][1] > 0.03 and results["moved"][2] > 0.03, "changed: moved weights"
assert results["other"][0] < 0.5 and results["other"][1] > 0.5, "changed: other weights"
print("as described: recomputed with the network's own weights")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
