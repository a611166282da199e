#!/usr/bin/env bash
# diffusers: flow pipelines use their generator for the first noise only, and stochastic steps draw from torch's own
#
# One would guess: pipeline(generator=g) makes the image reproducible with any scheduler, as for Stable Diffusion, whose
# pipeline hands the generator on to EulerAncestral, LCM or DDIM with eta. FlowMatchEulerDiscreteScheduler
# (stochastic_sampling=True) and FlowMatchLCMScheduler take a generator in step() too.
#
# What happens (diffusers 0.42.1, torch 2.13.0): the pipelines of FLUX.1, Stable Diffusion 3 and Z-Image call step()
# without it. Largest difference between the latents of two calls with generators of one seed, over their deviation:
#                        deterministic   stochastic_sampling=True   FlowMatchLCM
#   FLUX.1               0               > 1                        > 1
#   Stable Diffusion 3   0               > 1                        > 1
#   Z-Image              0               > 1                        > 1
#   Sana                 0               0                          0
#   Stable Diffusion 1.5 with EulerAncestral: 0
# Nothing is logged. Each call also moves torch's global random state on.
#
# Why it matters: SDE sampling is what makes a flow model's policy stochastic. Images of fixed seeds, by which an
# evaluation compares checkpoints, differ with one checkpoint; a resumed run draws other images; and where the global
# seed is the same on all ranks, so is the noise of the steps. Hand the generator on by wrapping scheduler.step.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import (
    AutoencoderDC, AutoencoderKL, EulerAncestralDiscreteScheduler, FlowMatchEulerDiscreteScheduler,
    FlowMatchLCMScheduler, FluxPipeline, FluxTransformer2DModel, SanaPipeline, SanaTransformer2DModel,
    SD3Transformer2DModel, StableDiffusion3Pipeline, StableDiffusionPipeline, UNet2DConditionModel, ZImagePipeline,
    ZImageTransformer2DModel,
)

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
torch.manual_seed(0)
vae = AutoencoderKL(latent_channels=4, block_out_channels=(8, 8), norm_num_groups=4, scaling_factor=0.8,
                    shift_factor=0.1, down_block_types=["DownEncoderBlock2D"] * 2,
                    up_block_types=["UpDecoderBlock2D"] * 2)
sana_vae = AutoencoderDC(latent_channels=4, attention_head_dim=2, encoder_block_types=("ResBlock", "ResBlock"),
                         decoder_block_types=("ResBlock", "ResBlock"), encoder_block_out_channels=(8, 8),
                         decoder_block_out_channels=(8, 8), encoder_qkv_multiscales=((), ()),
                         decoder_qkv_multiscales=((), ()), encoder_layers_per_block=(1, 1),
                         decoder_layers_per_block=(1, 1), scaling_factor=1.0)
heads = dict(num_layers=1, num_attention_heads=2, attention_head_dim=8)
flux = FluxTransformer2DModel(patch_size=1, in_channels=16, num_single_layers=1, joint_attention_dim=16,
                              pooled_projection_dim=16, axes_dims_rope=(2, 2, 4), **heads)
sd3 = SD3Transformer2DModel(sample_size=8, in_channels=4, out_channels=4, joint_attention_dim=16,
                            caption_projection_dim=16, pooled_projection_dim=16, pos_embed_max_size=32, **heads)
z_image = ZImageTransformer2DModel(in_channels=4, dim=32, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2,
                                   cap_feat_dim=16, axes_dims=[4, 6, 6], axes_lens=[64, 64, 64])
sana = SanaTransformer2DModel(patch_size=1, in_channels=4, out_channels=4, num_cross_attention_heads=2, sample_size=8,
                              cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=16, **heads)
unet = UNet2DConditionModel(block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1, cross_attention_dim=16,
                            attention_head_dim=2, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"))
text, pooled = torch.randn(1, 8, 16), torch.randn(1, 16)
both = dict(prompt_embeds=text, pooled_prompt_embeds=pooled)
flow = {
    "FLUX.1": (lambda s: FluxPipeline(s, vae, None, None, None, None, flux), both),
    "Stable Diffusion 3": (lambda s: StableDiffusion3Pipeline(sd3, s, vae, None, None, None, None, None, None),
                           dict(both, guidance_scale=1.0)),
    "Z-Image": (lambda s: ZImagePipeline(s, vae, None, None, z_image),
                dict(prompt_embeds=[text[0]], guidance_scale=0.0)),
    "Sana": (lambda s: SanaPipeline(None, None, sana_vae, sana, s), dict(
        prompt_embeds=text, prompt_attention_mask=torch.ones(1, 8), guidance_scale=1.0,
        use_resolution_binning=False)),
}


def difference(name, pipeline, options):
    pipeline.set_progress_bar_config(disable=True)
    first, second = (
        pipeline(height=32, width=32, num_inference_steps=4, output_type="latent",
                 generator=torch.Generator().manual_seed(0), **options)[0] for _ in range(2))
    result = ((first - second).abs().max() / first.std()).item()
    print(f"{name:20} {type(pipeline.scheduler).__name__}: {result:.2f}")
    return result


for name, (make, options) in flow.items():
    plain, noisy, lcm = (difference(name, make(scheduler), options) for scheduler in (
        FlowMatchEulerDiscreteScheduler(), FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
        FlowMatchLCMScheduler()))
    assert plain == 0, f"changed: {name}"
    assert (noisy == 0 and lcm == 0) if name == "Sana" else (noisy > 1 and lcm > 1), f"changed: {name}"
assert difference("Stable Diffusion 1.5", StableDiffusionPipeline(
    vae, None, None, unet, EulerAncestralDiscreteScheduler(), None, None, requires_safety_checker=False,
), dict(prompt_embeds=text, guidance_scale=1.0)) == 0, "changed: Stable Diffusion 1.5"
print("as described: the noise of the steps does not come from the generator")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
