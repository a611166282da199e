#!/usr/bin/env bash
# transformers: image processors divide images in [0, 1] by 255 once more, and version 5 no longer says so
#
# One would guess: an image processor that gets a float image in [0, 1] either uses it as it is, or warns, as the
# processors of transformers 4 did ("It looks like you are trying to rescale already rescaled images").
#
# What happens (transformers 5.24.0, torch 2.13.0), for a random image, as uint8 and as float32 in [0, 1]:
#   CLIP      std of pixel_values 1.09 from uint8, 0.14 from float32 (three constant channels: a black image)
#   SigLIP    0.58 and 0.002
#   ViT       0.58 and 0.002
# Torch tensors and numpy arrays are treated alike. No warning, no line in the log; below for the processors on PIL,
# and those on torchvision do the same. 4.57.6 logs a warning for each of these three.
#
# Why it matters: VAEs and training code hold images as floats in [0, 1]. A reward that passes them on scores nearly
# black images. Its scores still differ a little from image to image, so training runs, and learns nothing or noise.
# Pass do_rescale=False, or uint8.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/check.py" <<'PY'
import logging
import warnings

import torch
import transformers

version = transformers.__version__
print(f"transformers {version}, torch {torch.__version__}")
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("transformers").addHandler(handler)
warnings.showwarning = lambda message, *rest: said.append(str(message))
bytes_ = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
floats = bytes_ / 255
square = {"height": 64, "width": 64}
processors = {
    "CLIPImageProcessor": dict(size={"shortest_edge": 64}, crop_size=square),
    "SiglipImageProcessor": dict(size=square),
    "ViTImageProcessor": dict(size=square),
}
for name, options in processors.items():
    processor = getattr(transformers, name if version.startswith("4") else f"{name}Pil")(**options)
    read = lambda image, **more: torch.as_tensor(processor(images=image, return_tensors="pt", **more)["pixel_values"])
    right, kept = read(bytes_), read(floats, do_rescale=False)
    said.clear()
    wrong, numpy = read(floats), read(floats.numpy())
    warned = any("rescale" in line for line in said)
    print(f"{name}: std {right.std():.4f} from uint8, {wrong.std():.4f} from float, warned: {warned}")
    assert (right - kept).abs().max() < 0.05, "changed: do_rescale=False does not give the values of uint8"
    spread = wrong.flatten(2).std(-1).max()  # within a channel
    assert spread < 0.01 and (wrong - numpy).abs().max() < 1e-5, "changed: floats in [0, 1] are not divided again"
    assert warned == version.startswith("4"), "changed: which version warns"
print("as described")
PY
for pin in 4.57.6 5.24.0; do
    python3 -m venv "$folder/$pin"
    "$folder/$pin/bin/pip" install --quiet --no-compile torch==2.13.0 "transformers==$pin" pillow==12.0.0
    "$folder/$pin/bin/python" "$folder/check.py"
done
