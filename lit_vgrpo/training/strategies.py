"""Names of the strategies in recipes, and checks for settings that would silently train or save wrongly under each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Literal

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
    StrategyRegistry,
)
from typing_extensions import override

from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.policies.acceleration import attention_error
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.training.checkpoint_file import PortableCheckpoints
from lit_vgrpo.training.context_parallel import context_errors
from lit_vgrpo.training.optimizer import CustomOptimizer, OptimizerConfig
from lit_vgrpo.training.sharded import FSDP2, ZeRO

ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "Adadelta")
"""torch's optimizers whose state holds a tensor of the weight's shape, or a scalar, per weight."""
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
"""Precisions of the trainer that do not cast weights."""


class AbsentGPU(CPUAccelerator, CUDAAccelerator):  # type: ignore[misc]
    """GPUs of another machine, with the CPU in their place: a Trainer is built for them to be checked, not to run."""

    @staticmethod
    @override
    def parse_devices(devices: int | str | list[Any]) -> int:  # type: ignore[override]
        """Return the number of devices; all devices of an unknown machine are one."""
        if isinstance(devices, str):
            devices = devices.strip(",").split(",") if "," in devices else int(devices)
        return max(1, devices) if isinstance(devices, int) else len(devices)


def precision_error(strategy: Strategy) -> str | None:
    """Return why weights cannot keep their type under the trainer's precision, or ``None``."""
    kept = PRECISIONS[:1] if isinstance(strategy, PortableCheckpoints) else PRECISIONS
    if (precision := strategy.precision_plugin.precision) in kept:
        return None
    advice = "Leave it out and set model.policy.dtype, such as bfloat16."
    return f"trainer.precision={precision} would cast the trained weights. {advice}"


def strategy_errors(
    strategy: Strategy,
    policy: Policy,
    optimizer: OptimizerConfig | CustomOptimizer,
    sizes: Sizes,
    clip_algorithm: Literal["norm", "value"] = "norm",
) -> Iterator[str]:
    """Yield one line for each part of a run that does not work under a strategy."""
    is_portable, name = isinstance(strategy, PortableCheckpoints), type(strategy).__name__
    if isinstance(strategy, DeepSpeedStrategy | FSDPStrategy | ModelParallelStrategy) and not is_portable:
        ours = "zero2" if isinstance(strategy, DeepSpeedStrategy) else "fsdp2"
        yield f"trainer.strategy={name} writes checkpoints that only it can read. Use trainer.strategy={ours}."
    elif isinstance(strategy.checkpoint_io, AsyncCheckpointIO):
        yield "trainer.plugins=AsyncCheckpointIO returns before a checkpoint is on disk. Leave it out."
    elif (error := precision_error(strategy)) is not None:
        yield error
    elif (precision := strategy.precision_plugin.precision) == "bf16-mixed" and policy.dtype != torch.bfloat16:
        # Lightning replaces 16-mixed on a CPU
        typed = precision if strategy.root_device.type != "cpu" else "16-mixed or bf16-mixed"
        yield (
            f"trainer.precision={typed} has no effect: the policy computes in "
            f"model.policy.dtype={str(policy.dtype).removeprefix('torch.')}. Leave it out, or set "
            "model.policy.dtype=bfloat16."
        )
    if is_portable:
        yield from _optimizer_errors(strategy, optimizer)
        if policy.quantisation is not None:
            # FSDP2 and ZeRO-3 shard weights of one floating-point type; under ZeRO-1 and ZeRO-2 it is untested.
            yield (
                f"model.policy.quantisation={policy.quantisation} works on one device and under DDP, not under {name}. "
                "Leave it out, or use trainer.strategy=ddp."
            )
    if isinstance(strategy, FSDP2) or (isinstance(strategy, ZeRO) and strategy.stage == 3):
        # Compiled blocks are untested with the hooks by which FSDP2 and ZeRO-3 gather weights.
        whole = {name: getattr(policy, name, False) for name in ("fold_lora", "channels_last")}
        for option, value in {"compile": policy.compile_network, **whole}.items():
            if value is True:
                yield (
                    f"model.policy.{option}=true needs whole weights on every rank, and {name} shards them. "
                    "Leave it out, or use trainer.strategy=zero2."
                )
    if policy.dtype == torch.float16 and getattr(strategy.precision_plugin, "scaler", None) is None:
        # The loss is a mean over about 1e5 latent values, and float16's smallest number is 6e-8.
        yield (
            "model.policy.dtype=float16: gradients underflow, because nothing scales the loss. Use "
            "model.policy.dtype=bfloat16, or, on a GPU without it, trainer.precision=16-mixed, which scales it."
        )
    if isinstance(strategy, ZeRO) and sizes.micro_batch_size == "auto":
        yield (
            "data.micro_batch_size=auto does not work under ZeRO: a trial does not measure its buffers. Set a number, "
            "or use trainer.strategy=ddp or fsdp2."
        )
    if isinstance(strategy, ZeRO) and clip_algorithm != "norm":
        yield (
            f"model.gradient_clip_algorithm={clip_algorithm} does not work under ZeRO. Leave it out, or use ddp or "
            "fsdp2."
        )
    if isinstance(strategy, ZeRO) and len(policy.network_names) > 1:
        # It has zeros for a missing gradient, and AdamW then moves the weights by their moments.
        yield (
            "Two trained networks do not work under ZeRO: the one that no image of an update needs would move, too. "
            "Use trainer.strategy=ddp or fsdp2."
        )
    error = attention_error(policy.attention_backend or "native", isinstance(strategy.accelerator, AbsentGPU))
    yield from [] if error is None else [error]
    if isinstance(strategy, FSDP2):
        yield from [*strategy.mesh_errors(), *context_errors(policy, strategy.context_parallel)]


def _optimizer_errors(strategy: Strategy, optimizer: OptimizerConfig | CustomOptimizer) -> Iterator[str]:
    """Yield why an optimizer's state cannot be put into a checkpoint under a strategy that shards it."""
    fits, name = ELEMENTWISE if isinstance(strategy, FSDP2) else ("AdamW",), optimizer.kind
    if isinstance(optimizer, CustomOptimizer):
        name = optimizer.name
        is_fit = name in fits and optimizer.made.__module__.startswith("torch.optim")
    else:
        is_fit = name == "adamw"
    if not is_fit:
        yield (
            f"model.optimizer={name} keeps state that {type(strategy).__name__} cannot put into a checkpoint. "
            f"Use torch's {', '.join(fits)}, or trainer.strategy=ddp."
        )


def launcher_error(ranks: int) -> str | None:
    """Return why the processes that a launcher starts would not form one run of ``ranks`` ranks, or ``None``."""
    launchers = (kind() for kind in (TorchElasticEnvironment, SLURMEnvironment) if kind.detect())
    if (launcher := next(launchers, None)) is None:
        return None
    started = launcher.world_size()
    if isinstance(launcher, SLURMEnvironment) and started > 1 and "SLURM_STEP_ID" not in os.environ:
        return (
            f"SLURM's job has {started} tasks, but this process was not started by srun, so it would wait for the "
            f"others forever. Put srun before the command, or SLURM_JOB_NAME=bash to start {ranks} from here."
        )
    if started == ranks:
        return None
    advice = "Set trainer.devices to the number of processes on a node."
    if isinstance(launcher, SLURMEnvironment) and started == 1:
        advice = f"Set trainer.devices=1, start {ranks} with srun, or put SLURM_JOB_NAME=bash before the command."
    return (
        f"The launcher starts {started} processes, but trainer.devices times trainer.num_nodes is {ranks}: each would "
        f"train a run by itself. {advice}"
    )


# The names in recipes, as in ``trainer.strategy=zero2``.
for _stage in (1, 2, 3):
    StrategyRegistry.register(f"zero{_stage}", ZeRO, override=True, stage=_stage)
    if _stage > 1:
        StrategyRegistry.register(f"zero{_stage}_offload", ZeRO, override=True, stage=_stage, offload=True)
StrategyRegistry.register("fsdp2", FSDP2, override=True)
