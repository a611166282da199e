#!/usr/bin/env bash
# diffusers: CFG-Zero* gives NaN in Qwen-Image's modular pipeline, and magnitude-aware guidance takes no images
#
# One would guess: a guider of diffusers may be put into any modular pipeline that has one.
#
# What happens (diffusers 0.42.1, torch 2.13.0):
#  1. ClassifierFreeZeroStarGuidance returns zeros at its first step (zero_init_steps=1 by default). Qwen-Image's loop
#     then scales the prediction to the norm of the conditional one and divides by the norm 0: all latents are NaN, and
#     the image is black without an error. With zero_init_steps=0 they are finite.
#  2. MagnitudeAwareGuidance works on tokens, (B, N, C), but raises a RuntimeError for latents (B, C, H, W) and
#     (B, C, F, H, W): it asks for one norm over all dimensions but the first, and torch.linalg.norm takes at most two.
#     So it fails in SD 3, SDXL and Wan.
#
# Why it matters: rewards of black images are numbers, so a search over guiders or a rollout goes on with them.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import logging

import diffusers
import torch
from diffusers.guiders import ClassifierFreeGuidance, ClassifierFreeZeroStarGuidance, MagnitudeAwareGuidance
from diffusers.modular_pipelines.qwenimage.modular_blocks_qwenimage import QwenImageCoreDenoiseStep

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
logging.getLogger("diffusers").setLevel(logging.CRITICAL)
torch.manual_seed(0)
network = diffusers.QwenImageTransformer2DModel(
    in_channels=16, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
    axes_dims_rope=(4, 6, 6), joint_attention_dim=16).eval()
for weight in network.parameters():
    weight.data.normal_(0, 0.2)
pipeline = QwenImageCoreDenoiseStep().init_pipeline()
pipeline.set_progress_bar_config(disable=True)
texts = {}
for name in ("prompt_embeds", "negative_prompt_embeds"):
    texts[name], texts[f"{name}_mask"] = torch.randn(1, 6, 16), torch.ones(1, 6, dtype=torch.long)


def share_of_nans(guider):
    pipeline.update_components(transformer=network, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), guider=guider)
    latents = pipeline(**texts, height=64, width=64, num_inference_steps=6, output="latents",
                       generator=torch.Generator().manual_seed(0))
    return latents.isnan().float().mean().item()


shares = {
    "CFG": share_of_nans(ClassifierFreeGuidance(guidance_scale=4.0)),
    "CFG-Zero*": share_of_nans(ClassifierFreeZeroStarGuidance(guidance_scale=4.0)),
    "CFG-Zero*, zero_init_steps=0": share_of_nans(ClassifierFreeZeroStarGuidance(guidance_scale=4.0, zero_init_steps=0)),
}
for name, share in shares.items():
    print(f"Qwen-Image, {name}: {share:.0%} of the latents are NaN")
assert list(shares.values()) == [0, 1, 0], "changed: CFG-Zero* in Qwen-Image's modular pipeline"


def guided(*shape):
    try:
        guider = MagnitudeAwareGuidance(guidance_scale=4.0)
        return str(tuple(guider.forward(torch.randn(shape), torch.randn(shape)).pred.shape))
    except RuntimeError as error:
        return f"RuntimeError: {error}"


results = [guided(1, 16, 8), guided(1, 4, 8, 8), guided(1, 4, 2, 8, 8)]
print("magnitude-aware guidance of tokens, images, videos:", *results, sep="\n  ")
assert not results[0].startswith("Runtime") and all(result.startswith("Runtime") for result in results[1:]), "changed"
print("as described")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
