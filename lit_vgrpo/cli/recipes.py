"""``lightning recipes``: list the shipped recipes with their needs and evidence."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from lit_vgrpo.config.header import Header
from lit_vgrpo.config.recipe import find_recipe, shipped_recipes
from lit_vgrpo.errors import say


def list_recipes(names: Sequence[str]) -> int:
    """Print the shipped recipes, or those that are named."""
    recipes = {name: find_recipe(name) for name in names} or shipped_recipes()
    say("\n\n".join(_entry(name, Header.of_file(path)) for name, path in recipes.items()))
    return 0


def _entry(name: str, header: Header) -> str:
    parts = {"needs": header.needs, "expect": header.expect, "evidence": header.evidence or "its header states none"}
    width = min(120, shutil.get_terminal_size((120, 24)).columns)
    wrapped = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    lines = wrapped.wrap(f"{name}: {header.title}")
    wrapped.subsequent_indent = " " * 12
    for label, text in parts.items():
        wrapped.initial_indent = f"  {label:<10}"
        lines += wrapped.wrap(text)
    return "\n".join(lines)
