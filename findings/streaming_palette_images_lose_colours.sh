#!/usr/bin/env bash
# mosaicml-streaming, Pillow: a picture with a palette that is stored as "pil" is read back black
#
# One would guess: the column type "pil" stores any Pillow image without loss; it keeps mode, size and raw pixels.
#
# What happens (mosaicml-streaming 0.13.0, Pillow 11.3.0): the palette of mode "P" is not written. The picture that is
# read back has the mode "P" and the right numbers, and an empty palette. A drawing of four colours in a PNG with a
# palette, as image optimizers write it:
#                      colours after convert("RGB")
#   drawing            (220, 30, 30)   (30, 160, 60)   (40, 60, 200)   (250, 240, 230)
#   "pil"              (0, 0, 0)       (0, 0, 0)       (0, 0, 0)       (0, 0, 0)
#   "png"              as the drawing
# RGB, RGBA, L, LA, 1, I, I;16, F and CMYK come back exactly. Nothing is logged.
#
# Why it matters: drawings, logos and icons from the web often have palettes, and loaders convert to RGB after reading.
# They become black pictures with their captions. Convert to RGB before writing, or use "png".
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==4.57.6 numpy==2.1.3 pillow==11.3.0 \
    xxhash==3.6.0 Brotli==1.2.0 python-snappy==0.7.3 zstd==1.5.7.2 catalogue==2.0.10 matplotlib==3.10.7
"$folder/venv/bin/pip" install --quiet --no-compile --no-deps mosaicml-streaming==0.13.0  # without ten clouds' clients
cat > "$folder/check.py" <<'PY'
import sys
from types import ModuleType

import numpy
import PIL
import transformers.feature_extraction_utils  # noqa: F401
from PIL import Image

for name in ("", ".datasets", ".transforms", ".transforms.functional"):  # large, and only for other data sets
    sys.modules["torchvision" + name] = ModuleType("torchvision" + name)
sys.modules["torchvision.datasets"].VisionDataset = object
sys.modules["torchvision.transforms.functional"].to_tensor = None
import streaming
from streaming import MDSWriter, StreamingDataset

print(f"mosaicml-streaming {streaming.__version__}, Pillow {PIL.__version__}")
COLOURS = [(220, 30, 30), (30, 160, 60), (40, 60, 200), (250, 240, 230)]
drawing = Image.new("RGB", (64, 64))
for i, colour in enumerate(COLOURS):
    drawing.paste(colour, (16 * i, 0, 16 * i + 16, 64))
drawing.quantize(4).save(f"{sys.argv[1]}/drawing.png")
saved = Image.open(f"{sys.argv[1]}/drawing.png")
assert saved.mode == "P" and numpy.array_equal(saved.convert("RGB"), drawing)
noise = Image.fromarray(numpy.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=numpy.uint8))
PLAIN = [noise.convert(mode) for mode in ("RGB", "RGBA", "L", "LA", "1", "I", "F", "CMYK")]
PLAIN.append(Image.fromarray(numpy.arange(4096, dtype=numpy.uint16).reshape(64, 64) * 16))


def stored(kind, images):
    """Write the images to a dataset of streaming and read them back."""
    folder = f"{sys.argv[1]}/{kind}_{images[0].mode}"
    with MDSWriter(out=folder, columns={"image": kind}) as writer:
        for image in images:
            writer.write({"image": image})
    dataset = StreamingDataset(local=folder, batch_size=1, shuffle=False)
    return [dataset[i]["image"] for i in range(len(images))]


for before, after in zip(PLAIN, stored("pil", PLAIN)):
    assert before.mode == after.mode and before.tobytes() == after.tobytes(), before.mode
for kind in ("pil", "png"):
    after = stored(kind, [saved])[0]
    colours = [after.convert("RGB").getpixel((16 * i + 8, 32)) for i in range(4)]
    print(f"{kind}: mode {after.mode}, colours {colours}")
    if kind == "png":
        assert colours == COLOURS
    else:
        assert after.mode == "P" and max(max(colour) for colour in colours) < 4, "changed: the palette is kept"
print("as described: the palette is lost")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
