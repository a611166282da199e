#!/usr/bin/env bash
# diffusers: with FasterCache, Wan draws the first half of a batch from the second half's prompts
#
# One would guess: FasterCache computes a part of the passes with the negative prompt, and estimates the others from the
# passes with the prompt. Each video of a batch depends on its own prompt only.
#
# What happens (diffusers 0.42.1, torch 2.13.0): FasterCache takes the first half of each batch for the negative prompt
# and the second half for the prompt, as CogVideoX calls its network. Wan calls its network once for each of the two. So
# in a batch of two videos the first counts as the negative prompt of the second. A third of the passes computes the
# second video alone, and returns for the first the second's result plus an old difference. A tiny Wan pipeline, two
# prompts, 20 steps; the relative change of the first video when the second prompt is replaced:
#   without a cache    0.00
#   FasterCache        0.27
# Of the 40 passes, 13 compute the second video alone. A single video raises IndexError. Beyond a note that FasterCache
# is experimental, nothing is logged.
#
# Why it matters: batches, or several videos for each prompt, are a usual setting in scoring and RL, and here the videos
# of a group are no longer independent. Wan's network has enable_cache(), so nothing tells that this cache does not fit. Use
# TaylorSeerCacheConfig(cache_identifiers=[r"blocks\.\d+\.attn[12]"]), which keeps Wan's two calls, and all videos,
# apart; its default patterns name none of Wan's layers.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 ftfy
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import (
    FasterCacheConfig, FlowMatchEulerDiscreteScheduler, TaylorSeerCacheConfig, WanPipeline, WanTransformer3DModel,
)

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
torch.manual_seed(0)
network = WanTransformer3DModel(
    patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16, text_dim=32,
    freq_dim=32, ffn_dim=32, num_layers=3, rope_max_seq_len=32).eval()
pipeline = WanPipeline(tokenizer=None, text_encoder=None, vae=None, transformer=network,
                       scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0))
pipeline.set_progress_bar_config(disable=True)
prompts, negative = 3 * torch.randn(3, 8, 32), torch.randn(1, 8, 32)
noise = torch.randn(1, 16, 2, 8, 8)
rows = []
network.blocks[0].register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))


def draw(*which):
    """Draw a video for each prompt, all from the same noise."""
    rows.clear()
    count = len(which)
    return pipeline(
        prompt_embeds=prompts[list(which)], negative_prompt_embeds=negative.repeat(count, 1, 1), height=64, width=64,
        num_frames=5, num_inference_steps=20, guidance_scale=5.0, latents=noise.repeat(count, 1, 1, 1, 1),
        output_type="latent").frames


def distance(first, second):
    return ((first - second).norm() / second.norm()).item()


def first_video_changes():
    return distance(draw(0, 1)[0], draw(0, 2)[0])


def use_cache():
    network.disable_cache()
    network.enable_cache(FasterCacheConfig(current_timestep_callback=lambda: pipeline.current_timestep))


plain, true = first_video_changes(), draw(0, 1)
print(f"without a cache: another second prompt changes the first video by {plain:.4f}")
use_cache()
cached, videos = first_video_changes(), draw(0, 1)
alone = rows.count(1)
print(f"FasterCache: by {cached:.4f}; {alone} of {len(rows)} passes compute one video only; difference from the videos "
      f"without a cache: {[round(distance(*pair), 3) for pair in zip(videos, true)]}")
assert plain < 1e-5 and cached > 0.05, "changed: videos of a batch are independent"
assert alone > 10, "changed: all passes compute both videos"
use_cache()
try:
    draw(0)
except IndexError as error:
    print(f"FasterCache, a single video: IndexError: {error}")
else:
    raise AssertionError("changed: a single video raises no error")
network.disable_cache()
network.enable_cache(TaylorSeerCacheConfig(cache_identifiers=[r"blocks\.\d+\.attn[12]"]))  # the default names none
kept, moved = first_video_changes(), distance(draw(0, 1), true)
print(f"TaylorSeer: by {kept:.4f}; difference of both from the videos without a cache: {moved:.3f}")
assert kept < 1e-5 and moved > 1e-3, "changed: TaylorSeer skips layers and keeps the videos apart"
print("as described: the first half of a batch is drawn from the second")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
