#!/usr/bin/env bash
# datasets, Pillow: with_format("torch") gives an image with a palette as the numbers of its palette, in one channel
#
# One would guess: the Image feature decodes a PNG to its colours, and with_format("torch") gives (3, H, W) for a colour
# picture.
#
# What happens (datasets 5.2.0, Pillow 13.0.0, torch 2.13.0): the image stays in Pillow's mode "P", and its array holds
# the place of each pixel's colour in the palette. Picture of 64 x 64 pixels, mean error of the tensor in 8-bit values,
# compared with the picture itself:
#                                  shape           error     with Image(mode="RGB")
#   PNG, RGB                       (3, 64, 64)     0         0
#   PNG, palette of 256 colours    (1, 64, 64)     99.5      4.2
#   PNG, palette of 16 colours     (1, 64, 64)     120.3     16.6
#   GIF                            (1, 64, 64)     99.5      4.2
# with_format("numpy") does the same. Nothing is logged.
#
# Why it matters: the tensor looks like a grey picture, so that code which repeats grey to three channels takes the
# numbers for brightness. Graphics, logos and screenshots are often stored with a palette. Cast
# the column to Image(mode="RGB"), or call convert("RGB") in a transform.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 datasets==5.2.0 pillow==13.0.0
cat > "$folder/check.py" <<'PY'
import io

import datasets
import numpy as np
import PIL
import torch
from datasets import Dataset, Image
from PIL import Image as Pictures

print(f"datasets {datasets.__version__}, Pillow {PIL.__version__}, torch {torch.__version__}")
rows, columns = np.mgrid[0:64, 0:64]
colours = np.stack([rows * 4, columns * 4, 255 - rows * 4], axis=-1).astype(np.uint8)
picture = Pictures.fromarray(colours)


def stored(image, kind="PNG"):
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return {"bytes": buffer.getvalue(), "path": None}


files = {
    "PNG, RGB": stored(picture),
    "PNG, palette of 256 colours": stored(picture.quantize(256)),
    "PNG, palette of 16 colours": stored(picture.quantize(16)),
    "GIF": stored(picture, "GIF"),
}
data = Dataset.from_dict({"image": list(files.values())}).cast_column("image", Image())
forced = data.cast_column("image", Image(mode="RGB"))
converted = data.with_transform(lambda batch: {"image": [np.array(image.convert("RGB")) for image in batch["image"]]})
reference = torch.from_numpy(colours).permute(2, 0, 1).float()
errors = {}
for number, name in enumerate(files):
    tensor = data.with_format("torch")[number]["image"]
    array = data.with_format("numpy")[number]["image"]
    good = forced.with_format("torch")[number]["image"].float()
    own = torch.from_numpy(converted[number]["image"]).permute(2, 0, 1).float()
    as_rgb = tensor.float().expand(3, -1, -1)
    errors[name] = [round((guess - reference).abs().mean().item(), 1) for guess in (as_rgb, good, own)]
    print(f"{name}: mode {data[number]['image'].mode}, torch {tuple(tensor.shape)}, numpy {array.shape}; "
          f"mean error {errors[name][0]}, with Image(mode='RGB') {errors[name][1]}, convert('RGB') {errors[name][2]}")
    if name == "PNG, RGB":
        assert tuple(tensor.shape) == (3, 64, 64) and errors[name] == [0, 0, 0]
    else:
        indices = torch.from_numpy(np.array(data[number]["image"]))
        assert tuple(tensor.shape) == (1, 64, 64) and torch.equal(tensor[0], indices), f"changed: {name}"
        assert errors[name][0] > 50 and max(errors[name][1:]) < 20, f"changed: {name}"
print("as described: the tensor holds the numbers of the palette")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
