"""Checks of the checkpoint that a Trainer resumes from."""

from __future__ import annotations

from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lit_vgrpo.data import PromptDataModule
from lit_vgrpo.training.checkpoint_file import INPUTS_KEY, FileCheckpointIO
from lit_vgrpo.training.inputs import Inputs, changed_inputs, inputs_of


class ResumeGuard(Callback):
    """Puts fingerprints of a run's input files into its checkpoints, and refuses damaged checkpoints.

    Args:
        allow_changes: continue although input files have changed; ``None`` does so with a warning.

    Attributes:
        inputs: the fingerprints found so far.
        said: changes that were already reported.

    Raises:
        RuntimeError: before training, if ``allow_changes`` is false and files have changed.
    """

    def __init__(self, allow_changes: bool | None = None) -> None:
        self.allow_changes = allow_changes
        self.inputs: Inputs = {}
        self.said: list[str] = []

    def expect(self, inputs: Inputs, allow_changes: bool, said: list[str]) -> None:
        """Set the attributes after the checkpoint was checked before training."""
        self.inputs, self.allow_changes, self.said = inputs, allow_changes, said

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Some strategies write checkpoints in their own way and accept no other.
        try:
            if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
                trainer.strategy.checkpoint_io = FileCheckpointIO()
        except (MisconfigurationException, NotImplementedError):
            return

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != TrainerFn.FITTING or not checkpoint.get(INPUTS_KEY):
            return
        self._look(trainer, pl_module)
        for line in changed_inputs(checkpoint[INPUTS_KEY], self.inputs):
            if line in self.said:
                continue
            if self.allow_changes is False:
                raise RuntimeError(f"{line}. Put back what was there, or add allow_changes=true.")
            rank_zero_warn(f"{line}. Training continues with the current version.")

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(trainer, pl_module)

    def _look(self, trainer: Trainer, module: Any) -> None:
        """Take the fingerprints once everything is read; files that change later do not matter."""
        data = getattr(trainer, "datamodule", None)
        self.inputs = inputs_of(module, data if isinstance(data, PromptDataModule) else None, self.inputs)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[INPUTS_KEY] = self.inputs
