"""The command's process: its imports, and its rank before a Trainer exists."""

from __future__ import annotations

import logging
import os
from functools import partial
from importlib import metadata

from lit_vgrpo.errors import report


def quiet_imports() -> None:
    """Silence what libraries report while they are imported."""
    # filters, since torch and diffusers set the levels when they are imported
    for name, message in (
        ("DeepSpeed", "accelerator"),  # imported by diffusers, and reports on stdout
        ("bitsandbytes.backends.cpu.ops", "kernels-community"),  # imported by peft
        ("torch.utils._pytree", "Enum subclass"),  # of torchao
        ("diffusers.quantizers.torchao.torchao_quantizer", "Unable to import `torchao`"),
    ):
        logging.getLogger(name).addFilter(partial(_lacks, message))


def _lacks(message: str, record: logging.LogRecord) -> bool:
    return message not in record.getMessage()


def is_first_process() -> bool:
    """Return True on the rank that owns the run folder; works before a Trainer exists."""
    ranks = [os.environ.get(key, "0") for key in ("RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")]
    return all(rank in ("", "0") for rank in ranks)


def report_on_first(line: str) -> None:
    """Print a line on stderr, on the first rank only."""
    if is_first_process():
        report([line])


PACKAGES = ("lit-vgrpo", "lightning", "torch", "diffusers", "transformers", "peft")


def versions() -> dict[str, str]:
    """Return the installed versions of packages that affect a run's numbers."""
    return {name: metadata.version(name) for name in PACKAGES}
