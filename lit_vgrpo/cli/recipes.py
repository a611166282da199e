"""``lightning recipes``: list the shipped recipes with their needs and evidence."""

from __future__ import annotations

import math
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from lit_vgrpo.config.header import Header
from lit_vgrpo.config.recipe import find_recipe
from lit_vgrpo.errors import say
from lit_vgrpo.system.paths import shipped

TASKS = {
    "image": ("Images from text", ""),
    "edit": ("Edited pictures", "KontextPolicy"),
    "video": ("Videos", "num_frames:"),
    "distillation": ("Distillation", "class_path: OPD"),
    "pretraining": ("Pre-training", "class_path: Denoising"),
}
"""By the option's word, heading and text that the recipes of a task contain; the last one that applies counts."""
CARD = re.compile(r"a CPU core|an? \d+ GB GPU|\d+ GPUs of \d+ GB")


def list_recipes(names: Sequence[str], task: str | None = None, gpu: int | None = None) -> int:
    """Print a line for each shipped recipe, by task, or the details of those that are named or chosen.

    Args:
        task: Print those of one of ``TASKS`` only.
        gpu: Print those for one GPU of this many bytes only.
    """
    if names:
        say("\n\n".join(_entry(name, Header.of_file(find_recipe(name))) for name in names))
        return 0
    least, size = (0, math.inf) if gpu is None else (2, gpu / 2**30)  # without those for a CPU core
    recipes = sorted((*_group(path), name, path) for name, path in shipped().items())
    fitting = [one for one in recipes if least <= one[1] <= size and task in (None, [*TASKS][one[0]])]
    if task is None and gpu is None:
        say("Begin with: lightning run tiny_shapes (one minute on a CPU). More: lightning recipes NAME, --task, --gpu")
        for (title, _), group in groupby(fitting, key=lambda one: [*TASKS.values()][one[0]]):
            say(f"\n{title}")
            for _, _, card, name, path in group:
                start = f"  {name:<23} {card:<16} "
                width = max(20, _width() - len(start)) if sys.stdout.isatty() else sys.maxsize
                say(start + textwrap.shorten(Header.of_file(path).title, width, placeholder="..."))
        return 0
    parts = []
    for (number, _, card), group in groupby(fitting, key=lambda one: one[:3]):
        entries = (_entry(name, Header.of_file(path)) for *_, name, path in group)
        parts += [f"--- {[*TASKS.values()][number][0]}, on {card}", *entries]
    if gpu is not None:
        need = f"lightning check RECIPE --memory {size:g}GiB"
        parts.append(f"Others may fit with less memory (docs/reduce_memory.md): {need}")
    say("\n\n".join(parts))
    return 0


def _width() -> int:
    return min(120, shutil.get_terminal_size((120, 24)).columns)


def _group(path: Path) -> tuple[int, int, str]:
    """Return the number of a recipe's task, the GB of its cards, 1 without one, and the card."""
    text, card = path.read_text(encoding="utf-8"), CARD.findall(Header.of_file(path).needs)[0]
    task = max(number for number, (_, sign) in enumerate(TASKS.values()) if sign in text)
    return task, math.prod(map(int, re.findall(r"\d+", card))), card


def _entry(name: str, header: Header) -> str:
    parts = {"needs": header.needs, "expect": header.expect, "evidence": header.evidence or "its header states none"}
    wrapped = textwrap.TextWrapper(_width(), break_long_words=False, break_on_hyphens=False)
    lines = wrapped.wrap(f"{name}: {header.title}")
    wrapped.subsequent_indent = " " * 12
    for label, text in parts.items():
        wrapped.initial_indent = f"  {label:<10}"
        lines += wrapped.wrap(text)
    return "\n".join(lines)
