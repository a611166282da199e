#!/usr/bin/env bash
# diffusers: a hot-swapped LoRA loses the adapter's weight, and set_adapters then gives it the alpha of the old one
#
# One would guess: load_lora_weights(folder, adapter_name="style", hotswap=True) gives what a new adapter with this
# LoRA and set_adapters with the same weight would give.
#
# What happens (diffusers 0.42.1, peft 0.21.2, torch 2.13.0): swapping sets the scale of each layer to alpha / rank of
# the new LoRA, without the weight, and keeps the first one's alpha for later calls. Two LoRAs of rank 4; strength in
# relation to a newly loaded one with the same weight:
#                                                  alpha 4, then 8    alpha 8, then 4    alpha 4 both times
#   weight 1.0, after swapping                     1                  1                  1
#   set_adapters("style", 1.0) after that          0.5                2                  1
#   weight 0.5, after swapping                     2                  2                  2
#   set_adapters("style", 0.5) after that          0.5                2                  1
# lora_alpha in the network's peft_config stays that of the first one too. Nothing is logged.
#
# Why it matters: LoRAs are swapped to keep a compiled network. Pictures, or rollouts of RL, are then drawn with twice
# or half of the LoRA that was asked for. Give all LoRAs one alpha and rank, and call set_adapters after each swap; or
# delete the adapter and load the next one.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import sys

import diffusers
import peft
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from diffusers.training_utils import _collate_lora_metadata
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
torch.manual_seed(1)
inputs = dict(hidden_states=torch.randn(1, 4, 8, 8), encoder_hidden_states=torch.randn(1, 3, 16),
              pooled_projections=torch.randn(1, 16), timestep=torch.tensor([500]))


def build():
    torch.manual_seed(0)
    return StableDiffusion3Pipeline(SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
    ), None, None, None, None, None, None, None, None)


def write(name, alpha, seed):
    network = build().transformer
    torch.manual_seed(seed)
    network.add_adapter(LoraConfig(r=4, lora_alpha=alpha, target_modules=["to_q", "to_v"], init_lora_weights=False))
    for key, weight in network.named_parameters():
        if "lora_" in key:
            weight.data *= 0.1  # small, so that the output is nearly linear in the strength
    StableDiffusion3Pipeline.save_lora_weights(
        f"{sys.argv[1]}/{name}", transformer_lora_layers=get_peft_model_state_dict(network),
        **_collate_lora_metadata({"transformer": network}))


def load(pipeline, name, **options):
    pipeline.load_lora_weights(f"{sys.argv[1]}/{name}", adapter_name="style", **options)


@torch.no_grad()
def change(pipeline):
    return pipeline.transformer(**inputs).sample.double() - plain


with torch.no_grad():
    plain = build().transformer(**inputs).sample.double()
for name, alpha, seed in (("four", 4, 2), ("eight", 8, 3), ("other four", 4, 4)):
    write(name, alpha, seed)
for first, second, factor in (("four", "eight", 0.5), ("eight", "four", 2), ("four", "other four", 1)):
    for weight in (1.0, 0.5):
        anew, swapped = build(), build()
        for pipeline, name in ((anew, second), (swapped, first)):
            load(pipeline, name)
            pipeline.set_adapters("style", weight)
        load(swapped, second, hotswap=True)
        strengths = [(change(swapped).norm() / change(anew).norm()).item()]
        swapped.set_adapters("style", weight)
        strengths.append((change(swapped).norm() / change(anew).norm()).item())
        alpha = swapped.transformer.peft_config["style"].lora_alpha
        print(f"{first}, then {second}, weight {weight}: strength {strengths[0]:.2f} after swapping, "
              f"{strengths[1]:.2f} after set_adapters; peft_config has alpha {alpha}")
        assert abs(strengths[0] * weight - 1) < 0.1, "changed: swapping keeps the weight"
        assert abs(strengths[1] / factor - 1) < 0.1, "changed: set_adapters uses the new alpha"
        assert alpha == (8 if first == "eight" else 4), "changed: peft_config"
print("as described: the weight is lost, and the old alpha is kept")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
