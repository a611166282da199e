"""Text rendering: the text that an OCR model reads in an image, compared with the quoted text in the prompt."""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lit_vgrpo.core.pixels import to_pil
from lit_vgrpo.core.ranges import checked
from lit_vgrpo.errors import shortened
from lit_vgrpo.rewards.base import Reward
from lit_vgrpo.system.hub import LoadError

MEASURE = r'(?:(?<=[\d¼-¾⅐-⅞])|(?<=\d )(?=.\s))["”](?![぀-鿿가-힣])'  # inches or seconds, unless it closes a text
PAIRS = '"([^"]*)"|“([^“”]*)”|„([^“”„]*)[“”]|”([^“”„]*)”|«([^«»]*)»|»([^«»]*)«|「([^「」]*)」|『([^『』]*)』'
QUOTED = re.compile(f'{MEASURE}|{PAIRS}|(?P<unpaired>["“”„«»「」『』])')
ESCAPED, KEPT = '\\"', "\0"
SCRIPT_QUOTES = str.maketrans("\uff02\u301d\u301e\u301f", '"“””')
PLAIN_QUOTES = str.maketrans("\u2018\u2019\u201c\u201d\u201e", '\'\'"""')  # a recogniser does not distinguish them
RECOGNISER_HEIGHT = 48  # pixels, the line height that PP-OCR was trained on
DETECTOR_LINE_WIDTH = 320  # pixels, the recogniser's usual minimum width
MIN_LINE_CONFIDENCE = 0.5  # PaddleOCR's default
LINES_PER_PASS = 8  # more are slower on a CPU
MIN_HEIGHT = 64  # pixels, of the image


@checked
@dataclass(eq=False)
class OCRReward(Reward):
    """Legibility of the text quoted in the prompt: ``1 - edit distance / length of the text``, in [0, 1].

    The text is in double quotes, straight, curly or of another script, several pieces joined in order, or in the row's
    field ``text``. A quote after a number is a unit (``a 12" pizza``), and one without its partner is an error.
    PP-OCR reads the image through rapidocr, whose package includes the models. An image without legible text scores 0
    and is not a failure; a prompt without text is a failure.

    As in Flow-GRPO, spaces and case are ignored, the distance is divided by the length of the text to
    render, and lines with a low confidence are dropped. Unlike there, extra text around the right one lowers the score
    unless ``allow_extra`` is set, because a model could pass by filling the image with letters. All quoted pieces
    count, not only the first, and full-width or curly characters equal the plain ones.

    Args:
        detect: Find lines of text in the image and read them from top to bottom, left to right; ``False`` reads the
            image as one line, which is much faster and enough for small images of one word.
        allow_extra: Score 1 if the text occurs anywhere in what is read, as in Flow-GRPO's code.

    Source:
        arXiv 2505.05470 (Flow-GRPO), visual text rendering.
    """

    name = "ocr"
    concurrent = True

    detect: bool = True
    allow_extra: bool = False
    _engine: Any = field(default=None, init=False)

    def check(self) -> list[str]:
        """Report a missing package."""
        missing = [package for package in ("rapidocr", "onnxruntime") if find_spec(package) is None]
        return [f'OCRReward needs {missing[0]}. Run: pip install "lit-vgrpo[ocr]"'] if missing else []

    def prompt_error(self, prompt: str, row: dict[str, Any]) -> str | None:
        if row.get("text") is None and (unpaired := _quoted(prompt)[1]):
            what = f"a quotation mark without its partner, at {unpaired}"
            return f'Prompt "{shortened(prompt)}" has {what}. Close it, or put the text in the row\'s text field.'
        if not _plain(wanted_text(prompt, row)):
            return f'Prompt "{shortened(prompt)}" has no text to render. Put it in quotes, or in the row\'s text field.'
        return None

    def load(self) -> None:
        """Load detector and recogniser, once; raise LoadError for an error of :meth:`check`."""
        if self._engine is not None:
            return
        for error in self.check():
            raise LoadError(error)
        import rapidocr

        models = Path(rapidocr.__file__).parent / "models"
        least_width = DETECTOR_LINE_WIDTH if self.detect else RECOGNISER_HEIGHT
        self._engine = rapidocr.RapidOCR(
            params={
                "Global.log_level": "critical",
                "Global.use_cls": False,
                "Global.text_score": MIN_LINE_CONFIDENCE,
                # without a path, another release of rapidocr might download models
                "Det.model_path": str(max(models.glob("PP-OCR*_det_*.onnx"))),
                "Rec.model_path": str(max(models.glob("PP-OCR*_rec_*.onnx"))),
                "Rec.rec_img_shape": [3, RECOGNISER_HEIGHT, least_width],
                # one image at a time, so that results do not depend on the batch; it is no slower
                "Rec.rec_batch_num": LINES_PER_PASS if self.detect else 1,
                "EngineConfig.onnxruntime.intra_op_num_threads": 1,  # more cost more CPU time in total
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            }
        )

    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        errors = [self.prompt_error(prompt, row) for prompt, row in zip(prompts, rows, strict=True)]
        self.failure = next(filter(None, errors), None)
        scores = [
            math.nan if error else self.score(text, wanted_text(prompt, row))
            for error, text, prompt, row in zip(errors, self.read(images), prompts, rows, strict=True)
        ]
        return torch.tensor(scores, dtype=torch.float32)

    def read(self, images: Tensor) -> list[str]:
        """Return the text in each image ``(B, 3, H, W)`` in [0, 1], lines joined by a space; empty if there is none."""
        if not len(images):
            return []
        self.load()
        enlarged = [np.asarray(_enlarged(picture)) for picture in to_pil(images)]
        pictures = [np.ascontiguousarray(rgb[..., ::-1]) for rgb in enlarged]  # BGR
        if not self.detect:
            return list(self._engine.recognize_txt(pictures).txts or ())
        # one image at a time, because the padded line width would depend on the batch
        return [" ".join(self._engine(picture).txts or ()) for picture in pictures]

    def score(self, text: str, wanted: str) -> float:
        """Return 1 minus ``1 / length`` for each letter to change, add or remove, at least 0."""
        from torchmetrics.functional.text import edit_distance

        text, wanted = _plain(text), _plain(wanted)
        if self.allow_extra and wanted in text:
            return 1.0
        return max(0.0, 1 - int(edit_distance(text, wanted)) / len(wanted))


def wanted_text(prompt: str, row: dict[str, Any]) -> str:
    """Return the text that an image of this prompt must show, empty if none is given.

    >>> wanted_text('A sign that says "open" and a mug with “tea”', {})
    'open tea'
    >>> wanted_text('A 12" pizza box with the words "HOT SLICE"', {})
    'HOT SLICE'
    >>> wanted_text("A sign", {"text": "closed"})
    'closed'
    """
    if row.get("text") is not None:
        return str(row["text"])
    return " ".join(filter(None, _quoted(prompt)[0]))


def _quoted(prompt: str) -> tuple[list[str], str | None]:
    """Return the quoted texts of a prompt, and the first quotation mark without a partner with what follows it."""
    is_inner = prompt.count('"') > prompt.count(ESCAPED)  # else every mark is escaped, as in a program's source
    marks = [*QUOTED.finditer(prompt.replace(ESCAPED, KEPT if is_inner else '"').translate(SCRIPT_QUOTES))]
    texts = [mark[mark.lastindex] for mark in marks if mark.lastindex and not mark["unpaired"]]
    unpaired = (mark.string[mark.start() :][:20] for mark in marks if mark["unpaired"])
    return [text.replace(KEPT, '"').strip() for text in texts], next(unpaired, None)


def _plain(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).translate(PLAIN_QUOTES).split()).casefold()


def _enlarged(picture: Image.Image) -> Image.Image:
    scale = max(1, MIN_HEIGHT / picture.height)  # else small letters are illegible
    size = (max(1, round(picture.width * scale)), round(picture.height * scale))
    return picture.resize(size, Image.Resampling.BICUBIC) if scale > 1 else picture
