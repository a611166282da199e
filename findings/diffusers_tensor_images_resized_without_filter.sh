#!/usr/bin/env bash
# diffusers: an input image is resized with Lanczos if it is a PIL image, and by dropping pixels if it is a tensor
#
# One would guess: VaeImageProcessor resizes with its `resample` setting ("lanczos") whatever the image is given as, so
# that a pipeline edits the same picture whether it gets a PIL image, an array or a tensor.
#
# What happens (diffusers 0.42.1, torch 2.13.0): arrays and tensors are resized by torch's "nearest", which takes every
# n-th pixel, and `resample` is ignored. An image of noise, 64 x 64 pixels resized to 32 x 32:
#                            PIL image    array    tensor
#   standard deviation         0.262      0.589    0.589
#   equal to every 2nd pixel   no         yes      yes
# Enlarged to 128 x 128 pixels, each pixel of the tensor is simply repeated. Nothing is logged.
#
# Why it matters: a loop that trains an editing or image-to-image model has its reference images as tensors; the same
# model is used with PIL images. The pipelines resize to a multiple of 8 or 16 or to a preferred area, so most
# references are resized, and the training sees jagged edges and moire that do not occur in use. Resize tensors before.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 numpy==2.3.5
cat > "$folder/check.py" <<'PY'
import diffusers
import numpy
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
pixels = numpy.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=numpy.uint8)
array = pixels[None] / 255
tensor = torch.from_numpy(array).permute(0, 3, 1, 2).float()
given = {"PIL image": Image.fromarray(pixels), "array": array.astype(numpy.float32), "tensor": tensor}

for resample in ("lanczos", "bicubic"):
    processor = VaeImageProcessor(resample=resample)
    small = {name: processor.preprocess(image, height=32, width=32) for name, image in given.items()}
    large = {name: processor.preprocess(image, height=128, width=128) for name, image in given.items()}
    dropped = 2 * tensor[..., ::2, ::2] - 1
    repeated = (2 * tensor - 1).repeat_interleave(2, -1).repeat_interleave(2, -2)
    for name in given:
        drops = torch.allclose(small[name], dropped, atol=1e-6)
        repeats = torch.allclose(large[name], repeated, atol=1e-6)
        print(f"{resample}, {name}: standard deviation {small[name].std():.3f}, drops every 2nd pixel: {drops}, "
              f"repeats each pixel: {repeats}")
        assert drops == repeats == (name != "PIL image"), f"changed: {name}"
    same = {name: processor.preprocess(image) for name, image in given.items()}
    assert torch.allclose(same["PIL image"], same["tensor"], atol=1e-6), "equal without resizing"
print("as described: arrays and tensors are resized by dropping or repeating pixels")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
