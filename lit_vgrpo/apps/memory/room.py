"""Comparison of an estimate with the device's memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from lit_vgrpo.apps.memory.estimate import ADVICE, estimate
from lit_vgrpo.errors import UserError, is_deliberate, one_line
from lit_vgrpo.policies.meta import NotEstimated
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.system.memory import available_bytes
from lit_vgrpo.training.micro_batch import shown
from lit_vgrpo.training.strategies import AbsentGPU

if TYPE_CHECKING:
    from lit_vgrpo.launch.recipe_cli import RecipeCLI

SMALLEST_RESERVE, RESERVED = 2**30, 20
"""Memory reserved on a GPU for CUDA, its libraries and fragmentation: at least this many bytes, and one part in
this many. A choice, not a measurement."""


def memory_report(cli: RecipeCLI, given: str | None = None) -> tuple[str, list[str]]:
    """Return the estimate as text, and an error if the recipe needs more than its device has.

    A GPU counts as empty, even if other processes are using it. The batch sizes must fit the world size.

    Args:
        given: Size of another GPU to compare with, such as ``80GiB``.

    Raises:
        NotEstimated: There is no estimate; the message is the reason.
    """
    is_absent = isinstance(cli.trainer.accelerator, AbsentGPU)
    device = torch.device("cuda", 0) if is_absent or given is not None else cli.trainer.strategy.root_device
    if given is not None:
        name, size = "the given GPU", gpu_memory_of(given)
    elif is_absent:
        name, size = "", 0
    elif device.type == "cuda":
        name, size = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    else:
        name, size = "this machine's free memory", available_bytes() // max(1, cli.trainer.num_devices)
    free = size if device.type == "cpu" else max(0, size - max(SMALLEST_RESERVE, size // RESERVED))
    try:
        needed = estimate(cli, device)
    except NotEstimated:
        raise
    except LoadError as error:
        raise UserError(str(error)) from error
    except Exception as error:  # such as shapes that depend on values: a missing estimate must not fail the check
        if is_deliberate(error):  # the run's first update would raise it too
            raise UserError(str(error)) from error
        raise NotEstimated(f"{type(error).__name__}: {one_line(error)}") from error
    hint = "" if size and device.type == "cuda" else " Compare with a GPU: --memory 80GiB."
    text = f"{needed.table()}\n{f'Available: {shown(free)}, {name}.' if size else 'This machine has no GPU.'}{hint}"
    if needed.unknown:
        text += f"\nNot included, because their size is unknown: models of the reward {', '.join(needed.unknown)}."
    too_large = (
        f"The recipe needs about {shown(needed.peak)} per rank, in {needed.peak_phase}; {shown(free)} is available "
        f"({name}). Set {ADVICE[needed.peak_phase]}."
    )
    return text, [too_large] if size and needed.peak > free else []


def gpu_memory_of(text: str) -> int:
    """Return the bytes of a GPU size as sold, a number of GiB with or without a unit; raise UserError if it is invalid.

    >>> gpu_memory_of("80GB") == gpu_memory_of("80") == 80 * 2**30
    True
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:gi?b?)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise UserError(f"{text} is not a GPU size. Write it as --memory 80GiB.")
    return round(float(match[1]) * 2**30)
