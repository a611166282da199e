#!/usr/bin/env bash
# diffusers: with Pyramid Attention Broadcast, negative prompts and guidance vanish in Wan and Qwen-Image
#
# One would guess: PyramidAttentionBroadcastConfig(cross_attention_block_skip_range=2) uses the attention of one
# denoising step in the next step again, for the prompt and for the negative prompt.
#
# What happens (diffusers 0.42.1, torch 2.13.0): the hook counts passes of the network and keeps one output. Wan and
# Qwen-Image run the network twice in each step, first with the prompt, then with the negative prompt. With a range of
# 2, the second pass gets the attention that the first one computed in the same step, and nothing is kept from step to
# step. How far another negative prompt moves the latents of ten steps at guidance 4, in units of the move without a
# cache:
#                                              timesteps 100 to 800     all timesteps
#   Wan, cross-attention, range 2              0.27                     0.00
#   Qwen-Image, self-attention, range 2        0.48                     0.00
#   LTX-Video, cross-attention, range 2        1.34                     1.34
#   Wan, TaylorSeer's cache, interval 2                                 0.94
# LTX-Video runs both prompts in one batch. TaylorSeer's cache keeps one state for each of the two passes. Nothing is
# logged.
#
# Why it matters: enable_cache takes the configuration for each of these networks. Images of a "fast" evaluation or
# rollout then have little or no guidance.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import (
    AutoencoderKLLTXVideo, AutoencoderKLQwenImage, AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, LTXPipeline,
    LTXVideoTransformer3DModel, PyramidAttentionBroadcastConfig, QwenImagePipeline, QwenImageTransformer2DModel,
    TaylorSeerCacheConfig, WanPipeline, WanTransformer3DModel,
)

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
torch.manual_seed(0)
prompt, *negatives = torch.randn(3, 1, 6, 32)
mask = torch.ones(1, 6, dtype=torch.long)


def randomised(network):
    torch.manual_seed(1)
    for weight in network.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.2)
    return network


def wan():
    network = WanTransformer3DModel(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
                                    text_dim=32, freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32)
    vae = AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
                           latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    return WanPipeline(None, None, vae, FlowMatchEulerDiscreteScheduler(), transformer=randomised(network))


def ltx():
    network = LTXVideoTransformer3DModel(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8,
                                         cross_attention_dim=16, num_layers=2, caption_channels=32)
    vae = AutoencoderKLLTXVideo(latent_channels=4, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8,) * 4,
                                layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 5)
    return LTXPipeline(FlowMatchEulerDiscreteScheduler(), vae, None, None, randomised(network))


def qwen():
    network = QwenImageTransformer2DModel(in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
                                          num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=(4, 6, 6))
    vae = AutoencoderKLQwenImage(base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
                                 latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    return QwenImagePipeline(FlowMatchEulerDiscreteScheduler(), vae, None, None, randomised(network))


def options(pipeline, negative):
    if isinstance(pipeline, WanPipeline):
        return dict(num_frames=5, guidance_scale=4.0, negative_prompt_embeds=negative)
    if isinstance(pipeline, LTXPipeline):
        return dict(num_frames=9, guidance_scale=4.0, prompt_attention_mask=mask, negative_prompt_embeds=negative,
                    negative_prompt_attention_mask=mask)
    return dict(true_cfg_scale=4.0, prompt_embeds_mask=mask, negative_prompt_embeds=negative,
                negative_prompt_embeds_mask=mask)


def effect(build, cache=None):
    """Return how far another negative prompt moves the latents, on average."""
    pipeline = build()
    pipeline.set_progress_bar_config(disable=True)
    if isinstance(cache, dict):
        cache = PyramidAttentionBroadcastConfig(current_timestep_callback=lambda: pipeline.current_timestep, **cache)
    if cache is not None:
        pipeline.transformer.enable_cache(cache)
    results = [pipeline(prompt_embeds=prompt, height=64, width=64, num_inference_steps=10, output_type="latent",
                        generator=torch.Generator().manual_seed(0), **options(pipeline, negative))[0]
               for negative in negatives]
    return (results[0] - results[1]).abs().mean().item()


every = (-1, 1001)
cross = dict(cross_attention_block_skip_range=2)
wide = dict(**cross, cross_attention_timestep_skip_range=every)
own = dict(spatial_attention_block_skip_range=2)
own_wide = dict(**own, spatial_attention_timestep_skip_range=every)
# its default patterns name no layer of Wan
taylorseer = TaylorSeerCacheConfig(cache_interval=2, cache_identifiers=[r"blocks\.\d+\.attn[12]"])
shares = {}
for name, build, caches in (
    ("Wan", wan, {"cross": cross, "cross, all steps": wide, "TaylorSeer": taylorseer}),
    ("Qwen-Image", qwen, {"spatial": own, "spatial, all steps": own_wide}),
    ("LTX-Video", ltx, {"cross": cross, "cross, all steps": wide}),
):
    plain = effect(build)
    for label, cache in caches.items():
        share = shares[name, label] = effect(build, cache) / plain
        print(f"{name:12} {label:20} effect of the negative prompt, of that without a cache: {share:.2f}")
assert shares["Wan", "cross, all steps"] == shares["Qwen-Image", "spatial, all steps"] == 0, "changed: guidance works"
assert shares["Wan", "cross"] < 0.5 and shares["Qwen-Image", "spatial"] < 0.7, "changed: guidance in the default range"
kept = [shares["Wan", "TaylorSeer"], shares["LTX-Video", "cross"], shares["LTX-Video", "cross, all steps"]]
assert min(kept) > 0.8, "changed: guidance with TaylorSeer's cache, or in LTX-Video"
print("as described: the pass of the negative prompt gets the attention of the prompt")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
