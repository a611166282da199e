"""The prompts of the tiny tasks: images of a shape or of a word, and videos of a moving shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lit_vgrpo.tiny import shapes, words
from lit_vgrpo.tiny.shapes import CHOICES, MOTION_CHOICES

HELDOUT = "BAG CAT CUP DAM EAR EEL FAN GEM LAW MUD NET PEN RED SUN TUB WET".split()  # noqa: SIM905
TRAIN = (  # noqa: SIM905
    "ACE AGE APE ARC ARM ATE BAD BAR BAT BED BEE BEG BUD BUG BUN BUS CAB CAN CAP CAR CUB CUE CUT DEN DEW DUE EAT EGG "
    "ELF ELM EMU END ERA EWE FAR FED FEW FUN FUR GAP GAS GEL GUM LAB LAP LEG LET MAP MAT MEN MUG NAP NEW NUT PAN PAW "
    "PEA PET PUP RAM RAT RUG SAD SAW SEA SET SUM TAB TAG TEA TEN TUG USE WAR WEB"
).split()

Rows = tuple[list[dict[str, str]], list[dict[str, str]]]
"""Those to train on, and those held out."""


def word_rows() -> Rows:
    """Return the prompts of 75 training words and of 16 held-out words."""
    train, heldout = ([{"prompt": words.prompt_of(word)} for word in part] for part in (TRAIN, HELDOUT))
    return train, heldout


def shape_rows(choices: Mapping[str, Sequence[str]] = CHOICES, prompt: Callable[..., str] = shapes.prompt_of) -> Rows:
    """Return all 72 prompts, 60 to train on and 12 held out; the split is fixed and balanced in every attribute.

    Args:
        choices: The values of each of three attributes, by name.
        prompt: Returns the prompt of one value of each.
    """
    train: list[dict[str, str]] = []
    heldout: list[dict[str, str]] = []
    first, second, third = choices.values()
    for i, one in enumerate(first):
        for j, two in enumerate(second):
            for k, three in enumerate(third):
                row = dict(zip(choices, (one, two, three), strict=True))
                part = heldout if (len(third) * j + k) % len(first) == i else train
                part.append({"prompt": prompt(**row), **row})
    return train, heldout


def motion_prompt(colour: str, shape: str, motion: str) -> str:
    """Return the prompt of one video, e.g. ``a red circle moves up``."""
    return f"a {colour} {shape} moves {motion}"


def motion_rows() -> Rows:
    """Return the prompts of videos as :func:`shape_rows`."""
    return shape_rows(MOTION_CHOICES, motion_prompt)
