#!/usr/bin/env bash
# diffusers: with TaylorSeer's cache, HunyuanVideo 1.5's modular pipeline draws another video at each call
#
# One would guess: two calls with the same seed return the same video. DiffusionPipeline resets the caches of its models
# at the end of a call, so the pipelines that are not modular do.
#
# What happens (diffusers 0.42.1, torch 2.13.0): the modular pipeline passes cache contexts to the network, so the cache
# works, but nothing resets it. The second call starts with the features and the step counter of the first one, and
# returns other latents. After `_reset_stateful_cache()` of the network the first result comes back. Only Cosmos' modular
# pipeline resets its cache.
#
# Why it matters: images of one seed are compared before and after training, or between two ranks; here they depend on
# what was drawn before. Reset the network's cache before each call, or call disable_cache() and enable_cache() again.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import logging

import diffusers
import torch
from diffusers import ClassifierFreeGuidance, TaylorSeerCacheConfig
from diffusers.modular_pipelines.hunyuan_video1_5.modular_blocks_hunyuan_video1_5 import HunyuanVideo15CoreDenoiseStep

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
logging.getLogger("diffusers").setLevel(logging.CRITICAL)
torch.manual_seed(0)
network = diffusers.HunyuanVideo15Transformer3DModel(
    in_channels=65, out_channels=32, num_attention_heads=2, attention_head_dim=16, num_layers=2, num_refiner_layers=1,
    rope_axes_dim=(4, 6, 6), text_embed_dim=16, text_embed_2_dim=16, image_embed_dim=8, task_type="t2v").eval()
for weight in network.parameters():
    weight.data.normal_(0, 0.2)
pipeline = HunyuanVideo15CoreDenoiseStep().init_pipeline()
pipeline.update_components(transformer=network, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
                           guider=ClassifierFreeGuidance(guidance_scale=3.0))
pipeline.set_progress_bar_config(disable=True)
texts = {}
for name in ("prompt_embeds", "prompt_embeds_2", "negative_prompt_embeds", "negative_prompt_embeds_2"):
    texts[name] = torch.randn(1, 6, 16)
    texts[name.replace("embeds", "embeds_mask")] = torch.ones(1, 6)


def draw():
    return pipeline(**texts, height=64, width=64, num_frames=5, num_inference_steps=8, output="latents",
                    generator=torch.Generator().manual_seed(0))


def apart(one, other):
    return ((one - other).abs().max() / one.abs().max()).item()


without = apart(draw(), draw())
network.enable_cache(TaylorSeerCacheConfig(cache_interval=3, disable_cache_before_step=2, max_order=1))
first, second = draw(), draw()
network._reset_stateful_cache()
again = draw()
print(f"two calls differ by {without:.3f} without a cache, and by {apart(first, second):.3f} of the largest value with it")
print(f"after a reset the result differs from the first by {apart(first, again):.3f}")
assert without == 0 and apart(first, again) == 0
assert apart(first, second) > 0.01, "changed: the cache is reset between calls"
print("as described: the second call continues with the first one's cache")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
