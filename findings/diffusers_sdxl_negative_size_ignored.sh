#!/usr/bin/env bash
# diffusers: SDXL ignores negative_original_size and a negative crop without negative_target_size
#
# One would guess: the three are independent, as those of the prompt are. The documentation gives each a default of its
# own: "defaults to (1024, 1024)", "defaults to (0, 0)".
#
# What happens (diffusers 0.42.1, torch 2.13.0): they are read only if both negative_original_size and
# negative_target_size are given. Otherwise the negative prompt gets all numbers of the prompt. Original size, crop and
# target size that the network gets with the negative prompt of a 64 x 64 image, and the change of the latents:
#   nothing given                                            64, 64    0, 0      64, 64
#   negative_original_size=(16, 16)                          64, 64    0, 0      64, 64     0
#   negative_crops_coords_top_left=(32, 32)                  64, 64    0, 0      64, 64     0
#   both of them                                             64, 64    0, 0      64, 64     0
#   negative_target_size=(16, 16)                            64, 64    0, 0      64, 64     0
#   crops_coords_top_left=(32, 32), of the prompt            64, 64    32, 32    64, 64     0.36
#   negative_original_size and negative_target_size          16, 16    0, 0      64, 64     0.29
#   all three negative numbers                               16, 16    32, 32    64, 64     0.53
# (relative, random weights). Nothing is logged.
#
# Why it matters: guiding away from small or cropped images is what these arguments are for, and either may be tried
# alone. Training or distillation code that follows the documented defaults, (0, 0) for the negative crop, does not
# match the pipeline for a crop of the prompt.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
torch.manual_seed(0)
vae = AutoencoderKL(latent_channels=4, block_out_channels=(8, 8), norm_num_groups=4,
                    down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2)
unet = UNet2DConditionModel(
    sample_size=32, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    cross_attention_dim=16, attention_head_dim=2, norm_num_groups=4, addition_embed_type="text_time",
    addition_time_embed_dim=8, projection_class_embeddings_input_dim=64)
for weight in unet.parameters():
    if weight.ndim > 1:
        torch.nn.init.normal_(weight, std=0.2)
scheduler = DDIMScheduler(clip_sample=False, steps_offset=1)
pipeline = StableDiffusionXLPipeline(vae, None, None, None, None, unet, scheduler)
pipeline.set_progress_bar_config(disable=True)
texts = dict(zip(("prompt_embeds", "negative_prompt_embeds"), torch.randn(2, 1, 6, 16)))
texts |= dict(pooled_prompt_embeds=torch.ones(1, 16), negative_pooled_prompt_embeds=torch.zeros(1, 16))
seen = []
unet.register_forward_pre_hook(lambda module, given, options: seen.append(options["added_cond_kwargs"]["time_ids"]),
                               with_kwargs=True)


def draw(**options):
    seen.clear()
    latents = pipeline(**texts, height=64, width=64, num_inference_steps=3, guidance_scale=5.0, output_type="latent",
                       generator=torch.Generator().manual_seed(0), **options)[0]
    negative, positive = ([int(value) for value in row] for row in seen[0])
    return latents, negative, positive


plain, negative, positive = draw()
assert negative == positive == [64, 64, 0, 0, 64, 64]
changes, sizes = {}, {}
for label, options in {
    "negative_original_size": dict(negative_original_size=(16, 16)),
    "negative_crops_coords_top_left": dict(negative_crops_coords_top_left=(32, 32)),
    "both of them": dict(negative_original_size=(16, 16), negative_crops_coords_top_left=(32, 32)),
    "negative_target_size": dict(negative_target_size=(16, 16)),
    "both negative sizes": dict(negative_original_size=(16, 16), negative_target_size=(64, 64)),
    "crops_coords_top_left": dict(crops_coords_top_left=(32, 32)),
    "all three": dict(negative_original_size=(16, 16), negative_crops_coords_top_left=(32, 32),
                      negative_target_size=(64, 64)),
}.items():
    latents, negative, positive = draw(**options)
    changes[label], sizes[label] = ((latents - plain).norm() / plain.norm()).item(), negative
    print(f"{label}: the negative prompt gets {negative}, the prompt {positive}; "
          f"latents change by {changes[label]:.3f}")
for label in ("negative_original_size", "negative_crops_coords_top_left", "both of them", "negative_target_size"):
    assert changes[label] == 0 and sizes[label] == [64, 64, 0, 0, 64, 64], f"changed: {label}"
assert sizes["both negative sizes"] == [16, 16, 0, 0, 64, 64]
assert sizes["crops_coords_top_left"] == [64, 64, 32, 32, 64, 64], "changed: the negative prompt has its own crop"
assert sizes["all three"] == [16, 16, 32, 32, 64, 64] and changes["all three"] > 0.001
print("as described: one negative size alone is ignored")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
