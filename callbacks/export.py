"""Exports the trained weights in the diffusers format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_vgrpo.apps.report.model_card import add_card
from lit_vgrpo.callbacks.ema import EMA, averaged_weights
from lit_vgrpo.core.sharding import full, is_sharded, local
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.module import VGRPOModule
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.system.atomic_folder import WRITE_ERRORS, write_error, write_folder_atomically
from lit_vgrpo.training.saved_weights import AVERAGE, TRAINED
from lit_vgrpo.training.trainer_internals import callbacks_of


class Export(L.Callback):
    """Saves the policy after training, with the EMA's weights if that callback is used.

    LoRA: a folder for ``pipe.load_lora_weights``; full weights: a pipeline folder. A failed export only warns, because
    the checkpoint, which is saved afterwards, has the same weights.

    Args:
        folder: destination; relative paths are inside the run folder.

    Raises:
        ValueError: the folder is not a separate folder, such as ``..``.
    """

    def __init__(self, folder: str = "export") -> None:
        path = Path(folder)
        if not path.name or ".." in path.parts:
            raise ValueError(f"folder={folder} is not a separate folder. Use a name in the run folder, such as export.")
        self.folder = folder

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VGRPOModule)
        policy = pl_module.policy
        with averaged_weights(trainer, pl_module):
            # All ranks gather sharded weights, rank 0 writes them: an adapter, or a pipeline with its frozen weights.
            adapter = policy.lora_rank is not None
            written = trainable_parameters(policy.network) if adapter else dict(policy.network.named_parameters())
            sharded = any(is_sharded(p) for p in written.values())
            weights = {name: full(p, local(p)) for name, p in written.items()} if sharded else None
            if trainer.is_global_zero:
                self._write(policy, Path(trainer.default_root_dir), weights)
        trainer.strategy.barrier("export")

    def finish_run(self, trainer: L.Trainer, pl_module: L.LightningModule, completed: bool) -> None:
        """Add the model card, which shows the last evaluation; ``lightning run`` calls it on rank 0."""
        assert isinstance(pl_module, VGRPOModule)
        run = Path(trainer.default_root_dir)
        if completed and (folder := run / self.folder).is_dir():
            variant = AVERAGE if callbacks_of(trainer, EMA) else TRAINED
            add_card(folder, run, pl_module.policy, folder, variant, trainer.current_epoch)

    def _write(self, policy: Policy, root: Path, weights: Mapping[str, Tensor] | None) -> None:
        folder = root / self.folder
        try:
            with write_folder_atomically(folder, replace=True) as draft:
                policy.save(draft, weights)
        except WRITE_ERRORS as error:
            rank_zero_warn(
                f"No export: cannot write {folder}: {write_error(error)}. "
                f"Free some space and run: lightning export {root} --to {folder}"
            )
