"""``lightning init``: write a folder with a recipe, prompts and a reward to start from."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from lit_vgrpo.config.arguments import Options, subcommand
from lit_vgrpo.errors import UserError, say
from lit_vgrpo.system.atomic_folder import WRITE_ERRORS, vacant_folder, write_error, write_folder_atomically
from lit_vgrpo.system.paths import shipped_root

STARTER = "starter"
"""Shipped folder with the files."""
FILES = ("recipe.yaml", "train.txt", "heldout.txt", "reward.py")
NAME = "my_run"
"""Name in the files, replaced by the new folder's."""


@dataclass(kw_only=True)
class InitOptions(Options):
    """Options of ``lightning init``: one word, the folder.

    Attributes:
        folder: The folder to write: new or empty, and its name fit to be a run's.
    """

    subcommand: ClassVar[str] = "init"

    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        if len(self.words) != 1:
            raise UserError(f"init takes the name of one new folder. Write: lightning init {NAME}")
        name = Path(self.words[0]).expanduser().absolute().name
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise UserError(f"{name!r} cannot name a run. Use letters, digits, '_', '-' and '.': lightning init {NAME}")
        self.folder = vacant_folder(self.words[0])


@subcommand(InitOptions)
def init(options: InitOptions) -> int:
    """Write a recipe, prompts and a reward that run as they are on a tiny pipeline: ``FOLDER``."""
    folder = options.folder
    _write(folder)
    say(
        f"Wrote {', '.join(FILES)} to {folder}. Train on the tiny pipeline:\n"
        f"  cd {folder} && lightning run recipe.yaml\n"
        "For a real model, change the two lines marked CHANGE in recipe.yaml; your own reward goes into reward.py."
    )
    return 0


def _write(folder: Path) -> None:
    name = folder.absolute().name
    try:
        with write_folder_atomically(folder) as draft:
            for file in FILES:
                text = (shipped_root() / STARTER / file).read_text(encoding="utf-8")
                (draft / file).write_text(text.replace(NAME, name), encoding="utf-8")
    except WRITE_ERRORS as error:
        raise UserError(f"Cannot write {folder}: {write_error(error)}. Choose another folder.") from error
