"""Rearrange a ``SampleGrid`` image into one column per prompt, for the home page.

python tools/wide_grid.py runs/tiny_shapes/samples/after.png docs/tiny_shapes.png
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

GAP, LABEL, LINE, ROWS = 6, 76, 15, 3


def wide(grid: Image.Image) -> Image.Image:
    """Return the grid with the first images of each prompt in one column, the reference on top."""
    layout = json.loads(grid.text["layout"])  # type: ignore[attr-defined]
    width, height = layout["size"]
    top = 2 * LINE + GAP
    size = LABEL + len(layout["prompts"]) * (width + GAP), top + ROWS * (height + GAP)
    sheet = Image.new("RGB", size, "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=12)
    for row, label in enumerate(["before", "after", "after,\nother noise"]):
        pen.multiline_text((GAP, top + row * (height + GAP) + height // 2 - LINE), label, fill="gray", font=font)
    for column, (prompt, upper) in enumerate(zip(layout["prompts"], layout["top"], strict=True)):
        x = LABEL + column * (width + GAP)
        pen.multiline_text((x, 2), textwrap.fill(prompt, 15), fill="black", font=font)
        for row, left in enumerate(layout["left"][:ROWS]):
            cell = grid.crop((left, upper, left + width, upper + height))
            sheet.paste(cell, (x, top + row * (height + GAP)))
    return sheet


if __name__ == "__main__":
    wide(Image.open(sys.argv[1])).save(Path(sys.argv[2]), optimize=True)
