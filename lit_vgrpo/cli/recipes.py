"""``lightning recipes``: list the shipped recipes, what each needs and what its settings rest on."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import ClassVar

from lit_vgrpo.config.arguments import Options, subcommand
from lit_vgrpo.config.header import Header
from lit_vgrpo.config.help import text_width
from lit_vgrpo.config.recipe import find_recipe, shipped_recipes
from lit_vgrpo.errors import say


@dataclass(kw_only=True)
class RecipesOptions(Options):
    """Options of ``lightning recipes``: its words are names of recipes; none lists all."""

    subcommand: ClassVar[str] = "recipes"


@subcommand(RecipesOptions)
def recipes(options: RecipesOptions) -> int:
    """List the shipped recipes, or those that are named: ``[RECIPE ...]``."""
    found = {name: find_recipe(name) for name in options.words} or shipped_recipes()
    entries = [_entry(name, Header.of_file(path)) for name, path in found.items()]
    say("\n\n".join(entries))
    return 0


def _entry(name: str, header: Header) -> str:
    parts = {"needs": header.needs, "expect": header.expect, "evidence": header.evidence or "its header states none"}
    wrapped = textwrap.TextWrapper(text_width(), break_long_words=False, break_on_hyphens=False)
    lines = wrapped.wrap(f"{name}: {header.title}")
    wrapped.subsequent_indent = " " * 12
    for label, text in parts.items():
        wrapped.initial_indent = f"  {label:<10}"
        lines += wrapped.wrap(text)
    return "\n".join(lines)
