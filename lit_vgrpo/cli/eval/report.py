"""Report of an evaluation: intervals, differences, the JSON, the CSV and the table."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_vgrpo.cli.eval.scores import ImageScores
from lit_vgrpo.errors import counted
from lit_vgrpo.metrics import diversity
from lit_vgrpo.metrics.bootstrap import bootstrap_interval
from lit_vgrpo.system.paths import write_atomically
from lit_vgrpo.training.folder import candidates
from lit_vgrpo.training.saved_weights import REFERENCE

LEVEL, RESAMPLES = 0.95, 2000
INTERVAL = {"level": LEVEL, "resamples": RESAMPLES, "of": "prompts"}


def interval(values: Sequence[float], prompts: Sequence[int]) -> dict[str, Any]:
    """Return the mean and its bootstrap interval, without NaN values; whole prompts are resampled.

    >>> interval([1.0, 3.0, math.nan], [0, 0, 1])
    {'mean': 2.0, 'low': 2.0, 'high': 2.0, 'count': 2, 'failed': 1}
    """
    kept = [value for value in values if not math.isnan(value)]
    found: dict[str, Any] = {"mean": None, "low": None, "high": None}
    if kept:
        low, high = bootstrap_interval(values, prompts, LEVEL, RESAMPLES)
        found = {"mean": math.fsum(kept) / len(kept), "low": low, "high": high}
    return {**found, "count": len(kept), "failed": len(values) - len(kept)}


def rewards_of(scores: ImageScores) -> dict[str, Tensor]:
    """Return the weighted sum as ``reward``, and each reward by its name."""
    return {"reward": scores.total, **scores.parts}


def results(scores: Mapping[str, ImageScores], images_per_prompt: int) -> dict[str, Any]:
    """Return the means with intervals of each set of weights, and its differences to the reference image by image.

    Args:
        scores: for each set of weights, the scores of the same images: same prompts, same noise.
        images_per_prompt: image ``i`` was generated for prompt ``i // images_per_prompt``.
    """
    found: dict[str, Any] = {"variants": {}}
    measured = {variant: _measured(own, images_per_prompt) for variant, own in scores.items()}
    for variant, own in scores.items():
        means = {name: interval(values.tolist(), prompts) for name, (values, prompts) in measured[variant].items()}
        found["variants"][variant] = {"means": means, "distances": own.distances, "errors": own.errors}
    if REFERENCE in scores:
        start = measured.pop(REFERENCE)
        found["difference_to_reference"] = {
            variant: {
                name: interval((values - start[name][0]).tolist(), prompts) for name, (values, prompts) in own.items()
            }
            for variant, own in measured.items()
        }
    return found


def _measured(scores: ImageScores, images_per_prompt: int) -> dict[str, tuple[Tensor, list[int]]]:
    """Return ``{metric: (values, prompts)}``: float64 values and the number of each one's prompt."""
    prompts = [image // images_per_prompt for image in scores.image_ids]
    found = {name: (values.double(), prompts) for name, values in rewards_of(scores).items()}
    if scores.features is not None:
        rows = scores.features.isfinite().all(dim=1).nonzero().flatten().tolist()
        spread = diversity(scores.features[rows], [prompts[row] for row in rows])
        numbers = sorted(set(prompts))
        values = torch.tensor([spread.get(number, math.nan) for number in numbers], dtype=torch.float64)
        found["diversity"] = values, numbers
    return found


def write(report: dict[str, Any], scores: Mapping[str, ImageScores], wanted: Path) -> tuple[Path, Path]:
    """Write the JSON and a CSV with one line per image; never overwrite an earlier evaluation.

    Raises:
        OSError: a file cannot be created.
    """
    lines = io.StringIO(newline="")
    writer = csv.writer(lines)
    writer.writerow(["prompt", "image", "variant", *rewards_of(next(iter(scores.values())))])
    for variant, own in scores.items():
        columns = [values.tolist() for values in rewards_of(own).values()]
        for prompt, image, *values in zip(own.prompts, own.image_ids, *columns, strict=True):
            writer.writerow([prompt, image, variant, *("" if math.isnan(value) else value for value in values)])
    path = _reserved(wanted)
    write_atomically(path.with_suffix(".csv"), lines.getvalue())
    write_atomically(path, json.dumps(_plain(report), indent=2, ensure_ascii=False) + "\n")
    return path, path.with_suffix(".csv")


def _reserved(wanted: Path) -> Path:
    """Create the first of ``eval.json``, ``eval-2.json``, ... that does not exist, and return it."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for stem in candidates(wanted.with_suffix("")):
        path = stem.with_name(stem.name + wanted.suffix)
        if path.with_suffix(".csv").exists():
            continue
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable: the candidates never end")


def _plain(value: Any) -> Any:
    """Replace NaN, which JSON cannot hold, by null."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def table(report: dict[str, Any]) -> str:
    """Return the table for the terminal: one line per metric, one column per set of weights."""
    lines = [["", *report["variants"]], *_mean_lines(report), *_distance_lines(report), *_difference_lines(report)]
    widths = [max(len(line[column]) for line in lines if column < len(line)) for column in range(len(lines[0]))]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip() for line in lines]
    saved, prompts = report["checkpoint"], report["prompts"]
    sampled = f"{counted(prompts['count'], 'held-out prompt')} x {counted(prompts['images_per_prompt'], 'image')}"
    heading = [
        f"{saved['file']} after {counted(saved['iteration'], 'iteration')}",
        f"{sampled}, seed {report['seed']}",
        "",
    ]
    return "\n".join([*heading, *rows, "", *_notes(report)])


def _mean_lines(report: dict[str, Any]) -> Iterator[list[str]]:
    variants = [own["means"] for own in report["variants"].values()]
    held_out = {name for name, about in report["rewards"].items() if about["held_out"]}
    for name in variants[0]:
        yield [f"{name} (held out)" if name in held_out else name, *(_with_interval(own[name]) for own in variants)]
        if any(own[name]["failed"] for own in variants):
            yield ["  failed", *(str(own[name]["failed"]) for own in variants)]


def _distance_lines(report: dict[str, Any]) -> Iterator[list[str]]:
    variants = [own["distances"] for own in report["variants"].values()]
    for name in dict.fromkeys(name for own in variants for name in own):
        yield [name, *(format(own.get(name, math.nan), ".4g") for own in variants)]


def _difference_lines(report: dict[str, Any]) -> Iterator[list[str]]:
    variants = list(report.get("difference_to_reference", {}).values())
    if variants:
        yield ["minus reference"]
        for name in variants[0]:
            yield [f"  {name}", *(_with_interval(own[name], "+") for own in variants)]


def _notes(report: dict[str, Any]) -> Iterator[str]:
    yield f"In brackets: {LEVEL:.0%} intervals of the mean, from {RESAMPLES} bootstrap samples of the prompts."
    for name, reason in report["missing"].items():
        yield f"No {name}: {reason}"
    for variant, own in report["variants"].items():
        for name, message in own["errors"].items():
            yield f'{variant}: reward "{name}" failed: {message}'


def _with_interval(found: dict[str, Any], sign: str = "") -> str:
    if found["mean"] is None:
        return "-"
    numbers = (found[key] for key in ("mean", "low", "high"))
    mean, low, high = (format(value, f"{sign}.3f" if abs(value) < 100 else f"{sign}.5g") for value in numbers)
    return f"{mean} [{low}, {high}]"
