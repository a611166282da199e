"""Images and scores of the held-out evaluations that a run keeps for its report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_vgrpo.apps.report.kept import IMAGES_NAME, SCORES_NAME, folder_of
from lit_vgrpo.apps.report.selection import Choice, choose
from lit_vgrpo.core.gather import objects_of_all_ranks
from lit_vgrpo.core.pictures import PICTURE, read_picture
from lit_vgrpo.core.pixels import to_pil
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.data.rows import PROMPT
from lit_vgrpo.errors import UserError
from lit_vgrpo.module import VGRPOModule
from lit_vgrpo.system.paths import write_atomically

SIDE = 256
"""Longer side of a kept image, at most, in pixels."""
MOST_BYTES = 64 * 2**20
"""Pixels held during an evaluation, at most, per rank; of a larger held-out set the first images are considered."""
Asked = tuple[str, str | None]
"""A prompt, and the file of the picture that it edits."""


class KeptImages:
    """Writes ``RUN/report/`` at every held-out evaluation: each prompt's scores, and a few images.

    Args:
        number: best images to keep; as many worst ones, and as many on which two rewards disagree.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._slots: list[int] = []
        self._asked: list[Asked] = []
        self._pixels: list[Tensor] = []
        self._bytes = 0

    def start_over(self) -> None:
        """Discard the images of an interrupted evaluation."""
        self._slots, self._asked, self._pixels, self._bytes = [], [], [], 0

    def update(self, images: Tensor, batch: PromptBatch) -> None:
        """Add a batch of this rank's images, ``(B, 3, H, W)`` in [0, 1]."""
        self._slots += batch.slots
        self._asked += [(row[PROMPT], row.get(PICTURE)) for row in batch.rows]
        if self._bytes < MOST_BYTES and self.number:
            small = _small(images)
            self._pixels.append(small)
            self._bytes += small.numel()

    def compute(self, module: VGRPOModule) -> dict[str, float]:
        """Write what is kept, on rank 0, and discard the rest; it measures nothing."""
        held = sum(len(pixels) for pixels in self._pixels)
        of_ranks = objects_of_all_ranks((self._slots, self._asked, held))
        slots = [slot for own, _, _ in of_ranks for slot in own]
        asked = [one for _, own, _ in of_ranks for one in own]
        available = {slot for own, _, first in of_ranks for slot in own[:first]}
        scores = _scores(module, len(slots))
        places = [place for place, slot in enumerate(slots) if slot in available]
        chosen = choose(scores, asked, places, self.number)
        wanted = {slots[choice.image] for choice in chosen}
        pixels = torch.cat(self._pixels) if self._pixels else torch.empty(0)
        own = {slot: pixels[place] for place, slot in enumerate(self._slots[:held]) if slot in wanted}
        images = {slot: image for of_rank in objects_of_all_ranks(own) for slot, image in of_rank.items()}
        trainer = module.trainer
        iteration = module.record.iteration + 1 if module.record is not None else trainer.current_epoch
        self.start_over()
        if trainer.is_global_zero:
            folder = folder_of(Path(trainer.default_root_dir))
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _add_scores(folder, iteration, asked, scores)
                if self.number:
                    _write_images(folder, iteration, chosen, slots, asked, scores, images)
            except (OSError, ValueError, UserError) as error:
                rank_zero_warn(f"Cannot write {folder}: {error}. Training continues; the report will lack its images.")
        return {}


def _small(images: Tensor) -> Tensor:
    """Return images ``(B, 3, H, W)`` as uint8 on the CPU, resized to :data:`SIDE` at most; not finite is black."""
    images = images.float().nan_to_num(0, 0, 0)
    longest = max(images.shape[-2:])
    if longest > SIDE:
        size = [max(1, round(side * SIDE / longest)) for side in images.shape[-2:]]
        images = torch.nn.functional.interpolate(images, size, mode="bilinear", antialias=True, align_corners=False)
    return (images.clamp(0, 1) * 255).round().to(torch.uint8).cpu()


def _scores(module: VGRPOModule, images: int) -> dict[str, list[float]]:
    """Return each reward's scores of the newest evaluation, one per image."""
    names = [
        "reward",
        *(["untrained_reward"] if module.evaluator.untrained is not None else []),
        *module.evaluator.observed.part_names,
    ]
    found = {name: module.evaluator.of_images(f"heldout/{name}") for name in names}
    return {name: own.tolist() for name, own in found.items() if own is not None and len(own) == images}


def _add_scores(folder: Path, iteration: int, asked: list[Asked], scores: dict[str, list[float]]) -> None:
    """Append the sum and the count of every prompt's scores, by reward."""
    numbers = {one: number for number, one in enumerate(dict.fromkeys(asked))}
    line: dict[str, Any] = {"iteration": iteration, "scores": {}}
    for name, own in scores.items():
        sums = [[0.0, 0] for _ in numbers]
        for one, score in zip(asked, own, strict=True):
            if math.isfinite(score):
                sums[numbers[one]][0] += score
                sums[numbers[one]][1] += 1
        line["scores"][name] = [[float(f"{total:.7g}"), count] for total, count in sums]
    with (folder / SCORES_NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _write_images(
    folder: Path,
    iteration: int,
    chosen: list[Choice],
    slots: list[int],
    asked: list[Asked],
    scores: dict[str, list[float]],
    images: dict[int, Tensor],
) -> None:
    """Write the chosen images and their table, then remove those of the evaluation before."""
    entries = []
    for choice in chosen:
        slot = slots[choice.image]
        file = f"{iteration:05d}_{slot:06d}.png"
        to_pil(images[slot][None].float() / 255)[0].save(folder / file)
        prompt, picture = asked[choice.image]
        edited = None
        if picture is not None:
            edited = file.replace(".png", "_edited.png")
            to_pil(_small(read_picture(picture)[None] / 255).float() / 255)[0].save(folder / edited)
        own = {name: values[choice.image] for name, values in scores.items()}
        entries.append(
            {
                "file": file,
                "image": slot,
                "prompt": prompt,
                "edited": edited,
                "reason": choice.reason,
                "pair": choice.pair,
                "scores": {name: score if math.isfinite(score) else None for name, score in own.items()},
            }
        )
    table = {"iteration": iteration, "of": len(slots), "images": entries}
    write_atomically(folder / IMAGES_NAME, json.dumps(table, indent=1, ensure_ascii=False) + "\n")
    kept = {entry[name] for entry in entries for name in ("file", "edited")}
    for path in folder.glob("[0-9]*_[0-9]*.png"):
        if path.name not in kept:
            path.unlink(missing_ok=True)
