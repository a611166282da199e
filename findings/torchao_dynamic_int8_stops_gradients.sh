#!/usr/bin/env bash
# torchao: a LoRA on every layer of a network with int8 activations gets gradients in its last layer only, and no error
#
# One would guess: a LoRA is trained on a network quantized with Int8DynamicActivationInt8WeightConfig as on one with
# Int8WeightOnlyConfig, or backward() raises an error.
#
# What happens (torchao 0.18.0, peft 0.21.2, diffusers 0.42.1, torch 2.13.0): the output of such a layer has no gradient
# with respect to its input. Gradients flow through LoRA factors only, half of which start at zero. A small, random
# Stable Diffusion 3 network, a LoRA with target_modules="all-linear" (31 layers that have an effect), AdamW:
#                                        layers with a gradient at step     loss at step
#                                        0      1      10                   0       10      50
#   not quantized                        31     31     31                   1.51    1.40    1.02
#   int8 weights                         31     31     31                   1.51    1.40    1.02
#   int8 weights and activations         1      8      31                   1.51    1.49    1.24
# Later all layers have a gradient, of which the parts through the quantized layers are missing. Nothing is logged.
# With a LoRA on the attention's q, k and v only, backward() raises RuntimeError, as no path is left.
#
# Why it matters: the loss falls and all factors move, so that a run looks sound. RL of diffusion models samples much,
# and a base network that is quantized for fast sampling is then trained with wrong gradients. Train with int8 weights
# only.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 \
    peft==0.21.2 torchao==0.18.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
import torchao
from diffusers import SD3Transformer2DModel
from peft import LoraConfig
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

print(f"torchao {torchao.__version__}, diffusers {diffusers.__version__}, torch {torch.__version__}")
torch.manual_seed(1)
inputs = dict(hidden_states=torch.randn(2, 4, 8, 8), encoder_hidden_states=torch.randn(2, 3, 64),
              pooled_projections=torch.randn(2, 64), timestep=torch.tensor([500, 100]))
target = torch.randn(2, 4, 8, 8)


def build(config, target_modules="all-linear"):
    torch.manual_seed(0)
    network = SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=64, caption_projection_dim=64, pooled_projection_dim=64, out_channels=4)
    network.requires_grad_(False)
    if config is not None:
        quantize_(network, config)
    torch.manual_seed(2)
    network.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=target_modules))
    return network


def loss(network):
    return (network(**inputs).sample - target).square().mean()


def train(network):
    """Return in how many layers the LoRA has a gradient at steps 0, 1 and 10, and the loss at 0, 10 and 50."""
    factors = [weight for name, weight in network.named_parameters() if ".lora_B." in name]
    optimizer = torch.optim.AdamW([w for w in network.parameters() if w.requires_grad], lr=1e-3, weight_decay=0.0)
    losses, reached = [], []
    for _ in range(51):
        optimizer.zero_grad()
        value = loss(network)
        value.backward()
        reached.append(sum(factor.grad is not None and bool(factor.grad.any()) for factor in factors))
        losses.append(round(value.item(), 3))
        optimizer.step()
    return [reached[step] for step in (0, 1, 10)], [losses[step] for step in (0, 10, 50)]


results = {}
for name, config in (("not quantized", None), ("int8 weights", Int8WeightOnlyConfig()),
                     ("int8 weights and activations", Int8DynamicActivationInt8WeightConfig())):
    results[name] = train(build(config))
    print(f"{name:30} layers with a gradient at steps 0, 1, 10: {results[name][0]}; "
          f"loss at 0, 10, 50: {results[name][1]}")
plain, weights, both = results.values()
assert plain[0] == weights[0] == [31, 31, 31] and abs(plain[1][2] - weights[1][2]) < 0.02
assert both[0][0] == 1 and both[0][1] < 31, "changed: gradients pass quantized activations"
assert both[1][1] - plain[1][1] > 0.05, "changed: it trains as well"
try:
    loss(build(Int8DynamicActivationInt8WeightConfig(), ["to_q", "to_k", "to_v"])).backward()
except RuntimeError as error:
    print("a LoRA on q, k and v only:", error)
else:
    raise AssertionError("changed: a LoRA on q, k and v has gradients")
print("as described: no gradient passes a layer with int8 activations")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
