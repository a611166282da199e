"""Whether an estimate fits the device that a recipe would use, and what to set where it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lit_vgrpo.errors import one_line
from lit_vgrpo.estimate import estimate as stages
from lit_vgrpo.estimate.estimate import Estimate, estimate
from lit_vgrpo.estimate.meta import NotHere
from lit_vgrpo.estimate.shares import shown
from lit_vgrpo.hub import LoadError
from lit_vgrpo.memory import available_bytes

if TYPE_CHECKING:
    from lit_vgrpo.cli import RecipeCLI

NOT_COUNTED = "Not in it: the rewards' models, and what the device's libraries take for themselves."


def memory_report(cli: RecipeCLI) -> tuple[str, list[str]]:
    """The estimate as text, and the fault where the recipe needs more than its device has.

    The sizes must fit the world size, and the policy's own check must have passed.
    """
    try:
        found = estimate(cli)
    except NotHere as error:
        return f"memory: not estimated, {error} is not here", []
    except LoadError as error:
        return "memory: not estimated", [str(error)]
    except NotImplementedError:  # what the meta device says when a shape depends on values, which it has none of
        return f"memory: not estimated, shapes in {cli.model.policy.pipeline_class} depend on the prompts", []
    except Exception as error:  # of a family of the user's own: a check is no place to fail for want of an estimate
        return f"memory: not estimated: {type(error).__name__}: {one_line(error)}", []
    place, room = device_room(cli)
    lines = [found.table(), f"Room: {place}, {shown(room)}. {NOT_COUNTED}"]
    if found.peak <= room:
        return "\n".join(lines), []
    fault = (
        f"The recipe needs about {shown(found.peak)} on a rank, in {found.peak_phase}; there is room for {shown(room)} "
        f"({place}). {remedy(cli, found)}"
    )
    return "\n".join(lines), [fault]


def device_room(cli: RecipeCLI) -> tuple[str, int]:
    """The name of the device of a rank, and the bytes it has: all of a GPU's, a rank's part of the memory that is free.

    A GPU may be in use by others just now; what it has is a property of the machine.
    """
    device = cli.trainer.strategy.root_device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    return "this machine's free memory", available_bytes() // max(1, cli.trainer.num_devices)


def remedy(cli: RecipeCLI, found: Estimate) -> str:
    """What to type next: the first thing that is not done yet and lowers the phase that needs most."""
    policy, plan, phase = cli.model.policy, cli.datamodule.sizes.plan(cli.trainer.world_size), found.peak_phase
    on_gpu = cli.trainer.strategy.root_device.type == "cuda"
    rollout = min(cli.model.rollout_batch_size or plan.images_per_rank, plan.images_per_rank)
    decoded = min(rollout, policy.decode_batch_size)
    encoders, weights = found.parts["text encoders"], found.parts["trained weights"]
    smaller = [size for size in range(1, plan.micro_batch_size) if plan.micro_batch_size % size == 0]
    evaluated = cli.datamodule.eval_batch_size
    options = {
        "model.policy.gradient_checkpointing=true": phase == stages.TRAINING and not policy.gradient_checkpointing,
        f"data.micro_batch_size={smaller[-1] if smaller else 1}": phase in (stages.TRAINING, stages.STORED) and smaller,
        f"model.rollout_batch_size={max(1, rollout // 2)}": phase in (stages.ROLLOUT, stages.EVALUATION)
        and rollout > 1,
        f"model.policy.decode_batch_size={max(1, decoded // 2)}": phase == stages.DECODING and decoded > 1,
        f"data.eval_batch_size={evaluated // 2}": phase == stages.EVALUATION and evaluated > 1,
        "model.policy.offload_encoders=true": on_gpu and encoders > 0 and not policy.offload_encoders,
        "model.policy.dtype=bfloat16": policy.dtype == torch.float32 and not policy.trains_all,
        "model.policy.lora_rank=32": policy.trains_all,
        "model.optimizer.kind=adamw8bit": on_gpu
        and cli.model.optimizer_config.kind == "adamw"
        and found.parts["AdamW's moments"] > weights,
        "trainer.strategy=fsdp2": cli.trainer.world_size > 1 and not _shards(cli),
    }
    for option, helps in options.items():
        if helps:
            return f"Set {option}."
    return "Use more ranks under trainer.strategy=fsdp2, or a smaller height and width."


def _shards(cli: RecipeCLI) -> bool:
    return type(cli.trainer.strategy).__name__ in ("FSDP2", "ZeRO")
