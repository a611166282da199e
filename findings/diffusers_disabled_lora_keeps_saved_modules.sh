#!/usr/bin/env bash
# diffusers: layers that a LoRA trains as a whole (modules_to_save) stay active after disable_lora() and at weight 0
#
# One would guess: disable_lora(), disable_adapters() and set_adapters(["a"], [0.0]) give the base network, as
# disable_adapter() of peft does, for each adapter that diffusers accepts.
#
# What happens (diffusers 0.42.1, peft 0.21.2, torch 2.13.0): they switch the low-rank factors only. A layer in
# modules_to_save keeps its trained copy. Norm of the change of the output of Stable Diffusion 3's network:
#                                      LoRA active     LoRA off
#   modules_to_save=None                    0.241           0.000
#   modules_to_save=["proj_out"]            9.526           9.527
#   the same in peft                        9.526           0.000
# Nothing is logged.
#
# Why it matters: norm and output layers are often trained along with a LoRA. A KL penalty against the network without
# its LoRA is then one against a network that follows the policy in these layers, and a picture of the base has part of
# the training in it. Use get_peft_model and its disable_adapter().
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import diffusers
import peft
import torch
from diffusers import SD3Transformer2DModel
from peft import LoraConfig, get_peft_model

print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
torch.manual_seed(1)
inputs = dict(hidden_states=torch.randn(1, 4, 8, 8), encoder_hidden_states=torch.randn(1, 3, 16),
              pooled_projections=torch.randn(1, 16), timestep=torch.tensor([500]))


def build():
    torch.manual_seed(0)
    return SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4).eval()


@torch.no_grad()
def change(network):
    return (network(**inputs, return_dict=False)[0] - base).norm().item()


@torch.no_grad()
def train(network):
    """Stand for training: change each trained weight."""
    torch.manual_seed(2)
    for weight in network.parameters():
        if weight.requires_grad:
            weight.add_(0.1 * torch.randn_like(weight))
    return network


with torch.no_grad():
    base = build()(**inputs, return_dict=False)[0]
for saved in (None, ["proj_out"]):
    config = LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"], modules_to_save=saved)
    network = build()
    network.add_adapter(config, "a")
    train(network)
    sizes = {"active": change(network)}
    network.disable_lora()
    sizes["disable_lora()"] = change(network)
    network.enable_lora()
    network.disable_adapters()
    sizes["disable_adapters()"] = change(network)
    network.enable_adapters()
    network.set_adapters(["a"], [0.0])
    sizes["weight 0"] = change(network)
    model = train(get_peft_model(build(), config))
    in_peft = change(model)
    with model.disable_adapter():
        sizes["disable_adapter() of peft"] = change(model)
    print(f"modules_to_save={saved}:", ", ".join(f"{name} {size:.3f}" for name, size in sizes.items()))
    assert abs(in_peft - sizes["active"]) < 1e-4 and sizes["disable_adapter() of peft"] < 1e-6
    for name in ("disable_lora()", "disable_adapters()", "weight 0"):
        assert sizes[name] > 0.3 * sizes["active"] if saved else sizes[name] < 1e-4, f"changed: {name}"
print("as described: layers in modules_to_save stay trained")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
