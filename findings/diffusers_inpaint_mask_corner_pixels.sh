#!/usr/bin/env bash
# diffusers: inpainting reads one corner pixel of each 8 x 8 block of its mask, so that strokes vanish and masks move
#
# One would guess: every block of latents that a white pixel of the mask touches is painted anew, or every block that is
# at least half white. A stroke 7 pixels wide changes the picture, and a square is painted where it is.
#
# What happens (diffusers 0.42.1, torch 2.13.0): the pipelines shrink the mask to the latents with the nearest pixel,
# which is the top left one of each block. A picture of 128 x 128 pixels with a stroke from top to bottom, at each of 8
# positions. Positions at which the latents of the result differ from those of an empty mask:
#   width of the stroke            1      2      4      7      8
#   Stable Diffusion, SD 3         1      2      4      7      8   of 8
#   FLUX.1 Fill                    8      8      8      8      8   of 8
# A dot of 4 x 4 pixels has an effect at 16 of 64 positions. A square from 36 to 68 is painted from 40 to 72 in both
# directions: its first 4 rows and columns are kept, and 4 rows and columns outside it are lost.
# FLUX.1 Fill gives its network all 64 pixels of each block. Nothing is logged, and it is not documented.
#
# Why it matters: a mask from a segmentation network leaves the left and upper border of an object in the picture, and
# paints over what is to the right of it and below. Scratches, wires and thin text are not removed. Scores of an
# inpainting model on the masked pixels count pixels that it was never given. Enlarge a mask to whole blocks first.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import numpy as np
import torch
from diffusers import (
    AutoencoderKL, DDIMScheduler, FlowMatchEulerDiscreteScheduler, FluxFillPipeline, FluxTransformer2DModel,
    SD3Transformer2DModel, StableDiffusion3InpaintPipeline, StableDiffusionInpaintPipeline, UNet2DConditionModel,
)
from PIL import Image

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
torch.manual_seed(0)
vae, wide = (AutoencoderKL(
    latent_channels=channels, block_out_channels=(4, 4, 4, 4), norm_num_groups=2, layers_per_block=1, shift_factor=0.0,
    down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
) for channels in (4, 16))
unet = UNet2DConditionModel(sample_size=16, block_out_channels=(8,), norm_num_groups=4, layers_per_block=1,
                            down_block_types=["DownBlock2D"], up_block_types=["UpBlock2D"], cross_attention_dim=16,
                            attention_head_dim=2)
sd3 = SD3Transformer2DModel(sample_size=16, in_channels=16, out_channels=16, num_layers=1, num_attention_heads=2,
                            attention_head_dim=8, joint_attention_dim=16, caption_projection_dim=16,
                            pooled_projection_dim=16, pos_embed_max_size=16)
fill = FluxTransformer2DModel(in_channels=64 + 64 + 256, out_channels=64, num_layers=1, num_single_layers=1,
                              attention_head_dim=8, num_attention_heads=2, joint_attention_dim=16,
                              pooled_projection_dim=16, axes_dims_rope=(2, 2, 4), guidance_embeds=True)
text, pooled = torch.randn(1, 4, 16), torch.randn(1, 16)
pipelines = {
    "Stable Diffusion": (StableDiffusionInpaintPipeline(
        vae, None, None, unet, DDIMScheduler(), None, None, requires_safety_checker=False,
    ), dict(prompt_embeds=text, negative_prompt_embeds=text, strength=1.0)),
    "SD 3": (StableDiffusion3InpaintPipeline(sd3, FlowMatchEulerDiscreteScheduler(), wide, *[None] * 6),
             dict(prompt_embeds=text, pooled_prompt_embeds=pooled, guidance_scale=1.0, strength=1.0)),
    "FLUX.1 Fill": (FluxFillPipeline(FlowMatchEulerDiscreteScheduler(), wide, None, None, None, None, fill),
                    dict(prompt_embeds=text, pooled_prompt_embeds=pooled)),
}
picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (128, 128, 3), dtype=np.uint8))


def latents(name, rows, columns):
    pipe, given = pipelines[name]
    pipe.set_progress_bar_config(disable=True)
    mask = np.zeros((128, 128), np.uint8)
    mask[rows, columns] = 255
    return pipe(image=picture, mask_image=Image.fromarray(mask), height=128, width=128, num_inference_steps=2,
                output_type="latent", generator=torch.Generator().manual_seed(0), **given).images


found = {}
for name in pipelines:
    empty = latents(name, slice(0, 0), slice(0, 0))
    found[name] = [sum(not torch.equal(latents(name, slice(None), slice(start, start + width)), empty)
                       for start in range(64, 72)) for width in (1, 2, 4, 7, 8)]
    print(f"{name:17} strokes of width 1, 2, 4, 7, 8 with an effect: {found[name]} of 8 positions")
assert found == {"Stable Diffusion": [1, 2, 4, 7, 8], "SD 3": [1, 2, 4, 7, 8], "FLUX.1 Fill": [8] * 5}, "changed"

empty = latents("SD 3", slice(0, 0), slice(0, 0))
dots = sum(not torch.equal(latents("SD 3", slice(row, row + 4), slice(column, column + 4)), empty)
           for row in range(64, 72) for column in range(64, 72))
changed = (latents("SD 3", slice(36, 68), slice(36, 68)) != empty)[0].any(0).nonzero() * 8
print(f"dots of 4 x 4 with an effect: {dots} of 64; square from 36 to 68 painted from {changed.min(0).values.tolist()} "
      f"to {(changed.max(0).values + 8).tolist()}")
assert dots == 16 and changed.min().item() == 40 and changed.max().item() + 8 == 72, "changed"
print("as described: only the top left pixel of each block counts")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
