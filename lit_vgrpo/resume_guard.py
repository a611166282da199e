"""What stands between a Trainer and a checkpoint that it must not go on from."""

from __future__ import annotations

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lit_vgrpo.checkpoint_file import FileCheckpointIO


class ResumeGuard(Callback):
    """Has checkpoints written whole or not at all, and refuses damaged ones."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Some strategies write in a way of their own and refuse another one.
        try:
            if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
                trainer.strategy.checkpoint_io = FileCheckpointIO()
        except (MisconfigurationException, NotImplementedError):
            return
