"""Images of a report: the sample grids' cells, and the images that the run kept, as ``data:`` addresses."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from lit_vgrpo.apps.report import wording
from lit_vgrpo.apps.report.run_data import IMAGES_NAME, KEPT

LAYOUT = "layout"
"""Name of the text in a sample grid's PNG with the places of its images."""
TO_EDIT = "to edit"
"""Label of the grid's column with the pictures that the prompts edit."""
MOST_STAGES = 5
MOST_PROMPTS = 12
SIDE, EDITED_SIDE = 384, 128
"""Maximum longer sides of an image, and of a picture that a prompt edits, in pixels."""
PIXEL_ART = 128
"""Images up to this size are stored without loss, and enlarged without smoothing."""
REASONS = {"best": "Best", "worst": "Worst", "disagreement": "Rewards disagree most"}
UNREADABLE = (OSError, ValueError, KeyError, TypeError, SyntaxError, Image.DecompressionBombError)
"""Errors of files that are damaged, or replaced just now."""


@dataclass(frozen=True)
class Picture:
    """An image as a ``data:`` address."""

    source: str
    width: int
    height: int

    @property
    def is_small(self) -> bool:
        return max(self.width, self.height) <= PIXEL_ART


@dataclass
class Samples:
    """Images of the same prompts and noise.

    Attributes:
        prompts: the prompts.
        stages: each prompt's image, by time in training.
        edited: the pictures that the prompts edit; empty if they edit none.
    """

    prompts: list[str] = field(default_factory=list)
    stages: dict[str, list[Picture]] = field(default_factory=dict)
    edited: list[Picture] = field(default_factory=list)


def read_samples(run: Path) -> Samples:
    """Return the samples of a run: the reference, and up to four grids from the first to the last."""
    order = {"before": 0, "after": 2}
    files = sorted((run / "samples").glob("*.png"), key=lambda file: (order.get(file.stem, 1), file.stem))
    most = MOST_STAGES - 1
    if len(files) > most:
        files = [files[round(place * (len(files) - 1) / (most - 1))] for place in range(most)]
    found = Samples()
    for file in files:
        try:
            with Image.open(file) as image:
                sheet, layout = image.convert("RGB"), json.loads(image.info[LAYOUT])
            name = {"before": "start", "after": "end"}.get(file.stem) or f"iteration {int(file.stem.split('_')[1])}"
            pictures = _column(sheet, layout, 1)
            if not found.stages:
                found.stages["reference"] = _column(sheet, layout, 0)
                found.prompts = layout["prompts"][:MOST_PROMPTS]
                if TO_EDIT in layout["labels"]:
                    found.edited = _column(sheet, layout, layout["labels"].index(TO_EDIT), EDITED_SIDE)
            found.stages[name] = pictures
        except UNREADABLE:
            continue
    return found


def _column(sheet: Image.Image, layout: dict[str, Any], column: int, side: int = SIDE) -> list[Picture]:
    """Return a grid's images in a column: 0 is the reference, 1 the policy on the same noise."""
    (width, height), left, zoom = layout["size"], layout["left"][column], layout["zoom"]
    cells = [sheet.crop((left, top, left + width, top + height)) for top in layout["top"][:MOST_PROMPTS]]
    small = (width // zoom, height // zoom)
    return [picture(cell.resize(small, Image.Resampling.NEAREST), side) for cell in cells]


def read_kept(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the images that the run kept at its newest evaluation, by the reason for which it kept them.

    Each has its ``picture``, ``prompt``, ``image`` (its number), ``scores`` as text, the ``pair`` of rewards that
    disagree, and the picture that is ``edited``, if any.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        for entry in json.loads((run / KEPT / IMAGES_NAME).read_text(encoding="utf-8"))["images"]:
            scores = {name: wording.reward(score) for name, score in entry["scores"].items()}
            edited = Path(entry["edited"] or run / "none")
            shown = {
                "picture": _read_picture(run / KEPT / entry["file"]),
                "edited": _read_picture(edited, EDITED_SIDE) if edited.is_file() else None,
                "scores": scores if len(scores) > 2 else {"reward": scores["reward"]},  # a single reward is the sum
            }
            found.setdefault(REASONS[entry["reason"]], []).append({**entry, **shown})
    except UNREADABLE:
        pass
    return found


def _read_picture(file: Path, side: int = SIDE) -> Picture:
    with Image.open(file) as image:
        return picture(image, side)


def picture(image: Image.Image, side: int = SIDE) -> Picture:
    """Return an image for the page: as PNG if it is small, else as JPEG with its longer side at most ``side``."""
    image = image.convert("RGB")
    buffer, kind = io.BytesIO(), "png" if max(image.size) <= PIXEL_ART else "jpeg"
    if kind == "jpeg":
        image.thumbnail((side, side))
    image.save(buffer, kind, quality=85, optimize=True)
    return Picture(f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}", *image.size)
