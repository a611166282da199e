"""The strategies that recipes name, and those that are refused."""

from __future__ import annotations

from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
    StrategyRegistry,
)

from lit_vgrpo.fsdp import FSDP2
from lit_vgrpo.portable import PortableCheckpoints
from lit_vgrpo.zero import ZeRO

__all__ = ["FSDP2", "ZeRO", "register", "strategy_fault"]


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


def register() -> None:
    """Make the strategies known to Lightning by name: ``trainer.strategy=zero2``."""
    for stage in (1, 2, 3):
        StrategyRegistry.register(f"zero{stage}", ZeRO, f"DeepSpeed ZeRO-{stage}", override=True, stage=stage)
    for stage in (2, 3):
        text = f"DeepSpeed ZeRO-{stage} with CPU offload"
        StrategyRegistry.register(f"zero{stage}_offload", ZeRO, text, override=True, stage=stage, offload=True)
    StrategyRegistry.register("fsdp2", FSDP2, "Fully sharded data parallel, torch's second version", override=True)


register()
