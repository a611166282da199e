#!/usr/bin/env bash
# diffusers: LoRA weights per block do not reach blocks without attention, where a LoRA of convolutions stays at 1
#
# One would guess: set_adapters("style", {"unet": {"down": 0, "mid": 0, "up": 0}}) is the weight 0, as these three are
# all parts of the network that have blocks.
#
# What happens (diffusers 0.42.1, peft 0.21.2): the weights are expanded to the attention layers of each part. Residual
# layers take the weight of the attention layer with their number, if there is one. All others get 1: in Stable
# Diffusion's layout the blocks without attention, and the residual layers of the middle. A LoRA in a small network with
# 4 blocks, and its effect (change of the prediction) as a share of that at weight 1:
#                                       weight 0      0 for down, mid and up
#   attention                           0             0         0 of 32 layers active
#   attention and convolutions          0             0.49      10 of 48
#   the same and time embeddings        0             0.46      15 of 56
# (random weights). Nothing is logged.
#
# Why it matters: LoRAs of convolutions (LoCon) are common. A search for the blocks that carry a style, or a LoRA that
# is turned off in one part, leaves a share of it everywhere.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import diffusers
import peft
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
torch.manual_seed(0)
INPUTS = dict(sample=torch.randn(1, 4, 8, 8), timestep=500, encoder_hidden_states=torch.randn(1, 6, 16))


def network():
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=2, norm_num_groups=4).eval()


def lora(targets):
    torch.manual_seed(1)
    trained = network()
    trained.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=targets, init_lora_weights=False))
    return {f"unet.{name}": weight for name, weight in get_peft_model_state_dict(trained).items()}


@torch.no_grad()
def measure(targets, weights):
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)
    pipeline = StableDiffusionPipeline(vae, None, None, network(), DDIMScheduler(), None, None,
                                       requires_safety_checker=False)
    pipeline.load_lora_weights(lora(targets), adapter_name="style")
    pipeline.set_adapters("style", weights)
    scales = {name: module.scaling["style"] for name, module in pipeline.unet.named_modules()
              if getattr(module, "scaling", None)}
    return scales, pipeline.unet(**INPUTS).sample


base = network()(**INPUTS).sample.detach()
PARTS = dict.fromkeys(("down", "mid", "up"), 0.0)
left, counts = {}, {}
for name, targets in {"attention": ATTENTION, "attention and convolutions": [*ATTENTION, "conv1", "conv2"],
                      "the same and time": [*ATTENTION, "conv1", "conv2", "time_emb_proj"]}.items():
    _, full = measure(targets, 1.0)
    for label, weights in {"0": 0.0, "0 in all blocks": {"unet": PARTS}}.items():
        scales, output = measure(targets, weights)
        effect = left[name, label] = ((output - base).norm() / (full - base).norm()).item()
        active = [layer for layer, scale in scales.items() if scale > 0]
        counts[name, label] = len(active), len(scales)
        print(f"LoRA of {name}, weight {label}: {len(active)} of {len(scales)} layers active, in "
              f"{sorted({'.'.join(layer.split('.')[:3]) for layer in active})}, effect {effect:.2f}")
assert all(effect == 0 for (name, label), effect in left.items() if label == "0" or name == "attention"), "changed"
assert counts["attention and convolutions", "0 in all blocks"] == (10, 48), "changed: convolutions"
assert counts["the same and time", "0 in all blocks"] == (15, 56), "changed: time embeddings"
assert all(left[name, "0 in all blocks"] > 0.2 for name in ("attention and convolutions", "the same and time"))
print("as described: blocks without attention keep the LoRA at full strength")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
