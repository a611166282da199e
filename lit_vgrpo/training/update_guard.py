"""Decides which updates take a step: those with finite losses and gradients, and a suitable loss scale."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_vgrpo.core.gather import all_gather
from lit_vgrpo.core.snapshots import all_finite, trainable_parameters
from lit_vgrpo.errors import NotFiniteError
from lit_vgrpo.policies.two_networks import TwoNetworks
from lit_vgrpo.training.sharded import ZeRO, local_gradients

MOST_IN_A_ROW = 10

NonFinite = Literal["stop", "skip"]


class UpdateGuard:
    """Detects updates whose loss or gradient is not finite, the same on every rank, and reports which took a step.

    With a gradient scaler (``trainer.precision=16-mixed``) only losses are checked: the scaler itself skips steps with
    an overflow, and relies on occasional overflows to choose its scale. At a scale of at most 1, which is 16 halvings
    from the scaler's first one, ten consecutive skips stop the run: then the gradient itself is not finite.

    Args:
        action: Stop the run with the reason, or skip the update; ten consecutive skips also stop the run.
    """

    def __init__(self, action: NonFinite = "stop") -> None:
        self.action = action
        self.skipped = self._in_a_row = 0  # updates since the start, and most recently
        self._overflows = 0  # most recent steps that the scaler skipped at a scale of at most 1
        self.norm: Tensor | None = None  # of the last gradient over all ranks, before clipping
        self._losses: list[Tensor] = []
        self._is_refused = False
        self._scale: float | None = None

    def watch(self, loss: Tensor) -> None:
        """Record a micro-batch's loss without synchronising with the device."""
        self._losses.append(loss.detach())

    def refuses(self, gradients: Iterable[Tensor], when: str, norm: Tensor | None = None) -> bool:
        """Return whether to skip this update, or raise NotFiniteError; called once per update, on every rank.

        Args:
            gradients: This rank's gradients, or its shards of them.
            when: The position in the run, for the message.
            norm: Norm of the gradients; they are checked only if it is not finite, since squares may overflow.
        """
        losses, self._losses = self._losses, []
        loss_is_bad, norm_is_bad = _are_bad(losses, norm)
        gradient_is_bad = norm_is_bad and not all_finite(gradients)
        mine = torch.tensor([[int(loss_is_bad), int(gradient_is_bad)]])
        is_bad = all_gather(mine, every_process=True).bool()
        if not is_bad.any():
            self._in_a_row = 0
            return False
        self.skipped += 1
        self._in_a_row += 1
        if self.action == "skip" and self._in_a_row < MOST_IN_A_ROW:
            return True
        what, column = ("loss", 0) if is_bad[:, 0].any() else ("gradient", 1)
        ranks = [str(rank) for rank, bad in enumerate(is_bad[:, column]) if bad]
        where = f" on rank {', '.join(ranks)} of {len(is_bad)}" if len(is_bad) > 1 else ""
        often = f" for {self._in_a_row} updates in a row" if self.action == "skip" else ""
        advice = "Lower model.optimizer.lr or set model.gradient_clip_val=1.0"
        advice += "." if self.action == "skip" else ", or skip such updates: model.non_finite=skip."
        raise NotFiniteError(f"The {what} is not finite{where}{often}, {when}. The weights were not changed. {advice}")

    def check(self, trainer: Trainer, policy: nn.Module, when: str) -> None:
        """Check an update before its step, see :meth:`refuses`, and drop its gradients to skip it."""
        self._scale = _loss_scale(trainer)
        weights = list(trainable_parameters(policy).values())
        drop_zero_gradients(policy)
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients) if gradients else None
        self.norm = total.full_tensor() if isinstance(total, DTensor) else total
        if self._scale is not None:
            if self._overflows == MOST_IN_A_ROW:
                raise NotFiniteError(
                    f"The gradient is not finite at any loss scale, down to {self._scale:.2g}, {when}. The weights "
                    "were not changed. Leave out trainer.precision and set model.policy.dtype=bfloat16 or float32."
                )
            self._is_refused = self.refuses([], when)
        else:
            own = list(local_gradients(weights))
            norm = torch.nn.utils.get_total_norm(own) if self.norm is None else self.norm
            self._is_refused = self.refuses(own, when, norm)
        if self._is_refused:
            for weight in weights:
                weight.grad = None  # an optimizer ignores a weight without gradient, and its moments

    def took_step(self, trainer: Trainer) -> bool:
        """Return ``True`` after an update that changed the weights; a scaler lowers its scale when it skips a step."""
        if isinstance(trainer.strategy, ZeRO):  # only DeepSpeed has the gradient
            self.norm = trainer.strategy.last_gradient_norm()
        scale, before = _loss_scale(trainer), self._scale
        if self._is_refused or scale is None or before is None:
            return not self._is_refused
        is_taken = 0 < before <= scale
        self._overflows = 0 if is_taken or before > 1 else self._overflows + 1
        return is_taken

    def metrics(self) -> dict[str, float]:
        """Return the number of updates skipped since the start, if that does not end the run."""
        return {"policy/skipped_updates": float(self.skipped)} if self.action == "skip" else {}

    def state_dict(self) -> dict[str, int]:
        return {"skipped_updates": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state["skipped_updates"]


def drop_zero_gradients(policy: nn.Module) -> None:
    """Remove the gradient of one of two networks if it is zero, so that the optimizer leaves the network as it is.

    A network that no row of an update needed has no gradient in a single process, but zeros on several ranks.
    """
    network = getattr(policy, "network", None)
    for part in network.children() if isinstance(network, TwoNetworks) else ():
        gradients = [weight.grad for weight in part.parameters() if weight.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients, 1.0)  # the largest does not exist of a rank's empty shard
        if not (total.full_tensor() if isinstance(total, DTensor) else total):
            for weight in part.parameters():
                weight.grad = None


def _are_bad(losses: list[Tensor], norm: Tensor | None) -> tuple[bool, bool]:
    """Return whether a loss is not finite, and whether the norm is not or is unknown, with one synchronisation."""
    numbers = [*losses, *([] if norm is None else [norm])]
    if not numbers:
        return False, True
    device = numbers[0].device
    finite = torch.stack([number.to(device, torch.float32) for number in numbers]).isfinite().tolist()
    return not all(finite[: len(losses)]), norm is None or not finite[-1]


def _loss_scale(trainer: Trainer) -> float | None:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return None if scaler is None else scaler.get_scale()
