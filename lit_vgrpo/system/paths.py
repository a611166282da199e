"""Paths in recipes, and atomic writing of small files."""

from __future__ import annotations

import os
import sys
from importlib.resources import files
from pathlib import Path

from lit_vgrpo.errors import UserError

SHIPPED_PREFIX = "shipped:"
CONFIG_NAME = "config.yaml"
"""A run's recipe, in its folder."""


def shipped_root() -> Path:
    """Return the folder of the recipes, prompts and tiny pipelines installed with the package."""
    return Path(str(files("lit_vgrpo.recipes")))


def resolve_path(text: str | Path) -> Path:
    """Resolve a recipe's path: ``shipped:prompts/x.txt`` points into the installed recipes.

    Raises:
        ValueError: a ``shipped:`` path that leaves the installed folder.
    """
    text = str(text)
    if not text.startswith(SHIPPED_PREFIX):
        return Path(text).expanduser()
    root = shipped_root()
    path = (root / text[len(SHIPPED_PREFIX) :]).resolve()
    if root.resolve() not in (path, *path.parents):
        raise ValueError(f"{text} leaves the shipped recipes folder {root}. Give a path without '..'.")
    return path


def import_from_here() -> None:
    """Make modules in the current folder importable, which they are not from a console script."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def write_atomically(path: Path, text: str) -> None:
    """Write a small file in UTF-8 atomically; raise UserError if it cannot be written."""
    draft = path.with_name(f"{path.name}.tmp")
    try:
        with draft.open("w", newline="", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise UserError(f"Cannot write {path}: {error.strerror}.") from error
