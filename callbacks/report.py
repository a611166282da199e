"""Writes a run's HTML report, and keeps the scores and images that it shows."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import lightning as L
import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.utilities import rank_zero_warn
from PIL.Image import Image
from pydantic_core import to_json
from torch import Tensor

from lit_vgrpo.core.gather import all_gather_objects
from lit_vgrpo.core.pictures import picture_files, read_picture
from lit_vgrpo.core.pixels import to_pil
from lit_vgrpo.core.ranges import Range, checked
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.data.prompts import PROMPT
from lit_vgrpo.errors import UserError, one_line, shell_line
from lit_vgrpo.report.run_data import IMAGES_NAME, KEPT, REPORT_NAME, SCORES_NAME
from lit_vgrpo.system.paths import new_file, write_atomically
from lit_vgrpo.system.process import bar
from lit_vgrpo.training.trainer_internals import run_folder

if TYPE_CHECKING:
    from lit_vgrpo.module import VGRPOModule

When = Literal["evaluations", "end", "never"]
MOST_SHARE = 0.02
"""Maximum share of the run's time that writing reports takes; a refresh that comes sooner is left out."""
SIDE = 256
"""Maximum longer side of a kept image, in pixels."""
MOST_BYTES = 64 * 2**20
"""Maximum size of the pixels held during an evaluation, per rank; only the first images of a larger set are kept."""
MIN_DISAGREEMENT = 0.25
"""Minimum difference of two rewards' ranks, as a share of all images."""
KEPT_FILE = re.compile(r'"(\d{5,}_\d{6,}(?:_edited)?\.png)"')
"""A kept image's name in ``images.json``: the iteration and the number."""
TOTAL = "reward"
"""Name of the weighted sum among the scores."""
Asked = tuple[str, tuple[str, ...]]
"""A prompt, and the files of the pictures that it edits."""
Choice = tuple[int, str, tuple[str, str] | None]
"""An image's place among the scores, the reason to keep it, and two rewards that disagree on it."""


@checked
class Report(L.Callback):
    """Writes ``RUN/report.html``, a page that needs no other file, and keeps its images in ``RUN/report/``.

    ``lightning run`` adds it after all other callbacks, since it shows their results.

    Args:
        when: Write it at every held-out evaluation and at the end, only at the end, or never.
        kept_images: Best held-out images to keep per evaluation, plus the same number of worst ones and of ones on
            which two rewards disagree; 0 keeps none.

    Raises:
        ValueError: ``kept_images`` is out of range.
    """

    def __init__(self, when: When = "evaluations", kept_images: Annotated[int, Range(0, 100)] = 6) -> None:
        self.when, self.kept_images, self._kept = when, kept_images, KeptImages(kept_images)
        self._evaluations_shown = 0
        self._due_at = -math.inf
        self._is_final = False

    def setup(self, trainer: L.Trainer, pl_module: VGRPOModule, stage: str) -> None:
        if stage == "fit" and self.when != "never" and self._kept not in pl_module.evaluator.observers:
            pl_module.evaluator.observers.append(self._kept)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        """Refresh the report of the previous iteration."""
        self._is_final = False
        evaluations = len(pl_module.evaluator.history)
        is_due = evaluations != self._evaluations_shown and time.monotonic() > self._due_at
        if self.when == "evaluations" and is_due and trainer.is_global_zero:
            self._evaluations_shown = evaluations
            self._write(trainer, is_running=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        if trainer.is_global_zero:
            self.finish(trainer, pl_module, completed=True)

    def finish(self, trainer: L.Trainer, module: VGRPOModule, completed: bool) -> None:
        """Write the report of a run that has ended, unless that is done; called on the first rank."""
        if self.when != "never" and not self._is_final:
            self._is_final = True
            self._write(trainer, is_running=False)

    def _write(self, trainer: L.Trainer, is_running: bool) -> None:
        folder, started = run_folder(trainer), time.monotonic()
        for logger in trainer.loggers:  # Lightning's CSVLogger holds back a hundred rows
            logger.save()
        try:
            with bar("Writing the report", total=1):
                from lit_vgrpo.report.page import write_report  # imports matplotlib

                write_report(folder, folder / REPORT_NAME, is_running)
        except Exception as error:  # no error of the page is a reason to end a training run
            what = f"{type(error).__name__}: {one_line(error).rstrip('.')}"
            again = shell_line("lightning", "report", folder)
            rank_zero_warn(f"No report: {what}. Training is not affected. Try: {again}")
        self._due_at = time.monotonic() + (time.monotonic() - started) / MOST_SHARE


class KeptImages:
    """Writes ``RUN/report/`` at every held-out evaluation: each prompt's scores, and ``number`` images per reason."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.start_over()

    def start_over(self) -> None:
        """Discard the images of an interrupted evaluation."""
        self._slots: list[int] = []
        self._asked: list[Asked] = []
        self._pictures: list[Image] = []

    def update(self, images: Tensor, batch: PromptBatch) -> None:
        """Add a batch of this rank's images, ``(B, 3, H, W)`` in [0, 1]."""
        self._slots += batch.slots
        self._asked += [(row[PROMPT], picture_files(row)) for row in batch.rows]
        for picture in to_pil(images.float().nan_to_num(0, 0, 0)) if self.number else ():
            picture.thumbnail((SIDE, SIDE))
            if len(self._pictures) * 3 * picture.width * picture.height < MOST_BYTES:
                self._pictures.append(picture)

    def compute(self, module: VGRPOModule) -> dict[str, float]:
        """Write the scores and the chosen images on rank 0, and discard the rest; it measures nothing."""
        ranks = all_gather_objects((self._slots, self._asked, len(self._pictures)))
        slots = [slot for own, _, _ in ranks for slot in own]
        asked = [one for _, own, _ in ranks for one in own]
        available = {slot for own, _, held in ranks for slot in own[:held]}
        names = [TOTAL, "untrained_reward", *module.evaluator.observed.part_names]
        values = {name: module.evaluator.per_image(f"heldout/{name}") for name in names}
        scores = {name: own.tolist() for name, own in values.items() if own is not None and len(own) == len(slots)}
        places = [place for place, slot in enumerate(slots) if slot in available]
        chosen = choose(scores, asked, places, self.number)
        wanted = {slots[place] for place, _, _ in chosen}
        kept = {slot: picture for slot, picture in zip(self._slots, self._pictures, strict=False) if slot in wanted}
        images = {slot: image for chosen_images in all_gather_objects(kept) for slot, image in chosen_images.items()}
        self.start_over()
        trainer = module.trainer
        if trainer.is_global_zero and trainer.state.fn == "fit":
            iteration = module.iterations_done
            folder = run_folder(trainer) / KEPT
            try:
                folder.mkdir(parents=True, exist_ok=True)
                table = folder / IMAGES_NAME
                earlier = KEPT_FILE.findall(table.read_text(errors="replace")) if table.is_file() else []
                _add_scores(folder, iteration, asked, scores)
                entries: list[dict[str, Any]] = []
                for place, reason, pair in chosen:
                    prompt, edits = asked[place]
                    name = f"{iteration:05d}_{slots[place]:06d}"
                    file, edited = f"{name}.png", f"{name}_edited.png" if edits else None
                    _save(images[slots[place]], folder / file)
                    if edited is not None:
                        side_by_side = torch.cat([read_picture(picture) for picture in edits], dim=-1)
                        _save(to_pil(side_by_side[None] / 255)[0], folder / edited)
                    own = {key: of[place] for key, of in scores.items()}
                    entry = {"file": file, "image": slots[place], "prompt": prompt, "edited": edited, "reason": reason}
                    entries.append({**entry, "pair": pair, "scores": own})
                content = {"iteration": iteration, "of": len(slots), "images": entries}
                write_atomically(table, to_json(content, indent=1, inf_nan_mode="null").decode() + "\n")
                for file in {*earlier}.difference(*((entry["file"], entry["edited"]) for entry in entries)):
                    (folder / file).unlink(missing_ok=True)  # of the previous evaluation
            except (OSError, ValueError, UserError) as error:
                rank_zero_warn(f"Cannot write {folder}: {error}. Training continues, but the report has no images.")
        return {}


def _save(image: Image, path: Path) -> None:
    """Write a kept image, at most ``SIDE`` pixels long, as a PNG file."""
    image.thumbnail((SIDE, SIDE))
    with new_file(path) as file:
        image.save(file, format="PNG")


def _add_scores(folder: Path, iteration: int, asked: list[Asked], scores: dict[str, list[float]]) -> None:
    """Append the sum and the count of every prompt's scores, by reward."""
    sums = {name: {one: [0.0, 0] for one in asked} for name in scores}
    for name, own in scores.items():
        for one, score in zip(asked, own, strict=True):
            if math.isfinite(score):
                sums[name][one][0] += score
                sums[name][one][1] += 1
    line = {"iteration": iteration, "scores": {name: list(prompt_sums.values()) for name, prompt_sums in sums.items()}}
    opened = os.open(folder / SCORES_NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with open(opened, "r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)  # a line cut off by a full disk or a kill, which would swallow this
        file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


def choose(
    scores: Mapping[str, Sequence[float]], prompts: Sequence[Hashable], available: Collection[int], number: int
) -> list[Choice]:
    """Choose the best and worst images and those on which rewards disagree, of different prompts if there are enough.

    Args:
        scores: By reward, one score per image, NaN if it has none; ``reward`` is the weighted sum.
        prompts: One per image, in any form that tells them apart.
        available: Places of the images whose pixels are there.
        number: Images per reason, at most.

    >>> choose({"reward": [0.5, 1.0, 0.0]}, ["a", "b", "c"], [0, 1, 2], 1)
    [(1, 'best', None), (2, 'worst', None)]
    """
    total = np.asarray(scores.get(TOTAL, ()), dtype=np.float64)
    scored = [place for place in sorted(available) if place < len(total) and np.isfinite(total[place])]
    ordered = sorted(scored, key=lambda place: -total[place])
    most = min(number, len(ordered) // 2 or len(ordered))
    best = _of_many_prompts(ordered, prompts)[:most]
    worst = _of_many_prompts([place for place in reversed(ordered) if place not in best], prompts)[:most]
    chosen: list[Choice] = [*((place, "best", None) for place in best), *((place, "worst", None) for place in worst)]
    ranks = {name: _ranks(values) for name, values in scores.items() if name != TOTAL}
    pairs: dict[int, tuple[float, tuple[str, str]]] = {}
    for place in scored:
        own = {float(ranked[place]): name for name, ranked in ranks.items() if np.isfinite(ranked[place])}
        if own and max(own) - min(own) >= MIN_DISAGREEMENT:
            pairs[place] = max(own) - min(own), (own[max(own)], own[min(own)])
    odd = _of_many_prompts(sorted(pairs, key=lambda place: -pairs[place][0]), prompts)[:number]
    return [*chosen, *((place, "disagreement", pairs[place][1]) for place in odd)]


def _of_many_prompts(places: Sequence[int], prompts: Sequence[Hashable]) -> list[int]:
    """Return the first image of every prompt, then the second ones, and so on, each in the order given."""
    turn: Counter[Hashable] = Counter()
    turns = {}
    for place in places:
        turns[place] = turn[prompts[place]]
        turn[prompts[place]] += 1
    return sorted(places, key=turns.__getitem__)


def _ranks(scores: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return each score's rank in [0, 1], equal for equal scores, NaN for NaN; all NaN if the known ones are equal."""
    from scipy.stats import rankdata  # importing it takes 0.5 s

    known = np.where(np.isfinite(scores), scores, np.nan)
    if len(np.unique(known[~np.isnan(known)])) < 2:
        return np.full(len(known), np.nan)
    return (rankdata(known, nan_policy="omit") - 0.5) / np.count_nonzero(~np.isnan(known))
