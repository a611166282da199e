#!/usr/bin/env bash
# datasets: a map that only looks at a JPEG compresses it again, and an image resized in place is stored in its old size
#
# One would guess: map(lambda row: {"width": row["image"].width}) adds a column and leaves the images as they are; and
# Dataset.from_list([{"image": image}]) stores the pixels of the PIL image as it is now.
#
# What happens (datasets 5.2.0, Pillow 12.0.0):
#  1. A JPEG that lies in the dataset as bytes, as in parquet files from the hub, is decoded when map's function reads
#     it, and written again with Pillow's default quality 75, whether or not the function returns it. Mean change in
#     grey levels (of 255), and size of the file (quality 98, 26 KB):
#       map that does not read the image           0.00   26 KB
#       filter that reads it                       0.00   26 KB
#       map that reads it, returns a new column    2.51    9 KB
#       three such maps                            2.99    9 KB
#  2. A PIL image that was opened from a file is stored as that file, whatever was done to it since in place. After
#     image.thumbnail((64, 64)) or drawing on it, the dataset holds the file's 256 x 256 pixels. Methods that return a
#     new image, such as resize and convert, are stored as they are.
# Nothing is logged.
#
# Why it matters: a column of sizes or scores, made with map, spoils the images that a reward model, a JPEG reward or FID
# sees next; each further map adds to it. Masked or shrunk images reach a model unmasked and in full size. Use
# cast_column("image", Image(decode=False)) before map, or map(..., remove_columns=["image"]) and join the result; give
# datasets a copy of an image that was changed in place.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile datasets==5.2.0 pillow==12.0.0 numpy==2.3.5
cat > "$folder/check.py" <<'PY'
import os
import sys

os.environ["HF_HOME"] = os.path.join(sys.argv[1], "cache")
import datasets
import numpy
import PIL
import PIL.Image
import PIL.ImageDraw

print(f"datasets {datasets.__version__}, Pillow {PIL.__version__}")
datasets.disable_progress_bars()
path = os.path.join(sys.argv[1], "image.jpg")
noise = numpy.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=numpy.uint8)
PIL.Image.fromarray(noise).resize((256, 256), PIL.Image.Resampling.BICUBIC).save(path, quality=98)


def stored(image):
    return datasets.Dataset.from_list([{"image": image}])[0]["image"]


small = PIL.Image.open(path)
small.thumbnail((64, 64))
masked = PIL.Image.open(path)
PIL.ImageDraw.Draw(masked).rectangle((0, 0, 256, 256), fill="black")
sizes = [small.size, stored(small).size, stored(small.copy()).size]
levels = [float(numpy.asarray(image).mean()) for image in (masked, stored(masked), stored(masked.copy()))]
print("after thumbnail: image", sizes[0], "stored", sizes[1], "stored from a copy", sizes[2])
print("after drawing a black box, mean: image {:.1f}, stored {:.1f}, stored from a copy {:.1f}".format(*levels))
assert sizes == [(64, 64), (256, 256), (64, 64)], "changed: thumbnail"
assert levels[0] == levels[2] == 0 and levels[1] > 50, "changed: drawing"

with open(path, "rb") as file:
    data = file.read()
pixels = numpy.asarray(PIL.Image.open(path)).astype(float)


def fresh():
    features = datasets.Features(image=datasets.Image())
    return datasets.Dataset.from_list([{"image": {"bytes": data, "path": None}}], features=features)


def read(row):
    return {"width": row["image"].width}


results = {
    "map that does not read the image": fresh().map(lambda row: {"width": 0}),
    "filter that reads it": fresh().filter(lambda row: row["image"].width > 1),
    "map that reads it, returns a new column": fresh().map(read),
    "three such maps": fresh().map(read).map(read).map(read),
}
losses = {}
for name, table in results.items():
    size = len(table.cast_column("image", datasets.Image(decode=False))[0]["image"]["bytes"])
    losses[name] = float(numpy.abs(numpy.asarray(table[0]["image"]) - pixels).mean())
    print(f"{name}: {losses[name]:.2f} grey levels, {size / 1000:.0f} KB of {len(data) / 1000:.0f} KB")
changes = list(losses.values())
assert changes[:2] == [0, 0] and changes[3] > changes[2] > 1, "changed: map"
print("as described")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
