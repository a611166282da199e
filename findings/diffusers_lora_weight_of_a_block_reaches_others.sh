#!/usr/bin/env bash
# diffusers: in FLUX.1, a LoRA weight for transformer block 1 also counts in 20 other blocks, whatever they were given
#
# One would guess: a weight given to set_adapters for one block of a transformer counts in that block, as a weight for
# one block of a UNet does.
#
# What happens (diffusers 0.42.1, peft 0.21.2, torch 2.13.0): a key counts in each layer whose name contains it
# anywhere, and the first key that does wins. Weights of the 19 + 38 blocks of a small FLUX.1, for a LoRA on attention:
#   {"transformer_blocks.1": 0}                               0 in transformer_blocks 1 and 10 to 18
#                                                             0 in single_transformer_blocks 1 and 10 to 19
#   the same and "transformer_blocks.12": 1                   the same; 1 is ignored
#   the same two keys in the other order                      1 in block 12 of both kinds, else the same
#   {"transformer_blocks.1.": 0}                              0 in transformer_blocks 1 and single_transformer_blocks 1
#   {"up": {"block_0": [1, 0, 1]}} in a UNet                  0 in the second part of that block, and nowhere else
# Nothing is logged. With a LoRA on a layer that no key names and that is not deep enough, such as x_embedder or a
# single block's proj_out, the call raises IndexError.
#
# Why it matters: weights by block are used to find out which blocks carry style and which content, and to mix LoRAs.
# A scan over blocks 0 to 18 switches off 21 blocks for block 1, 12 for 2, 10 for 3 and two for each other one. Keys
# like "transformer_blocks.1.attn." do not help either; set the layers' own weights, by module.set_scale(adapter, w).
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
    DDIMScheduler, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel, StableDiffusionPipeline,
    UNet2DConditionModel,
)
from peft import LoraConfig

print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
config = LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"])
flux = FluxTransformer2DModel(
    patch_size=1, in_channels=8, num_layers=19, num_single_layers=38, num_attention_heads=1, attention_head_dim=8,
    pooled_projection_dim=8, joint_attention_dim=8, axes_dims_rope=(2, 2, 4))
flux.add_adapter(config, "style")
flux_pipeline = FluxPipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, None, None, flux)
unet = UNet2DConditionModel(
    sample_size=8, block_out_channels=(8, 8), norm_num_groups=4, cross_attention_dim=8, attention_head_dim=4,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"))
unet.add_adapter(config, "style")
unet_pipeline = StableDiffusionPipeline(
    None, None, None, unet, DDIMScheduler(), None, None, requires_safety_checker=False)


def blocks_with(network, weight):
    """Return the names of the blocks of which all layers have this weight."""
    found = {}
    for name, module in network.named_modules():
        if hasattr(module, "lora_A"):
            block = name.split(".attn")[0]
            found.setdefault(block, set()).add(module.scaling["style"])
    return {block for block, weights in found.items() if weights == {weight}}


def of_flux(weights):
    flux_pipeline.set_adapters("style", {"transformer": weights})
    return blocks_with(flux, 0)


def names(double, single):
    return {f"transformer_blocks.{i}" for i in double} | {f"single_transformer_blocks.{i}" for i in single}


one, twelve = "transformer_blocks.1", "transformer_blocks.12"
wide = names([1, *range(10, 19)], [1, *range(10, 20)])
for weights, expected in (
    ({one: 0}, wide), ({one: 0, twelve: 1}, wide), ({twelve: 1, one: 0}, wide - names([12], [12])),
    ({one + ".": 0}, names([1], [1])),
):
    found = of_flux(weights)
    print(f"{weights}: 0 in {len(found)} of 57 blocks")
    assert found == expected, f"changed: {sorted(found)}"

scan = [len(of_flux({f"transformer_blocks.{i}": 0})) for i in range(19)]
print("a scan over blocks 0 to 18 switches off", *scan)
assert scan == [2, 21, 12, 10] + [2] * 15, "changed: the scan"

unet_pipeline.set_adapters("style", {"unet": {"up": {"block_0": [1, 0, 1]}}})
found = blocks_with(unet, 0)
print("UNet:", *sorted(found))
assert found == {"up_blocks.0.attentions.1.transformer_blocks.0"}

wider = FluxPipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, None, None, flux)
flux.delete_adapters("style")
flux.add_adapter(LoraConfig(r=2, target_modules=["to_q", "x_embedder"]), "other")
try:
    wider.set_adapters("other", {"transformer": {one: 0}})
    raise AssertionError("changed: no error with x_embedder")
except IndexError as error:
    print("with x_embedder: IndexError:", error)
print("as described: a block's weight reaches other blocks")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
