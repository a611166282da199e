#!/usr/bin/env bash
# diffusers: a network saved while a LoRA is loaded comes back with weights on the meta device
#
# One would guess: save_pretrained of a network with an unmerged LoRA writes the base weights under their own names, or
# refuses; a pipeline's save_pretrained calls it.
#
# What happens (diffusers 0.42.1, peft 0.21.2, torch 2.13.0): the file has peft's names, to_q.base_layer.weight and
# to_q.lora_A.default.weight. from_pretrained finds neither to_q.weight nor a use for the others, prints a warning that
# the missing weights are "newly initialized", and leaves them on the meta device. The first pass raises a RuntimeError.
#
# Why it matters: a training script that saves its pipeline at the end loses a folder that only a rename of its keys
# brings back. Call fuse_lora() and unload_lora_weights() first, or save the adapter alone.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 peft==0.21.2 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import logging
from tempfile import TemporaryDirectory

import diffusers
import peft
import torch
from diffusers import SD3Transformer2DModel
from peft import LoraConfig

print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
for name in ("diffusers", "peft"):
    logging.getLogger(name).setLevel(logging.CRITICAL)


def outcome(fuse):
    network = SD3Transformer2DModel(
        sample_size=8, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=16,
        caption_projection_dim=16, pooled_projection_dim=16, out_channels=4)
    network.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
    if fuse:
        network.fuse_lora()
        network.unload_lora()
    with TemporaryDirectory() as folder:
        network.save_pretrained(folder)
        loaded, info = SD3Transformer2DModel.from_pretrained(folder, output_loading_info=True)
    meta = sum(weight.is_meta for weight in loaded.parameters())
    try:
        with torch.no_grad():
            loaded(torch.randn(1, 4, 8, 8), timestep=torch.tensor([500.0]), encoder_hidden_states=torch.randn(1, 4, 16),
                   pooled_projections=torch.randn(1, 16))
        result = "a prediction"
    except RuntimeError as error:
        result = f"RuntimeError: {error}"
    print(f"{'fused and unloaded' if fuse else 'with the LoRA'}: {len(info['missing_keys'])} missing, {meta} on meta, {result}")
    return meta, result


meta, result = outcome(fuse=False)
assert meta == 4 and result.startswith("RuntimeError"), "changed: a network saved with a LoRA"
assert outcome(fuse=True) == (0, "a prediction")
print("as described: unload the LoRA before saving")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
