#!/usr/bin/env bash
# diffusers: SDXL's inpainting encodes without the VAE's latents_mean and latents_std, and decodes with them
#
# One would guess: an SDXL checkpoint whose VAE has latents_mean and latents_std, such as Playground v2.5, works in all
# of SDXL's pipelines. Text-to-image and image-to-image read both settings.
#
# What happens (diffusers 0.42.1, torch 2.13.0): inpainting multiplies the encoded image by scaling_factor alone, and
# decodes with mean and deviation. ControlNet inpainting and the T2I-Adapter's pipeline read neither. Playground v2.5's
# statistics on a small VAE; error of the latents by their norm, and of the pictures by their deviation:
#                                                       latents        picture
#   inpainting, mask that keeps everything              0.78           0.83
#   the same with perturbed-attention guidance          0.78           0.83
#   the same with a ControlNet                          0.78           0.00 (not what the network was trained on)
#   T2I-Adapter at scale 0, compared with SDXL          0.00           0.16
#   all of them with SDXL's own statistics              0.00           0.00
# Nothing is logged.
#
# Why it matters: the network sees latents of another mean and deviation than in training, and the part of the picture
# that should be kept comes back with other colours, so that a reward or a score of edits measures the pipeline.
# Encode the picture yourself, normalize it, and pass it as a tensor with 4 channels.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import (
    AutoencoderKL, ControlNetModel, EulerDiscreteScheduler, StableDiffusionXLAdapterPipeline,
    StableDiffusionXLControlNetInpaintPipeline, StableDiffusionXLImg2ImgPipeline, StableDiffusionXLInpaintPipeline,
    StableDiffusionXLPAGInpaintPipeline, StableDiffusionXLPipeline, T2IAdapter, UNet2DConditionModel)

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
playground = dict(scaling_factor=0.5, latents_mean=[-1.6574, 1.886, -1.383, 2.5155],
                  latents_std=[8.4927, 5.9022, 6.5498, 5.2299])
torch.manual_seed(0)
shape = dict(block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, cross_attention_dim=16,
             attention_head_dim=2, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
             addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=64)
unet = UNet2DConditionModel(up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), **shape)
controlnet = ControlNetModel(conditioning_embedding_out_channels=(4, 4), **shape)
adapter = T2IAdapter(channels=[8, 16], num_res_blocks=1, downscale_factor=2, adapter_type="full_adapter")
scheduler = EulerDiscreteScheduler()
prompt = dict(prompt_embeds=torch.randn(1, 4, 16), pooled_prompt_embeds=torch.randn(1, 16), guidance_scale=1.0,
              num_inference_steps=2, height=32, width=32)
picture, keep_all = torch.rand(1, 3, 32, 32), torch.zeros(1, 1, 32, 32)


def run(pipeline, output_type, **options):
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(output_type=output_type, generator=torch.Generator().manual_seed(0), **prompt, **options)[0]


for name, statistics in {"SDXL": dict(scaling_factor=0.13025), "Playground v2.5": playground}.items():
    torch.manual_seed(0)
    vae = AutoencoderKL(latent_channels=4, block_out_channels=(8, 8), norm_num_groups=4, **statistics,
                        down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2)
    vae.quant_conv.weight.data[4:], vae.quant_conv.bias.data[4:] = 0, -30  # the encoder draws no noise
    parts = vae, None, None, None, None, unet
    with torch.no_grad():
        encoded = vae.encode(picture * 2 - 1).latent_dist.mode()
        decoded = (vae.decode(encoded).sample / 2 + 0.5).clamp(0, 1)
    mean = torch.tensor(statistics.get("latents_mean", [0.0] * 4)).view(1, 4, 1, 1)
    deviation = torch.tensor(statistics.get("latents_std", [1.0] * 4)).view(1, 4, 1, 1)
    normalized = (encoded - mean) / deviation * statistics["scaling_factor"]
    image_to_image = StableDiffusionXLImg2ImgPipeline(*parts, scheduler).prepare_latents(
        picture * 2 - 1, None, 1, 1, torch.float32, "cpu", add_noise=False)
    assert torch.allclose(image_to_image, normalized, atol=1e-5), "changed: image-to-image"
    errors = {}
    for kind, pipeline, options in (
        ("inpainting", StableDiffusionXLInpaintPipeline(*parts, scheduler), {}),
        ("inpainting with PAG", StableDiffusionXLPAGInpaintPipeline(*parts, scheduler), dict(pag_scale=0.0)),
        ("inpainting with a ControlNet", StableDiffusionXLControlNetInpaintPipeline(*parts, controlnet, scheduler),
         dict(control_image=picture)),
    ):
        latents, output = (run(pipeline, output_type, image=picture, mask_image=keep_all, strength=0.6, **options)
                           for output_type in ("latent", "pt"))
        errors[kind] = ((latents - normalized).norm() / normalized.norm()).item(), (
            (output - decoded).abs().mean() / decoded.std()).item()
        if kind == "inpainting" and name != "SDXL":
            given = run(pipeline, "pt", image=normalized, mask_image=keep_all, strength=0.6)
            cure = ((given - decoded).abs().mean() / decoded.std()).item()
            print(f"{name}, normalized latents given as the image: picture {cure:.2f}")
            assert cure < 1e-3, "changed: the cure"
    pairs = [(run(StableDiffusionXLPipeline(*parts, scheduler), kind),
              run(StableDiffusionXLAdapterPipeline(*parts, adapter, scheduler), kind, image=picture,
                  adapter_conditioning_scale=0.0)) for kind in ("latent", "pt")]
    errors["T2I-Adapter at scale 0"] = tuple(((a - b).abs().mean() / a.std()).item() for a, b in pairs)
    for kind, (latents, output) in errors.items():
        print(f"{name}, {kind}: error of the latents {latents:.2f}, of the picture {output:.2f}")
    if name == "SDXL":
        assert max(max(pair) for pair in errors.values()) < 1e-3, "changed: SDXL's own statistics"
    else:
        assert min(errors["inpainting"] + errors["inpainting with PAG"]) > 0.3, "changed: inpainting"
        assert errors["inpainting with a ControlNet"][0] > 0.3, "changed: ControlNet inpainting"
        assert errors["T2I-Adapter at scale 0"][0] < 1e-3 < 0.05 < errors["T2I-Adapter at scale 0"][1], "changed: T2I"
print("as described: inpainting leaves the mean and the deviation out when it encodes")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
