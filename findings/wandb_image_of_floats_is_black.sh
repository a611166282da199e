#!/usr/bin/env bash
# wandb: an image tensor or array with values in [0, 1] is logged as a black picture
#
# One would guess: wandb.Image shows float images in [0, 1], as TensorBoard does and as its own version 0.28 did, or
# it says that it cannot.
#
# What happens (torch 2.13.0): up to 0.28, wandb scaled floats to 8 bits. 0.31 casts them as they are, and says nothing.
# Lowest and highest pixel of the picture:
#   image                                     TensorBoard   wandb 0.28.0   wandb 0.31.0
#   float32 tensor or array, 0 to 1           0, 255        0, 255         0, 1
#   the same, 0.3 to 0.6                      76, 153       76, 153        0, 0
#   bfloat16 tensor, 0.3 to 0.6               76, 153       TypeError      TypeError
#   uint8 tensor or array, 76 to 153          76, 153       76, 153        76, 153
# 0.28 says nothing about [0, 1] either: its warning that scaling will be removed comes for values below 0 or above 255
# only. The docstring of 0.31 says that values are expected in [0, 255].
#
# Why it matters: decoders, make_grid and reward code give floats in [0, 1], and many image loggers hand these on. After
# an upgrade all samples of a run are black, which looks like a model that has collapsed, or like NaN. PIL images and
# uint8 are right in both versions.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 tensorboard==2.21.0 pillow==13.0.0
cat > "$folder/check.py" <<'PY'
import io

import numpy as np
import torch
import wandb
from PIL import Image
from torch.utils.tensorboard.summary import image as tensorboard_image

print(f"wandb {wandb.__version__}, torch {torch.__version__}")
whole, part = (torch.linspace(*ends, 16).view(1, 4, 4).expand(3, -1, -1).clone() for ends in ((0, 1), (0.3, 0.6)))
images = {"0 to 1": whole, "0.3 to 0.6": part, "bfloat16": part.bfloat16(), "uint8": (part * 255).byte()}


def ends(pixels):
    return pixels.min().item(), pixels.max().item()


def shown(image):
    try:
        return ends(np.asarray(wandb.Image(image).image))
    except TypeError as error:
        return type(error).__name__


def tensorboard(image):
    value = tensorboard_image("image", image, dataformats="CHW").value[0]
    return ends(np.asarray(Image.open(io.BytesIO(value.image.encoded_image_string))))


found = {name: shown(image) for name, image in images.items()}
for name, image in images.items():
    print(f"{name:12} TensorBoard {tensorboard(image)}, wandb {found[name]}")
    assert tensorboard(image) == ((0, 255) if name == "0 to 1" else (76, 153))
    if name != "bfloat16":
        assert shown(image.permute(1, 2, 0).numpy()) == found[name], f"changed: array and tensor differ, {name}"
scales = wandb.__version__ == "0.28.0"
assert found == {
    "0 to 1": (0, 255) if scales else (0, 1), "0.3 to 0.6": (76, 153) if scales else (0, 0),
    "bfloat16": "TypeError", "uint8": (76, 153),
}, f"changed: {found}"
print("as described")
PY
for version in 0.28.0 0.31.0; do
  "$folder/venv/bin/pip" install --quiet --no-compile "wandb==$version"
  WANDB_MODE=offline "$folder/venv/bin/python" -W ignore "$folder/check.py"
done
