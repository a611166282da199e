"""``lightning recipes``: list the shipped recipes, what each needs and what its settings rest on."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lit_vgrpo.config.arguments import Options
from lit_vgrpo.config.header import Header
from lit_vgrpo.config.recipe import find_recipe, shipped_recipes
from lit_vgrpo.errors import UserError, report, say

WIDTH = 120


@dataclass(kw_only=True)
class RecipesOptions(Options):
    """Options of ``lightning recipes``: its words are names of recipes; none lists all."""

    subcommand: ClassVar[str] = "recipes"


def recipes(args: Sequence[str]) -> int:
    """List the shipped recipes, or those that are named: ``[RECIPE ...]``.

    Returns:
        0, or 2 for a name that is no recipe.
    """
    try:
        names = RecipesOptions.parse(args).words
        found = {name: find_recipe(name) for name in names} or shipped_recipes()
        entries = [_entry(name, Header.of_file(path)) for name, path in found.items()]
    except UserError as error:
        report(error.errors)
        return 2
    say("\n\n".join(entries))
    return 0


def _entry(name: str, header: Header) -> str:
    parts = {"needs": header.needs, "expect": header.expect, "evidence": header.evidence or "its header states none"}
    lines = [f"{name}: {header.title}"]
    for label, text in parts.items():
        if text:
            start, gap = f"  {label:<10}", " " * 12
            lines += textwrap.wrap(
                text, WIDTH, initial_indent=start, subsequent_indent=gap, break_long_words=False, break_on_hyphens=False
            )
    return "\n".join(lines)
