"""The report's page: what its templates show, and the file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from shlex import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from lit_vgrpo.apps.report import wording
from lit_vgrpo.apps.report.curves import plots
from lit_vgrpo.apps.report.images import read_kept, read_samples
from lit_vgrpo.apps.report.recipe_diff import config_text, difference_to_shipped, differences
from lit_vgrpo.apps.report.run_data import AXES, RunData, read_run
from lit_vgrpo.apps.report.verdict import Verdict
from lit_vgrpo.system.paths import CONFIG_NAME, write_atomically

PHASES = {
    "time/rollout_s": "Sampling",
    "time/decode_s": "Decoding",
    "time/reward_s": "Scoring",
    "time/prepare_s": "Preparing",
}
MARK = "<!-- lightning report -->"
"""First line of the page; only files that start with it are overwritten."""


class RunPage:
    """A run as the templates see it."""

    def __init__(self, run: RunData) -> None:
        self.run = run
        self.name = run.name
        self.verdict = Verdict(run)
        self.samples = read_samples(run.folder)
        self.galleries = read_kept(run.folder)
        self.recipe_difference = difference_to_shipped(run.recipe)
        self.config = config_text(run.folder)

    @cached_property
    def seconds(self) -> list[tuple[str, float, float]]:
        """Phases of the iterations: name, seconds and share."""
        rows = [point.metrics for point in self.run.iterations]
        found = {title: sum(max(row.get(key, 0.0), 0.0) for row in rows) for key, title in PHASES.items()}
        found["Updates"] = max(sum(row["time/iteration_s"] for row in rows) - sum(found.values()), 0.0)
        whole = sum(found.values())
        return [(title, own, own / whole) for title, own in found.items() if own >= 0.0005 * whole > 0]

    @cached_property
    def passes(self) -> list[tuple[str, int]]:
        """Images through the network, by phase of training."""
        found: Counter[str] = Counter()
        for name, value in self.run.iterations[-1].metrics.items() if self.run.iterations else ():
            if name.startswith("passes/"):
                found[name.removeprefix("passes/").rpartition("_with")[0].replace("_", " ")] += round(value)
        return found.most_common()

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Device, memory, seed and versions."""
        summary = self.run.summary
        memory = summary.get("peak_memory_bytes")
        found = {
            "Outcome": self.run.outcome,
            "Device": summary.get("device"),
            "Processes": summary.get("world_size"),
            "Peak memory": memory and f"{memory / 1e9:.1f} GB",
            "Training": wording.duration(self.run.total("seconds")),
            "Optimizer steps": summary.get("optimizer_steps"),
            "Seed": summary.get("seed", self.run.recipe.get("seed_everything")),
            **summary.get("versions", {}),
        }
        return [(name, str(value)) for name, value in found.items() if value is not None]

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Next steps with the run, and their commands; none without a recipe."""
        folder = self.run.folder
        if not self.run.recipe:
            return []
        config, run = quote(str(folder / CONFIG_NAME)), quote(str(folder))
        prompt = quote([*self.samples.prompts, "a red circle"][0])
        return [
            ("Reproduce, in a new folder", f"lightning run {config} run_dir={quote(f'{folder}-again')}"),
            ("Resume", f"lightning run {config} --resume"),
            ("Evaluate, with intervals", f"lightning eval {run} --reference"),
            ("Sample", f"lightning sample {run} --prompt {prompt}"),
            ("Export for diffusers", f"lightning export {run} --to {quote(f'{folder.name}-export')}"),
        ]


class Page:
    """Input of the templates.

    Args:
        runs: the runs, one or several.
        live: the page is served, and reloads when a run has new rows.
    """

    def __init__(self, runs: Sequence[RunData], live: bool = False) -> None:
        self.runs = [RunPage(run) for run in runs]
        self.title = ", ".join(run.name for run in runs)
        self.live = live
        self.plots = plots(runs)
        self.axes = {axis: title for axis, title in AXES.items() if any(axis in plot.drawings for plot in self.plots)}
        self.recipe_rows = differences([run.recipe for run in runs])


def render(runs: Sequence[RunData], live: bool = False) -> str:
    """Return the report of one run or several as HTML."""
    return environment().get_template("page.html.j2").render(page=Page(runs, live), mark=MARK)


@cache
def environment() -> Environment:
    """Return the templates' environment, with the formats of numbers as ``say``."""
    made = Environment(
        loader=PackageLoader("lit_vgrpo.apps.report"),
        autoescape=True,  # prompts, paths and recipes may contain anything
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["say"] = wording
    return made


def write_report(folder: Path, out: Path, is_running: bool = False) -> None:
    """Write the report of a run folder to a file, atomically.

    Args:
        is_running: called by the run itself, while it trains.

    Raises:
        UserError: the run cannot be read, or the file cannot be written.
    """
    write_atomically(out, render([read_run(folder, is_running)]))
