#!/usr/bin/env bash
# diffusers: with one IP-Adapter image per prompt, each picture of a batch is drawn with the images of all prompts
#
# One would guess: ip_adapter_image_embeds holds tensors "of shape (batch_size, num_images, emb_dim)", so that prompt i
# of a batch gets the images of row i.
#
# What happens (diffusers 0.42.1, torch 2.13.0): the pipelines repeat the embeddings batch_size times, as if they were
# those of one prompt. The attention then views them with the batch size of the latents, and lines up the images of all
# prompts for each of them. Two prompts with one image each, in one call; relative distance of each picture to the one
# that is drawn alone, from the same noise:
#                                        SD                 SDXL
#   no images                            0                  0
#   alone with its own image             0.85    0.57       0.41    0.60
#   alone with both images               0       0          0       0
# (random weights, latents). Nothing is logged.
#
# Why it matters: rollouts, evaluations and data generation run prompts in batches, each with its reference image. The
# pictures then follow all references of their batch, and a test with one prompt does not show it.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import (
    AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline, UNet2DConditionModel,
)

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
torch.manual_seed(0)
vae = AutoencoderKL(latent_channels=4, block_out_channels=(8, 8), norm_num_groups=4,
                    down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2)
prompts, negatives, pooled = torch.randn(2, 6, 16), torch.randn(2, 6, 16), torch.randn(2, 16)
pictures = torch.randn(2, 1, 16)  # one image embedding for each prompt: (batch_size, num_images, emb_dim)
EMPTY = torch.zeros_like(pictures)


def network(**more):
    unet = UNet2DConditionModel(
        sample_size=32, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16, attention_head_dim=2, norm_num_groups=4, **more)
    for weight in unet.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.2)
    return unet.eval()


def add_adapter(unet):
    """Load an IP-Adapter with random weights, in the format of the published ones."""
    layers = {}
    for number, name in enumerate(name for name in unet.attn_processors if "attn2" in name):
        attention = unet.get_submodule(name.removesuffix(".processor"))
        layers[f"{2 * number + 1}.to_k_ip.weight"] = torch.randn(attention.to_k.weight.shape) * 0.3
        layers[f"{2 * number + 1}.to_v_ip.weight"] = torch.randn(attention.to_v.weight.shape) * 0.3
    projection = {"proj.weight": torch.randn(64, 16) * 0.3, "proj.bias": torch.zeros(64),
                  "norm.weight": torch.ones(16), "norm.bias": torch.zeros(16)}
    unet._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": layers}])


scheduler = DDIMScheduler(clip_sample=False, steps_offset=1)
pipelines = {
    "SD": StableDiffusionPipeline(vae, None, None, network(), scheduler, None, None, requires_safety_checker=False),
    "SDXL": StableDiffusionXLPipeline(vae, None, None, None, None, scheduler=scheduler, unet=network(
        addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=64)),
}


def draw(name, which, embeddings=None):
    """Draw one image for each of the prompts, whose embeddings have the documented shape."""
    given = {} if embeddings is None else {"ip_adapter_image_embeds": [embeddings]}
    if name == "SDXL":
        given |= dict(pooled_prompt_embeds=pooled[which], negative_pooled_prompt_embeds=pooled[which])
    generators = [torch.Generator().manual_seed(number) for number in (0, 1)][which]
    return pipelines[name](prompt_embeds=prompts[which], negative_prompt_embeds=negatives[which], height=64, width=64,
                           num_inference_steps=5, guidance_scale=5.0, output_type="latent", generator=generators,
                           **given)[0]


def distance(first, second):
    return round(((first - second).norm() / second.norm()).item(), 4)


for name, pipeline in pipelines.items():
    pipeline.set_progress_bar_config(disable=True)
    first, second = slice(0, 1), slice(1, 2)
    without = distance(draw(name, slice(0, 2))[:1], draw(name, first))
    add_adapter(pipeline.unet)
    batch = draw(name, slice(0, 2), torch.cat([EMPTY, pictures]))
    both = pictures.transpose(0, 1)  # two images for one prompt
    own, all_images = [], []
    for number, which in enumerate((first, second)):
        own.append(distance(batch[which], draw(name, which, torch.cat([EMPTY[which], pictures[which]]))))
        all_images.append(distance(batch[which], draw(name, which, torch.cat([torch.zeros_like(both), both]))))
    print(f"{name}: two prompts together, compared with each alone: without images {without}, "
          f"with its own image {own}, with both images {all_images}")
    assert without < 1e-3 and max(all_images) < 1e-3 and min(own) > 0.1, f"changed: {name}"
print("as described: each prompt gets the images of all prompts")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
