"""The prompt sources that a recipe names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from lit_vgrpo.core.ranges import PositiveFloat, PositiveInt, checked
from lit_vgrpo.errors import nearest
from lit_vgrpo.system.hub import local_folder
from lit_vgrpo.system.paths import resolve_path

Kind = Literal["txt", "jsonl", "csv", "parquet", "folder", "hub"]
FILE_KINDS = ("txt", "jsonl", "csv", "parquet")
USE = (
    "Use a .txt, .jsonl, .csv or .parquet file, a folder of them, a hub dataset, owner/name, or "
    '{"prompts": ["a cat", "a dog"]}.'
)


class PromptError(ValueError):
    """Prompts cannot be read or are malformed; the one-line message has the file and the line or row."""


@checked
@dataclass
class PromptSource:
    """Prompts of one file, folder, dataset or list.

    Args:
        path: ``.txt``, ``.jsonl``, ``.csv`` or ``.parquet`` file; a folder of such files or one that the ``datasets``
            library saved; a hub dataset, ``owner/name``; ``shipped:`` paths are resolved. With ``prompts``, a name for
            messages.
        weight: Share of the sampled prompts relative to other sources, independent of the source's size.
        column: The prompt's column or field; "prompt" by default.
        split: Split of a dataset; "train" by default.
        config: Configuration of a dataset that has several.
        rewards: Names of the rewards that apply to these prompts, for rows without a field of that name; all by
            default.
        teacher: Name of the teacher of these prompts in :class:`~lit_vgrpo.objectives.OPD`, for rows without a field of
            that name.
        limit: Use only the first N rows.
        name: Name in metrics; with several sources, the path's stem by default.
        prompts: The prompts themselves: texts, or rows such as ``{"prompt": "a cat"}``.

    Raises:
        TypeError: Neither ``path`` nor ``prompts`` is given.
        ValueError: ``rewards`` is empty.
    """

    path: str = ""
    weight: PositiveFloat = 1.0
    column: str | None = None
    split: str | None = None
    config: str | None = None
    rewards: str | list[str] | None = None
    teacher: str | None = None
    limit: PositiveInt | None = None
    name: str | None = None
    prompts: list[Any] | None = None

    def __post_init__(self) -> None:
        if not self.path and self.prompts is None:
            raise TypeError('A source has no path. Write {"path": "prompts.txt"}, or {"prompts": ["a cat"]}.')
        self.path = self.path or "prompts"
        if self.rewards is not None and not self.rewards:
            raise ValueError(f"rewards={self.rewards!r} of {self.path}: no reward applies. Name one, or leave it out.")


if TYPE_CHECKING:
    Source = str | PromptSource | dict[str, Any]
    Sources = Source | Sequence[Source]
else:
    # the type that the parser sees: for a class it would read every existing path as a file of its options
    Source = str | dict[str, Any]
    Sources = Source | list[Source]


def as_source(value: Source | Path) -> PromptSource:
    """Build a source from a path or from its options; raise TypeError or ValueError for a wrong option."""
    if isinstance(value, PromptSource):
        return value
    return PromptSource(**value) if isinstance(value, Mapping) else PromptSource(str(value))


def as_sources(value: Sources) -> list[PromptSource]:
    """Return one or several sources as a list, several with different names; raises as in :func:`as_source`.

    >>> as_sources(["a cat", "a red dog"])[0].prompts
    ['a cat', 'a red dog']
    """
    if isinstance(value, str | Path | PromptSource | Mapping):
        return [as_source(value)]
    if hasattr(value, "columns"):  # iterating over a data frame gives its columns' names
        raise TypeError(f"A {type(value).__name__} is not a list of rows. Pass them, such as df.to_dict('records').")
    if not isinstance(value, Iterable):
        raise TypeError(f"{value!r} is neither prompts nor their file. {USE}")
    entries = sorted(value, key=str) if isinstance(value, Set) else list(value)  # a set has no lasting order
    if not entries:
        raise PromptError("The list of prompts is empty.")
    if all(map(_is_prompt, entries)) and any(" " in str(entry) for entry in entries):  # one word may be a folder's name
        return [PromptSource(prompts=entries)]
    if all(isinstance(entry, Mapping) and "prompt" in entry for entry in entries):
        return [PromptSource(prompts=entries)]
    for entry in entries:
        if not isinstance(entry, str | Path | PromptSource | Mapping):
            raise TypeError(f"{entry!r} in the list of prompts is neither a text nor a file. {USE}")
    sources = [as_source(entry) for entry in entries]
    taken = [source.name for source in sources if source.name is not None]
    for name in taken:
        if taken.count(name) > 1:
            raise ValueError(f"name={name} occurs in {taken.count(name)} sources. Give each a different name.")
    for number, source in enumerate(sources if len(sources) > 1 else ()):
        if source.name is None:
            stem = Path(source.path).stem
            name = next(n for n in chain([stem], (f"{stem}_{i}" for i in count(2))) if n not in taken)
            taken.append(name)
            sources[number] = replace(source, name=name)
    return sources


def _is_prompt(entry: object) -> bool:
    """Return True for a text that names no file and no dataset."""
    if not isinstance(entry, str) or not entry.strip() or ("/" in entry and " " not in entry.strip()):
        return False
    return not entry.endswith(tuple(f".{kind}" for kind in FILE_KINDS)) and not os.path.exists(entry)


def kind_of(source: PromptSource) -> Kind:
    """Return the kind of file, folder or dataset of a source; raise PromptError if there is none, or a wrong option."""
    try:
        path = resolve_path(source.path)
    except ValueError as error:
        raise PromptError(str(error)) from error
    suffix = path.suffix.lower().removeprefix(".")
    if path.is_dir():
        return "folder"
    if path.is_file() and suffix in FILE_KINDS:
        if source.split or source.config:
            raise PromptError(f"{path} has no splits or configurations. Leave out split and config.")
        return cast("Kind", suffix)
    if path.exists():
        raise PromptError(f"{path} is not a prompt file. {USE}")
    # "prompts/train.tsv" looks like a hub name, but the folder prompts/ exists
    is_hub_name = local_folder(source.path) is None and "/" in source.path and not path.parent.is_dir()
    if suffix in FILE_KINDS or not is_hub_name:
        files = sorted(path.parent.glob("*"), key=lambda file: file.suffix == path.suffix)
        names = {file.stem: file.name for file in files}  # suffixes alone make names alike
        guess = nearest(path.stem, names)
        meant = USE if guess is None else f"Did you mean {Path(source.path).with_name(names[guess])}?"
        raise PromptError(f"{source.path} does not exist. {meant}")
    return "hub"
