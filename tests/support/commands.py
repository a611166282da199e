"""The command's parts as functions of their arguments, as they are typed."""

from functools import partial
from unittest.mock import patch

from typer.main import get_command

from lit_vgrpo.apps.compare.options import CompareOptions
from lit_vgrpo.cli.commands import app
from lit_vgrpo.cli.main import main

COMMANDS = list(get_command(app).commands)


def command(name, args):
    return main([name, *args])


run, check, export, init = (partial(command, name) for name in ("run", "check", "export", "init"))
evaluate, sample_images, score = (partial(command, name) for name in ("eval", "sample", "score"))
check_reward, report, vote, compare = (partial(command, n) for n in ("check-reward", "report", "vote", "compare"))


def options(name, body, args):
    """Return the options that a command would run with; raise its UserError."""
    with patch(f"lit_vgrpo.{body}") as patched:
        app([name, *args], standalone_mode=False, obj=[name, *args])
    return patched.call_args.args[0]


evaluate_options = partial(options, "eval", "cli.eval.evaluate")
serve_options = partial(options, "serve-reward", "apps.serve.command.serve")


def compare_options(args):
    return CompareOptions(**vars(options("compare", "apps.compare.command.compare", args)))
