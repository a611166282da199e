#!/usr/bin/env bash
# peft: a LoRA added to convolutions with circular padding pads with zeros, which brings the seams back
#
# One would guess: a LoRA on a convolution sees the same padded input as the convolution, since its effect is to be that
# of an added weight; and whether a network is switched to circular padding before or after loading a LoRA is the same.
#
# What happens (peft 0.21.2, diffusers 0.42.1, torch 2.13.0): peft builds the LoRA's convolution with kernel, stride,
# padding and groups of its layer, but not with its padding_mode. A small Stable Diffusion UNet with
# padding_mode="circular" in all convolutions, and a LoRA on the convolutions of its residual blocks: relative error of
# "a latent rolled around by 4 pixels gives the prediction rolled around by 4 pixels", and what merging changes:
#                                                       error of rolling   change by merging
#   without a LoRA                                      0                  -
#   LoRA, then circular                                 0                  0
#   circular, then LoRA                                 0.42               0.37
#   circular, then LoRA, merged                         0                  -
#   circular, then LoRA on attention layers             0                  0
#   LoHa, LoKr, in either order                         0.01, 0.35         0.01, 0.32
# The errors grow with the LoRA, here one of random weights. Nothing is logged.
#
# Why it matters: setting padding_mode of all convolutions is the usual way to seamless textures and panoramas, and some
# networks are trained with "reflect" or "circular". A LoRA that is loaded later draws a border into the picture, one
# that is merged does not, and a LoRA trained that way is another one after merging. Set padding_mode again after each
# load, or merge.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import copy

import diffusers
import peft
import torch
from diffusers import UNet2DConditionModel
from peft import LoHaConfig, LoKrConfig, LoraConfig, get_peft_model

print(f"peft {peft.__version__}, diffusers {diffusers.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
base = UNet2DConditionModel(
    sample_size=16, block_out_channels=(16, 32), norm_num_groups=4, cross_attention_dim=16, attention_head_dim=8,
    layers_per_block=1, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")).eval()
latent, text = torch.randn(1, 4, 16, 16), torch.randn(1, 5, 16)
convolutions = dict(r=4, target_modules=["conv1", "conv2"])


def circular(network):
    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.padding_mode = "circular"
    return network


@torch.no_grad()
def draw(network, image=latent):
    return network(image, torch.tensor([500]), text).sample


def relative(new, old):
    return ((new - old).norm() / old.norm()).item()


def of_rolling(network):
    return relative(draw(network, latent.roll(4, 3)), draw(network).roll(4, 3))


def add(network, config):
    torch.manual_seed(1)
    return get_peft_model(network, config).eval()


def measure(name, network):
    error, before = of_rolling(network), draw(network)
    network.merge_adapter()
    change, merged = relative(draw(network), before), of_rolling(network)
    print(f"{name:40} error of rolling {error:.3f}, merged {merged:.3f}; change by merging {change:.3f}")
    assert merged < 1e-4
    return error, change


def new():
    return copy.deepcopy(base)


print(f"without a LoRA: error of rolling {of_rolling(circular(new())):.3f}, zero padding {of_rolling(new()):.3f}")
assert of_rolling(circular(new())) < 1e-4 and of_rolling(new()) > 0.01
lora = LoraConfig(init_lora_weights=False, **convolutions)
attention = LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
assert max(measure("LoRA, then circular", circular(add(new(), lora)))) < 1e-4
assert max(measure("circular, then LoRA on attention", add(circular(new()), attention))) < 1e-4
assert min(measure("circular, then LoRA", add(circular(new()), lora))) > 0.1, "changed: LoRA"
for kind in (LoHaConfig, LoKrConfig):
    config = kind(init_weights=False, **convolutions)
    for name, network in (
        (f"circular, then {kind.__name__}", add(circular(new()), config)),
        (f"{kind.__name__}, then circular", circular(add(new(), config))),
    ):
        assert min(measure(name, network)) > 1e-3, f"changed: {name}"
print("as described: the LoRA pads with zeros")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
