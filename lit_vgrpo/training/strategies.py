"""Names of the strategies in recipes, and checks for settings that would silently train or save wrongly under each."""

from __future__ import annotations

from typing import Any

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


def strategy_errors(
    strategy: Strategy, policy: Policy, optimizer: OptimizerConfig | CustomOptimizer, sizes: Sizes
) -> list[str]:
    """Return one line for each part of a run that does not work under a strategy."""
    errors = (
        strategy_error(strategy),
        optimizer_error(strategy, optimizer),
        whole_weights_error(strategy, policy),
        quantisation_error(strategy, policy),
        scaling_error(strategy, policy),
        micro_batch_error(strategy, sizes),
        attention_error(policy.attention_backend or "native", isinstance(strategy.accelerator, AbsentGPU)),
    )
    mesh_errors = (
        [*strategy.mesh_errors(), *context_errors(policy, strategy.context_parallel)]
        if isinstance(strategy, FSDP2)
        else []
    )
    return [*(error for error in errors if error is not None), *mesh_errors]


def launcher_error(ranks: int) -> str | None:
    """Return why a launcher's processes would not form one run, or ``None``; on one device Lightning ignores them."""
    launchers = (kind() for kind in (TorchElasticEnvironment, SLURMEnvironment) if kind.detect())
    started = next((launcher.world_size() for launcher in launchers), ranks)
    if started == ranks:
        return None
    return (
        f"The launcher starts {started} processes, but trainer.devices times trainer.num_nodes is {ranks}: each would "
        "train a run by itself. Set trainer.devices to the number of processes on a node."
    )


def strategy_error(strategy: Strategy) -> str | None:
    """Return why a run cannot use a strategy or the trainer's precision, or ``None``."""
    is_portable = isinstance(strategy, PortableCheckpoints)
    if isinstance(strategy, DeepSpeedStrategy | FSDPStrategy | ModelParallelStrategy) and not is_portable:
        return (
            f"trainer.strategy={type(strategy).__name__} writes checkpoints that only it can read. "
            f"Use trainer.strategy={'zero2' if isinstance(strategy, DeepSpeedStrategy) else 'fsdp2'}."
        )
    if isinstance(strategy.checkpoint_io, AsyncCheckpointIO):
        return "trainer.plugins=AsyncCheckpointIO returns before a checkpoint is on disk. Leave it out."
    precision = strategy.precision_plugin.precision
    if precision in (PRECISIONS[:1] if is_portable else PRECISIONS):
        return None
    return (
        f"trainer.precision={precision} would cast the trained weights. Leave it out and set model.policy.dtype, "
        "such as bfloat16."
    )


def clipping_error(strategy: Strategy, algorithm: str) -> str | None:
    """Return why gradients cannot be clipped by an algorithm under a strategy, or ``None``."""
    if algorithm == "norm" or not isinstance(strategy, ZeRO):
        return None
    return f"model.gradient_clip_algorithm={algorithm} does not work under ZeRO. Leave it out, or use ddp or fsdp2."


def optimizer_error(strategy: Strategy, optimizer: OptimizerConfig | CustomOptimizer) -> str | None:
    """Return why an optimizer does not work under a strategy, or ``None``."""
    if optimizer.kind == "adamw" or not isinstance(strategy, PortableCheckpoints):
        return None
    fits = ELEMENTWISE if isinstance(strategy, FSDP2) else ("AdamW",)
    name = optimizer.kind
    if isinstance(optimizer, CustomOptimizer):
        cls = getattr(optimizer.make, "func", optimizer.make)  # a class with its options bound
        name = cls.__name__
        if name in fits and cls.__module__.startswith("torch.optim"):
            return None
    return (
        f"model.optimizer={name} keeps state that {type(strategy).__name__} cannot put into a checkpoint. "
        f"Use torch's {', '.join(fits)}, or trainer.strategy=ddp."
    )


def whole_weights_error(strategy: Strategy, policy: Policy) -> str | None:
    """Return which speed option of a policy needs whole weights that a strategy shards, or ``None``.

    Compiled blocks are untested with the hooks by which FSDP2 and ZeRO-3 gather weights.
    """
    used = [name for name, value in (("compile", policy.compile_network), ("fold_lora", policy.fold_lora)) if value]
    if not used or not (isinstance(strategy, FSDP2) or (isinstance(strategy, ZeRO) and strategy.stage == 3)):
        return None
    return (
        f"model.policy.{used[0]}=true needs whole weights on every rank, and {type(strategy).__name__} shards them. "
        "Leave it out, or use trainer.strategy=zero2."
    )


def quantisation_error(strategy: Strategy, policy: Policy) -> str | None:
    """Return why a quantised network does not work under a strategy, or ``None``.

    FSDP2 and ZeRO-3 shard weights of one floating-point type; under ZeRO-1 and ZeRO-2 it is untested.
    """
    if policy.quantisation is None or not isinstance(strategy, PortableCheckpoints):
        return None
    return (
        f"model.policy.quantisation={policy.quantisation} works on one device and under DDP, not under "
        f"{type(strategy).__name__}. Leave it out, or use trainer.strategy=ddp."
    )


def scaling_error(strategy: Strategy, policy: Policy) -> str | None:
    """Return why a policy cannot be trained in float16, or ``None``.

    The loss is a mean over about 1e5 latent values, so most gradients underflow in float16 (smallest number: 6e-8)
    unless the loss is scaled before the backward pass.
    """
    if policy.dtype != torch.float16 or getattr(strategy.precision_plugin, "scaler", None) is not None:
        return None
    return (
        "model.policy.dtype=float16: gradients underflow, because nothing scales the loss. Use "
        "model.policy.dtype=bfloat16, or, on a GPU without it, trainer.precision=16-mixed, which scales it."
    )


def micro_batch_error(strategy: Strategy, sizes: Sizes) -> str | None:
    """Return why ``micro_batch_size="auto"`` does not work under a strategy, or ``None``."""
    if sizes.micro_batch_size != "auto" or not isinstance(strategy, ZeRO):
        return None
    return (
        "data.micro_batch_size=auto does not work under ZeRO: a trial does not measure its buffers. Set a number, or "
        "use trainer.strategy=ddp or fsdp2."
    )


# The names in recipes, as in ``trainer.strategy=zero2``.
for _stage in (1, 2, 3):
    StrategyRegistry.register(f"zero{_stage}", ZeRO, override=True, stage=_stage)
    if _stage > 1:
        StrategyRegistry.register(f"zero{_stage}_offload", ZeRO, override=True, stage=_stage, offload=True)
StrategyRegistry.register("fsdp2", FSDP2, override=True)
