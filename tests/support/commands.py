"""The command's parts as functions of their arguments, as they are typed."""

from functools import partial
from unittest.mock import patch

from lit_vgrpo.cli.commands import app
from lit_vgrpo.cli.main import main


def command(name, args):
    return main([name, *args])


run, check, export, init = (partial(command, name) for name in ("run", "check", "export", "init"))
evaluate, sample_images, score = (partial(command, name) for name in ("eval", "sample", "score"))
check_reward, report, vote, compare = (partial(command, n) for n in ("check-reward", "report", "vote", "compare"))

BODIES = {
    "eval": "lit_vgrpo.cli.eval.evaluate",
    "serve-reward": "lit_vgrpo.apps.serve.command.serve",
    "vote": "lit_vgrpo.apps.vote.command.vote",
    "compare": "lit_vgrpo.apps.compare.command.compare",
}


def options(name, args):
    """Return the options that a command would run with; raise its UserError."""
    with patch(BODIES[name]) as body:
        app([name, *args], standalone_mode=False, obj=[name, *args])
    return body.call_args.args[0]


compare_options, vote_options = partial(options, "compare"), partial(options, "vote")
evaluate_options, serve_options = partial(options, "eval"), partial(options, "serve-reward")
