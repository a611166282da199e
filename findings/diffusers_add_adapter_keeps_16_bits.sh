#!/usr/bin/env bash
# diffusers, peft: add_adapter gives a bfloat16 network a bfloat16 LoRA, whose small steps are rounded away
#
# One would guess: network.add_adapter(config) of diffusers and peft's get_peft_model(network, config) make the same
# LoRA, and peft keeps trained factors in float32 (autocast_adapter_dtype is True by default).
#
# What happens (diffusers 0.42.1, peft 0.21.2, torch 2.13.0): only get_peft_model raises 16-bit adapters to float32.
# add_adapter and peft's inject_adapter_in_model keep the type of the layer. 20 steps of AdamW with a learning rate of
# 1e-5, gaussian initialisation, bfloat16 network:
#                          type        changed entries of A    mean change of A    mean change of B
#   add_adapter            bfloat16            2 %                 3.6e-06             1.5e-04
#   get_peft_model         float32           100 %                 1.7e-04             1.5e-04
# B, which starts at zero, moves at first. Nothing is logged.
#
# Why it matters: 1e-5 to 1e-4 are usual learning rates in reinforcement learning with LoRA. Half of the LoRA stays at
# its random start, the reward still rises, and a run with get_peft_model learns something else. Cast the trained
# weights with diffusers.training_utils.cast_training_params(network).
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
from diffusers.training_utils import cast_training_params
from peft import LoraConfig, get_peft_model, inject_adapter_in_model

print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
diffusers.logging.set_verbosity_error()
config = LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_v"], init_lora_weights="gaussian")


def build():
    torch.manual_seed(0)
    network = SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=3, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=32, out_channels=4)
    return network.to(torch.bfloat16)


def add(network):
    network.add_adapter(config)
    return network


def add_and_cast(network):
    network.add_adapter(config)
    cast_training_params(network)
    return network


def train(model):
    """Return the type, the share of changed entries of A, and the mean changes of A and B."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    start = {name: weight.detach().clone() for name, weight in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-5, weight_decay=0.0)
    for step in range(20):
        torch.manual_seed(step)
        shapes = dict(hidden_states=(1, 4, 8, 8), encoder_hidden_states=(1, 3, 32), pooled_projections=(1, 32))
        inputs = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(**inputs, timestep=torch.tensor([500]), return_dict=False)[0]
        (output.float() - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = {factor: torch.cat([(trained[name] - start[name]).detach().float().abs().flatten()
                                for name in trained if factor in name]) for factor in ("lora_A", "lora_B")}
    (dtype,) = {weight.dtype for weight in trained.values()}
    return dtype, (moved["lora_A"] > 0).float().mean().item(), *(change.mean().item() for change in moved.values())


injected = inject_adapter_in_model(config, build()).named_parameters()
assert {weight.dtype for name, weight in injected if "lora" in name} == {torch.bfloat16}, "changed: inject"
found = {"add_adapter": train(add(build())), "get_peft_model": train(get_peft_model(build(), config)),
         "add_adapter and cast_training_params": train(add_and_cast(build()))}
for name, (dtype, share, first, second) in found.items():
    print(f"{name}: {dtype}, changed entries of A {share:.0%}, mean change of A {first:.1e}, of B {second:.1e}")
dtype, share, first, _ = found.pop("add_adapter")
assert dtype == torch.bfloat16 and share < 0.2, "changed: add_adapter"
for dtype, share, right, _ in found.values():
    assert dtype == torch.float32 and share > 0.95 and first < right / 5, "changed"
print("as described: the factors A hardly move")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
