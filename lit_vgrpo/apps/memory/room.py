"""Comparison of an estimate with the device's memory, and advice if it does not fit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lit_vgrpo.apps.memory import estimate as stages
from lit_vgrpo.apps.memory.estimate import Estimate, estimate
from lit_vgrpo.apps.memory.meta import NotHere
from lit_vgrpo.core.batches import at_most
from lit_vgrpo.errors import UserError, one_line
from lit_vgrpo.system.hub import LoadError, local_folder
from lit_vgrpo.system.memory import available_bytes
from lit_vgrpo.training.memory_shares import shown

if TYPE_CHECKING:
    from lit_vgrpo.launch.recipe_cli import RecipeCLI

CONFIGURATIONS = 'hf download {} --include "*.json" "*.txt" "*.model"'
SMALLEST_RESERVE, RESERVED = 2**30, 20
"""Memory reserved on a GPU: at least this many bytes, and this fraction of it. A choice, not a measurement."""


class NotEstimated(Exception):
    """The memory of a recipe cannot be estimated here; the message says why."""


@dataclass(frozen=True)
class Room:
    """Memory of a rank's device.

    Attributes:
        name: Name for messages.
        size: Total bytes.
        reserve: Bytes kept back for a GPU's context, libraries and fragmentation.
    """

    name: str
    device: torch.device
    size: int
    reserve: int = 0

    @property
    def free(self) -> int:
        """Bytes available to the recipe."""
        return max(0, self.size - self.reserve)

    def __str__(self) -> str:
        left = f" minus {shown(self.reserve)} for CUDA, its libraries and fragmentation" if self.reserve else ""
        hint = " Compare with a GPU: --memory 80GiB." if self.device.type == "cpu" else ""
        return f"{self.name}, {shown(self.size)}{left}.{hint}"


def memory_report(cli: RecipeCLI, gpu_memory: int | None = None) -> tuple[str, list[str]]:
    """Return the estimate as text, and an error if the recipe needs more than its device has.

    The batch sizes must fit the world size.

    Args:
        gpu_memory: Bytes of a GPU to compare with instead of this machine's devices.

    Raises:
        NotEstimated: With the reason.
    """
    place = room_of(cli, gpu_memory)
    try:
        found = estimate(cli, place.device)
    except NotHere as error:
        checkpoint = str(error)
        is_hubs = local_folder(checkpoint) is None
        how = f"; its small files are enough: {CONFIGURATIONS.format(checkpoint)}" if is_hubs else ""
        raise NotEstimated(f"{checkpoint} is not here{how}") from error
    except LoadError as error:
        raise UserError(str(error)) from error
    except NotImplementedError as error:  # raised on the meta device if a shape depends on values
        raise NotEstimated(f"shapes in {cli.model.policy.pipeline_class} depend on the prompts") from error
    except Exception as error:  # from a user's own policy: a missing estimate must not fail the check
        raise NotEstimated(f"{type(error).__name__}: {one_line(error)}") from error
    lines = [found.table(), f"Available: {place}"]
    if found.unknown:
        lines.append(f"Not included, because their size is unknown: models of the reward {', '.join(found.unknown)}.")
    if found.peak <= place.free:
        return "\n".join(lines), []
    message = (
        f"The recipe needs about {shown(found.peak)} per rank, in {found.peak_phase}; "
        f"{shown(place.free)} is available ({place.name}). {remedy(cli, found, place.device)}"
    )
    return "\n".join(lines), [message]


def room_of(cli: RecipeCLI, gpu_memory: int | None = None) -> Room:
    """Return a rank's device: a GPU's memory minus a reserve, or the rank's share of this machine's free memory.

    A GPU counts whole, even if other processes are using it now.
    """
    device = cli.trainer.strategy.root_device
    if gpu_memory is not None:
        return Room("the given GPU", torch.device("cuda", 0), gpu_memory, reserve_of(gpu_memory))
    if device.type == "cuda":
        size = torch.cuda.get_device_properties(device).total_memory
        return Room(torch.cuda.get_device_name(device), device, size, reserve_of(size))
    return Room("this machine's free memory", device, available_bytes() // max(1, cli.trainer.num_devices))


def reserve_of(size: int) -> int:
    """Return the bytes of a GPU that are kept back for what is not counted."""
    return max(SMALLEST_RESERVE, size // RESERVED)


def gpu_memory_of(text: str) -> int:
    """Return the bytes of a GPU size as sold: a number of GiB, with or without a unit.

    Raises:
        UserError: The text is not a size.

    >>> gpu_memory_of("80GB") == gpu_memory_of("80") == 80 * 2**30
    True
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:gi?b?)?", text.strip(), re.IGNORECASE)
    size = round(float(found[1]) * 2**30) if found else 0
    if size <= 0:
        raise UserError(f"{text} is not a GPU size. Write it as --memory 80GiB.")
    return size


def remedy(cli: RecipeCLI, found: Estimate, device: torch.device) -> str:
    """Return the advice: the first unused option that lowers the largest phase."""
    policy, plan, phase = cli.model.policy, cli.datamodule.sizes.plan(cli.trainer.world_size), found.peak_phase
    on_gpu = device.type == "cuda"
    rollout = at_most(plan.images_per_iteration, cli.model.rollout_batch_size) or plan.images_per_rank
    decoded = policy.decode_batch_size
    encoders, weights = found.parts["text encoders"], found.parts["trained weights"]
    smaller = [size for size in range(1, plan.micro_batch_size) if plan.micro_batch_size % size == 0]
    evaluated = cli.datamodule.eval_batch_size
    options = {
        "model.policy.gradient_checkpointing=true": phase == stages.TRAINING and not policy.gradient_checkpointing,
        f"data.micro_batch_size={smaller[-1] if smaller else 1}": phase in (stages.TRAINING, stages.STORED) and smaller,
        f"model.rollout_batch_size={max(1, rollout // 2)}": phase in (stages.ROLLOUT, stages.SCOUTS, stages.EVALUATION)
        and rollout > 1,
        f"model.policy.decode_batch_size={max(1, decoded // 2)}": phase == stages.DECODING and decoded > 1,
        f"data.eval_batch_size={evaluated // 2}": phase == stages.EVALUATION and evaluated > 1,
        "model.policy.offload_encoders=true": on_gpu and encoders > 0 and not policy.offload_encoders,
        "model.policy.dtype=bfloat16": policy.dtype == torch.float32 and not policy.trains_all,
        "model.policy.lora_rank=32": policy.trains_all,
        "model.policy.quantisation=nf4": policy.lora_rank is not None
        and policy.quantisation is None
        and not _shards(cli)
        and found.parts["frozen weights"] > found.peak // 4,
        "model.optimizer.kind=adamw8bit": on_gpu
        and cli.model.optimization.optimizer.kind == "adamw"
        and found.parts["AdamW's moments"] > weights,
        "trainer.strategy=fsdp2": cli.trainer.world_size > 1 and not _shards(cli),
    }
    for option, helps in options.items():
        if helps:
            return f"Set {option}."
    return "Use more ranks under trainer.strategy=fsdp2, or a smaller height and width."


def _shards(cli: RecipeCLI) -> bool:
    return type(cli.trainer.strategy).__name__ in ("FSDP2", "ZeRO")
