"""The strategies that recipes name, and those that are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
    StrategyRegistry,
)

from lit_vgrpo.fsdp import FSDP2
from lit_vgrpo.micro_batch import auto_fault
from lit_vgrpo.policies.precision import scaling_fault
from lit_vgrpo.policies.speed import sharding_fault
from lit_vgrpo.portable import PortableCheckpoints
from lit_vgrpo.zero import ZeRO

if TYPE_CHECKING:
    from lit_vgrpo.module import VGRPOModule
    from lit_vgrpo.sizes import Sizes

__all__ = ["FSDP2", "ZeRO", "register", "strategy_fault", "strategy_faults"]


PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
USABLE = ", ".join(PRECISIONS)


def strategy_faults(strategy: Strategy, module: VGRPOModule, sizes: Sizes) -> list[str]:
    """What of a run does not go with a strategy, a line each."""
    found = (
        strategy_fault(strategy),
        precision_fault(strategy),
        plugin_fault(strategy),
        module.optimizer_config.sharding_fault(strategy),
        sharding_fault(module.policy, strategy),
        scaling_fault(module.policy, strategy),
        auto_fault(sizes, strategy),
    )
    return [fault for fault in found if fault is not None]


def strategy_fault(strategy: Strategy) -> str | None:
    """Why a run cannot go on under a strategy, in a line; ``None`` when it can."""
    name = type(strategy).__name__
    advice = {DeepSpeedStrategy: "zero2", FSDPStrategy: "fsdp2", ModelParallelStrategy: "fsdp2"}
    if not isinstance(strategy, PortableCheckpoints):
        for kind, ours in advice.items():
            if isinstance(strategy, kind):
                return f"trainer.strategy={name} writes checkpoints that only it can read. Use trainer.strategy={ours}."
        return None
    precision = strategy.precision_plugin.precision
    if precision != "32-true":
        return (
            f"trainer.precision={precision} would cast the trained weights under {name}. "
            "Leave it out and set model.policy.dtype=bfloat16."
        )
    return None


def precision_fault(strategy: Strategy) -> str | None:
    """Why a precision of the trainer's cannot be trained in, in a line; ``None`` where it can.

    All but autocast cast the trained weights, and leave the policy's other parts, which compute in types of their own.
    """
    precision = strategy.precision_plugin.precision
    if isinstance(strategy, PortableCheckpoints) or precision in PRECISIONS:
        return None
    instead = "Leave it out" if precision == "64-true" else "Leave it out and set model.policy.dtype=bfloat16"
    return f"trainer.precision={precision} would cast the trained weights alone. {instead}, or use one of: {USABLE}."


def plugin_fault(strategy: Strategy) -> str | None:
    """Why a plugin cannot write this run's checkpoints, in a line; ``None`` where none is in the way."""
    if isinstance(strategy.checkpoint_io, AsyncCheckpointIO):
        return (
            "trainer.plugins=AsyncCheckpointIO writes a checkpoint some time later, and RunCheckpoint has to know "
            "that it is whole. Leave it out."
        )
    return None


def register() -> None:
    """Make the strategies known to Lightning by name: ``trainer.strategy=zero2``."""
    for stage in (1, 2, 3):
        StrategyRegistry.register(f"zero{stage}", ZeRO, f"DeepSpeed ZeRO-{stage}", override=True, stage=stage)
    for stage in (2, 3):
        text = f"DeepSpeed ZeRO-{stage} with CPU offload"
        StrategyRegistry.register(f"zero{stage}_offload", ZeRO, text, override=True, stage=stage, offload=True)
    StrategyRegistry.register("fsdp2", FSDP2, "Fully sharded data parallel, torch's second version", override=True)


register()
