"""``lightning score``: score image files with a reward."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lit_vgrpo.cli.image_files import batches_of, find_images, loaded, read_image
from lit_vgrpo.config.recipe import shipped_overlays
from lit_vgrpo.data import read_prompts
from lit_vgrpo.errors import UserError, counted, say, score_text, shell_line, shortened
from lit_vgrpo.launch.build import NO_REWARD, build_reward
from lit_vgrpo.options import Score
from lit_vgrpo.rewards import Scores
from lit_vgrpo.system.paths import check_writable, write_atomically
from lit_vgrpo.system.process import bar
from lit_vgrpo.training.settings import UnscorablePrompts

OUT_KINDS = (".json", ".csv")


def score(options: Score) -> int:
    """Score images: ``REWARD IMAGES... [--prompt TEXT | --prompts FILE] [key=value ...]``; return 1 if one failed."""
    words, out = options.words, options.out
    if not words or "=" in words[0].partition(":")[0]:
        raise UserError(NO_REWARD)
    if options.prompt is not None and options.prompts is not None:
        raise UserError("--prompt and --prompts are both given. Use --prompt TEXT for all images, or --prompts FILE.")
    if out is not None and (out.suffix not in OUT_KINDS or out.is_dir()):
        fitting = shell_line("--out", out.with_suffix(".json"))
        raise UserError(f"--out {out} is not a .json or .csv file. Use {fitting}.")
    if out is not None:
        check_writable(out)
    named, images, overlays = [words[0]], list[str](), shipped_overlays()
    for word in words[1:]:
        is_path = os.path.exists(os.path.expanduser(word))  # a Path refuses long names
        is_overlay = word.endswith((".yaml", ".yml")) or (word in overlays and not is_path)
        (named if is_overlay or ("=" in word and not is_path) else images).append(word)
    reward = build_reward(named)
    files = find_images(images)
    rows = rows_for(files, options)
    has_no_prompt = options.prompt is None and options.prompts is None
    prompt_errors = UnscorablePrompts.of(reward, rows).refused(any_failure=True)
    errors = [*reward.check(), *prompt_errors]
    if prompt_errors and has_no_prompt:
        errors.append("No prompt was given. Add --prompt TEXT, or --prompts FILE with one prompt per image.")
    if errors:
        raise UserError(*errors)
    scores: list[dict[str, Any]] = []
    with loaded(reward), bar("Scoring", total=len(files)) as scored:
        size = len(files) if reward.compares else options.batch_size
        for batch in batches_of(map(read_image, files), rows, size):
            batch_scores = reward.score(*batch)
            for index, prompt in enumerate(batch[1]):
                scores.append(image_scores(batch_scores, index, files[len(scores)], prompt))
            scored.update(len(batch_scores))
    say(score_table(scores, reward.part_names, shows_prompts=options.prompts is not None))
    if has_no_prompt:
        say("No prompt was given: rewards that use it received an empty one.", error=True)
    if out is not None:
        described = {"reward": named, "weights": reward.weight_of, "images": scores}
        is_json = out.suffix == ".json"
        write_atomically(out, json.dumps(described, indent=2) + "\n" if is_json else _csv_of(scores, reward.part_names))
        say(f"Written: {out}")
    return int(any(image["failures"] for image in scores))


def rows_for(files: Sequence[Path], options: Score) -> list[dict[str, Any]]:
    """Return the prompt's row of each image, by default empty; raise UserError if there is not one prompt per image."""
    if options.prompts is None:
        return [{"prompt": options.prompt or ""} for _ in files]
    try:
        rows = read_prompts(options.prompts, edits=False)
    except ValueError as error:
        raise UserError(str(error)) from error
    if len(rows) != len(files):
        count = f"{counted(len(rows), 'prompt')} for {counted(len(files), 'image')}"
        raise UserError(f"{options.prompts} has {count}. Give one per image, from {files[0]} to {files[-1]}.")
    return rows


def image_scores(batch: Scores, index: int, file: Path, prompt: str) -> dict[str, Any]:
    """Return the scores of one image of a batch as plain values.

    Returns:
        ``image`` and ``prompt``; ``total``, the weighted sum; ``parts``, the score of each reward that applies, by
        name; ``failures``, reasons by name. A score that failed is ``None``.
    """
    parts = {name: _number(part[index]) for name, part in batch.parts.items() if batch.applies_to(name)[index]}
    failures = {name: batch.errors.get(name, "no reason given") for name, value in parts.items() if value is None}
    total = _number(batch.total[index])
    return {"image": f"{file}", "prompt": prompt, "total": total, "parts": parts, "failures": failures}


def score_table(scores: Sequence[Mapping[str, Any]], names: Sequence[str], shows_prompts: bool) -> str:
    """Return a table with a row per image and a column per reward, followed by the reasons of failures."""

    def cell(value: float | None) -> str:
        return "failed" if value is None else score_text(value, decimals=4)

    rows = [[cell(one["parts"][name]) if name in one["parts"] else "-" for name in names] for one in scores]
    rows = [[shortened(one["prompt"]), *cells, cell(one["total"])] for cells, one in zip(rows, scores, strict=True)]
    table = pd.DataFrame(rows, [one["image"] for one in scores], pd.Index(["prompt", *names, "total"], name="image"))
    reasons = [f"{one['image']}: {name} failed: {why}" for one in scores for name, why in one["failures"].items()]
    return "\n".join([table.iloc[:, 0 if shows_prompts else 1 :].to_string(), *reasons])


def _csv_of(scores: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return a CSV table with failed cells empty and the reasons in the last column."""
    rows = []
    for one in scores:
        why = "; ".join(f"{name}: {reason}" for name, reason in one["failures"].items())
        rows.append([one["image"], one["prompt"], *map(one["parts"].get, names), one["total"], why])
    table = pd.DataFrame(rows, columns=["image", "prompt", *names, "total", "failures"])
    return table.to_csv(index=False, lineterminator="\n")


def _number(value: Any) -> float | None:
    return None if math.isnan(value) else float(value)
