"""The report's page: what its templates need, and the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from shlex import quote
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from lit_vgrpo.apps.report import wording
from lit_vgrpo.apps.report.curves import panels
from lit_vgrpo.apps.report.kept import folder_of, read_images
from lit_vgrpo.apps.report.plots import Plot, draw
from lit_vgrpo.apps.report.recipe_diff import RecipeDifference, Row, config_text, difference_to_shipped, differences
from lit_vgrpo.apps.report.run_data import AXES, RunData, read_run
from lit_vgrpo.apps.report.samples import EDITED_SIDE, SIDE, UNREADABLE, Picture, Samples, picture, read_samples
from lit_vgrpo.apps.report.verdict import Verdict
from lit_vgrpo.system.paths import CONFIG_NAME, write_atomically

FEWEST_ITERATIONS = 3
"""A shorter run has no curves worth drawing."""
REASONS = {"best": "Best", "worst": "Worst", "disagreement": "Rewards disagree most"}
PHASES = {
    "time/rollout_s": "Sampling",
    "time/decode_s": "Decoding",
    "time/reward_s": "Scoring",
    "time/prepare_s": "Preparing",
}
UPDATES = "Updates"
MARK = "<!-- lightning report -->"
"""First line of the page; only files that start with it are overwritten."""


@dataclass(frozen=True)
class Scored:
    """An image with its scores."""

    picture: Picture
    prompt: str
    number: int
    scores: list[tuple[str, str]]
    pair: tuple[str, str] | None
    edited: Picture | None


class RunPage:
    """A run as the templates see it."""

    def __init__(self, run: RunData) -> None:
        self.run = run
        self.verdict = Verdict(run)

    @property
    def name(self) -> str:
        return self.run.name

    @cached_property
    def samples(self) -> Samples:
        return read_samples(self.run.folder)

    @cached_property
    def kept(self) -> dict[str, Any]:
        return read_images(self.run.folder)

    @cached_property
    def galleries(self) -> list[tuple[str, list[Scored]]]:
        """The kept images by the reason for which they were kept."""
        found: dict[str, list[Scored]] = {title: [] for title in REASONS.values()}
        for entry in self.kept["images"]:
            try:
                shown = self._kept_picture(entry["file"])
                edited = self._kept_picture(entry["edited"], EDITED_SIDE) if entry.get("edited") else None
                pair = tuple(map(str, entry["pair"])) if entry.get("pair") else None
                scores = {str(name): wording.reward(score) for name, score in entry["scores"].items()}
                known = list(scores.items()) if len(scores) > 2 else list(scores.items())[:1]
                found[REASONS[entry["reason"]]].append(
                    Scored(shown, str(entry["prompt"]), int(entry["image"]), known, pair, edited)  # type: ignore[arg-type]
                )
            except UNREADABLE:  # replaced by those of the next evaluation just now, or damaged
                continue
        return [(title, images) for title, images in found.items() if images]

    def _kept_picture(self, file: str, side: int = SIDE) -> Picture:
        with Image.open(folder_of(self.run.folder) / Path(file).name) as image:
            return picture(image, side)

    @cached_property
    def seconds(self) -> list[tuple[str, float, float]]:
        """The phases of the iterations: name, seconds and share."""
        rows = [point.metrics for point in self.run.iterations]
        found = {title: sum(max(row.get(key, 0.0), 0.0) for row in rows) for key, title in PHASES.items()}
        whole = sum(row["time/iteration_s"] for row in rows)
        found[UPDATES] = max(whole - sum(found.values()), 0.0)
        whole = sum(found.values())
        return [(title, own, own / whole) for title, own in found.items() if whole and own / whole >= 0.0005]

    @cached_property
    def passes(self) -> list[tuple[str, int]]:
        """Images through the network, by phase."""
        saved = self.run.summary.get("network_passes") or {}
        if saved:
            found = {name.replace("_", " "): sum(own.values()) for name, own in saved.items()}
        else:
            newest = self.run.iterations[-1].metrics if self.run.iterations else {}
            kept = {name: value for name, value in newest.items() if name.startswith("passes/")}
            found = {}
            for name, value in kept.items():
                phase = name.removeprefix("passes/").rpartition("_with")[0].replace("_", " ")
                found[phase] = found.get(phase, 0) + round(value)
        return sorted(found.items(), key=lambda entry: -entry[1])

    @cached_property
    def recipe_difference(self) -> RecipeDifference | None:
        return difference_to_shipped(self.run.recipe)

    @cached_property
    def config(self) -> str:
        return config_text(self.run.folder)

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Device, memory, seed and versions."""
        summary = self.run.summary
        found = {
            "Outcome": self.run.outcome,
            "Device": summary.get("device"),
            "Processes": summary.get("world_size"),
            "Peak memory": wording.size(summary["peak_memory_bytes"]) if summary.get("peak_memory_bytes") else None,
            "Training": wording.duration(self.run.total("seconds")),
            "CPU time": wording.duration(summary["cpu_seconds"]) if summary.get("cpu_seconds") is not None else None,
            "Optimizer steps": wording.amount(summary["optimizer_steps"]) if "optimizer_steps" in summary else None,
            "Seed": summary.get("seed", self.run.recipe.get("seed_everything")),
            **(summary.get("versions") or {}),
        }
        return [(str(name), str(value)) for name, value in found.items() if value is not None]

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Next steps with the run, and their commands; none without a recipe."""
        folder = self.run.folder
        if not self.run.recipe:
            return []
        config, run = quote(str(folder / CONFIG_NAME)), quote(str(folder))
        return [
            ("Reproduce, in a new folder", f"lightning run {config} run_dir={quote(f'{folder}-again')}"),
            ("Resume", f"lightning run {config} --resume"),
            ("Evaluate, with intervals", f"lightning eval {run} --reference"),
            ("Sample", f"lightning sample {run} --prompt {quote(self._prompt)}"),
            ("Export for diffusers", f"lightning export {run} --to {quote(f'{folder.name}-export')}"),
        ]

    @property
    def _prompt(self) -> str:
        return next(iter(self.samples.prompts), "a red circle")


class Page:
    """Input of the templates.

    Args:
        runs: the runs, one or several.
        live: the page is served, and reloads when a run has new rows.
    """

    def __init__(self, runs: Sequence[RunData], live: bool = False) -> None:
        self.runs = [RunPage(run) for run in runs]
        self.live = live

    @property
    def title(self) -> str:
        return ", ".join(run.name for run in self.runs)

    @cached_property
    def plots(self) -> list[Plot]:
        if max(len(page.run.iterations) for page in self.runs) < FEWEST_ITERATIONS:
            return []
        return [draw(panel, f"p{n}") for n, panel in enumerate(panels([page.run for page in self.runs]))]

    @property
    def axes(self) -> dict[str, str]:
        """The costs that some plot is drawn against."""
        return {axis: title for axis, title in AXES.items() if any(axis in plot.drawings for plot in self.plots)}

    @cached_property
    def recipe_rows(self) -> list[Row]:
        """Settings in which the runs differ."""
        return differences([page.run.recipe for page in self.runs]) if len(self.runs) > 1 else []


def render(runs: Sequence[RunData], live: bool = False) -> str:
    """Return the report of one run or several as HTML."""
    return environment().get_template("page.html.j2").render(page=Page(runs, live), mark=MARK)


@cache
def environment() -> Environment:
    """Return the templates' environment, with the words for numbers as ``say``."""
    made = Environment(
        loader=PackageLoader("lit_vgrpo.apps.report"),
        autoescape=True,  # prompts, paths and recipes are anything
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["say"] = wording
    return made


def write_report(folders: Sequence[Path], out: Path, is_running: bool = False) -> None:
    """Write the report of run folders to a file, atomically.

    Args:
        is_running: called by the run itself, while it trains.

    Raises:
        UserError: a run cannot be read, or the file cannot be written.
    """
    write_atomically(out, render([read_run(folder, is_running) for folder in folders]))
