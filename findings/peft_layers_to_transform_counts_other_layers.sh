#!/usr/bin/env bash
# peft: in diffusers' networks, layers_to_transform takes a number inside a feed-forward layer for the block's number
#
# One would guess: LoraConfig(target_modules=["to_q", "net.0.proj"], layers_to_transform=[0]) trains these layers in
# block 0 only, as it does in a language model, and layers_to_transform=[1] those of block 1.
#
# What happens (peft 0.21.2, diffusers 0.42.1, torch 2.13.0): without layers_pattern, the number is the first one with
# two names before it. The blocks of diffusers' transformers are at the root
# (transformer_blocks.3.attn.to_q), so their number is never read, but the 0 of ff.net.0.proj is. Stable Diffusion 3
# with three blocks, layers with a LoRA:
#   [0]                                          ff.net.0.proj in all three blocks, to_q in none
#   [1]                                          NoMatchingPeftModuleError
#   [0], layers_pattern="transformer_blocks"     to_q and ff.net.0.proj in block 0
# In a U-Net (down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q) the number is that of "attentions", so [0] takes
# a part of every level. Nothing is logged.
#
# Why it matters: training only some blocks is a usual way to save memory or to keep a style. Here the run trains, the
# loss falls, and the layers are others than those asked for. Set layers_pattern, and print the trained names.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import diffusers
import peft
import torch
from diffusers import SD3Transformer2DModel, UNet2DConditionModel

print(f"peft {peft.__version__}, diffusers {diffusers.__version__}, torch {torch.__version__}")


def sd3():
    return SD3Transformer2DModel(
        sample_size=8, in_channels=4, out_channels=4, num_layers=3, num_attention_heads=2, attention_head_dim=8,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, pos_embed_max_size=8)


def unet():
    return UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=2, cross_attention_dim=16,
        attention_head_dim=2, transformer_layers_per_block=2, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"))


def trained(make, targets, numbers, **options):
    network = make()
    config = peft.LoraConfig(r=2, target_modules=targets, layers_to_transform=numbers, **options)
    try:
        network.add_adapter(config)
    except ValueError as error:
        result = type(error).__name__
    else:
        result = [name for name, layer in network.named_modules() if hasattr(layer, "lora_A")]
    print(f"{type(network).__name__}, {numbers}, {options}:", result)
    return result


targets = ["attn.to_q", "ff.net.0.proj"]
every = [f"transformer_blocks.{block}.ff.net.0.proj" for block in range(3)]
assert trained(sd3, targets, [0]) == every, "changed: other layers"
assert trained(sd3, targets, [1]) == "NoMatchingPeftModuleError", "changed: block 1 is found"
assert trained(sd3, targets, [0], layers_pattern="transformer_blocks") == [
    "transformer_blocks.0.attn.to_q", "transformer_blocks.0.ff.net.0.proj"], "changed: with a pattern"
names = trained(unet, ["attn1.to_q"], [0])
assert len(names) == 6 and all(".attentions.0." in name for name in names), "changed: U-Net"
print("as described: the number that is read is not that of the block")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
