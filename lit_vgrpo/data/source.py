"""The sources of prompts that a recipe names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lit_vgrpo.core.ranges import PositiveFloat, PositiveInt, checked
from lit_vgrpo.errors import unknown_option
from lit_vgrpo.system.hub import local_folder
from lit_vgrpo.system.paths import resolve_path

Kind = Literal["txt", "jsonl", "csv", "parquet", "folder", "hub"]
FILE_KINDS: tuple[Kind, ...] = ("txt", "jsonl", "csv", "parquet")
USE = "Use a .txt, .jsonl, .csv or .parquet file, a folder of them, or a dataset of the hub, owner/name."


class PromptError(ValueError):
    """Prompts cannot be read or are malformed; the one-line message has the file and the line or row."""


@checked
@dataclass
class PromptSource:
    """Prompts of one file, folder or dataset.

    Args:
        path: ``.txt``, ``.jsonl``, ``.csv`` or ``.parquet`` file; a folder of such files or one that the ``datasets``
            library saved; a hub dataset, ``owner/name``; ``shipped:`` paths are resolved.
        weight: share of the sampled prompts relative to other sources, independent of the source's size.
        column: the prompt's column or field; "prompt" by default.
        split: split of a dataset; by default its only one, or "train".
        config: configuration of a dataset that has several.
        rewards: names of the rewards that apply to these prompts, for rows without a field of that name; all by
            default.
        limit: use only the first N rows.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a weight or limit is too small, or the path is empty.
    """

    path: str
    weight: PositiveFloat = 1.0
    column: str | None = None
    split: str | None = None
    config: str | None = None
    rewards: str | list[str] | None = None
    limit: PositiveInt | None = None

    def __post_init__(self) -> None:
        for name, value, needed in self._typed():
            if not needed:
                what = "name or a list of names" if name == "rewards" else "text"
                raise TypeError(f"{name}={value!r} has the wrong type. Give a {what}.")
        if not self.path.strip():
            raise ValueError(f"path={self.path!r} is empty. {USE}")

    def _typed(self) -> Iterator[tuple[str, object, bool]]:
        names = self.rewards if isinstance(self.rewards, list) else [self.rewards or ""]
        yield "path", self.path, isinstance(self.path, str)
        for name in ("column", "split", "config"):
            yield name, getattr(self, name), isinstance(getattr(self, name), str | type(None))
        yield "rewards", self.rewards, all(isinstance(name, str) for name in names)


if TYPE_CHECKING:
    Source = str | PromptSource | dict[str, Any]
    Sources = Source | Sequence[Source]
else:
    # the type that the parser sees: for a class it would read every existing path as a file of its options
    Source = str | dict[str, Any]
    Sources = Source | list[Source]


def as_source(value: Source | Path, name: str = "") -> PromptSource:
    """Build a source from a path or from its options.

    Args:
        value: the recipe's value.
        name: its key, for messages.

    Raises:
        TypeError: an option is unknown or has the wrong type.
        ValueError: an option's value is invalid.
    """
    if isinstance(value, PromptSource):
        return value
    given = dict(value) if isinstance(value, Mapping) else {"path": str(value)}
    prefix = f"{name}." if isinstance(value, Mapping) and name else ""
    options = [field.name for field in fields(PromptSource)]
    for option in given:
        if option not in options:
            raise TypeError(unknown_option(f"{prefix}{option}", "PromptSource", options))
    if "path" not in given:
        raise TypeError(f"{prefix}path is missing. {USE}")
    try:
        return PromptSource(**given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{prefix}{error}") from error


def as_sources(value: Sources) -> list[PromptSource]:
    """Return one or several sources as a list; raises as in :func:`as_source`, and ValueError for an empty list."""
    if isinstance(value, str | PromptSource | Mapping):
        return [as_source(value, "train")]
    if not value:
        raise ValueError(f"train=[] is empty. {USE}")
    return [as_source(entry, f"train[{number}]") for number, entry in enumerate(value)]


def kind_of(source: PromptSource) -> Kind:
    """Return the kind of file, folder or dataset at the source's path.

    Raises:
        PromptError: it does not exist or holds no prompts, or an option does not apply to it.
    """
    kind = _kind(source.path)
    if kind in FILE_KINDS:
        for name, value in (("split", source.split), ("config", source.config)):
            if value is not None:
                raise PromptError(f"{source.path} is a file and has no {name}. Leave out {name}={value}.")
    if kind == "txt" and source.column is not None:
        raise PromptError(f"{source.path} has one prompt per line and no columns. Leave out column={source.column}.")
    return kind


def _kind(text: str) -> Kind:
    try:
        path = resolve_path(text)
    except ValueError as error:
        raise PromptError(str(error)) from error
    suffix = path.suffix.lower().removeprefix(".")
    for kind in FILE_KINDS:
        if suffix == kind:
            if path.is_file():
                return kind
            wrong = "is not a file" if path.exists() else "does not exist"
            raise PromptError(f"{path} {wrong}. Give the path of a .txt, .jsonl, .csv or .parquet prompt file.")
    if path.is_dir():
        return "folder"
    # "prompts/train.tsv" looks like a hub name, but the folder prompts/ exists
    if path.exists() or local_folder(text) is not None or "/" not in text or path.parent.is_dir():
        raise PromptError(f"{path} is not a prompt file. {USE}" if path.exists() else f"{path} does not exist. {USE}")
    return "hub"
