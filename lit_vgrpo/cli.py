"""The command ``lightning`` (also ``lit-vgrpo`` and ``python -m lit_vgrpo``).

Standard library only at import, so that an unknown verb or ``--help`` answers at once. ``sys.argv`` is read and never
changed: the child processes of a DDP run are started from it.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple


class Verb(NamedTuple):
    """A verb of the command: where its function lives and what the help says about it."""

    target: str
    usage: str
    summary: str
    takes_recipe: bool = False


VERBS: dict[str, Verb] = {
    "run": Verb(
        "lit_vgrpo.commands.run:run",
        "RECIPE.yaml [OVERLAY.yaml ...] [key=value ...] [--resume]",
        "train a recipe, or a curriculum of several; a shipped one goes by its name",
        takes_recipe=True,
    ),
    "check": Verb(
        "lit_vgrpo.commands.check:check",
        "RECIPE.yaml [OVERLAY.yaml ...] [key=value ...] [--memory 80GiB] [--untrusted]",
        "find every fault of a recipe, no training; --untrusted lists the code, variables and hosts that it names",
        takes_recipe=True,
    ),
    "eval": Verb(
        "lit_vgrpo.commands.evaluate.command:evaluate",
        "RUN [--ema] [--reference] [--checkpoint FILE] [--fid-reference FOLDER] [--features NETWORK] [--out FILE.json] "
        "[key=value ...]",
        "score the held-out prompts with a run's weights, with confidence intervals",
    ),
    "export": Verb(
        "lit_vgrpo.commands.export.command:export",
        "RUN --to DIR [--format kohya] [--ema] [--merge] [--dtype bfloat16] [--checkpoint FILE] [key=value ...]",
        "write a run's LoRA, or its weights as a pipeline folder, for diffusers to load",
    ),
    "sample": Verb(
        "lit_vgrpo.commands.sample.command:sample_images",
        "RUN --prompt TEXT [--prompt TEXT ... | --prompts FILE] [--seed 0] [--count 1] [--reference] [--ema] "
        "[--checkpoint FILE] [--steps N] [--guidance G] [--out DIR] [key=value ...]",
        "draw prompts with a run's weights as PNG files",
    ),
    "compare": Verb(
        "lit_vgrpo.commands.compare.command:compare",
        "RECIPE.yaml [key=value ...] [--methods vgrpo,mixgrpo,...] [--seeds 3] [--target 0.6,0.7] "
        "[--settings published,tuned] [--iterations N] [--evaluate-every 5] [--jobs 2] [--first-seed 0] [--out FOLDER] "
        "[--sweep]",
        "race training methods on the same task; the same command continues one that was stopped",
        takes_recipe=True,
    ),
    "score": Verb(
        "lit_vgrpo.commands.score.command:score",
        "REWARD_OR_RECIPE IMAGE_OR_FOLDER ... [--prompt TEXT | --prompts FILE] [--out FILE.json|.csv] [--batch-size 1] "
        "[key=value ...]",
        "score image files with a reward, each part and the sum",
    ),
    "check-reward": Verb(
        "lit_vgrpo.commands.score.check_reward:check_reward",
        "RECIPE.yaml [OVERLAY.yaml ...] [key=value ...] [--images FOLDER] [--num-prompts 4] [--images-per-prompt 2]",
        "try a recipe's rewards on a few images: scores, failures, time, memory",
        takes_recipe=True,
    ),
    "serve-reward": Verb(
        "lit_vgrpo.commands.serve.command:serve",
        "REWARD_OR_RECIPE [key=value ...] [--host 127.0.0.1] [--port 8000] [--token-env NAME] [--device cpu|cuda:0] "
        "[--batch-size 32] [--max-wait-ms 5] [--max-request-mb 64] [--max-images 256] [--max-megapixels 4]",
        "score images over HTTP for runs on other machines",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run one of our verbs, or hand over to the Lightning SDK's own command where that is installed.

    Args:
        argv: the arguments after the program's name; ``None`` reads ``sys.argv``.

    Returns:
        The exit status: 0, 1 for a failure while training, 2 for a mistake of the user, 130 after Ctrl-C, 143 after
        SIGTERM, 129 after SIGHUP.
    """
    args = sys.argv[1:] if argv is None else list(argv)
    verb = VERBS.get(args[0]) if args else None
    sdk = _lightning_sdk() if verb is None and argv is None and _called_as_lightning() else None
    if sdk is not None:
        return int(sdk() or 0)
    outputs = _outlast_readers() if argv is None else []
    status = _answer(args) if verb is None else _run(verb, args)
    return next((1 for output in outputs if output.is_incomplete()), 0) or status


def _run(verb: Verb, args: list[str]) -> int:
    asked = any(word in ("-h", "--help") for word in args[1:])
    if asked or not args[1:]:
        print(f"usage: lightning {args[0]} {verb.usage}\n{verb.summary}", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    if verb.takes_recipe and "LOCAL_RANK" not in os.environ:  # of several ranks the first one speaks, later
        from lit_vgrpo.config.recipe import look_at
        from lit_vgrpo.errors import UserError, report

        try:
            look_at(args[1])
        except UserError as error:
            report(error.faults)
            return 2
    _quiet_libraries()
    module, function = verb.target.split(":")
    try:
        with _said("Loading ..."):
            body = getattr(import_module(module), function)
        return int(body(args[1:]))
    except KeyboardInterrupt:
        print("Stopped before anything was done.", file=sys.stderr)
        return 130


@contextmanager
def _said(text: str) -> Iterator[None]:
    """Show a text in a terminal while something takes its time."""
    in_terminal = sys.stderr is not None and sys.stderr.isatty()
    if in_terminal:
        print(text, end="\r", file=sys.stderr, flush=True)
    yield
    if in_terminal:
        print(" " * len(text), end="\r", file=sys.stderr, flush=True)


class _Output(io.FileIO):
    """A standard stream that never fails: what a closed pipe or terminal, or a full disk, does not take is dropped.

    What a run makes is in its folder, and what is printed only tells of it: a pager that is closed must not end a
    training of days, and ``| head`` is no error.
    """

    _lost: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # a reader that has left, a terminal that is gone
                self._lost = error
            return memoryview(data).nbytes

    def is_incomplete(self) -> bool:
        """Say so where a file, which somebody will read, lacks what was printed."""
        sys.stdout.flush()
        if self._lost is not None:
            print(f"Not all of the output could be written: {self._lost.strerror}.", file=sys.stderr)
        return self._lost is not None


def _outlast_readers() -> list[_Output]:
    """Put the standard streams on outputs that never fail."""
    outputs = []
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell, with >&-; its number must not go to the next file that is opened
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  open for as long as the process
        if isinstance(stream, io.TextIOWrapper):
            output = _Output(stream.fileno(), "wb", closefd=False)
            buffer = io.BufferedWriter(output)
            text = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=stream.line_buffering)
            setattr(sys, name, text)
            outputs.append(output)
    return outputs


def _called_as_lightning() -> bool:
    return Path(sys.argv[0]).stem == "lightning"


def _lightning_sdk() -> Callable[[], int | None] | None:
    if find_spec("lightning_sdk") is None:
        return None
    try:
        return import_module("lightning_sdk.cli.entrypoint").main_cli
    except (ImportError, AttributeError):
        return None


def _answer(args: list[str]) -> int:
    if args and args[0] in ("-V", "--version"):
        from lit_vgrpo import __version__

        print(f"lit-vgrpo {__version__}")
        return 0
    lines = [f"  lightning {name} {verb.usage}\n      {verb.summary}" for name, verb in VERBS.items()]
    if args and args[0] in ("-h", "--help"):
        print("\n".join(["usage:", *lines, "Try: lightning run tiny_shapes"]))
        return 0
    said = f"{args[0]!r} is not a verb of this command" if args else "No verb given"
    print(f"{said}. Use {' or '.join(VERBS)}, for example: lightning run tiny_shapes", file=sys.stderr)
    return 2


def _quiet_libraries() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # deepspeed, imported by diffusers, reports on stdout which accelerator it found
    logging.getLogger("DeepSpeed").addFilter(_is_worth_saying)
    # imported by peft where it is installed, and warns of kernels that only quantized networks need
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def _is_worth_saying(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING and "accelerator" not in record.getMessage()
