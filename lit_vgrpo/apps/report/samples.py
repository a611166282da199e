"""Images of the run's sample grids: each prompt on the same noise, before, during and after training."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

LAYOUT = "layout"
"""Name of the text in a grid's PNG that says where its images are."""
TO_EDIT = "to edit"
"""Label of the grid's column with the pictures that the prompts edit."""
MOST_STAGES = 5
MOST_PROMPTS = 12
SIDE = 384
"""Longer side of an image in the report, at most, in pixels."""
EDITED_SIDE = 128
"""The same of a picture that a prompt edits."""
PIXEL_ART = 128
"""Images up to this size are stored without loss."""
UNREADABLE = (OSError, ValueError, KeyError, TypeError, SyntaxError, Image.DecompressionBombError)


@dataclass(frozen=True)
class Picture:
    """An image as a ``data:`` address."""

    source: str
    width: int
    height: int

    @property
    def is_small(self) -> bool:
        """It is shown enlarged, so its pixels are to stay sharp."""
        return max(self.width, self.height) <= PIXEL_ART


@dataclass(frozen=True)
class Stage:
    """A time in training, and its image of each prompt."""

    name: str
    pictures: list[Picture]


@dataclass(frozen=True)
class Samples:
    """Images of the same prompts at several stages.

    Attributes:
        grids: whole sample grids, where they do not say where their images are.
        edited: the pictures that the prompts edit; empty if they edit none.
    """

    prompts: list[str]
    stages: list[Stage]
    grids: list[Stage]
    edited: list[Picture]


def read_samples(run: Path) -> Samples:
    """Return the samples of a run: the reference, and up to four grids from the first to the last."""
    files = sorted((run / "samples").glob("*.png"), key=_order)
    if len(files) > MOST_STAGES - 1:  # the first, the last, and those in the middle of the rest
        picks = [round(i * (len(files) - 1) / (MOST_STAGES - 2)) for i in range(MOST_STAGES - 1)]
        files = [files[pick] for pick in picks]
    stages: list[Stage] = []
    grids: list[Stage] = []
    prompts: list[str] = []
    edited: list[Picture] = []
    for file in files:
        try:
            with Image.open(file) as image:
                sheet, text = image.convert("RGB"), image.info.get(LAYOUT)
            layout = None if text is None else json.loads(text)
            if layout is None:
                grids.append(Stage(_name(file), [picture(sheet, 1024)]))
                continue
            if not stages:
                prompts = [str(prompt) for prompt in layout["prompts"]][:MOST_PROMPTS]
                stages.append(Stage("reference", _column(sheet, layout, 0, len(prompts))))
                if TO_EDIT in (labels := layout.get("labels", [])):
                    edited = _column(sheet, layout, labels.index(TO_EDIT), len(prompts), EDITED_SIDE)
            stages.append(Stage(_name(file), _column(sheet, layout, 1, len(prompts))))
        except UNREADABLE:  # still being written, or damaged
            continue
    return Samples(prompts, stages, [] if stages else grids[-1:], edited)


def _column(sheet: Image.Image, layout: dict[str, Any], column: int, rows: int, side: int = SIDE) -> list[Picture]:
    """Return a grid's images in a column: 0 is the reference, 1 the policy on the same noise."""
    width, height = (int(side) for side in layout["size"])
    left, zoom = int(layout["left"][column]), int(layout["zoom"])
    found = []
    for top in layout["top"][:rows]:
        cell = sheet.crop((left, top, left + width, top + height))
        small = (width // zoom, height // zoom)
        found.append(picture(cell if zoom == 1 else cell.resize(small, Image.Resampling.NEAREST), side))
    return found


def picture(image: Image.Image, side: int = SIDE) -> Picture:
    """Return an image for the page: as PNG where it is small, else as JPEG with its longer side at most ``side``."""
    image = image.convert("RGB")
    buffer, kind = io.BytesIO(), "png"
    if max(image.size) <= PIXEL_ART:
        image.save(buffer, "PNG", optimize=True)
    else:
        image.thumbnail((side, side))
        image.save(buffer, "JPEG", quality=85, optimize=True)
        kind = "jpeg"
    return Picture(f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}", *image.size)


def _order(file: Path) -> tuple[int, str]:
    return {"before": 0, "after": 2}.get(file.stem, 1), file.stem


def _name(file: Path) -> str:
    number = file.stem.removeprefix("iteration_")
    return {"before": "start", "after": "end"}.get(
        file.stem, f"iteration {int(number)}" if number.isdigit() else number
    )
