#!/usr/bin/env bash
# diffusers: gradient checkpointing of HunyuanImage 2.1's network raises TypeError in its first training pass
#
# One would guess: a network that declares support for it trains after enable_gradient_checkpointing(), with the same
# loss and more passes. That is how FLUX, SD 3.5, Qwen-Image and the others behave.
#
# What happens (diffusers 0.42.1, torch 2.13.0): a pass without gradient works, and the first one with gradient raises
#   TypeError: ModelMixin.enable_gradient_checkpointing.<locals>._gradient_checkpointing_func() got an unexpected
#   keyword argument 'attention_mask'
# The network passes two arguments of its blocks by keyword, and the default function takes only positional ones.
# So does the network of Wan Animate 2; all others pass them by position.
#
# Why it matters: this network has 17 billion weights, so that training it without checkpointing needs far more memory.
# Give the function: enable_gradient_checkpointing(partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1
cat > "$folder/check.py" <<'PY'
from functools import partial

import diffusers
import torch
from diffusers import HunyuanImageTransformer2DModel
from torch.utils.checkpoint import checkpoint

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
network = HunyuanImageTransformer2DModel(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16,
                                         num_layers=1, num_single_layers=1, num_refiner_layers=1, text_embed_dim=16,
                                         text_embed_2_dim=16, rope_axes_dim=(8, 8), patch_size=(1, 1))
given = {
    "hidden_states": torch.randn(1, 4, 4, 4), "timestep": torch.tensor([500.0]),
    "encoder_hidden_states": torch.randn(1, 6, 16), "encoder_attention_mask": torch.ones(1, 6, dtype=torch.int64),
    "encoder_hidden_states_2": torch.randn(1, 3, 16), "encoder_attention_mask_2": torch.ones(1, 3, dtype=torch.int64),
}


def gradient():
    network.zero_grad()
    network(**given).sample.square().mean().backward()
    return network.transformer_blocks[0].attn.to_q.weight.grad.clone()


assert network._supports_gradient_checkpointing
plain = gradient()
network.enable_gradient_checkpointing()
with torch.no_grad():
    network(**given)
try:
    gradient()
    raise SystemExit("changed: it trains")
except TypeError as error:
    print(f"TypeError: {error}")
    assert "unexpected keyword argument" in str(error)
network.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=False))
difference = (gradient() - plain).abs().max().item()
print(f"with the function given: largest difference of the gradient {difference:.1e}")
assert difference < 1e-6
print("as described: the default function takes no keywords")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
