#!/usr/bin/env bash
# diffusers: export_to_video writes 8-bit frames as their negative
#
# One would guess: export_to_video takes a list of numpy arrays, and arrays of type uint8 are pixels already, as for
# imageio, matplotlib and Image.fromarray. If it does not take them, it raises.
#
# What happens (diffusers 0.42.1, imageio 2.38.1): all arrays are multiplied by 255 and cast to uint8. For uint8 the
# product wraps around, so that x becomes 256 - x. Grey values 64, 128 and 192, written and read again with load_video:
#   PIL images                              64     128    192
#   float arrays in [0, 1]                  64     128    192
#   uint8 arrays                            192    128    64
#   frames of load_video as arrays          193    129    65
#   uint8 arrays, imageio itself            mean error 0.7
# Nothing is logged. The type hint says list[np.ndarray], and the range is not documented.
#
# Why it matters: frames that were kept in 8 bits, or read from a file, are natural arguments. A negative is a valid
# video, so that a reward model or a logger that gets the file goes on. Make PIL images of them first.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 \
    imageio==2.38.1 imageio-ffmpeg==0.8.1
cat > "$folder/check.py" <<'PY'
import sys

import diffusers
import imageio
import numpy as np
from diffusers.utils import export_to_video, load_video
from PIL import Image

print(f"diffusers {diffusers.__version__}, imageio {imageio.__version__}")
ramp = np.broadcast_to(np.arange(0, 256, 4, dtype=np.uint8)[None, :, None], (64, 64, 3)).copy()
reference = ramp.astype(float)


def written(frames, name):
    path = export_to_video(frames, f"{sys.argv[1]}/{name}.mp4", fps=8)
    return np.array(load_video(path)[4]).astype(float)


found = {
    "PIL images": written([Image.fromarray(ramp)] * 9, "pil"),
    "float arrays in [0, 1]": written([ramp / np.float32(255)] * 9, "float"),
    "uint8 arrays": written([ramp] * 9, "bytes"),
    "one uint8 array (F, H, W, C)": written(np.stack([ramp] * 9), "array"),
    "what load_video gave, as arrays": None,
}
again = [np.array(frame) for frame in load_video(f"{sys.argv[1]}/pil.mp4")]
found["what load_video gave, as arrays"] = written(again, "again")
errors = {}
for name, video in found.items():
    errors[name] = np.abs(video - reference).mean(), np.abs(video - (256 - reference) % 256).mean()
    print(f"{name}: grey values 64, 128, 192 become {[round(video[32, column, 0]) for column in (16, 32, 48)]}, "
          f"mean error {errors[name][0]:.1f}, of the negative {errors[name][1]:.1f}")
for name, (error, negative) in errors.items():
    if "uint8" in name or "load_video" in name:
        assert negative < 8 < 60 < error, f"changed: {name}"
    else:
        assert error < 3, f"changed: {name}"
with imageio.get_writer(f"{sys.argv[1]}/imageio.mp4", fps=8) as writer:
    for _ in range(9):
        writer.append_data(ramp)
direct = np.array(load_video(f"{sys.argv[1]}/imageio.mp4")[4]).astype(float)
print(f"imageio itself, uint8 arrays: mean error {np.abs(direct - reference).mean():.1f}")
assert np.abs(direct - reference).mean() < 3
print("as described: uint8 frames are written as their negative")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
