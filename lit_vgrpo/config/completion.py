"""Completion of the command in a shell, by argcomplete; it must answer at once, so it imports nothing large.

The shell calls the command with ``_ARGCOMPLETE`` in its environment and the line typed so far.
"""

from __future__ import annotations

import os
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_vgrpo.config.help import CLASSES, PARTS, TOP, TRAINER, class_options, command_options, options_of
from lit_vgrpo.config.tree import class_name, leaves, typed_key
from lit_vgrpo.system.paths import CONFIG_NAME, shipped_root

SHELLS = ("bash", "zsh", "fish", "powershell")
PROGRAMS = ("lightning", "lit-vgrpo")
MODEL = (*CLASSES, "heldout_reward")
"""Parts of the model that name a class."""
MOST_LEVELS = 2
"""Folders below the current one in which runs are looked for."""


def print_completion(args: Sequence[str]) -> tuple[str, int]:
    """Return the shell code that switches completion on, and the exit status."""
    from argcomplete import shellcode

    shell = args[0] if args else Path(os.environ.get("SHELL", "bash")).name
    if shell not in SHELLS:
        return f"{shell} is not a shell with completion. Use --print-completion {' or '.join(SHELLS)}.", 2
    return shellcode(PROGRAMS, shell=shell), 0


def complete(subcommands: Mapping[str, Any]) -> None:
    """Write the completions of the line in the environment, and end the process.

    Args:
        subcommands: The command's own table, with each one's options, usage and summary.
    """
    import argcomplete

    typed = os.environ.get("COMP_LINE", "").split()[1:]
    chosen = typed[0] if typed and typed[0] in subcommands else None
    parser = ArgumentParser(add_help=False)
    for flag in ("--help", "--version", "--print-completion"):
        parser.add_argument(flag, action="store_true")
    names = parser.add_subparsers()
    for name, subcommand in subcommands.items():
        own = names.add_parser(name, help=subcommand.summary, add_help=False)
        if name == chosen:
            _add_arguments(own, subcommand)
    names.add_parser("help", help="list a subcommand's options and keys").add_argument("of", choices=[*subcommands])
    argcomplete.autocomplete(parser, always_complete_options="long", exclude=["-h"])


def _add_arguments(parser: ArgumentParser, subcommand: Any) -> None:
    parser.add_argument("--help", action="store_true", help="list the options and keys")
    flags = [word.strip("[]") for word in subcommand.usage.split() if word.startswith("[--") and word.endswith("]")]
    for option in command_options(subcommand.options):
        if option.name in flags:
            parser.add_argument(option.name, action="store_true", help=option.text)
        else:
            parser.add_argument(option.name, help=option.text, default=SUPPRESS)
    parser.add_argument("words", nargs="*").completer = _Words(subcommand)  # type: ignore[attr-defined]


class _Words:
    """Completes a recipe, a run or a reward, and the keys that may follow."""

    def __init__(self, subcommand: Any) -> None:
        self.first = subcommand.usage.strip("[").split()[0].partition(".")[0]
        self.takes_keys = "key=value" in subcommand.usage
        self.several = f"{self.first} ..." in subcommand.usage

    def __call__(self, prefix: str, parsed_args: Any, **_: Any) -> list[str]:
        from argcomplete.completers import DirectoriesCompleter, FilesCompleter

        words = list(parsed_args.words or [])
        if words and not self.several:
            return _keys(prefix, words[0], words[1:]) if self.takes_keys else list(FilesCompleter()(prefix))
        found = list(DirectoriesCompleter()(prefix))
        if self.first == "RUN":
            found += _runs(Path())
        elif self.first == "REWARD_OR_RECIPE":
            found += CLASSES["reward"].split()
        if "RECIPE" in self.first:
            found += sorted(path.stem for path in shipped_root().glob("*.yaml"))
            found += FilesCompleter(("yaml", "yml"))(prefix)
        return found


def _runs(folder: Path, levels: int = MOST_LEVELS) -> Iterator[str]:
    """Yield the run folders below a folder."""
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.name.startswith("."):
            if (entry / CONFIG_NAME).is_file():
                yield str(entry)
            elif levels > 1:
                yield from _runs(entry, levels - 1)


def _keys(prefix: str, recipe: str, typed: Sequence[str]) -> list[str]:
    """Return the keys of any recipe and of this one as ``key=``, or the classes that a key may name."""
    key, equals, _ = prefix.partition("=")
    if equals:
        return [
            f"{key}={name}" for name in CLASSES.get(key.removeprefix("model.").removeprefix("heldout_"), "").split()
        ]
    keys = [*TOP, *(f"trainer.{name}" for name in TRAINER), *(f"model.{name}" for name in MODEL)]
    for part, place in PARTS.items():
        keys += [f"{part}.{option.name}" for option in class_options(place)]
    plain = _plain(recipe)
    own = [typed_key(place) for place, _ in leaves(plain, lambda *_: False) if place[-1] != "class_path"]
    for part in MODEL:
        name, is_typed = _chosen(part, plain, typed)
        keys += [f"model.{part}.{option.name}" for option in options_of(part.removeprefix("heldout_"), name)]
        if is_typed:  # the settings of the recipe's own class go with it
            own = [leaf for leaf in own if not leaf.startswith(f"model.{part}.") or ".rollout." in leaf]
    return [f"{key}=" for key in dict.fromkeys([*keys, *own])]


def _chosen(part: str, plain: dict[str, Any], typed: Sequence[str]) -> tuple[str, bool]:
    """Return the short name of a part's class, and True if it was typed, False if it is the recipe's."""
    for word in reversed(typed):
        key, _, value = word.partition("=")
        if key.removesuffix(".class_path") == f"model.{part}":
            return value, True
    model = plain.get("model")
    own = model.get(part) if isinstance(model, dict) else None
    return class_name(own), False


def _plain(recipe: str) -> dict[str, Any]:
    """Return a recipe's file as plain values; empty if it cannot be read."""
    import yaml

    named = Path(recipe).expanduser()
    places = (named, named / CONFIG_NAME, shipped_root() / f"{named.stem}.yaml")
    try:
        path = next(place for place in places if place.is_file())
        plain = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (StopIteration, OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return plain if isinstance(plain, dict) else {}
