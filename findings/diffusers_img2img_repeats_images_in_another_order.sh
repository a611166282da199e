#!/usr/bin/env bash
# diffusers: with several prompts and several images each, image-to-image pipelines start from another prompt's image
#
# One would guess: a call with prompts A, B, their input images a, b and num_images_per_prompt=2 draws A from a twice,
# then B from b twice.
#
# What happens (diffusers 0.42.1, torch 2.13.0): the prompts are repeated as A A B B, the images as a b a b. What the
# network was given in such a call:
#   Stable Diffusion 1.5, SDXL and Z-Image, image-to-image:   Aa Ab Ba Bb
#   Stable Diffusion 1.5, ControlNet's image:                 Aa Aa Bb Bb
# The shapes agree, so nothing is raised. The first warns that there are fewer images than prompts, and asks for one
# image per prompt, which it was given; SDXL and Z-Image log nothing.
#
# Why it matters: in RL for image editing a group has one prompt, one input image and num_images_per_prompt samples. A
# batch of two groups edits the wrong image in half of its samples, and the reward, which compares with the right image,
# trains against the instruction. Repeat prompts and images outside and leave num_images_per_prompt at 1.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import (
    AutoencoderKL, ControlNetModel, DDIMScheduler, FlowMatchEulerDiscreteScheduler, StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline, StableDiffusionXLImg2ImgPipeline, UNet2DConditionModel, ZImageImg2ImgPipeline,
    ZImageTransformer2DModel,
)

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
diffusers.utils.logging.disable_progress_bar()
torch.manual_seed(0)
vae = AutoencoderKL(latent_channels=4, block_out_channels=(8, 8), norm_num_groups=4, scaling_factor=0.8,
                    shift_factor=0.1, down_block_types=["DownEncoderBlock2D"] * 2,
                    up_block_types=["UpDecoderBlock2D"] * 2)
blocks = dict(block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1, cross_attention_dim=16,
              attention_head_dim=2, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"))
unet = UNet2DConditionModel(sample_size=8, up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **blocks)
xl_unet = UNet2DConditionModel(sample_size=8, up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
                               addition_embed_type="text_time", addition_time_embed_dim=4,
                               projection_class_embeddings_input_dim=16 + 6 * 4, **blocks)
control = ControlNetModel(conditioning_embedding_out_channels=(8, 8), **blocks)
z_image = ZImageTransformer2DModel(in_channels=4, dim=32, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2,
                                   cap_feat_dim=16, axes_dims=[4, 6, 6], axes_lens=[64, 64, 64])
texts = torch.tensor([-1.0, 1.0])[:, None, None].expand(2, 8, 16)  # prompt A is -1, B is 1
latents = torch.tensor([-50.0, 50.0])[:, None, None, None].expand(2, 4, 8, 8)  # image a is below 0, b above
pictures = torch.tensor([0.0, 1.0])[:, None, None, None].expand(2, 3, 16, 16)
seen = []


def watch(network, names):
    forward = network.forward

    def call(*given, **options):
        options |= dict(zip(names, given))
        image = options.get("controlnet_cond", options.get(names[0]))
        border = 0.5 if "controlnet_cond" in options else 0.0
        text = options.get("encoder_hidden_states", options.get("cap_feats"))
        seen.append(" ".join("AB"[int(t.mean() > 0)] + "ab"[int(i.mean() > border)] for t, i in zip(text, image)))
        return forward(**options)

    network.forward = call


watch(unet, ("sample", "timestep"))
watch(xl_unet, ("sample", "timestep"))
watch(control, ("sample", "timestep"))
watch(z_image, ("x", "t", "cap_feats"))


def run(name, pipeline, **options):
    seen.clear()
    pipeline.set_progress_bar_config(disable=True)
    with torch.no_grad():
        pipeline(num_images_per_prompt=2, num_inference_steps=10, output_type="latent",
                 generator=torch.Generator().manual_seed(0), **options)
    print(f"{name}: {seen[0]}")
    return seen[0]


text, start = dict(prompt_embeds=texts, guidance_scale=1.0), dict(image=latents, strength=0.1)
sd = run("Stable Diffusion 1.5", StableDiffusionImg2ImgPipeline(
    vae, None, None, unet, DDIMScheduler(), None, None, requires_safety_checker=False), **text, **start)
xl = run("SDXL", StableDiffusionXLImg2ImgPipeline(vae, None, None, None, None, xl_unet, DDIMScheduler()),
         pooled_prompt_embeds=torch.zeros(2, 16), **text, **start)
z = run("Z-Image", ZImageImg2ImgPipeline(FlowMatchEulerDiscreteScheduler(), vae, None, None, z_image),
        prompt_embeds=list(texts), guidance_scale=0.0, height=16, width=16, **start)
controlled = run("ControlNet", StableDiffusionControlNetPipeline(
    vae, None, None, unet, control, DDIMScheduler(), None, None, requires_safety_checker=False), image=pictures, **text)
assert sd == xl == z == "Aa Ab Ba Bb", "changed: each prompt gets its own image"
assert controlled == "Aa Aa Bb Bb", "changed: ControlNet"
print("as described: half of the samples start from the image of another prompt")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
