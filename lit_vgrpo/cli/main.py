"""The command ``lightning`` (also ``lit-vgrpo`` and ``python -m lit_vgrpo``).

Nothing outside of the standard library is imported at first, so that ``--help`` and unknown subcommands answer at once.
``sys.argv`` is never changed: the child processes of a DDP run are started from it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from lit_vgrpo import __version__
from lit_vgrpo.cli.subcommands import SUBCOMMANDS, Subcommand
from lit_vgrpo.system.process import import_without_gc
from lit_vgrpo.system.streams import ignore_broken_pipes


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand, or hand over to the Lightning SDK's own command where that is installed.

    Args:
        argv: Arguments after the program's name; ``None`` reads ``sys.argv`` and takes the process for the command's
            own: its streams, imports and end.

    Returns:
        Exit status: 0, 1 for a failure while training, 2 for a mistake of the user, 130 after Ctrl-C, 143 after
        SIGTERM, 129 after SIGHUP.
    """
    if argv is None and "_ARGCOMPLETE" in os.environ:
        from lit_vgrpo.config.completion import complete

        complete(SUBCOMMANDS)
    args = sys.argv[1:] if argv is None else list(argv)
    if len(args) == 2 and args[0] == "help" and args[1] in SUBCOMMANDS:
        args = [args[1], "--help"]
    subcommand = SUBCOMMANDS.get(args[0]) if args else None
    if subcommand is None and argv is None and (sdk := _lightning_sdk()) is not None:
        return int(sdk() or 0)
    if argv is not None:
        return _answer(args) if subcommand is None else _run(subcommand, args, import_module)
    ignore_broken_pipes()
    if subcommand is not None and subcommand.ends_quickly:
        # It compiles nothing, but bitsandbytes would prepare the compiler when it is imported: a CPU second.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    return _answer(args) if subcommand is None else _run(subcommand, args, import_without_gc)


def _run(subcommand: Subcommand, args: list[str], load: Callable[[str], ModuleType]) -> int:
    asked = any(word in ("-h", "--help") for word in args[1:])
    if asked or (subcommand.needs_arguments and not args[1:]):
        usage = f"usage: lightning {args[0]} {subcommand.usage}\n{subcommand.summary}"
        print(f"{usage}\n\n{_details(subcommand)}" if asked else usage, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    if subcommand.takes_recipe and "LOCAL_RANK" not in os.environ:  # of several ranks, the first reports later
        from lit_vgrpo.config.recipe import look_at
        from lit_vgrpo.errors import UserError, report

        try:
            look_at(args[1])
        except UserError as error:
            report(error.errors)
            return 2
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    module, function = subcommand.target.split(":")
    try:
        _show_in_terminal("Loading ...")
        body = getattr(load(module), function)
        _show_in_terminal("           ")
        return int(body(args[1:]))
    except KeyboardInterrupt:
        print("Stopped before anything was done.", file=sys.stderr)
        return 130


def _details(subcommand: Subcommand) -> str:
    """Return the example, and the options and keys with their defaults."""
    from lit_vgrpo.config.help import command_options, recipe_keys, table

    parts = [f"Example: lightning {subcommand.example}"]
    if options := command_options(subcommand.options):
        parts.append(table("Options:", options))
    return "\n\n".join([*parts, recipe_keys()] if subcommand.takes_recipe else parts)


def _show_in_terminal(text: str) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        print(text, end="\r", file=sys.stderr, flush=True)


def _lightning_sdk() -> Callable[[], int | None] | None:
    if Path(sys.argv[0]).stem != "lightning" or find_spec("lightning_sdk") is None:
        return None
    try:
        return import_module("lightning_sdk.cli.entrypoint").main_cli
    except (ImportError, AttributeError):
        return None


def _answer(args: list[str]) -> int:
    first = args[0] if args else None
    if first in ("-V", "--version"):
        print(f"lit-vgrpo {__version__}")
        return 0
    if first in ("-h", "--help"):
        lines = [f"  lightning {name} {own.usage}\n      {own.summary}" for name, own in SUBCOMMANDS.items()]
        print("\n".join(["usage:", *lines, "Try: lightning run tiny_shapes"]))
        return 0
    if first == "--print-completion":
        from lit_vgrpo.config.completion import print_completion

        text, status = print_completion(args[1:])
        print(text, file=sys.stderr if status else sys.stdout)
        return status
    said = "No subcommand given" if first is None else f"{first!r} is not a subcommand"
    print(f"{said}. Use one of: {', '.join(SUBCOMMANDS)}. Try: lightning run tiny_shapes", file=sys.stderr)
    return 2
