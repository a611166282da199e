#!/usr/bin/env bash
# diffusers: from_pipe() casts the networks of the pipeline that it is given to float32
#
# One would guess: NEW.from_pipe(pipeline) shares the networks "without reallocating additional memory", as its
# documentation puts it, and leaves them as they are.
#
# What happens (diffusers 0.42.1, torch 2.13.0): without a dtype, from_pipe takes float32 and casts the shared networks
# to it in place. The given pipeline is float32 from then on as well. Type and size of the network of a bfloat16
# pipeline of Stable Diffusion 3:
#   before                                              bfloat16   24,200 bytes
#   after StableDiffusion3Img2ImgPipeline.from_pipe     float32    48,400 bytes
#   after the same with dtype=torch.bfloat16            bfloat16   24,200 bytes
#   after AutoPipelineForImage2Image.from_pipe          bfloat16   24,200 bytes
# The only line that is logged is the one that any .to(dtype) of a network logs.
#
# Why it matters: from_pipe is the way to draw with a second pipeline (editing, guidance variants) from the network that
# is in training. Memory doubles and each pass is slower from that moment on, and rollouts before and after it are of
# different precision. Give dtype=pipeline.dtype.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import (
    AutoencoderKL, AutoPipelineForImage2Image, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel,
    StableDiffusion3Img2ImgPipeline, StableDiffusion3Pipeline)

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.logging.set_verbosity_error()


def build():
    transformer = SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4)
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=2, latent_channels=4)
    pipeline = StableDiffusion3Pipeline(
        transformer, FlowMatchEulerDiscreteScheduler(), vae, None, None, None, None, None, None)
    return pipeline.to(torch.bfloat16)


def show(name, pipeline):
    size = sum(weight.numel() * weight.element_size() for weight in pipeline.transformer.parameters())
    print(f"{name}: {pipeline.transformer.dtype}, {pipeline.vae.dtype}, {size} bytes in the transformer")
    return pipeline.transformer.dtype


Img2Img = StableDiffusion3Img2ImgPipeline
for make, options, expected in ((Img2Img, {}, torch.float32), (Img2Img, dict(dtype=torch.bfloat16), torch.bfloat16),
                                (AutoPipelineForImage2Image, {}, torch.bfloat16)):
    given = build()
    assert show("before", given) == torch.bfloat16
    made = make.from_pipe(given, **options)
    assert made.transformer is given.transformer
    assert show(f"after {make.__name__}.from_pipe(pipeline, {options})", given) == expected, "changed"
print("as described: the given pipeline is float32")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
