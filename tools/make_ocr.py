"""Generates prompts that ask for text in the image, with our own texts and sentences, the text in double quotes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
TRAIN_COUNT, HELDOUT_COUNT = 400, 60

SHOP_PLACES = [
    "a storefront with the sign", "a wooden board above a shop door that reads", "a market stall with a banner saying",
    "a delivery van with the words", "a shop window with gold letters that spell", "a paper bag printed with",
    "an enamel sign on a brick wall that says", "a food truck with the name", "a neon sign that glows with",
]  # fmt: skip
QUALITIES = ["Fresh", "Warm", "Fine", "Little", "Honest", "Daily", "Golden", "Corner", "Old Town", "Riverside"]
GOODS = [
    "Bread", "Coffee", "Flowers", "Books", "Cheese", "Shoes", "Records", "Noodles", "Lamps", "Tea", "Bicycles",
    "Pottery", "Tomatoes", "Watches", "Pies",
]  # fmt: skip
NOTICE_PLACES = [
    "a handwritten note on a fridge that says", "a cardboard notice taped to a door reading",
    "a chalkboard outside a cafe with the words", "a small brass plate that says", "a sticky note on a monitor with",
    "a warning sign on a fence that reads", "a letter board in a hallway that spells", "a road sign that says",
]  # fmt: skip
REQUESTS = {
    "Please close": ["the gate", "the blue door", "the window", "the lid", "the curtain", "both shutters"],
    "Do not touch": ["the piano", "the wet paint", "the clock", "the old maps", "the fish tank", "the wires"],
    "Keep off": ["the grass", "the ice", "the roof", "the flower bed", "the tracks", "the jetty"],
    "Mind": ["the last step", "the low beam", "your head", "the puddle", "the sleeping cat", "the cable"],
    "Please return": ["the red pen", "all trays", "the spare key", "empty bottles", "the step ladder", "my umbrella"],
    "Wait behind": ["the yellow line", "the rope", "the barrier", "the second desk", "the screen", "the glass"],
}
TITLE_PLACES = [
    "a hardback novel on a table titled", "a film poster with the title", "a vinyl record cover that reads",
    "a museum banner announcing", "a theatre programme with the words", "a magazine cover with the headline",
    "a board game box called", "a concert flyer that says",
]  # fmt: skip
MOODS = ["Silent", "Crooked", "Paper", "Seventh", "Hollow", "Distant", "Velvet", "Wandering", "Frozen", "Electric"]
SUBJECTS = ["Harbour", "Orchard", "Engine", "Lantern", "Sparrow", "Staircase", "Comet", "Garden", "Letter", "Winter"]
NUMBERED = [
    ("a bus with a display showing", "Route"), ("a door plate that reads", "Room"),
    ("a boarding pass on a table printed with", "Gate"), ("a station sign that says", "Platform"),
    ("a raffle ticket printed with", "Ticket"), ("a folding chair with a label that reads", "Seat"),
    ("a metal cabinet with a tag saying", "Locker"), ("a harbour crane painted with", "Berth"),
]  # fmt: skip
VIEWS = [
    "", "", "", ", at night", ", in the rain", ", close up", ", in soft daylight", ", watercolour", ", pencil sketch",
]  # fmt: skip


def ocr_prompts() -> tuple[list[str], list[str]]:
    """Return training and held-out prompts; no text occurs twice."""
    draw = random.Random("ocr prompts")
    prompts: dict[str, str] = {}
    while len(prompts) < TRAIN_COUNT + HELDOUT_COUNT:
        place, text = _scene(draw)
        text = text.upper() if draw.random() < 0.4 else text
        prompts.setdefault(text.lower(), f'{place} "{text}"{_pick(draw, VIEWS)}')
    made = list(prompts.values())
    return made[:TRAIN_COUNT], made[TRAIN_COUNT:]


def _scene(draw: random.Random) -> tuple[str, str]:
    """Return where the text appears, and the text."""
    kind = _pick(draw, ["shop", "shop", "shop", "notice", "title", "title", "number", "number"])
    if kind == "shop":
        return _pick(draw, SHOP_PLACES), f"{_pick(draw, QUALITIES)} {_pick(draw, GOODS)}"
    if kind == "notice":
        request = _pick(draw, list(REQUESTS))
        return _pick(draw, NOTICE_PLACES), f"{request} {_pick(draw, REQUESTS[request])}"
    if kind == "title":
        return _pick(draw, TITLE_PLACES), f"The {_pick(draw, MOODS)} {_pick(draw, SUBJECTS)}"
    place, label = _pick(draw, NUMBERED)
    return place, f"{label} {1 + int(draw.random() * 99)}"


def _pick(draw: random.Random, words: Sequence[T]) -> T:
    return words[int(draw.random() * len(words))]
