#!/usr/bin/env bash
# diffusers: a negative prompt that callback_on_step_end returns has no effect in Stable Diffusion, SD 3 and LTX-Video
#
# One would guess: callback_on_step_end may ask for "negative_prompt_embeds", which is in the pipeline's list of tensors
# for callbacks. What the callback returns under that name is the negative prompt of the next steps.
#
# What happens (diffusers 0.42.1, torch 2.13.0): the callback gets the tensor, and what it returns is dropped. Before
# the first step the pipeline has put both prompts into prompt_embeds, and only that is read. Four steps at guidance 5,
# with another negative prompt returned after each step. Mean change of the latents, and rows of prompt_embeds for one
# prompt:
#                                 change     rows of prompt_embeds
#   Stable Diffusion              0          2: negative, positive
#   SD 3 image-to-image           0          2: negative, positive
#   LTX-Video                     0          2: negative, positive
#   Wan                           0.072      1: positive
# In the first three, putting the new negative prompt into the first half of prompt_embeds does change the latents.
# Nothing is logged.
#
# Why it matters: schedules for negative prompts, and ablations of when they count, measure no effect at all and take it
# for a result. A callback that works for Wan is silently ignored elsewhere. A callback that reads prompt_embeds for a
# log or a reward gets the embedding of the negative prompt in the first rows of some families, but not of others.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import (
    AutoencoderKL, AutoencoderKLLTXVideo, AutoencoderKLWan, DDIMScheduler, FlowMatchEulerDiscreteScheduler,
    LTXPipeline, LTXVideoTransformer3DModel, SD3Transformer2DModel, StableDiffusion3Img2ImgPipeline,
    StableDiffusionPipeline, UNet2DConditionModel, WanPipeline, WanTransformer3DModel,
)

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
torch.manual_seed(0)
vae = AutoencoderKL(latent_channels=4, block_out_channels=(8, 8), norm_num_groups=4, shift_factor=0.0,
                    down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2)
unet = UNet2DConditionModel(sample_size=8, block_out_channels=(8,), norm_num_groups=4, layers_per_block=1,
                            down_block_types=["CrossAttnDownBlock2D"], up_block_types=["CrossAttnUpBlock2D"],
                            cross_attention_dim=16, attention_head_dim=2)
sd3 = SD3Transformer2DModel(sample_size=8, in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2,
                            attention_head_dim=8, joint_attention_dim=16, caption_projection_dim=16,
                            pooled_projection_dim=16, pos_embed_max_size=8)
wan = WanTransformer3DModel(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
                            freq_dim=16, ffn_dim=16, num_layers=1, rope_max_seq_len=32)
ltx = LTXVideoTransformer3DModel(in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=8,
                                 cross_attention_dim=16, num_layers=1, caption_channels=16)
ltx_vae = AutoencoderKLLTXVideo(latent_channels=8, block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4,
                                layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 5)
flow = FlowMatchEulerDiscreteScheduler()
positive, negative, other = torch.randn(3, 1, 8, 16)
mask, size = torch.ones(1, 8), dict(height=32, width=32)
pooled = dict(pooled_prompt_embeds=torch.ones(1, 16), negative_pooled_prompt_embeds=torch.zeros(1, 16))
pipelines = {
    "Stable Diffusion": (StableDiffusionPipeline(
        vae, None, None, unet, DDIMScheduler(), None, None, requires_safety_checker=False), size),
    "SD 3 img2img": (StableDiffusion3Img2ImgPipeline(sd3, flow, vae, *[None] * 6),
                     dict(image=torch.rand(1, 3, 32, 32), strength=1.0, **pooled)),
    "LTX-Video": (LTXPipeline(flow, ltx_vae, None, None, ltx),
                  dict(**size, num_frames=9, prompt_attention_mask=mask, negative_prompt_attention_mask=mask)),
    "Wan": (WanPipeline(None, None, AutoencoderKLWan(base_dim=4, z_dim=4, num_res_blocks=1), flow, wan),
            dict(**size, num_frames=1)),
}


def picture(name, change=None):
    pipe, given = pipelines[name]
    pipe.set_progress_bar_config(disable=True)
    shapes = {}

    def callback(pipe, step, time, tensors):
        shapes.update({key: tuple(value.shape) for key, value in tensors.items()})
        return {} if change is None else change(tensors)

    result = pipe(num_inference_steps=4, guidance_scale=5.0, output_type="latent",
                  prompt_embeds=positive, negative_prompt_embeds=negative, callback_on_step_end=callback,
                  callback_on_step_end_tensor_inputs=["prompt_embeds", "negative_prompt_embeds"],
                  generator=torch.Generator().manual_seed(0), **given)[0]
    return result, shapes


for name in pipelines:
    plain, shapes = picture(name)
    swapped, _ = picture(name, lambda tensors: {"negative_prompt_embeds": other})
    rows = shapes["prompt_embeds"][0]
    moved = (swapped - plain).abs().mean().item()
    print(f"{name:17} rows: prompt_embeds {rows}, negative_prompt_embeds {shapes['negative_prompt_embeds'][0]}; "
          f"new negative prompt moves the latents by {moved:.4f}", end="")
    assert (moved > 1e-3) == (name == "Wan") == (rows == 1), "changed"
    if rows == 2:
        both, _ = picture(name, lambda tensors: {"prompt_embeds": torch.cat([other, positive])})
        print(f", put into prompt_embeds by {(both - plain).abs().mean():.4f}", end="")
        assert (both - plain).abs().mean() > 1e-3, "changed: prompt_embeds"
    print()
print("as described: a returned negative prompt has no effect where prompt_embeds holds both")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
