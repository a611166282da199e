#!/usr/bin/env bash
# diffusers: FreeNoise with noise_type="repeat_context" repeats no noise, and is the same as "random"
#
# One would guess: enable_free_noise(context_length=16, noise_type="repeat_context") draws noise for 16 frames and
# repeats it. The documentation: "Repeats a fixed batch of `context_length` latents to create a final latent of size
# `num_frames`".
#
# What happens (diffusers 0.42.1, torch 2.13.0): the code compares the length with "repeat_context" where it means the
# noise type, so that noise is drawn for all frames, and what is repeated is cut off. First latents of 32 frames with
# the same seed, and the correlation of frames 16 frames apart:
#   "random"                                       0.00
#   "repeat_context"                               0.00    (the same numbers as "random")
#   "repeat_context", 16 frames of latents given   1.00
#   "shuffle_context", with the frame it copies    1.00
# Nothing is logged.
#
# Why it matters: the repeated noise is what holds a long video together, and a comparison of the noise types has the
# baseline in it twice. Draw the noise of context_length frames yourself and pass it as latents.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import (
    AnimateDiffPipeline, AutoencoderKL, DDIMScheduler, MotionAdapter, UNet2DConditionModel, UNetMotionModel)

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
torch.manual_seed(0)
vae = AutoencoderKL(latent_channels=4, block_out_channels=(8, 8), norm_num_groups=4,
                    down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2)
unet = UNet2DConditionModel(sample_size=16, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1,
                            cross_attention_dim=16, attention_head_dim=2,
                            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"))
adapter = MotionAdapter(block_out_channels=(8, 8), motion_layers_per_block=1, motion_norm_num_groups=4,
                        motion_num_attention_heads=2)
pipeline = AnimateDiffPipeline(vae, None, None, UNetMotionModel.from_unet2d(unet, adapter), adapter, DDIMScheduler())


def first_latents(noise_type, latents=None):
    """Return the latents of 32 frames that the pipeline starts from."""
    pipeline.enable_free_noise(context_length=16, context_stride=4, noise_type=noise_type)
    return pipeline.prepare_latents(1, 4, 32, 32, 32, torch.float32, "cpu", torch.Generator().manual_seed(0), latents)


def same(latents, distance=16):
    """Return the correlation of frames that are 16 apart."""
    pair = torch.stack([latents[:, :, :-distance].flatten(), latents[:, :, distance:].flatten()])
    return torch.corrcoef(pair)[0, 1].item()


random, repeated, shuffled = (first_latents(kind) for kind in ("random", "repeat_context", "shuffle_context"))
given = first_latents("repeat_context", torch.randn(1, 4, 16, 16, 16))
copied = sum(any(torch.equal(shuffled[:, :, frame], shuffled[:, :, other]) for other in range(16))
             for frame in range(16, 32))
print(f"frames 16 apart: random {same(random):.2f}, repeat_context {same(repeated):.2f}, repeat_context with 16 frames "
      f"given {same(given):.2f}; shuffle_context: {copied} of 16 frames are copies of the first 16")
assert torch.equal(random, repeated), "changed: repeat_context is not random"
assert abs(same(repeated)) < 0.1 and abs(same(random)) < 0.1, "changed: the noise"
assert same(given) > 0.999, "changed: given latents"
assert copied == 16, "changed: shuffle_context"
print("as described: repeat_context is random")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
