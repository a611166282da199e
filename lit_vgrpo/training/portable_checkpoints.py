"""Checkpoints that can be resumed under any strategy and world size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import nn
from typing_extensions import override

from lit_vgrpo.core.sharding import cut, full, local, write
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.training.checkpoint_file import verify_for_trainer


class PortableCheckpoints(Strategy):
    """Writes one file per checkpoint, on rank 0, with whole tensors, as a single process does.

    Weights are loaded before they are sharded or wrapped, as under DDP, so that hooks run in the same order.
    """

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return False

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @property
    def _trained(self) -> dict[str, nn.Parameter]:
        """Trained parameters by name, in the optimizer's order."""
        assert self.lightning_module is not None
        return trainable_parameters(self.lightning_module)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        # Memory-mapped, so that the processes of a node share its pages.
        safe = True if weights_only is None else weights_only
        content: dict[str, Any] = torch.load(checkpoint_path, map_location="cpu", mmap=True, weights_only=safe)
        verify_for_trainer(checkpoint_path, content.get("state_dict", {}))
        return content

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the trained weights, whole on rank 0; all ranks must call it."""
        return {name: full(p, local(p)) for name, p in self._trained.items()}

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        saved = checkpoint["state_dict"]
        trained = {name: p for name, p in self._trained.items() if name in saved}
        write(trained, {name: cut(p, saved[name]) for name, p in trained.items()})
