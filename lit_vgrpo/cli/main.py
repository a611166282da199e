"""The command ``lightning`` (also ``lit-vgrpo`` and ``python -m lit_vgrpo``): its process, errors and exit status.

``sys.argv`` is never changed: the child processes of a DDP run are started from it.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
import warnings
from contextlib import suppress
from typing import Any

from lit_vgrpo.cli.commands import app
from lit_vgrpo.core.ranges import limit_in_words
from lit_vgrpo.errors import RewardError, UserError, error_in_user_code, nearest, report, shell_line
from lit_vgrpo.system.paths import started_here
from lit_vgrpo.system.process import ignore_broken_pipes, is_first_process

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
EXPECTED_ERRORS = (UserError, ValueError, ImportError, OSError)
"""Errors shown as a message only; others are bugs and show a traceback."""

INVALID = r"^Invalid value for '([^']+)': (?:Value error, )?(.*?)(?:, unable to .*)?$"


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments after the program's name; ``None`` reads ``sys.argv`` and manages the process's streams and end.

    Returns:
        Exit status: 0, 1 if the work failed, 2 for a user error, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.
        A page or a server without a run ends with 0 after Ctrl-C and SIGTERM: it is stopped in no other way.
    """
    args = sys.argv[1:] if argv is None else list(argv)
    debug = "--debug" in args
    args = [word for word in args if word != "--debug"]
    if not args or args[0] == "help":
        args = [*args[1:2], "--help"]
    if argv is None:
        ignore_broken_pipes()
        warnings.showwarning = _show_warning
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        if args[0] == "check":
            # It compiles nothing, but bitsandbytes would prepare the compiler when it is imported: a CPU second.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    return _answer(args, debug)


def _show_warning(message: Warning | str, *place: object, **options: object) -> None:
    """Print a warning as one line, without the line of code that gave it."""
    report([f"Warning: {message}"])


def _answer(args: list[str], debug: bool) -> int:
    """Run a command; print its error as one line on the first rank."""
    try:
        if not (rank := os.environ.get("LOCAL_RANK", "0")).isdigit():  # which libraries read when they are imported
            raise UserError(f"LOCAL_RANK={rank} in the environment is not a whole number. Run: unset LOCAL_RANK")
        with started_here():
            return int(app(args, prog_name="lightning", standalone_mode=False, obj=args) or 0)
    except RewardError as error:
        errors, status = [str(error)], 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            where = f" {error.filename}" if error.filename else ""
            advice = "Free some space, or write to another disk (run_dir, TMPDIR)."
            report([f"Cannot write{where}: {error.strerror}. {advice}"])  # on any rank: each may have a separate disk
            return 1
        is_usage = hasattr(error, "format_message")
        if not is_usage and not isinstance(error, EXPECTED_ERRORS):
            if (place := error_in_user_code(error)) is None:
                raise
            error = UserError(place)
        errors, status = _lines(error), 2
    if is_first_process():
        report(errors)
    return status


def _lines(error: Exception) -> list[str]:
    if isinstance(error, UserError):
        return error.errors
    if hasattr(error, "format_message"):
        message = limit_in_words(error.format_message())
        message = re.sub(INVALID, r"\1: \2", message)
        hint = f" Overrides are written key=value{_override_of(error)}" if "No such option" in message else ""
        if message.startswith("Missing "):
            parameter, command = getattr(error, "param", None), getattr(error, "ctx", None)
            hint = f" {getattr(parameter, 'help', None) or ''} Try: lightning help {getattr(command, 'info_name', '')}"
        return [message + "." * (message[-1] not in ".?") + hint]
    return [f"{error} (--debug shows the traceback)"]


def _override_of(error: Any) -> str:
    """Return the override that an unknown option such as ``--max_epochs 3`` stands for, as the end of a sentence."""
    from lit_vgrpo.config.recipe import SECTIONS, find_recipe, loaded
    from lit_vgrpo.config.tree import leaves, typed_key

    words, option = list(error.ctx.obj or []), str(error.option_name)
    name, typed = option.lstrip("-").replace("-", "_"), [word.partition("=")[0] for word in words]
    for word in words[1:] if option in typed else ():
        with suppress(UserError):
            keys = [typed_key(place) for place, _ in leaves(loaded(find_recipe(word)))]
            meant = [key for key in keys if key.endswith(f".{name}") or not error.possibilities]
            key = name if name.partition(".")[0] in SECTIONS else nearest(name, meant)
            value = words[typed.index(option)].partition("=")[2] or [*words[typed.index(option) + 1 :], "VALUE"][0]
            return f": {shell_line(f'{key}={value}')}" if key else "."
    return "."
