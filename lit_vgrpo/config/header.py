"""The comment at the top of a recipe: its purpose, needs, and the evidence for its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_vgrpo.errors import UserError

LEVELS = ("measured here", "published settings, not measured", "ours, not measured")
"""Levels of evidence; the first one is followed by its command in brackets."""
LABELS = ("Evidence", "Needs", "Expect")
MARK, COMMAND = "#", "#   "


@dataclass(frozen=True)
class Header:
    """Header of a recipe; missing parts are empty.

    Attributes:
        title: First line of the header.
        commands: Example commands.
        evidence: Origin of the settings and whether they were measured, one of ``LEVELS``.
        needs: Weights, extras and memory.
        expect: Expected result of a run.
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
        lines = text.splitlines()
        end = next((number for number, line in enumerate(lines) if not line.startswith(MARK)), len(lines))
        commands = tuple(line.removeprefix(COMMAND).strip() for line in lines[:end] if line.startswith(COMMAND))
        prose = [line.removeprefix(MARK).strip() for line in lines[:end] if not line.startswith(COMMAND)]
        said = {label: _labelled(prose, f"{label}: ") for label in LABELS}
        return cls(prose[0] if prose else "", commands, said["Evidence"], said["Needs"], said["Expect"])

    @classmethod
    def of_file(cls, path: Path) -> Header:
        """Read the header of a recipe's file; raise UserError if it cannot be read."""
        try:
            return cls.of(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"Cannot read {path}: {error}.") from error


def _labelled(prose: Sequence[str], label: str) -> str:
    """Return the text after a label: until the next one, or the first line that ends a sentence."""
    for number, line in enumerate(prose):
        _, found, text = line.partition(label)
        if not found:
            continue
        rest = iter(prose[number + 1 :])
        text = _before_next_label(text)
        while not text.endswith((".", "\0")) and (more := next(rest, None)) is not None:
            text = f"{text} {_before_next_label(more)}"
        return text.rstrip(".\0 ")
    return ""


def _before_next_label(text: str) -> str:
    """Return the text up to the next label, then a NUL if there was one."""
    found = [text.index(f"{label}: ") for label in LABELS if f"{label}: " in text]
    return f"{text[: min(found)].rstrip()}\0" if found else text
