#!/usr/bin/env bash
# aim: a pixel just outside [0, 1] is logged at the other end of the scale, so that clipped highlights turn black
#
# One would guess: aim.Image of a float tensor cuts values off at 0 and 1, as TensorBoard does.
#
# What happens (aim 3.29.1, torch 2.13.0): it multiplies by 255 and casts to 8 bits, so that numbers wrap around. A grey
# ramp as it was logged, 0 to 255:
#   pixel in the tensor       -0.02    0       0.5     1       1.01    1.1     1.5
#   TensorBoard               0        0       127     255     255     255     255
#   aim                       251      0       127     255     1       24      126
# No warning. uint8 tensors and PIL images are right.
#
# Why it matters: an autoencoder's output is not bounded, and samples with strong guidance leave [0, 1] in highlights
# and shadows first. Logged without a clamp, they show black and coloured specks that are not in the images that rewards
# and metrics see. Clamp, or convert to PIL.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 tensorboard==2.21.0 pillow==13.0.0 aim==3.29.1
cat > "$folder/check.py" <<'PY'
import io
from importlib.metadata import version

import aim
import numpy as np
import torch
from PIL import Image
from torch.utils.tensorboard.summary import image as tensorboard_image

print(f"aim {version('aim')}, torch {torch.__version__}")
values = torch.tensor([-0.02, 0.0, 0.5, 1.0, 1.01, 1.1, 1.5])
ramp = values.view(1, 1, -1).expand(3, 4, -1).contiguous()


def by_tensorboard(image):
    value = tensorboard_image("image", image, dataformats="CHW").value[0]
    return np.asarray(Image.open(io.BytesIO(value.image.encoded_image_string)))[0, :, 0].tolist()


def by_aim(image):
    return np.asarray(aim.Image(image).to_pil_image())[0, :, 0].tolist()


eight_bits = (ramp.clamp(0, 1) * 255).byte()
print("pixels     ", [round(value, 2) for value in values.tolist()])
print("TensorBoard", by_tensorboard(ramp))
print("aim        ", by_aim(ramp), "uint8:", by_aim(eight_bits))
assert by_tensorboard(ramp) == by_aim(eight_bits) == by_aim(ramp.clamp(0, 1)) == [0, 0, 127, 255, 255, 255, 255]
assert by_aim(ramp)[1:] == [0, 127, 255, 1, 24, 126], "changed: aim"
print("as described: pixels wrap around")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
