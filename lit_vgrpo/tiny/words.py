"""Images of one short word and prompts that quote it: a small task for the OCR reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from lit_vgrpo.core.ranges import ClosedUnitInterval, checked

HEIGHT, WIDTH = 16, 40  # pixels
LETTERS = "ABCDEFGLMNPRSTUW"  # of all words; without O, which OCR reads as 0 in random letters
WORD_LENGTH = 3
PROMPT = 'a sign that says "{}"'

_SIZE = 16  # pixels of the em square: three letters are 29 wide, a capital 12 high
_SHIFT = (2.0, 1.0)  # pixels, the maximum displacement from the centre, x and y
_PAPER = (0.88, 0.98)  # range of grey values
_INKS = ((0.76, 0.08, 0.10), (0.05, 0.45, 0.15), (0.10, 0.20, 0.72), (0.50, 0.10, 0.58), (0.08, 0.08, 0.10))
_FINER = 4  # rendered at this scale and averaged, for subpixel positions


def prompt_of(word: str) -> str:
    """Return the task's prompt for a word, quoted for the OCR reward."""
    return PROMPT.format(word)


@lru_cache(maxsize=1)
def _font() -> ImageFont.FreeTypeFont:
    import matplotlib  # ships DejaVu, so that no font needs to be installed

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono-Bold.ttf"
    return ImageFont.truetype(path, _SIZE * _FINER)


def render(word: str, generator: torch.Generator) -> Tensor:
    """Render a word, which fills the image with three letters, near the centre; ``(3, 16, 40)``, float32 in [0, 1].

    The generator chooses the position, one of five dark colours, and the light grey below.
    """
    u = torch.rand(4, generator=generator, device=generator.device).cpu()
    mask = Image.new("L", (WIDTH * _FINER, HEIGHT * _FINER))
    x, y = (
        _FINER * (size / 2 + shift * (2 * float(v) - 1))
        for size, shift, v in zip((WIDTH, HEIGHT), _SHIFT, u[:2], strict=True)
    )
    ImageDraw.Draw(mask).text((x, y), word, fill=255, font=_font(), anchor="mm")
    cover = torch.from_numpy(np.array(mask.reduce(_FINER))).float() / 255
    paper = _PAPER[0] + (_PAPER[1] - _PAPER[0]) * u[2]
    ink = torch.tensor(_INKS[int(u[3] * len(_INKS))])[:, None, None]
    return paper + cover * (ink - paper)


def random_letters(generator: torch.Generator) -> str:
    """Return uniform random letters, the length of one of the task's words."""
    picks = torch.randint(len(LETTERS), (WORD_LENGTH,), generator=generator, device=generator.device)
    return "".join(LETTERS[i] for i in picks.tolist())


@checked
class WordImages:
    """Training images for the denoising objective, with captions that are often misspelt.

    They show random letters, independent of the rows; words, held-out or not, only appear by chance.

    Args:
        caption_noise: Probability, for each letter independently, that the caption is wrong. A model trained on such
            pairs misspells, which leaves room for RL to improve it.
    """

    def __init__(self, caption_noise: ClosedUnitInterval = 0.4) -> None:
        self.caption_noise = caption_noise

    def __call__(
        self, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]], generators: Sequence[torch.Generator]
    ) -> tuple[Tensor, list[str]]:
        """Return an image of random letters, ``(B, 3, 16, 40)``, float32 in [0, 1], and a caption per generator."""
        shown = [random_letters(generator) for generator in generators]
        images = list(map(render, shown, generators))
        return torch.stack(images), [prompt_of(letters) for letters in map(self._misspell, shown, generators)]

    def _misspell(self, letters: str, generator: torch.Generator) -> str:
        u, pick = torch.rand(2, len(letters), generator=generator, device=generator.device).tolist()
        said = ""
        for letter, chance, other in zip(letters, u, pick, strict=True):
            others = LETTERS.replace(letter, "")
            said += others[int(other * len(others))] if chance < self.caption_noise else letter
        return said
