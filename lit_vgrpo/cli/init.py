"""``lightning init``: write a folder with a recipe, prompts and a reward to start from."""

from __future__ import annotations

import re
from pathlib import Path

from lit_vgrpo.errors import UserError, say
from lit_vgrpo.system.paths import WRITE_ERRORS, shipped_root, vacant_folder, write_error, write_folder_atomically

STARTER = "starter"
"""Shipped folder with the files."""
FILES = ("recipe.yaml", "train.txt", "heldout.txt", "reward.py")
NAME = "my_run"
"""Name in the files, replaced by the new folder's."""


def write_starter(text: str) -> int:
    """Write a recipe, prompts and a reward that run unchanged on a tiny pipeline.

    Args:
        text: The folder to write, new or empty; its name must be a valid run name.
    """
    name = Path(text).expanduser().absolute().name
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError(f"{name!r} cannot name a run. Use letters, digits, '_', '-' and '.': lightning init {NAME}")
    folder = vacant_folder(text)
    try:
        with write_folder_atomically(folder) as draft:
            for file in FILES:
                content = (shipped_root() / STARTER / file).read_text(encoding="utf-8")
                (draft / file).write_text(content.replace(NAME, name), encoding="utf-8")
    except WRITE_ERRORS as error:
        raise UserError(f"Cannot write {folder}: {write_error(error)}. Choose another folder.") from error
    say(
        f"Wrote {', '.join(FILES)} to {folder}. Train on the tiny pipeline:\n"
        f"  cd {folder} && lightning run recipe.yaml\n"
        "For a real model, change the two lines marked CHANGE in recipe.yaml; your reward goes into reward.py."
    )
    return 0
