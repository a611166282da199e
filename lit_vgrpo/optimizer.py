"""AdamW's settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass
class OptimizerConfig:
    """AdamW over the trainable weights.

    Args:
        lr: learning rate after warm-up; constant from there on.
        betas: decay of the first and second moment.
        weight_decay: decoupled weight decay.
        eps: term added to the denominator.
        warmup_steps: optimizer steps over which the rate rises linearly.
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 1e-4
    eps: float = 1e-8
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"model.optimizer.lr={self.lr} does not train. Use a positive number such as 3e-4.")
        if self.warmup_steps < 0:
            raise ValueError(f"model.optimizer.warmup_steps={self.warmup_steps} is negative. Use 0 or more.")

    def build(self, parameters: Iterable[nn.Parameter]) -> Any:
        """What ``configure_optimizers`` returns: the optimizer, and the schedule where there is one."""
        optimizer = torch.optim.AdamW(
            list(parameters), lr=self.lr, betas=self.betas, weight_decay=self.weight_decay, eps=self.eps
        )
        if not self.warmup_steps:
            return optimizer
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.warmup_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}
