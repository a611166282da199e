"""Images of the same prompts and noise, before, during and after training."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from PIL import ExifTags, Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from lit_vgrpo.core.pictures import references_of, stacked_references
from lit_vgrpo.core.pixels import save_webp, strips, to_uint8
from lit_vgrpo.core.ranges import PositiveInt, Range, checked
from lit_vgrpo.data.prompts import Rows
from lit_vgrpo.report.run_data import LAYOUT, TO_EDIT
from lit_vgrpo.system.paths import new_file, write_error
from lit_vgrpo.system.process import bar
from lit_vgrpo.training.loggers import log_picture
from lit_vgrpo.training.saved_weights import averaged_weights
from lit_vgrpo.training.trainer_internals import run_folder

if TYPE_CHECKING:
    from lit_vgrpo.data.module import PromptDataModule
    from lit_vgrpo.module import VGRPOModule

LABEL_HEIGHT = 18
MIN_WIDTH = 96
"""Smaller images are enlarged to this width, without smoothing."""
GAP = 4


@checked
@dataclass(eq=False)
class SampleGrid(L.Callback):
    """Grid of held-out prompts sampled with fixed noise, saved as ``RUN/samples/*.png`` and logged.

    One row per prompt. The first column shows the frozen reference, the second the policy on the same noise, the others
    the policy on other noise; the last shows the picture that the prompt edits, if there is one. The policy uses the
    EMA's weights if that callback is used. In these grids, a video is a strip of its frames. ``RUN/samples/*.webp`` are
    the same grids with moving videos, for the report.

    Args:
        num_prompts: Number of rows.
        images_per_prompt: Number of columns after the reference's.
        every_n_iterations: Sample every N iterations of training.
    """

    num_prompts: Annotated[int, Range(1, 10_000)] = 6
    images_per_prompt: Annotated[int, Range(1, 10_000)] = 4
    every_n_iterations: PositiveInt = 20
    _rows: Rows = field(default_factory=list, init=False)
    _reference: Tensor | None = field(default=None, init=False)

    def on_train_start(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        assert pl_module.reference is not None
        self._rows = trainer.datamodule.heldout_samples(self.num_prompts)  # type: ignore[attr-defined]
        if not self._rows:
            return
        with pl_module.ledger.phase("samples"), pl_module.reference.swapped_into(pl_module.policy):
            ids = [row * self.images_per_prompt for row in range(len(self._rows))]
            self._reference = generate(pl_module, self._rows, ids)
        if trainer.global_step == 0:
            self._draw(trainer, pl_module, "before")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        iteration = trainer.current_epoch + 1
        if self._rows and iteration % self.every_n_iterations == 0 and iteration != trainer.max_epochs:
            self._draw(trainer, pl_module, f"iteration_{iteration:05d}")

    def on_train_end(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        if self._rows:
            pl_module.evaluator.evaluate_end(pl_module)  # for the rewards of the rows
            self._draw(trainer, pl_module, "after")

    def _draw(self, trainer: L.Trainer, pl_module: VGRPOModule, name: str) -> None:
        assert self._reference is not None
        columns = self.images_per_prompt
        with pl_module.ledger.phase("samples"), averaged_weights(trainer, pl_module):
            repeated = [row for row in self._rows for _ in range(columns)]
            images = generate(pl_module, repeated, list(range(len(repeated))))
        if trainer.is_global_zero:
            path = run_folder(trainer) / "samples" / f"{name}.png"
            try:
                rows = torch.cat([self._reference[:, None], images.unflatten(0, (-1, columns))], dim=1)
                given = stacked_references(self._rows)
                if given is not None:
                    given = given.flatten(0, -4).unflatten(0, (len(rows), -1))
                    if rows.ndim == 6:  # beside a video, a picture stands still
                        given = given[:, :, None].expand(-1, -1, rows.shape[2], -1, -1, -1)
                    rows = torch.cat([rows, given], dim=1)
                labels = ["reference", "trained" if name == "after" else name.replace("_", " ")]
                labels += [] if given is None else [""] * (columns - 1) + [TO_EDIT]
                prompts = [row["prompt"] for row in self._rows]
                rewards = self._rewards(trainer, pl_module)
                picture = draw_grid(strips(rows.flatten(0, 1)).unflatten(0, rows.shape[:2]), prompts, labels)
                caption = "  \n".join(
                    prompt if reward is None else f"{prompt}: held-out reward {reward:.4g}"
                    for prompt, reward in zip(prompts, rewards, strict=True)
                )
                log_picture(trainer.loggers, "samples", picture, trainer.global_step, caption)
                path.parent.mkdir(parents=True, exist_ok=True)
                notes = PngInfo()
                notes.add_text(LAYOUT, json.dumps({**picture.info[LAYOUT], "rewards": rewards}))
                with new_file(path) as file:
                    picture.save(file, format="PNG", pnginfo=notes)
                if rows.ndim == 6:
                    path = path.with_suffix(".webp")
                    moving = [draw_grid(frames, prompts, labels) for frames in rows.unbind(2)]
                    exif = Image.Exif()
                    exif[ExifTags.Base.ImageDescription] = json.dumps({**moving[0].info[LAYOUT], "rewards": rewards})
                    duration = round(1000 / pl_module.policy.frames_per_second)
                    is_enlarged = rows.shape[-1] < MIN_WIDTH
                    with new_file(path) as file:
                        save_webp(moving, file, duration, lossless=is_enlarged, exif=exif)
            except Exception as error:  # a grid is no reason to end a run, or to lose what others write at its end
                rank_zero_warn(f"Cannot write {path}: {write_error(error).rstrip('.')}. Training continues without it.")

    def _rewards(self, trainer: L.Trainer, module: VGRPOModule) -> list[float | None]:
        """Return each row's mean reward over its held-out images, if these weights were evaluated."""
        data: PromptDataModule = trainer.datamodule  # type: ignore[attr-defined]
        is_current = module.evaluator.step == trainer.global_step
        scores = module.evaluator.per_image("heldout/reward") if is_current else None
        numbers = torch.tensor(module.evaluator.numbers)
        size, rows, means = data.heldout_images_per_prompt, data.heldout_rows(), list[float]()
        for row in self._rows:
            own = numbers // size == rows.index(row)  # on several ranks, a limit leaves out images of each
            means.append(math.nan if scores is None else float(scores[own].nanmean()))
        return [None if math.isnan(mean) else mean for mean in means]


def generate(module: VGRPOModule, rows: Rows, ids: list[int]) -> Tensor:
    """Return held-out images ``(B, 3, H, W)``, or videos ``(B, F, 3, H, W)``, of rows, on the CPU."""
    with bar("Drawing samples", total=1):
        return module.evaluator.generate([row["prompt"] for row in rows], ids, len(ids), references_of(rows)).cpu()


def draw_grid(images: Tensor, prompts: list[str], labels: list[str], below: Sequence[str] = ()) -> Image.Image:
    """Return a labelled image of ``images (rows, columns, 3, H, W)`` in [0, 1], a prompt above each row.

    Its ``info["layout"]`` gives the places of the images: ``prompts``, ``labels``, ``zoom``, ``size``, and the
    cells' ``left`` and ``top`` edges in pixels.

    Args:
        labels: Labels above the first columns.
        below: Text below each image, row by row; it may have several lines.
    """
    rows, columns, _, height, width = images.shape
    zoom = max(1, -(-MIN_WIDTH // width))
    lines = max((text.count("\n") + 1 for text in below), default=0)
    font = ImageFont.load_default(size=12)
    widest = max((math.ceil(font.getlength(line)) for text in below for line in text.split("\n")), default=0)
    cell_w, cell_h = max(width * zoom, widest) + GAP, height * zoom + GAP + (1 + lines) * LABEL_HEIGHT
    sheet = Image.new("RGB", (columns * cell_w + 3 * GAP, rows * cell_h + LABEL_HEIGHT), "white")
    pen = ImageDraw.Draw(sheet)
    left = [GAP + column * cell_w + (2 * GAP if column else 0) for column in range(columns)]
    for x, label in zip(left, labels, strict=False):
        pen.text((x, 2), label, fill="gray", font=font)
    for row, prompt in enumerate(prompts):
        top = LABEL_HEIGHT + row * cell_h
        pen.text((GAP, top + 2), prompt, fill="black", font=font)
        for column, x in enumerate(left):
            pixels = to_uint8(images[row, column]).permute(1, 2, 0).numpy()
            picture = Image.fromarray(pixels).resize((width * zoom, height * zoom), Image.Resampling.NEAREST)
            sheet.paste(picture, (x, top + LABEL_HEIGHT))
            text = below[row * columns + column] if below else ""
            pen.text((x, top + LABEL_HEIGHT + height * zoom + 2), text, fill="black", font=font)
    tops = [2 * LABEL_HEIGHT + row * cell_h for row in range(rows)]
    place = {"zoom": zoom, "size": [width * zoom, height * zoom], "left": left, "top": tops}
    sheet.info[LAYOUT] = {"prompts": prompts, "labels": labels, **place}
    return sheet
