"""The comment at the top of a recipe: its purpose, needs, and the evidence for its settings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from lit_vgrpo.errors import UserError

LEVELS = ("measured here", "published settings, not measured", "ours, not measured")
"""Levels of evidence; the first one is followed by its command in brackets."""
LABELS = ("Evidence", "Needs", "Expect")
LABELLED = re.compile(rf"\b({'|'.join(LABELS)}): (.*?)(?=\.$|\s(?:{'|'.join(LABELS)}): |\Z)", re.DOTALL | re.MULTILINE)
"""A label and its text, up to the next label or the first line that ends a sentence."""
MARK, COMMAND = "#", "#   "


@dataclass(frozen=True)
class Header:
    """Header of a recipe; missing parts are empty.

    ``evidence`` is the origin of the settings and whether they were measured, one of ``LEVELS``; ``needs`` are weights,
    extras and memory; ``expect`` is the expected result of a run.
    """

    title: str = ""
    commands: tuple[str, ...] = ()
    evidence: str = ""
    needs: str = ""
    expect: str = ""

    @classmethod
    def of(cls, text: str) -> Header:
        """Read the header of a recipe, given as the text of its file.

        >>> header = Header.of("# A task\\n#   lightning run a\\n# Needs: a GPU of\\n# 40 GB. Expect: .9\\nmodel: ...")
        >>> header.title, header.commands, header.needs, header.expect, header.evidence
        ('A task', ('lightning run a',), 'a GPU of 40 GB', '.9', '')
        """
        lines = list(takewhile(lambda line: line.startswith(MARK), text.splitlines()))
        commands = tuple(line.removeprefix(COMMAND).strip() for line in lines if line.startswith(COMMAND))
        prose = "\n".join(line.removeprefix(MARK).strip() for line in lines if not line.startswith(COMMAND))
        texts = {match[1]: " ".join(match[2].split()).rstrip(".") for match in LABELLED.finditer(prose)}
        parts = (texts.get(label, "") for label in LABELS)
        return cls(prose.partition("\n")[0], commands, *parts)

    @classmethod
    def of_file(cls, path: Path) -> Header:
        """Read the header of a recipe's file; raise UserError if it cannot be read."""
        try:
            return cls.of(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"Cannot read {path}: {error}.") from error
