#!/usr/bin/env bash
# diffusers: a Wan LoRA in musubi-tuner's names loads only if it covers every layer of every block
#
# One would guess: the converter renames the layers that are in the file; a LoRA on the attention layers only, or on
# some of the blocks, loads as well as one on all layers.
#
# What happens (diffusers 0.42.1, peft 0.21.2, torch 2.13.0): the converter counts the blocks in the file and then
# expects blocks 0 to n - 1 with eight attention and two feed-forward layers each, and an alpha for each:
#   all layers of two blocks:        converted, 40 tensors
#   attention only:                  KeyError: 'blocks_0_ffn_0.lora_down.weight'
#   self-attention only:             KeyError: 'blocks_0_cross_attn_q.lora_down.weight'
#   all layers, second block only:   KeyError: 'blocks_0_self_attn_q.lora_down.weight'
#   all layers, without alphas:      KeyError: 'blocks_0_self_attn_q.alpha'
# The same layers under diffusers' own names load.
#
# Why it matters: reinforcement learning usually trains small adapters on the attention layers (and freezes early or
# late blocks to save memory). Such a policy, exported in the names that ComfyUI users and musubi-tuner exchange, is
# refused with an error that looks like a damaged file.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import diffusers
import peft
import torch
from diffusers import WanPipeline

print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
own = [f"self_attn_{p}" for p in "qkvo"]
cross = [f"cross_attn_{p}" for p in "qkvo"]
forward = ["ffn_0", "ffn_2"]


def convert(title, layers, blocks=(0, 1), alpha=True):
    weights = {}
    for name in (f"lora_unet_blocks_{block}_{layer}" for block in blocks for layer in layers):
        weights |= {f"{name}.lora_down.weight": torch.ones(4, 16), f"{name}.lora_up.weight": torch.ones(16, 4)}
        if alpha:
            weights[f"{name}.alpha"] = torch.tensor(4.0)
    try:
        result = f"converted, {len(WanPipeline.lora_state_dict(weights))} tensors"
    except KeyError as error:
        result = f"KeyError: {error}"
    print(f"{title}: {result}")
    return result


assert convert("all layers of two blocks", own + cross + forward) == "converted, 40 tensors"
assert convert("attention only", own + cross) == "KeyError: 'blocks_0_ffn_0.lora_down.weight'", "changed"
assert convert("self-attention only", own).startswith("KeyError"), "changed"
assert convert("all layers, second block only", own + cross + forward, [1]).startswith("KeyError"), "changed"
assert convert("all layers, without alphas", own + cross + forward, alpha=False).startswith("KeyError"), "changed"
names = [f"transformer.blocks.{block}.attn1.to_q.lora_{letter}.weight" for block in (0, 1) for letter in "AB"]
assert len(WanPipeline.lora_state_dict({name: torch.ones(4, 4) for name in names})) == 4
print("as described: a part of the layers is refused")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
