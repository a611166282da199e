#!/usr/bin/env bash
# torch: antialias=True changes bicubic enlargements too, where there is nothing to filter
#
# One would guess: interpolate(..., mode="bicubic", antialias=True) differs from antialias=False only when the image
# gets smaller, as it is with mode="bilinear".
#
# What happens (torch 2.13.0, Pillow 13.0.0): the two have different cubic kernels (a = -0.5 with, -0.75 without
# antialias). Random image of 12 x 12 enlarged to 30 x 30, largest difference in grey levels of 255:
#   bicubic:  antialias against none 16.3, antialias against Pillow 0.0, none against Pillow 16.3
#   bilinear: antialias against none 0.0
#
# Why it matters: rewards that are differentiated through (ReFL, DRaFT) resize the decoded image with torch, while the
# same reward model was trained on images that Pillow resized, and CLIP, PickScore and HPS use bicubic. For images
# smaller than the reward model's input the flag looks irrelevant, but only antialias=True gives the images the model
# knows.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6 pillow==13.0.0
cat > "$folder/check.py" <<'PY'
import numpy
import PIL
import torch
import torch.nn.functional as F
from PIL import Image

print(f"torch {torch.__version__}, Pillow {PIL.__version__}")
image = torch.rand(1, 1, 12, 12, generator=torch.Generator().manual_seed(0))
found = {}
for mode in ("bicubic", "bilinear"):
    with_it, without = (F.interpolate(image, size=(30, 30), mode=mode, antialias=flag)[0, 0] for flag in (True, False))
    pillow = Image.fromarray(image[0, 0].numpy()).resize((30, 30), getattr(Image.Resampling, mode.upper()))
    pillow = torch.from_numpy(numpy.array(pillow))
    found[mode] = [255 * (a - b).abs().max().item() for a, b in ((with_it, without), (with_it, pillow), (without, pillow))]
    print(f"{mode}, in grey levels: antialias against none {found[mode][0]:.1f}, antialias against Pillow "
          f"{found[mode][1]:.1f}, none against Pillow {found[mode][2]:.1f}")
assert found["bicubic"][0] > 5 and found["bicubic"][1] < 0.1 and found["bicubic"][2] > 5, "changed"
assert max(found["bilinear"]) < 0.1, "changed"
print("as described: only the antialiased enlargement is Pillow's")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
