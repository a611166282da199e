"""Small runs with FID and KID under each strategy: ``fid_worker.py SPEC.json``; each rank writes what it found."""

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import lightning as L
import torch
from helpers import make_data, make_module, make_trainer
from processes import small_strategy

from lit_vgrpo import OptimizerConfig
from lit_vgrpo.callbacks import EMA, FID
from lit_vgrpo.training import strategies as _  # noqa: F401  known to Lightning by name from here on


class Witness(L.Callback):
    """Keeps what every evaluation found."""

    def __init__(self):
        self.found = []

    def on_train_start(self, trainer, pl_module):
        self.found.append(dict(pl_module.evaluator.latest))

    def on_validation_end(self, trainer, pl_module):
        self.found.append(dict(pl_module.evaluator.latest))


def main(spec):
    for strategy in spec["strategies"]:
        torch.manual_seed(0)
        module = make_module(spec["sd3"], optimizer=OptimizerConfig(lr=1e-3))
        witness = Witness()
        callbacks = [EMA(0.5), FID(spec["real"], features=spec["script"], kid=True), witness]
        data = make_data(heldout_limit=7, heldout_images_per_prompt=3, eval_batch_size=4)
        parallel = {"devices": 2, "strategy": small_strategy(strategy)} if strategy else {}
        trainer = make_trainer(spec["out"], 1, callbacks, **parallel)
        trainer.fit(module, datamodule=data)
        Path(spec["out"], f"{strategy}-{trainer.global_rank}.json").write_text(json.dumps(witness.found))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
