#!/usr/bin/env bash
# diffusers: in bfloat16, FLUX.1 and Qwen-Image tell their network a rounded time, Stable Diffusion 3 the exact one
#
# One would guess: the network gets the noise level that the scheduler is at. Latents and weights are in 16 bits, but
# times are a few numbers that the scheduler keeps in float32.
#
# What happens (diffusers 0.42.1, torch 2.13.0): the pipelines of FLUX.1 and Qwen-Image convert the time to the type of
# the latents before they divide it by 1000, that of Stable Diffusion 3 does not convert it. With 28 steps:
#   FLUX.1      in bfloat16: the time is off by up to 0.0035
#   Qwen-Image  in bfloat16: the time is off by up to 0.0037
#   SD 3        in bfloat16: the time is exact
# The scheduler still steps from and to the exact times, so that network and scheduler disagree. Nothing is logged.
#
# Why it matters: trainers pass exact times, so that the same weights draw another picture in the pipeline, and a change
# of evaluation code changes scores. Compare pictures in float32, or convert the time in the trainer too.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import (
    AutoencoderKL, AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel,
    QwenImagePipeline, QwenImageTransformer2DModel, SD3Transformer2DModel, StableDiffusion3Pipeline)

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
STEPS = 28
diffusers.logging.set_verbosity_error()
heads = dict(num_attention_heads=2, attention_head_dim=16)
kl = dict(block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, norm_num_groups=4,
          up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4)
flux = FluxPipeline(
    transformer=FluxTransformer2DModel(**heads, in_channels=16, num_layers=1, num_single_layers=1, joint_attention_dim=16,
                                       pooled_projection_dim=16, axes_dims_rope=(4, 6, 6)),
    vae=AutoencoderKL(**kl), scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None)
qwen = QwenImagePipeline(
    transformer=QwenImageTransformer2DModel(**heads, in_channels=64, out_channels=16, num_layers=1, joint_attention_dim=16,
                                            axes_dims_rope=(4, 6, 6)),
    vae=AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1), text_encoder=None, tokenizer=None,
    scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True))
sd3 = StableDiffusion3Pipeline(
    transformer=SD3Transformer2DModel(**heads, sample_size=8, in_channels=4, out_channels=4, num_layers=1,
                                      joint_attention_dim=16, caption_projection_dim=32, pooled_projection_dim=16),
    vae=AutoencoderKL(**kl), scheduler=FlowMatchEulerDiscreteScheduler(), text_encoder=None, tokenizer=None,
    text_encoder_2=None, tokenizer_2=None, text_encoder_3=None, tokenizer_3=None)


def largest_error(pipeline, unit, dtype):
    """The largest difference between the network's time, in units of 1, and the scheduler's noise level."""
    pipeline.to(dtype)
    pipeline.set_progress_bar_config(disable=True)
    texts, seen = torch.zeros(1, 4, 16, dtype=dtype), []
    if pipeline is qwen:
        given = dict(prompt_embeds=texts, prompt_embeds_mask=torch.ones(1, 4, dtype=torch.int64), true_cfg_scale=1.0)
    else:
        given = dict(prompt_embeds=texts, pooled_prompt_embeds=torch.zeros(1, 16, dtype=dtype), guidance_scale=1.0)
    note = pipeline.transformer.register_forward_pre_hook(
        lambda module, args, named: seen.append(named["timestep"][0].double().item() / unit), with_kwargs=True)
    pipeline(**given, height=32, width=32, num_inference_steps=STEPS, output_type="latent")
    note.remove()
    exact = pipeline.scheduler.sigmas[:STEPS].double()
    return (torch.tensor(seen, dtype=torch.float64) - exact).abs().max().item()


for name, pipeline, unit, rounds in (("FLUX.1", flux, 1, True), ("Qwen-Image", qwen, 1, True), ("SD 3", sd3, 1000, False)):
    wide, narrow = (largest_error(pipeline, unit, dtype) for dtype in (torch.float32, torch.bfloat16))
    print(f"{name}: off by {wide:.4f} in float32, {narrow:.4f} in bfloat16")
    assert wide < 1e-5, f"changed: {name}'s time is not exact in float32"
    assert (narrow > 1e-3) == rounds, f"changed: {name} {'does not round' if rounds else 'rounds'} its time"
print("as described: two of three round the network's time")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
