"""Small runs with callbacks that look at all ranks' images: ``rank_worker.py SPEC.json``."""

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import lightning as L
import torch
from helpers import Breaking, Brightness, make_data, make_module, make_trainer
from processes import small_strategy

from lit_vgrpo import OptimizerConfig
from lit_vgrpo.callbacks import EMA, FID, CollapseStop, RewardHackAlarm
from lit_vgrpo.callbacks.report import KeptImages
from lit_vgrpo.launch.train import leave_together
from lit_vgrpo.rewards import JPEGCompressibility, Weighted
from lit_vgrpo.training import strategies as _  # noqa: F401  known to Lightning by name from here on
from lit_vgrpo.training.checkpoint import RunCheckpoint
from lit_vgrpo.training.trainer_internals import run_folder


class OnOneRank(RewardHackAlarm):
    """Rings on rank 0 alone, after the second iteration; the others must stop with it."""

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.is_global_zero and trainer.current_epoch == 1:
            for watch in self.watches.values():
                watch.add = lambda now: self.patience
        super().on_train_epoch_end(trainer, pl_module)


def run(spec, name, callbacks, **options):
    torch.manual_seed(0)
    reward = Weighted([Brightness(), JPEGCompressibility()])
    module = make_module(spec["sd3"], reward=reward, optimizer=OptimizerConfig(lr=1e-4))
    module.evaluator.observers.append(KeptImages(2))
    data = make_data(heldout_limit=5, heldout_images_per_prompt=3, eval_batch_size=4)
    folder = Path(spec["out"], name)
    options |= {"devices": spec["devices"], "strategy": spec["strategy"]} if spec["devices"] > 1 else {}
    trainer = make_trainer(folder, 3, [*callbacks, RunCheckpoint(1)], enable_checkpointing=True, **options)
    error = ""
    try:
        trainer.fit(module, datamodule=data)
    except FloatingPointError as stopped:
        error = str(stopped)
    return {
        "iterations": trainer.current_epoch,
        "error": error.replace(f"{run_folder(trainer)}", "RUN"),
        "heldout": module.evaluator.latest,
        "fingerprint": module.evaluator.history[-1].fingerprint,
    }


def guard(spec):
    """Runs with an alarm, and on two ranks with weights that break on one; each rank writes what it found."""
    found = {"alarm": run(spec, "alarm", [OnOneRank(metric=None, action="stop")])}
    if spec["devices"] > 1:
        found["broken"] = run(spec, "broken", [Breaking(), CollapseStop()])
    Path(spec["out"], f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


class Witness(L.Callback):
    """Keeps what every evaluation found."""

    def __init__(self):
        self.found = []

    def on_train_start(self, trainer, pl_module):
        self.found.append(dict(pl_module.evaluator.latest))

    def on_validation_end(self, trainer, pl_module):
        self.found.append(dict(pl_module.evaluator.latest))


def fid(spec):
    """A run with FID and KID; each rank writes what it found."""
    torch.manual_seed(0)
    module = make_module(spec["sd3"], optimizer=OptimizerConfig(lr=1e-3))
    strategy, witness = spec["strategy"], Witness()
    callbacks = [EMA(0.5), FID(spec["real"], features=spec["script"], kid=True), witness]
    data = make_data(heldout_limit=7, heldout_images_per_prompt=3, eval_batch_size=4)
    parallel = {"devices": 2, "strategy": small_strategy(strategy)} if strategy else {}
    trainer = make_trainer(spec["out"], 1, callbacks, **parallel)
    trainer.fit(module, datamodule=data)
    Path(spec["out"], f"{strategy}-{trainer.global_rank}.json").write_text(json.dumps(witness.found))


if __name__ == "__main__":
    spec = json.loads(Path(sys.argv[1]).read_text())
    guard(spec["guard"])
    fid(spec["fid"])
    leave_together()
