"""Start and end of the command's own process, without what is not needed of them."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
from contextlib import suppress
from importlib import import_module
from types import ModuleType

from lit_vgrpo.errors import report


def import_at_once(name: str) -> ModuleType:
    """Import a module and what it needs, without collecting garbage meanwhile.

    Imports make a million objects that stay. Each full collection would look at all of them, twenty times over.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        if was_enabled:
            gc.enable()
            gc.freeze()  # nor need later collections look at them, but the last one, which looks for leaks
            atexit.register(gc.unfreeze)


def quiet_imports() -> None:
    """Silence what libraries report while they are imported."""
    # deepspeed, imported by diffusers, reports on stdout which accelerator it found
    logging.getLogger("DeepSpeed").addFilter(
        lambda record: record.levelno >= logging.WARNING and "accelerator" not in record.getMessage()
    )
    # imported by peft where it is installed, and warns of kernels that only quantized networks need
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
        lambda record: "kernels-community" not in record.getMessage()
    )
    # where torchao is installed, which peft and diffusers import: of its own enums, and of classes that it has moved;
    # filters, since torch and diffusers set the levels when they are imported
    logging.getLogger("torch.utils._pytree").addFilter(lambda record: "Enum subclass" not in record.getMessage())
    logging.getLogger("diffusers.quantizers.torchao.torchao_quantizer").addFilter(
        lambda record: "Unable to import `torchao`" not in record.getMessage()
    )


def is_first_process() -> bool:
    """Return True on the rank that owns the run folder; works before a Trainer exists."""
    ranks = [os.environ.get(key, "0") for key in ("RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")]
    return all(rank in ("", "0") for rank in ranks)


def report_on_first(line: str) -> None:
    """Print a line on stderr, on the first rank only."""
    if is_first_process():
        report([line])


class QuickEnd:
    """Ends the process after all exit handlers, without freeing every module, which takes a second.

    Registered before any other handler, it is the last to run. It is for a command that leaves no file open.

    Attributes:
        status: Exit status; ``None`` ends as ever.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        atexit.register(self._end)

    def _end(self) -> None:
        if self.status is None or getattr(sys, "last_value", None) is not None:
            return
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(self.status)
