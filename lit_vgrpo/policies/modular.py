"""Modular pipelines of diffusers, called and read like its other pipelines."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lit_vgrpo.system.hub import LoadError, fetched_folder, local_folder, quiet_libraries

MODULAR_INDEX = "modular_model_index.json"
RESULTS = ("images", "videos")


def as_pipeline(pipeline: Any) -> Any:
    """Return a copy of a modular pipeline that is called like diffusers' other pipelines; any other one as it is.

    Its call has the inputs of its blocks as parameters, and returns a tuple with the images or videos. Blocks that
    rewrite the prompt are left out, and so are their components.
    """
    kind = type(pipeline)
    if not hasattr(kind, "default_call_parameters") or is_modular(pipeline):
        return pipeline
    blocks = without_rewriters(pipeline.blocks)
    components = {name: getattr(pipeline, name, None) for name in blocks.component_names}
    return _rebuilt(
        kind, blocks, pipeline.config, {name: part for name, part in components.items() if part is not None}
    )


def is_modular(pipeline: Any) -> bool:
    """Return whether a pipeline comes from :func:`as_pipeline`."""
    return hasattr(type(pipeline), "result")


def _rebuilt(kind: Any, blocks: Any, index: Mapping[str, Any], components: Mapping[str, Any]) -> Any:
    """Return a modular pipeline of a class, with the entries of an index, that is called like others."""
    results = [name for name in RESULTS if name in blocks.output_names]
    if not results:
        raise LoadError(f"{kind.__name__} returns no {' or '.join(RESULTS)}, but {', '.join(blocks.output_names)}.")

    def call(self: Any, **given: Any) -> tuple[Any]:
        return (kind.__call__(self, output=results[0], **given),)

    def save_pretrained(self: Any, folder: Any, **options: Any) -> None:
        kind.save_pretrained(self, str(folder), overwrite_modular_index=True, **options)
        readdress(Path(folder), Path(folder).name)

    def set_progress_bar_config(self: Any, **options: Any) -> None:
        for block in _inner(blocks):  # the pipeline's own method reaches the outermost only
            if hasattr(block, "set_progress_bar_config"):
                block.set_progress_bar_config(**options)

    own, keyword = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), inspect.Parameter.KEYWORD_ONLY
    inputs = [inspect.Parameter(taken.name, keyword, default=taken.default) for taken in blocks.inputs if taken.name]
    call.__signature__ = inspect.Signature([own, *inputs])  # type: ignore[attr-defined]
    methods = [call, save_pretrained, set_progress_bar_config]
    replaced = {"__call__" if method is call else method.__name__: method for method in methods}
    absent = {name: tuple(value) for name, value in index.items() if _is_part(value) and name not in components}
    present = {name: value for name, value in index.items() if name not in absent}
    with quiet_libraries():
        pipeline: Any = type(kind.__name__, (kind,), {**replaced, "result": results[0]})(
            blocks, modular_config_dict=present
        )
        pipeline.register_components(**components)
        pipeline.register_to_config(**absent)  # which an export keeps
    return pipeline


def without_rewriters(blocks: Any) -> Any:
    """Return blocks without those that return another prompt than they get, such as a language model's; in place."""
    for name in rewriters(blocks):
        blocks.sub_blocks.pop(name)
    return blocks


def rewriters(blocks: Any) -> list[str]:
    """Return the names of the blocks that rewrite the prompt."""
    named = blocks.sub_blocks.items()
    return [name for name, block in named if "prompt" in {*block.input_names} & {*block.intermediate_output_names}]


def _inner(block: Any) -> Iterator[Any]:
    for part in getattr(block, "sub_blocks", {}).values():
        yield part
        yield from _inner(part)


# --- folders ----------------------------------------------------------------------------------------------------------


def has_modular_index(folder: Path) -> bool:
    """Return whether a folder is a modular pipeline's; another index takes precedence."""
    return (folder / MODULAR_INDEX).is_file() and not (folder / "model_index.json").is_file()


def read_modular_index(folder: Path) -> dict[str, Any]:
    """Return a modular pipeline's index in the form of the others: the library and class of each part to be loaded.

    Raises:
        LoadError: Its blocks are not in diffusers.
    """
    index = json.loads((folder / MODULAR_INDEX).read_text())
    names = without_rewriters(_blocks(index)).component_names
    known = {name: value for name, value in index.items() if name in names or not _is_part(value)}
    return {name: _named(folder, value) if _is_part(value) else value for name, value in known.items()}


def part_folder(
    folder: Path, name: str, checkpoint: str, revision: str | None = None, variant: str | None = None
) -> Path:
    """Return the folder of a part: in its pipeline's folder, or, of a modular pipeline, in that of another repository.

    A part of a modular pipeline on the hub is downloaded.

    Args:
        folder: Of the pipeline.
        name: Of the part.
        checkpoint: The pipeline's folder or hub name.
        revision: Of its repository.
        variant: Of the weights.
    """
    own = own_folder(folder, name)
    if (own.is_dir() and local_folder(checkpoint) is not None) or not has_modular_index(folder):
        return own
    source = json.loads((folder / MODULAR_INDEX).read_text())[name][2]
    repository, inner = _repository(source) or checkpoint, source.get("subfolder") or ""
    if (local := local_folder(repository)) is not None:
        return local / inner
    return fetched_folder(repository, inner, revision if repository == checkpoint else source.get("revision"), variant)


def own_folder(folder: Path, name: str) -> Path:
    """Return the folder of a part in its pipeline's folder; of a modular pipeline it may not exist."""
    entry: Any = json.loads((folder / MODULAR_INDEX).read_text()).get(name) if has_modular_index(folder) else None
    return folder / ((entry[2].get("subfolder") or "-") if _is_part(entry) else name)


def assembled(kind: Any, folder: Path, components: Mapping[str, Any]) -> Any:
    """Return the modular pipeline of a folder with the given components, called like others."""
    index = json.loads((folder / MODULAR_INDEX).read_text())
    return _rebuilt(kind, without_rewriters(_blocks(index)), index, components)


def readdress(folder: Path, repository: str) -> None:
    """Write a repository's name into the index of a modular pipeline's folder, for the parts that the folder has."""
    path = folder / MODULAR_INDEX
    if path.is_file():
        index = json.loads(path.read_text())
        for name, entry in index.items():
            if _is_part(entry) and (folder / name).is_dir():
                entry[2]["pretrained_model_name_or_path"] = repository
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def lines_that_load(pipeline: Any, source: str, dtype: str, variant: str | None, revision: str | None) -> list[str]:
    """Return the lines of Python that load a modular pipeline from a hub name or folder, a quoted text."""
    import diffusers

    kind, name = type(pipeline).__name__, type(pipeline.blocks).__name__
    of_index = f"{source}, revision={revision!r}" if revision else source
    lines = [f"pipe = diffusers.{kind}.from_pretrained({of_index})"]
    if found := rewriters(getattr(diffusers, name)()):
        pops = [f'blocks.sub_blocks.pop("{block}")' for block in found]
        lines = [f"blocks = diffusers.{name}()", *pops, f"pipe = diffusers.{kind}(blocks, {of_index})"]
    parts = {part: entry[2] for part, entry in pipeline.config.items() if _is_part(entry)}
    own = [part for part in parts if json.dumps(_repository(parts[part]), ensure_ascii=False) == source]
    versions = {"variant": dict.fromkeys(parts, variant), "revision": dict.fromkeys(own, revision)}
    given = [f", {key}={value}" for key, value in versions.items() if any(value.values())]
    return [*lines, f"pipe.load_components(dtype={dtype}{''.join(given)})"]


def _blocks(index: Mapping[str, Any]) -> Any:
    """Return the blocks that an index names, or its class's own where it names a composition, as diffusers does."""
    import diffusers

    kind, name = getattr(diffusers, index["_class_name"], None), index.get("_blocks_class_name")
    blocks = getattr(diffusers, name or "", None)
    if blocks is not None and not blocks.block_classes:  # SequentialPipelineBlocks
        blocks = getattr(diffusers, getattr(kind, "default_blocks_name", None) or "", None)
    if blocks is None:
        raise LoadError(
            f"{index['_class_name']} has blocks that diffusers lacks, {name}. Pass AutoPolicy a loaded pipeline."
        )
    return blocks()


def _is_part(entry: Any) -> bool:
    return isinstance(entry, list | tuple) and len(entry) == 3 and isinstance(entry[2], dict)


def _repository(source: Mapping[str, Any]) -> str:
    return source.get("pretrained_model_name_or_path") or source.get("repo") or ""


def _named(folder: Path, entry: list[Any]) -> list[Any]:
    """Return the library and class of a part, or nulls if nothing is to be loaded."""
    source, inner = entry[2], folder / (entry[2].get("subfolder") or "-")
    return list(source.get("type_hint") or entry[:2]) if _repository(source) or inner.is_dir() else [None, None]
