"""Where prompts come from, as a recipe says it."""

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
    """Prompts cannot be read, or one of them is wrong, said in one line with the file and the line or row."""


@checked
@dataclass
class PromptSource:
    """Prompts of one file, folder or dataset.

    Args:
        path: ``.txt``, ``.jsonl``, ``.csv`` or ``.parquet`` file; a folder of such files or one that the ``datasets``
            library saved; a dataset of the hub, ``owner/name``; ``shipped:`` paths are resolved.
        weight: share of the prompts that are drawn, in relation to the other sources; its size plays no part.
        column: column or field of the prompt; "prompt" by default.
        split: split of a dataset; by default its only one, or "train".
        config: configuration of a dataset that has several.
        rewards: names of the rewards that apply to these prompts, for rows without a field of that name; all by
            default.
        limit: take only the first so many rows.

    Raises:
        TypeError: a value of another type.
        ValueError: a weight or a limit that is too small, or an empty path.
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
            raise ValueError(f"path={self.path!r} names nothing. {USE}")

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
    # what the recipe's parser sees: for a class it would open every path that exists as the file of its options
    Source = str | dict[str, Any]
    Sources = Source | list[Source]


def as_source(value: Source | Path, name: str = "") -> PromptSource:
    """Return the source of a path or of a source's options.

    Args:
        value: what a recipe says.
        name: its key, for messages.

    Raises:
        TypeError: an option of another type, or no option.
        ValueError: an option's value.
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
    """One source or several as a list; raises as :func:`as_source`, and ValueError for an empty list."""
    if isinstance(value, str | PromptSource | Mapping):
        return [as_source(value, "train")]
    if not value:
        raise ValueError(f"train=[] names no prompts. {USE}")
    return [as_source(entry, f"train[{number}]") for number, entry in enumerate(value)]


def kind_of(source: PromptSource) -> Kind:
    """Name the kind of what is at the source's path.

    Raises:
        PromptError: nothing does, or nothing that holds prompts, or an option does not go with it.
    """
    kind = _kind(source.path)
    if kind in FILE_KINDS:
        for name, value in (("split", source.split), ("config", source.config)):
            if value is not None:
                raise PromptError(f"{source.path} is a file and has no {name}. Leave out {name}={value}.")
    if kind == "txt" and source.column is not None:
        raise PromptError(f"{source.path} has one prompt a line and no columns. Leave out column={source.column}.")
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
    # "prompts/train.tsv" has the form of a hub name; beside it lies the folder prompts/
    if path.exists() or local_folder(text) is not None or "/" not in text or path.parent.is_dir():
        raise PromptError(f"{path} is not a prompt file. {USE}" if path.exists() else f"{path} does not exist. {USE}")
    return "hub"
