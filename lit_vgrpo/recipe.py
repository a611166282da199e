"""What was typed, and the recipe file it names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_vgrpo.errors import UserError, nearest
from lit_vgrpo.paths import shipped_root


@dataclass
class Command:
    """A parsed command line: the recipe's file and the overrides as ``(key, text)``."""

    recipe: Path
    overrides: list[tuple[str, str]]

    def parser_args(self) -> list[str]:
        return [f"--config={self.recipe}", *(f"--{key}={text}" for key, text in self.overrides)]


def parse_command(args: Sequence[str]) -> Command:
    """Split ``RECIPE key=value --key=value --key value`` into its parts.

    Raises:
        UserError: no recipe, two recipes, an option without a value, or a recipe that does not exist.
    """
    recipe: str | None = None
    overrides: list[tuple[str, str]] = []
    pending = list(args)
    while pending:
        word = pending.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        if equals and key:
            overrides.append((key, text))
        elif word.startswith("--"):
            if not pending:
                raise UserError(f"{word} has no value. Write {key}=VALUE.")
            overrides.append((key, pending.pop(0)))
        elif recipe is None:
            recipe = word
        else:
            raise UserError(f"{word!r} is neither the recipe ({recipe}) nor an override. Write overrides as key=value.")
    if recipe is None:
        raise UserError("No recipe given. Try: lightning run tiny_shapes")
    return Command(find_recipe(recipe), overrides)


def find_recipe(text: str) -> Path:
    """The file of a recipe: a path, or the name of a shipped one, with or without ``recipes/`` and ``.yaml``.

    Raises:
        UserError: there is none of that name.
    """
    path = Path(text).expanduser()
    if path.is_file():
        return path
    shipped = {file.stem: file for file in shipped_root().glob("*.yaml")}
    if path.stem in shipped and path.parent.name in ("", "recipes") and path.suffix in ("", ".yaml"):
        return shipped[path.stem]
    what = "is a folder, not a recipe" if path.is_dir() else "is no recipe: no such file, and not a shipped name"
    guess = nearest(path.stem, shipped)
    hint = f"Did you mean {guess}?" if guess else f"Shipped: {', '.join(sorted(shipped))}."
    raise UserError(f"{text} {what}. {hint}")


def read_recipe(command: Command) -> dict[str, Any]:
    """The recipe as plain values, overrides and interpolations applied.

    Raises:
        UserError: it is not YAML, not a mapping, or an interpolation leads nowhere.
    """
    try:
        loaded = OmegaConf.load(command.recipe)
        if not OmegaConf.is_dict(loaded):
            raise UserError(f"{command.recipe} is no recipe: its top level must be a mapping with model: and data:.")
        plain = OmegaConf.to_container(loaded, resolve=False)
        assert isinstance(plain, dict)
        for key, text in command.overrides:
            _set(plain, key, text)
        resolved = OmegaConf.to_container(OmegaConf.create(plain), resolve=True)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark is not None else ""
        raise UserError(f"{command.recipe}{where} is not YAML: {getattr(error, 'problem', error)}.") from error
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "a value"
        raise UserError(f"{command.recipe}: {key}: {str(error).splitlines()[0]}. Check the ${{...}} in it.") from error
    except OSError as error:
        raise UserError(f"Cannot read {command.recipe}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{command.recipe} is not a text file in UTF-8.") from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _set(recipe: dict[Any, Any], key: str, text: str) -> None:
    """Put an override in its place; ``init_args`` may be left out, as the parser allows."""
    try:
        value = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)["value"]  # type: ignore[index,call-overload]
    except (yaml.YAMLError, OmegaConfBaseException):
        value = text
    node = recipe
    append = key.endswith("+")
    parts = key.rstrip("+").split(".")
    for part in parts[:-1]:
        node = _options_of(node, part)
        if not isinstance(node.get(part), dict):
            node[part] = {"class_path": node[part]} if isinstance(node.get(part), str) else {}
        node = node[part]
    node = _options_of(node, parts[-1])
    old = node.get(parts[-1])
    if append:
        value = [*(old or []), *(value if isinstance(value, list) else [value])]
    elif isinstance(old, dict) and "class_path" in old and isinstance(value, str):
        value = {**old, "class_path": value}
    node[parts[-1]] = value


def _options_of(node: dict[Any, Any], part: str) -> dict[Any, Any]:
    if "class_path" in node and part not in ("class_path", "init_args", "dict_kwargs"):
        return node.setdefault("init_args", {})
    return node
