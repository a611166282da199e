#!/usr/bin/env bash
# Pillow, diffusers: a video saved as GIF, WebP or APNG loses each frame that equals the one before it
#
# One would guess: export_to_gif of 16 frames gives 16 frames when it is read back, at the rate that was asked for.
#
# What happens (Pillow 13.0.0, diffusers 0.42.1, imageio 2.38.1): Pillow writes a frame that equals the one before it
# as a longer duration. Readers return one frame per image of the file, so that the video is shorter and its motion
# larger. A square that moves by 4 pixels in every fourth frame, 16 frames:
#                                     frames read back     pixels per frame, mean
#   frames as they were                     16                    0.8
#   export_to_gif                            4                    4.0
#   imageio.mimwrite, GIF                    4                    4.0
#   Pillow, lossless WebP or APNG            4                    4.0
#   frames with one random pixel each       16                    0.8
# A video that stands still is one frame. The rate is another one too, since GIF counts hundredths of a second and
# Pillow cuts the rest off: 12 frames per second are read back as 12.5, 30 as 33.3, 60 as 100. Nothing is logged.
#
# Why it matters: GIF and WebP are usual for samples of video models and for small data sets. Flow, smoothness and
# motion rewards of such a file see a video that is faster than the one that was generated, most of all for videos that
# hardly move, which these rewards are there to find; two files of one model differ in length. Keep PNG frames instead.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6 diffusers==0.42.1 pillow==13.0.0 \
    imageio==2.38.1
cat > "$folder/check.py" <<'PY'
import sys

import diffusers
import imageio
import numpy as np
import PIL
from diffusers.utils import export_to_gif
from PIL import Image, ImageSequence

print(f"Pillow {PIL.__version__}, diffusers {diffusers.__version__}, imageio {imageio.__version__}")
folder = sys.argv[1]


def video(still=False, marked=False):
    """Return 16 frames in which a square moves by 4 pixels in every fourth frame."""
    random, frames = np.random.default_rng(0), []
    for number in range(16):
        frame = np.zeros((32, 64, 3), np.uint8)
        start = 4 if still else 4 + number // 4 * 4
        frame[8:24, start:start + 16] = 255
        if marked:
            frame[random.integers(24, 32), random.integers(0, 64), 0] = 100 + number
        frames.append(Image.fromarray(frame))
    return frames


def motion(frames):
    """Return the mean distance per frame in pixels by which the square's left edge moves."""
    edges = [np.asarray(frame.convert("L"))[16].argmax() for frame in frames]
    return float(np.abs(np.diff(edges)).mean()) if len(edges) > 1 else 0.0


def read(path):
    with Image.open(path) as file:
        frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(file)]
    assert len(imageio.mimread(path)) == len(frames)
    return frames


def by_diffusers(frames, **options):
    export_to_gif(frames, f"{folder}/a.gif", **options)
    return f"{folder}/a.gif"


def by_imageio(frames):
    imageio.mimwrite(f"{folder}/b.gif", [np.asarray(frame) for frame in frames], fps=8)
    return f"{folder}/b.gif"


def by_pillow(frames, ending, **options):
    frames[0].save(f"{folder}/c.{ending}", save_all=True, append_images=frames[1:], duration=125, **options)
    return f"{folder}/c.{ending}"


print(f"as generated: {len(video())} frames, motion {motion(video()):.2f}")
for name, path in (("export_to_gif", by_diffusers(video())), ("imageio", by_imageio(video())),
                   ("WebP", by_pillow(video(), "webp", lossless=True)), ("APNG", by_pillow(video(), "png"))):
    frames = read(path)
    print(f"{name}: {len(frames)} frames, motion {motion(frames):.2f}")
    assert len(frames) == 4 and motion(frames) == 4, "changed: all frames are there"
marked = read(by_diffusers(video(marked=True)))
print(f"one random pixel in each frame: {len(marked)} frames, motion {motion(marked):.2f}")
assert len(marked) == 16 and motion(marked) == motion(video())
still = read(by_diffusers(video(still=True)))
print("a video that stands still:", len(still), "frame")
assert len(still) == 1, "changed: still frames are kept"

for rate, expected in ((8, 120), (12, 80), (16, 60), (24, 40), (30, 30), (60, 10)):
    with Image.open(by_diffusers(video(marked=True), fps=rate)) as file:
        duration = file.info["duration"]
    print(f"{rate} frames per second: read back as {1000 / duration:.1f}")
    assert duration == expected, "changed: the rate"
print("as described: equal frames are dropped, and the rate is rounded")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
