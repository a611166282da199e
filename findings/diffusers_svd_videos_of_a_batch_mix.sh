#!/usr/bin/env bash
# diffusers: Stable Video Diffusion decodes frames of two videos as one clip if decode_chunk_size does not fit
#
# One would guess: the videos of a batch do not depend on each other. decode_chunk_size=8 decodes each video 8 frames at
# a time, and num_videos_per_prompt=2 draws two videos of each image.
#
# What happens (diffusers 0.42.1, torch 2.13.0):
#  1. The frames of all videos are laid end to end and cut into chunks. With 14 frames and chunks of 8, the second chunk
#     is made of 6 frames of video 0 and 2 of video 1, and the decoder's layers along time mix them. Two images, the
#     first one replaced by another, mean change of the frames of video 1:
#       decode_chunk_size         frames 0, 1    2 to 9    10 to 13
#       14 or 7                   0              0         0
#       8                         0.02, 0.01     0         0
#     Video 1 is also cut at other places than it would be alone.
#  2. With two images and num_videos_per_prompt=2, the embeddings are those of images 0, 0, 1, 1, but the latents that
#     are put beside the noise are those of 0, 1, 0, 1. Two of the four videos are drawn from one image's embedding and
#     the other image's latents.
# Nothing is logged.
#
# Why it matters: samples of a group that are compared with each other get parts of each other. A small chunk is what
# one sets when memory runs out, as it does with several videos. Let the chunk divide num_frames, and repeat images
# instead of num_videos_per_prompt.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 pillow==13.0.0
cat > "$folder/check.py" <<'PY'
import diffusers
import numpy as np
import PIL.Image
import torch
from diffusers import (
    AutoencoderKLTemporalDecoder, EulerDiscreteScheduler, StableVideoDiffusionPipeline,
    UNetSpatioTemporalConditionModel,
)
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
FRAMES = 14
unet = UNetSpatioTemporalConditionModel(
    block_out_channels=(32, 64), layers_per_block=1, sample_size=32, in_channels=8, out_channels=4,
    down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
    up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), cross_attention_dim=32,
    num_attention_heads=8, projection_class_embeddings_input_dim=96, addition_time_embed_dim=32)
vae = AutoencoderKLTemporalDecoder(block_out_channels=(32, 64), in_channels=3, out_channels=3, latent_channels=4,
                                   down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"))
encoder = CLIPVisionModelWithProjection(CLIPVisionConfig(
    hidden_size=32, projection_dim=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37,
    patch_size=32, image_size=224))
for network in (unet, vae, encoder):
    network.eval()
    for weight in network.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.05)
pipeline = StableVideoDiffusionPipeline(
    vae, encoder, unet, EulerDiscreteScheduler(prediction_type="v_prediction", interpolation_type="linear"),
    CLIPImageProcessor(crop_size=224, size=224))
pipeline.set_progress_bar_config(disable=True)
rng = np.random.default_rng(0)
first, other, second = (PIL.Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(3))
inputs = []
unet.register_forward_pre_hook(lambda module, args, kwargs: inputs.append((args[0], kwargs["encoder_hidden_states"])),
                               with_kwargs=True)


def videos(images, **options):
    return pipeline(images, height=32, width=32, num_frames=FRAMES, num_inference_steps=1, output_type="pt",
                    generator=torch.Generator().manual_seed(0), **options).frames


changes = {}
for chunk in (14, 7, 8):
    a, b = (videos([image, second], decode_chunk_size=chunk)[1] for image in (first, other))
    changes[chunk] = (a - b).abs().mean(dim=(1, 2, 3))
    print(f"decode_chunk_size={chunk}: changes of video 1's frames:", *(f"{x:.3f}" for x in changes[chunk].tolist()))
assert max(changes[14].max(), changes[7].max()) < 1e-4, "changed: chunks that fit"
assert changes[8][:2].min() > 1e-3 and changes[8][2:].max() < 1e-4, "changed: chunks that do not fit"

inputs.clear()
videos([first, second], num_videos_per_prompt=2)
noisy, embeddings = inputs[0][0][4:, 0, 4:], inputs[0][1][4:, 0]  # the guided half, without the half for guidance


def order(x):
    """Return for each row the number of the first row that equals it, up to rounding."""
    return [next(j for j in range(4) if torch.allclose(x[i], x[j], atol=1e-4)) for i in range(4)]


print(f"rows whose embeddings are equal: {order(embeddings)}; whose image latents are equal: {order(noisy)}")
assert order(embeddings) == [0, 0, 2, 2], "changed: the order of the embeddings"
assert order(noisy) == [0, 1, 0, 1], "changed: the order of the latents"
print("as described: videos of a batch mix")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
