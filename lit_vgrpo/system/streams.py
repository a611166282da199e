"""Standard streams that survive the exit of their readers."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any

from lit_vgrpo.errors import say


class Output(io.FileIO):
    """Standard stream that never fails: output to a closed pipe or terminal, or a full disk, is dropped.

    A run's results are in its folder, and its output only reports them: closing a pager must not end a long training
    run, and ``| head`` is not an error.
    """

    _lost: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # the reader or the terminal is gone
                self._lost = error
            return memoryview(data).nbytes

    def is_incomplete(self) -> bool:
        """Return True and warn if a file lacks part of the output."""
        sys.stdout.flush()
        if self._lost is not None:
            say(f"Not all of the output could be written: {self._lost.strerror}.", error=True)
        return self._lost is not None


def outlast_readers() -> list[Output]:
    """Replace the standard streams with ones that never fail."""
    outputs = []
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell with >&-; the next opened file must not get its number
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  open for as long as the process
        if isinstance(stream, io.TextIOWrapper):
            output = Output(stream.fileno(), "wb", closefd=False)
            buffer = io.BufferedWriter(output)
            text = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=stream.line_buffering)
            setattr(sys, name, text)
            outputs.append(output)
    return outputs


def say_from_handler(text: str) -> None:
    """Write to stderr from a signal's handler, which may interrupt another write; a line end stands before the text.

    A live table would draw over what is written past it; its own stream locks, and takes the text above the table.
    """
    if hasattr(sys.stderr, "rich_proxied_file"):
        say(text.strip(), error=True)
    else:
        with suppress(OSError):
            os.write(2, text.encode())  # print() is not safe here: a stream cannot be re-entered
