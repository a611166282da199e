"""The report's page: its images, the data of its templates, and the file."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import ExifTags, Image, ImageSequence

from lit_vgrpo.core.pixels import save_webp
from lit_vgrpo.errors import one_line
from lit_vgrpo.report import run_data, verdict
from lit_vgrpo.report.curves import plots
from lit_vgrpo.report.defaults import own_settings
from lit_vgrpo.report.run_data import TO_EDIT, RunData, Say
from lit_vgrpo.report.verdict import Verdict
from lit_vgrpo.system.paths import read_regular, write_atomically
from lit_vgrpo.training.resume import newest_checkpoint, next_commands

PHASES = {
    "time/rollout_s": "Sampling",
    "time/decode_s": "Decoding",
    "time/reward_s": "Scoring",
    "time/prepare_s": "Preparing",
}
MOST_PROMPTS = 12
SIDE, MOVING_SIDE, EDITED_SIDE = 384, 256, 128
"""Maximum longer sides of an image, of a moving video, and of a picture that a prompt edits, in pixels."""
PIXEL_ART = 128
"""Images up to this size are stored without loss, and enlarged without smoothing."""
SUMS = ("reward", verdict.UNTRAINED)
"""Scores that a gallery leaves out if they are those of a single reward."""
REASONS = {"best": "Best", "worst": "Worst", "disagreement": "Rewards disagree most"}
UNDONE = ("failed", "interrupted", "unsaved", run_data.UNFINISHED)
"""Outcomes after which a run may continue."""
GRID = re.compile(r"before|after|iteration_\d+")
"""Names of sample grids, without their suffix."""
MARK = "<!-- lightning report -->"
"""First line of the page; only files that start with it are overwritten."""
Frames = Sequence[Image.Image]
"""An image, or a video's frames, all of one size."""


@dataclass(frozen=True)
class Picture:
    """An image or a moving video as a ``data:`` address; ``still`` is a video's first frame."""

    source: str
    width: int
    height: int
    still: str | None = None

    @property
    def is_small(self) -> bool:
        return max(self.width, self.height) <= PIXEL_ART


@dataclass(frozen=True)
class Pair:
    """A prompt's images from the same noise, before and after training, possibly of several runs.

    Attributes:
        images: By their labels, such as "before" and "after".
        edited: The picture that the prompt edits, if any.
        change: Root mean square difference of the images before and after.
        rewards: Mean rewards of the prompt's held-out images, by the labels of :attr:`images`, where known.
    """

    prompt: str
    images: dict[str, Picture]
    edited: Picture | None
    change: float
    rewards: dict[str, float]

    @property
    def scores(self) -> dict[str, str]:
        """The rewards as text."""
        return dict(zip(self.rewards, verdict.column([*self.rewards.values()]), strict=True))


@contextmanager
def reading(file: Path, say: Say) -> Iterator[None]:
    """Say in a line that a file is damaged, or is being replaced, instead of raising an error."""
    try:
        yield
    except Exception as error:  # of libraries and of content of any type
        say(f"{file} is damaged ({type(error).__name__}: {one_line(error):.200}).")


def read_pairs(run: Path, say: Say = lambda line: None) -> list[Pair]:
    """Return the pairs of a run's newest readable sample grid, largest change first; ``say`` names damaged ones."""
    order = {"before": 0, "after": 2}
    files = [file for file in (run / "samples").glob("*.png") if GRID.fullmatch(file.stem)]
    start: dict[str, Any] = {}
    with suppress(Exception), Image.open(io.BytesIO(read_regular(run / "samples" / "before.png"))) as sheet:
        start = _layout(sheet)
    for file in sorted(files, key=lambda file: (order.get(file.stem, 1), file.stem), reverse=True):
        with reading(file, say):
            moving = file.with_suffix(".webp")
            with Image.open(io.BytesIO(read_regular(moving if moving.exists() else file))) as sheet:
                layout = _layout(sheet)
                before, after = (_column(sheet, layout, column) for column in (0, 1))
                edited: list[Any] = [None] * len(before)
                if TO_EDIT in layout["labels"]:
                    edited = [cell for (cell,) in _column(sheet, layout, layout["labels"].index(TO_EDIT))]
                duration = sheet.info.get("duration", 0)
            time = file.stem if file.stem in order else f"iteration {int(file.stem.split('_')[1])}"
            rewards = {time: layout.get("rewards")}
            if start.get("prompts") == layout["prompts"]:
                rewards = {"before": start.get("rewards"), **rewards}
            pairs = []
            for row, (prompt, a, b, c) in enumerate(zip(layout["prompts"], before, after, edited, strict=False)):
                images = {"before": video(a, duration), time: video(b, duration)}
                own = {label: float(means[row]) for label, means in rewards.items() if means and means[row] is not None}
                pairs.append(Pair(str(prompt), images, c and picture(c, EDITED_SIDE), _difference(a, b), own))
            return sorted(pairs, key=lambda pair: -pair.change)
    return []


def _layout(sheet: Image.Image) -> dict[str, Any]:
    """Return what a grid shows where; those of earlier versions have no ``rewards``."""
    text = sheet.info.get(run_data.LAYOUT) or sheet.getexif()[ExifTags.Base.ImageDescription]
    layout: dict[str, Any] = json.loads(text)
    return layout


def side_by_side(runs: Sequence[RunPage]) -> list[Pair]:
    """Return the images of several runs by prompt; identical images before training appear once."""
    pairs: dict[tuple[str, Picture | None], Pair] = {}
    for run in runs:
        for pair in run.pairs:
            joined = pairs.setdefault((pair.prompt, pair.edited), replace(pair, images={}, rewards={}))
            for label, image in pair.images.items():
                if label == "before" and image in joined.images.values():
                    continue
                name = label if label == "before" and not joined.images else f"{run.name}, {label}"
                joined.images[name] = image
                if label in pair.rewards:
                    joined.rewards[name] = pair.rewards[label]
    return list(pairs.values())


def _difference(frames: Frames, others: Frames) -> float:
    pairs = zip(frames, others, strict=True)
    return float(np.mean([np.mean((np.asarray(a, dtype=np.float64) - np.asarray(b)) ** 2) for a, b in pairs]) ** 0.5)


def _column(sheet: Image.Image, layout: dict[str, Any], column: int) -> list[Frames]:
    """Return the frames of a grid's images in a column: 0 is the reference, 1 the policy on the same noise."""
    (width, height), left, zoom = layout["size"], layout["left"][column], layout["zoom"]
    boxes = [(left, top, left + width, top + height) for top in layout["top"][:MOST_PROMPTS]]
    small = (width // zoom, height // zoom)
    frames = (frame.convert("RGB") for frame in ImageSequence.Iterator(sheet))
    cells = [[frame.crop(box).resize(small, Image.Resampling.NEAREST) for box in boxes] for frame in frames]
    return list(zip(*cells, strict=True))


def read_kept(run: Path, known: set[str], say: Say = lambda line: None) -> dict[str, list[dict[str, Any]]]:
    """Return the images that the run kept at its newest evaluation, by reason, without those already known.

    Each has its ``picture``, ``prompt``, ``image`` (its number), ``scores`` as text, the ``pair`` of rewards that
    disagree, and the picture that is ``edited``, if any. ``say`` names a damaged table.
    """
    table = run / run_data.KEPT / run_data.IMAGES_NAME
    galleries: dict[str, list[dict[str, Any]]] = {}
    # The table may name any file on the disk, and the page is meant to be shared.
    pictures = (run / run_data.KEPT).glob("*.png")
    files = {file.name: file for file in pictures if file.is_file() and not file.is_symlink()}
    with reading(table, say) if table.exists() else suppress(FileNotFoundError):
        entries = json.loads(read_regular(table))["images"]
        columns = {name: [one["scores"][name] for one in entries] for first in entries[:1] for name in first["scores"]}
        parts = [column for name, column in columns.items() if name not in SUMS]
        names = [name for name, column in columns.items() if name not in SUMS or column not in parts]
        for entry in entries:
            image, edited = _read_picture(files[entry["file"]]), files.get(entry["edited"])
            shown = {
                "image": int(entry["image"]),
                "prompt": str(entry["prompt"]),
                "pair": [*map(str, entry["pair"] or ())],
                "picture": image,
                "edited": None if edited is None else _read_picture(edited, EDITED_SIDE),
                "scores": {name: verdict.score(entry["scores"][name]) for name in names},
            }
            if image.source not in known:
                known.add(image.source)
                galleries.setdefault(REASONS[entry["reason"]], []).append(shown)
    return galleries


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


def video(frames: Frames, duration: int) -> Picture:
    """Return a video, ``duration`` ms per frame, as WebP, lossless if small; one frame is a :func:`picture`."""
    if len(frames) == 1:
        return picture(frames[0])
    first, buffer = picture(frames[0], MOVING_SIDE), io.BytesIO()
    scaled = [frame.resize((first.width, first.height)) for frame in frames]
    save_webp(scaled, buffer, duration, lossless=first.is_small)
    source = f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return replace(first, source=source, still=first.source)


def read_benchmarks(run: Path, say: Say) -> list[dict[str, Any]]:
    """Return results of ``lightning eval --benchmark``, each with ``title``, ``protocol``, ``table`` and ``papers``."""
    results = []
    for file in sorted((run / run_data.BENCHMARKS).glob("*.json")):
        with reading(file, say):
            report = json.loads(read_regular(file))
            names = ("height", "width", "steps", "guidance", "images_per_prompt")
            protocol = ", ".join(f"{name.replace('_', ' ')} {report['protocol'][name]}" for name in names)
            table = [[str(row[0]), *map(str, row[1:])] for row in report["table"]]
            papers = {paper: [*map(str, why or ())] for paper, why in report["papers"].items()}
            results.append({"title": report["title"], "table": table, "papers": papers, "protocol": protocol})
    return results


class RunPage:
    """A run as the templates see it."""

    def __init__(self, run: RunData) -> None:
        self.run = run
        self.name = run.name
        self.verdict = Verdict(run)
        self.pairs = read_pairs(run.folder, run.left_out.append)
        shown = {picture.source for pair in self.pairs for picture in pair.images.values()}
        self.galleries = read_kept(run.folder, shown, run.left_out.append)
        self.benchmarks = read_benchmarks(run.folder, run.left_out.append)

    @property
    def evaluations(self) -> dict[str, list[str]]:
        """Held-out metrics of all evaluations as text, by name."""
        points, names = self.run.evaluations, [change.name for change in self.verdict.changes]
        return {name: verdict.column([point.metrics.get(name) for point in points]) for name in names}

    @cached_property
    def seconds(self) -> list[tuple[str, float, float]]:
        """Phases of the iterations: name, seconds and share."""
        rows = [point.metrics for point in self.run.iterations]
        phases = {title: sum(max(row.get(key, 0.0), 0.0) for row in rows) for key, title in PHASES.items()}
        phases["Updates"] = max(sum(row["time/iteration_s"] for row in rows) - sum(phases.values()), 0.0)
        whole = sum(phases.values())
        return [(title, part, part / whole) for title, part in phases.items() if part >= 0.0005 * whole > 0]

    @property
    def figures(self) -> list[tuple[str, str]]:
        """Cost, date and commit, as shown in the result."""
        run, summary = self.run, self.run.summary
        is_gpu = "cpu" not in str(summary.get("device", "cpu")).lower()
        seconds = run.total("seconds")
        spent = seconds if is_gpu else summary.get("cpu_seconds")
        shown = {
            "Iterations": verdict.amount(run.num_iterations),
            "Images": self._images,
            "Training time": verdict.duration(seconds),
            "GPU time" if is_gpu else "CPU time": spent and verdict.duration(spent * summary.get("world_size", 1)),
            "Network passes": verdict.amount(run.total("passes")),
            "Date": str(summary.get("date") or "")[:10],
            "Commit": summary.get("commit"),
        }
        return [(name, value) for name, value in shown.items() if value]

    @property
    def _images(self) -> str:
        """The images of all iterations, and how many are of one that was interrupted."""
        run, data = self.run, self.run.recipe.get("data") or {}
        images, sizes = run.total("images"), [data.get(name) for name in ("prompts_per_iteration", "group_size")]
        each = math.prod(size if isinstance(size, int) else 0 for size in sizes)
        rest = int(images or 0) - run.num_iterations * each
        is_cut = run.outcome in UNDONE and 0 < rest <= each
        return verdict.amount(images) + (f", {rest} of an unfinished iteration" if is_cut else "")

    @property
    def settings(self) -> list[tuple[str, str]]:
        """The recipe's settings that differ from the defaults."""
        return own_settings(self.run.recipe)

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Next steps that are possible in the run's state, and their commands."""
        folder, run = self.run.folder, self.run
        if not run.recipe or newest_checkpoint(folder) is None:
            return []
        prompt = self.pairs[0].prompt if self.pairs and self.pairs[0].edited is None else None
        has_heldout, is_undone = bool(self.verdict.compared), run.outcome in UNDONE
        return [*next_commands(folder, prompt, has_heldout, is_undone, not self.verdict.unseen).items()]

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Device, memory, seed and versions."""
        summary = self.run.summary
        memory = summary.get("peak_memory_bytes")
        peaks = {phase: f"{peak / 1e9:.1f} GB" for phase, peak in summary.get("peak_memory_bytes_by_phase", {}).items()}
        differ = len({*peaks.values()}) > 1
        shown = {
            "Outcome": self.run.outcome,
            "Device": summary.get("device"),
            "Processes": summary.get("world_size"),
            "Peak memory": memory and f"{memory / 1e9:.1f} GB",
            "Peak memory by phase": ", ".join(f"{phase} {peak}" for phase, peak in peaks.items()) if differ else None,
            "Training": verdict.duration(self.run.total("seconds")),
            "Optimizer steps": summary.get("optimizer_steps"),
            "Seed": summary.get("seed", self.run.recipe.get("seed_everything")),
            **summary.get("versions", {}),
        }
        return [(name, str(value)) for name, value in shown.items() if value is not None]


def render(runs: Sequence[RunData], live: bool = False) -> str:
    """Return the report of one or several runs as HTML; with ``live``, the page reloads when a run has new rows."""
    run_data.tell_apart(runs)
    groups, apart = run_data.by_task(runs)
    marks = [f"task{number}-" for number in range(len(groups))] if len(groups) > 1 else [""]
    options = {"tasks": [*map(_task, groups, marks)], "runs": runs, "apart": apart, "live": live, "mark": MARK}
    return environment().get_template("page.html.j2").render(options)


def _task(runs: Sequence[RunData], mark: str) -> dict[str, Any]:
    """Return what the templates show of runs that compare; ``mark`` makes its ids unique in the page."""
    drawn, pages = plots(runs, mark), [RunPage(run) for run in runs]
    return {
        "mark": mark,
        "runs": pages,
        "pairs": side_by_side(pages) if len(pages) > 1 else pages[0].pairs,
        "disagree": any(REASONS["disagreement"] in page.galleries for page in pages),
        "is_alarming": any(page.verdict.alarms or page.verdict.cheating.is_likely for page in pages),
        "plots": drawn,
        "axes": {axis: title for axis, title in run_data.AXES.items() if any(axis in plot.drawings for plot in drawn)},
        "recipe_rows": run_data.differences([run.recipe for run in runs]),
    }


@cache
def environment() -> Environment:
    """Return the templates' environment, with the formats of numbers as ``say``."""
    options: dict[str, Any] = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    # Prompts, paths and recipes may contain anything.
    made = Environment(loader=PackageLoader("lit_vgrpo.report"), autoescape=True, **options)
    made.globals["say"] = verdict
    return made


def write_report(folder: Path, out: Path, is_running: bool = False) -> None:
    """Write a run's report atomically, also while it ``is_running``; raise UserError if that fails."""
    write_atomically(out, render([run_data.read_run(folder, is_running)]))
