"""Standard streams that survive the exit of their readers."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any

from lit_vgrpo.errors import say


class Output(io.FileIO):
    """Standard stream that drops what cannot be written, because closing a pager must not end a long training run."""

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
            text = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=stream.line_buffering)
            setattr(sys, name, text)


def say_from_handler(text: str) -> None:
    """Write to stderr from a signal's handler, which may interrupt another write.

    A live table would draw over what is written past it; its stream locks, and takes the text above the table.
    """
    if hasattr(sys.stderr, "rich_proxied_file"):
        say(text.strip(), error=True)
    else:
        with suppress(OSError):
            os.write(2, text.encode())  # print() is not safe here: a stream cannot be re-entered
