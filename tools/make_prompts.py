"""Write the shipped prompts, the same on every run; those for image quality are our own words in our own templates.

python tools/make_prompts.py recipes/prompts
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from make_geneval import geneval_rows
from make_ocr import ocr_prompts
from tiny_prompts import shape_rows, word_rows

from lit_vgrpo.tiny import shapes

T = TypeVar("T")
TRAIN_COUNT, HELDOUT_COUNT = 400, 60

CREATURES = [
    "a red fox", "an old tortoise", "a barn owl", "a grey wolf", "a sleepy tabby cat", "a wet golden retriever",
    "a white heron", "a young elephant", "a pair of otters", "a curious goat", "a hummingbird", "an octopus",
    "a snow leopard", "a hedgehog", "a black horse", "a flock of starlings", "a lighthouse keeper's parrot",
    "a giant moth", "a small clockwork dragon", "a stag with mossy antlers",
]  # fmt: skip
DEEDS = [
    "crossing a shallow stream", "curled up on a stack of books", "looking back over its shoulder",
    "resting on a mossy log", "waiting at a garden gate", "half hidden in tall grass", "under a broken umbrella",
    "beside a steaming teapot", "on a cobbled street", "at the edge of a frozen lake", "in front of a bakery window",
    "among fallen maple leaves", "on a wooden pier", "in a greenhouse full of ferns",
]  # fmt: skip
PEOPLE = [
    "an elderly fisherman", "a ballet dancer", "a street violinist", "a beekeeper", "a young astronaut", "a potter",
    "a librarian in a green cardigan", "a mountain guide", "a baker covered in flour", "a girl with a paper kite",
    "a chess player", "a knight without a helmet", "a watchmaker", "a diver in a brass helmet",
    "a grandmother telling a story", "a cyclist in the rain",
]  # fmt: skip
PORTRAITS = [
    "laughing", "lost in thought", "looking straight at the viewer", "seen from behind", "at work by a window",
    "resting after a long day", "holding a lantern", "in profile", "surrounded by tools of the trade",
    "reading a crumpled letter",
]  # fmt: skip
PLACES = [
    "a fishing village on stilts", "a terraced rice valley", "an abandoned observatory", "a night market",
    "a desert of red dunes", "a cathedral made of driftwood", "a narrow alley with laundry lines",
    "a volcanic island", "a railway station from the nineteen twenties", "a city built on the backs of whales",
    "a birch forest", "a glass house on a cliff", "an overgrown amusement park", "a monastery above the clouds",
    "a canal with painted boats", "a library with a spiral stair", "a lavender field",
    "a harbour full of sailing ships", "an underwater train tunnel", "a hilltop observatory under the milky way",
]  # fmt: skip
THINGS = [
    "a blue ceramic teapot", "a stack of antique suitcases", "a bowl of figs and walnuts", "a cracked pocket watch",
    "a typewriter with a sheet of paper", "a slice of lemon cake", "a vase of wilting tulips", "a pair of worn boots",
    "a copper telescope", "a chess set carved from ice", "a loaf of rye bread on linen", "a yellow raincoat on a hook",
    "a glass of mint tea", "a violin without strings", "three pears and a silver knife", "a jar of fireflies",
]  # fmt: skip
SETTINGS = [
    "on a marble table", "on a windowsill", "against a plain grey background", "on a rough wooden bench",
    "in an empty white room", "on wet sand", "on a velvet cloth", "in a cluttered attic",
]  # fmt: skip
PAIRS = [
    "a red cube on top of a blue sphere", "two green apples and one orange", "a cat to the left of a tall vase",
    "a small boat below a huge bridge", "a yellow bird on a purple fence", "three candles behind a glass bottle",
    "a bicycle leaning on a striped lighthouse", "a white cup inside a larger black cup",
    "four umbrellas in four different colours", "a square window above a round door",
    "a wooden chair next to a metal chair", "a dog wearing a scarf beside a snowman wearing a hat",
]  # fmt: skip
LIGHTS = [
    "at dawn", "in thick morning fog", "under a full moon", "in the last light of the day", "in soft window light",
    "lit by a single candle", "in harsh midday sun", "during a thunderstorm", "in neon light", "under northern lights",
    "in light snowfall", "with long shadows", "backlit, with a bright rim",
]  # fmt: skip
STYLES = [
    "oil painting with visible brush strokes", "watercolour on rough paper", "black and white photograph",
    "woodblock print", "35 mm film photograph", "pencil sketch", "children's book illustration", "pixel art",
    "low poly render", "art nouveau poster", "charcoal drawing", "macro photograph", "stained glass window",
    "linocut in two colours", "claymation still", "isometric illustration", "paper collage", "matte painting",
    "blueprint drawing", "pastel drawing", "embroidery on linen", "wide angle photograph", "ink wash painting",
]  # fmt: skip
QUALITIES = [
    "shallow depth of field", "muted colours", "vivid colours", "high contrast", "fine detail", "a calm mood",
    "a playful mood", "generous empty space", "symmetrical composition", "seen from above", "seen from very low",
    "warm palette", "cold palette",
]  # fmt: skip


def make_prompts(count: int, seed: int = 0) -> list[str]:
    """Return ``count`` distinct prompts, deterministic given the seed."""
    draw = random.Random(f"image prompts {seed}")
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        prompts[_one(draw)] = None
    return list(prompts)


def files() -> dict[str, str]:
    """Return the content of each shipped file; no prompt is in both a training file and its held-out file.

    ``shapes_all.jsonl`` holds both, for pre-training. In ``shapes_tasks`` the colour selects reward and teacher.
    """
    images = make_prompts(TRAIN_COUNT + HELDOUT_COUNT)
    texts = {"pickscore": (images[:TRAIN_COUNT], images[TRAIN_COUNT:]), "ocr": ocr_prompts()}
    found = {f"{name}_{side}.txt": _lines(part) for name, parts in texts.items() for side, part in _sides(parts)}
    pictures, signs = shape_rows(), word_rows()
    tasks = with_tasks(pictures[0]), with_tasks(pictures[1])
    rows = {"geneval": geneval_rows(), "shapes": pictures, "shapes_tasks": tasks, "words": signs}
    tables = {f"{name}_{side}": part for name, parts in rows.items() for side, part in _sides(parts)}
    tables["shapes_all"] = [*pictures[0], *pictures[1]]
    return found | {f"{name}.jsonl": _lines(json.dumps(row) for row in part) for name, part in tables.items()}


def with_tasks(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the rows with the name of their task as reward and teacher."""
    return [row | dict.fromkeys(("rewards", "teacher"), task_of(row)) for row in rows]


def task_of(row: dict[str, str]) -> str:
    """Return the attribute that a prompt is for: every two of the six colours share one."""
    return list(shapes.CHOICES)[shapes.COLOURS.index(row["colour"]) // 2]


def write(folder: Path) -> None:
    """Write the shipped files into ``folder``."""
    for name, content in files().items():
        (folder / name).write_text(content, encoding="utf-8", newline="\n")


def _sides(parts: tuple[T, T]) -> Iterator[tuple[str, T]]:
    return zip(("train", "heldout"), parts, strict=True)


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _one(draw: random.Random) -> str:
    def pick(words: Sequence[str]) -> str:
        return words[int(draw.random() * len(words))]

    scene = pick(["creature", "creature", "person", "person", "place", "place", "thing", "pair"])
    if scene == "creature":
        subject = f"{pick(CREATURES)} {pick(DEEDS)}"
    elif scene == "person":
        subject = f"{pick(PEOPLE)}, {pick(PORTRAITS)}"
    elif scene == "place":
        subject = pick(PLACES)
    elif scene == "thing":
        subject = f"{pick(THINGS)} {pick(SETTINGS)}"
    else:
        subject = pick(PAIRS)
    shape = pick(["plain", "light", "style", "full", "full", "leading"])
    if shape == "plain":
        return f"{subject}, {pick(QUALITIES)}" if scene in ("place", "pair") else subject
    if shape == "light":
        return f"{subject}, {pick(LIGHTS)}"
    if shape == "style":
        return f"{subject}, {pick(STYLES)}"
    if shape == "full":
        return f"{subject}, {pick(LIGHTS)}, {pick(STYLES)}, {pick(QUALITIES)}"
    return f"{pick(STYLES)} of {subject}, {pick(QUALITIES)}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Give the folder to write to: python tools/make_prompts.py recipes/prompts")
    write(Path(sys.argv[1]))
