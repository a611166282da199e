#!/usr/bin/env bash
# diffusers, peft: a ControlNet made from a network with a LoRA gets random attention weights
#
# One would guess: from_transformer() of a ControlNet copies the network's blocks, and a LoRA in it is merged, left out,
# or refused. ControlNetModel.from_unet() raises an error then.
#
# What happens (diffusers 0.42.1, peft 0.21.2, torch 2.13.0): peft renames a layer "to_q" with a LoRA to
# "to_q.base_layer". FluxControlNetModel, SD3ControlNetModel and QwenImageControlNetModel load the blocks with
# strict=False, which skips every name that does not fit. All layers that the LoRA is on keep their random
# initialization; the others are copied. Tiny networks, a LoRA on to_q, to_k, to_v and to_out.0:
#   network               weights of the blocks    copied without LoRA    copied with LoRA
#   Stable Diffusion 3    56                       56                     40
#   FLUX.1                46                       46                     32
#   Qwen-Image            32                       32                     24
# It is the same with disable_lora(), and after fuse_lora(). Nothing is logged, and the ControlNet's outputs start at
# zero in any case, so the first images are right.
#
# Why it matters: a ControlNet is trained from a copy of a tuned network, or a pipeline with a distillation LoRA (Turbo,
# Lightning) is loaded first. It then trains with attention from scratch, without a sign but a slower loss. Make the
# ControlNet before the LoRA is loaded, or after fuse_lora() and unload_lora().
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import diffusers
import peft
import torch
from diffusers import (
    ControlNetModel, FluxControlNetModel, FluxTransformer2DModel, QwenImageControlNetModel, QwenImageTransformer2DModel,
    SD3ControlNetModel, SD3Transformer2DModel, UNet2DConditionModel,
)
from peft import LoraConfig

print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
heads = dict(attention_head_dim=16, num_attention_heads=2)
CASES = {
    "Stable Diffusion 3": (
        lambda: SD3Transformer2DModel(
            sample_size=8, patch_size=1, in_channels=4, num_layers=4, joint_attention_dim=16, caption_projection_dim=32,
            pooled_projection_dim=16, out_channels=4, **heads),
        lambda network: SD3ControlNetModel.from_transformer(network, num_layers=2), 56, 40),
    "FLUX.1": (
        lambda: FluxTransformer2DModel(
            patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, joint_attention_dim=32,
            pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), **heads),
        lambda network: FluxControlNetModel.from_transformer(network, num_layers=1, num_single_layers=1, **heads),
        46, 32),
    "Qwen-Image": (
        lambda: QwenImageTransformer2DModel(
            patch_size=2, in_channels=16, out_channels=4, num_layers=2, joint_attention_dim=16,
            axes_dims_rope=(8, 4, 4), **heads),
        lambda network: QwenImageControlNetModel.from_transformer(network, num_layers=1, **heads), 32, 24),
}


def add_lora(network):
    network.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False))


def copied(weights, controlnet):
    """Count the blocks' weights, and those that the ControlNet has in common with the base network."""
    names = [name for name in controlnet.state_dict() if "transformer_blocks" in name]
    return len(names), sum(torch.equal(controlnet.state_dict()[name], weights[name]) for name in names)


def fused(network):
    add_lora(network)
    network.fuse_lora()


def disabled(network):
    add_lora(network)
    network.disable_lora()


for name, (make_network, make_controlnet, count, expected) in CASES.items():
    torch.manual_seed(0)
    network = make_network()
    weights = {key: weight.clone() for key, weight in network.state_dict().items()}
    assert copied(weights, make_controlnet(network)) == (count, count)
    add_lora(network)
    total, found = copied(weights, make_controlnet(network))
    print(f"{name}: {found} of {total} weights copied from the network with a LoRA")
    assert found == expected, f"changed: {name}"
    for change in (disabled, fused):
        network = make_network()
        network.load_state_dict(weights)
        change(network)
        assert copied(weights, make_controlnet(network))[1] == expected, f"changed: {name}, {change.__name__}"
    network.unload_lora()
    assert copied(network.state_dict(), make_controlnet(network))[1] == count, "changed: unloading does not help"

unet = UNet2DConditionModel(
    sample_size=8, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=16, attention_head_dim=2,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    norm_num_groups=4)
add_lora(unet)
try:
    ControlNetModel.from_unet(unet)
except RuntimeError as error:
    print(f"ControlNetModel.from_unet: {str(error).splitlines()[0]}")
else:
    raise AssertionError("changed: ControlNetModel.from_unet raises no error")
print("as described: layers with a LoRA are not copied")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
