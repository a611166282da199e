"""Exports the trained weights in the diffusers format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_vgrpo.core.sharding import full, is_sharded, local
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.errors import one_line, shell_line
from lit_vgrpo.policies.modular import readdress
from lit_vgrpo.system.paths import write_new_folder
from lit_vgrpo.system.process import bar
from lit_vgrpo.training.folder import EXPORT
from lit_vgrpo.training.saved_weights import averaged_weights, evaluated_weights
from lit_vgrpo.training.trainer_internals import run_folder

if TYPE_CHECKING:
    from lit_vgrpo.module import VGRPOModule


class Export(L.Callback):
    """Saves the policy after training, with the EMA's weights if that callback is used.

    LoRA: a folder for ``pipe.load_lora_weights``; full weights: a pipeline folder. A failed export only warns, because
    the checkpoint, which is saved afterwards, has the same weights.

    Args:
        folder: Destination; relative paths are inside the run folder.

    Raises:
        ValueError: The folder is not a separate folder, such as ``..``.
    """

    def __init__(self, folder: str = EXPORT) -> None:
        path = Path(folder)
        if not path.name or ".." in path.parts:
            raise ValueError(f"folder={folder} is not a separate folder. Use a name in the run folder, such as export.")
        self.folder = folder

    def on_train_end(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        policy, root = pl_module.policy, run_folder(trainer)
        with bar("Exporting the weights", total=1), averaged_weights(trainer, pl_module):
            # All ranks gather sharded weights, rank 0 writes them: an adapter, or a pipeline with its frozen weights.
            adapter = policy.lora_rank is not None
            written = trainable_parameters(policy.network) if adapter else dict(policy.network.named_parameters())
            sharded = any(is_sharded(p) for p in written.values())
            weights = {name: full(p, local(p)) for name, p in written.items()} if sharded else None
            if trainer.is_global_zero:
                folder = root / self.folder
                advice = f"Free some space and run: {shell_line('lightning', 'export', root, '--to', folder)}"
                try:
                    with write_new_folder(folder, advice, replace=True) as draft:
                        policy.save(draft, weights)
                        readdress(draft, folder.name)
                except Exception as error:  # the checkpoint must still be saved
                    rank_zero_warn(f"No export. {one_line(error)}")
        trainer.strategy.barrier("export")

    def finish(self, trainer: L.Trainer, module: VGRPOModule, completed: bool) -> None:
        """Add the model card, since only now the last evaluation is known; called on the first rank."""
        run = run_folder(trainer)
        folder = run / self.folder
        if completed and folder.is_dir():
            from lit_vgrpo.report.model_card import add_card  # imports matplotlib

            weights, spec = evaluated_weights(trainer), module.evaluator.spec
            add_card(folder, run, module.policy, folder, weights, trainer.current_epoch, spec=spec)
