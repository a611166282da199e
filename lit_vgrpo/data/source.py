"""The prompt sources that a recipe names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lit_vgrpo.core.ranges import PositiveFloat, PositiveInt, checked
from lit_vgrpo.errors import unknown_option
from lit_vgrpo.system.hub import local_folder
from lit_vgrpo.system.paths import resolve_path

Kind = Literal["txt", "jsonl", "csv", "parquet", "folder", "hub"]
FILE_KINDS: tuple[Kind, ...] = ("txt", "jsonl", "csv", "parquet")
USE = "Use a .txt, .jsonl, .csv or .parquet file, a folder of them, or a hub dataset, owner/name."


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
        TypeError: a weight or limit has the wrong type.
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
        if not str(self.path).strip():  # would be the current folder
            raise ValueError(f"path={self.path!r} is empty. {USE}")


if TYPE_CHECKING:
    Source = str | PromptSource | dict[str, Any]
    Sources = Source | Sequence[Source]
else:
    # the type that the parser sees: for a class it would read every existing path as a file of its options
    Source = str | dict[str, Any]
    Sources = Source | list[Source]


def as_source(value: Source | Path) -> PromptSource:
    """Build a source from a path or from its options.

    Raises:
        TypeError: an option is unknown, missing or has the wrong type.
        ValueError: an option's value is invalid.
    """
    if isinstance(value, PromptSource):
        return value
    if not isinstance(value, Mapping):
        return PromptSource(str(value))
    options = [field.name for field in fields(PromptSource)]
    for option in value:
        if option not in options:
            raise TypeError(unknown_option(option, "PromptSource", options))
    return PromptSource(**value)


def as_sources(value: Sources) -> list[PromptSource]:
    """Return one or several sources as a list; raises as in :func:`as_source`, and ValueError for an empty list."""
    if isinstance(value, str | PromptSource | Mapping):
        return [as_source(value)]
    if not value:
        raise ValueError(f"train=[] is empty. {USE}")
    return [as_source(entry) for entry in value]


def kind_of(source: PromptSource) -> Kind:
    """Return the kind of file, folder or dataset at the source's path.

    Raises:
        PromptError: there is none, or an option does not apply to it.
    """
    try:
        path = resolve_path(source.path)
    except ValueError as error:
        raise PromptError(str(error)) from error
    suffix = path.suffix.lower().removeprefix(".")
    if path.is_dir():
        return "folder"
    if path.is_file() and suffix in FILE_KINDS:
        ignored = [name for name in ("split", "config") if getattr(source, name) is not None]
        ignored += ["column"] if suffix == "txt" and source.column is not None else []
        if ignored:
            raise PromptError(f"{path} has no {ignored[0]}. Leave out {ignored[0]}={getattr(source, ignored[0])}.")
        return next(kind for kind in FILE_KINDS if kind == suffix)
    if path.exists():
        raise PromptError(f"{path} is not a prompt file. {USE}")
    # "prompts/train.tsv" looks like a hub name, but the folder prompts/ exists
    is_hub_name = local_folder(source.path) is None and "/" in source.path and not path.parent.is_dir()
    if suffix in FILE_KINDS or not is_hub_name:
        raise PromptError(f"{path} does not exist. {USE}")
    return "hub"
