#!/usr/bin/env bash
# Pillow, diffusers: a 16-bit grey picture, such as a depth map, turns white in RGB, and a 16-bit colour one does not
#
# One would guess: convert("RGB") of a 16-bit picture divides its values by 257 or 256, so that a ramp from 0 to 65,535
# is a ramp from 0 to 255.
#
# What happens (Pillow 13.0.0, diffusers 0.42.1, torch 2.13.0): a 16-bit grey PNG opens in mode I;16, and its conversion
# cuts values off at 255. A 16-bit colour PNG is scaled as it is opened. Share of white pixels of a ramp of 256 steps:
#   grey, convert("RGB") or convert("L")                            99.6 %
#   grey, diffusers' load_image                                     99.6 %
#   grey, VaeImageProcessor(do_convert_rgb=True), as for ControlNet 99.6 %
#   colour, convert("RGB")                                           0.4 %
# Nothing is logged.
#
# Why it matters: depth maps are stored in 16 bits. ControlNet and depth-conditioned pipelines get one flat white
# picture, train and sample without an error, and learn to ignore it. Scale the values first, in numpy.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 pillow==13.0.0 \
    opencv-python-headless==5.0.0.93
cat > "$folder/check.py" <<'PY'
import sys

import cv2
import diffusers
import numpy as np
import PIL
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import load_image
from PIL import Image

print(f"Pillow {PIL.__version__}, diffusers {diffusers.__version__}, torch {torch.__version__}")
folder = sys.argv[1]
ramp = np.tile((np.arange(256) * 257).astype(np.uint16), (256, 1))  # from 0 to 65,535
cv2.imwrite(f"{folder}/grey.png", ramp)
cv2.imwrite(f"{folder}/colour.png", np.stack([ramp] * 3, -1))
grey, colour = Image.open(f"{folder}/grey.png"), Image.open(f"{folder}/colour.png")
print("modes:", grey.mode, colour.mode)
assert np.array_equal(np.asarray(grey), ramp), "changed: the file is read otherwise"
processor = VaeImageProcessor(vae_scale_factor=8, do_convert_rgb=True, do_normalize=False)
white = {
    'grey, convert("RGB")': np.asarray(grey.convert("RGB")) == 255,
    'grey, convert("L")': np.asarray(grey.convert("L")) == 255,
    "grey, load_image": np.asarray(load_image(grey)) == 255,
    "grey, VaeImageProcessor": processor.preprocess(grey).numpy() == 1,
    'colour, convert("RGB")': np.asarray(colour.convert("RGB")) == 255,
}
for name, share in white.items():
    print(f"{name:25} {share.mean():.1%} white")
    assert abs(share.mean() - (0.004 if name.startswith("colour") else 0.996)) < 0.001, f"changed: {name}"
print("as described: 16-bit grey turns white")
PY
"$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
