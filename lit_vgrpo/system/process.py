"""The command's process: its imports, its rank before a Trainer exists, and its standard streams."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from contextvars import ContextVar
from importlib import metadata
from shutil import get_terminal_size
from typing import Any

from lit_vgrpo.errors import report
from lit_vgrpo.system.paths import start_folder

BAR = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
DELAY_S = 2.0
shows_bars = ContextVar("shows_bars", default=True)
"""False for a Trainer that shows its progress with anything but :class:`~lit_vgrpo.callbacks.ProgressBar`."""
PACKAGES = ("lit-vgrpo", "lightning", "torch", "diffusers", "transformers", "peft")


def quiet_imports() -> None:
    """Silence messages of libraries during their import."""
    # filters, since torch and diffusers set the levels when they are imported
    for name, words in (
        ("DeepSpeed", "accelerator"),  # imported by diffusers, prints to stdout
        ("bitsandbytes.backends.cpu.ops", "kernels-community"),  # imported by peft
    ):
        logging.getLogger(name).addFilter(lambda record, words=words: words not in record.getMessage())  # type: ignore[misc]


def is_first_process() -> bool:
    """Return True on the rank that owns the run folder; works before a Trainer exists."""
    ranks = [os.environ.get(key, "0") for key in ("RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")]
    return not any(rank.isdigit() and int(rank) for rank in ranks)


def report_on_first(line: str) -> None:
    """Print a line on stderr, on the first rank only."""
    if is_first_process():
        report([line])


def bar(title: str, items: Any = None, is_brief: bool = False, kind: Any = None, **options: Any) -> Any:
    """Return tqdm's bar on a terminal's stderr, removed at its end; elsewhere, or on another rank, it shows nothing.

    Most waits that are ``is_brief`` end before a bar would be shown; ``kind`` is a subclass of tqdm. Other options are
    tqdm's, such as ``total``.
    """
    from tqdm import tqdm

    columns, rows = get_terminal_size()  # 80 x 24 in a container that does not know
    if not (shows_bars.get() and is_first_process() and sys.stderr is not None and sys.stderr.isatty()):
        options["disable"] = True  # otherwise not given, so that TQDM_DISABLE works
    options |= {"delay": DELAY_S} if is_brief else {}
    options = {"leave": False, "file": sys.stderr, "ncols": columns, "nrows": rows, "bar_format": BAR, **options}
    return (kind or tqdm)(items, title, **options)


def requeue_job() -> None:
    """Requeue the SLURM job of this process, as Lightning does; report it if that fails."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    try:
        job = os.environ["SLURM_JOB_ID"] if array is None else f"{array}_{task}"
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.SubprocessError) as error:
        report([f"The job was not requeued: {error}"])


def versions() -> dict[str, str]:
    """Return the installed versions of packages that affect a run's numbers."""
    return {name: metadata.version(name) for name in PACKAGES}


def commit() -> str | None:
    """Return the git commit of the start folder, with ``-dirty`` if files were changed; ``None`` outside of one."""
    try:
        command = ["git", "-C", str(start_folder()), "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


class Output(io.FileIO):
    """Standard stream that drops output it cannot write, because closing a pager must not end a long training run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def ignore_broken_pipes() -> None:
    """Replace the standard streams with ones that never fail."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell with >&-; the next opened file must not get its number
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  open for as long as the process
        if isinstance(stream, io.TextIOWrapper):
            buffer = io.BufferedWriter(Output(stream.fileno(), "wb", closefd=False))
            is_line_buffered = stream.line_buffering or stream.write_through  # PYTHONUNBUFFERED sets the latter alone
            text = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=is_line_buffered)
            setattr(sys, name, text)
