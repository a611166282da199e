#!/usr/bin/env bash
# Lightning: EMAWeightAveraging that has not started yet puts the untrained weights into checkpoints and validation
#
# One would guess: with EMAWeightAveraging(update_starting_at_step=N) the average is used from step N on. Before that
# there is no average, so validation, checkpoints and the end of fit see the trained weights.
#
# What happens (lightning 2.6.6, torch 2.13.0): before the first update the "average" is the copy of the weights made
# when fit began, and it is used in the same places. One weight from 0, trained towards 1, 100 steps:
#                                 weight after fit   validation loss   weight in the checkpoint
#   without the callback               1.000             0.000                1.000
#   update_starting_at_step=50         1.000             0.000                1.000
#   update_starting_at_step=200        0.000             1.000                0.000
# Nothing is logged. Until step N validation reports the loss of the initial weights, so that early stopping and "best"
# checkpoints see a loss that does not move, and a run that ends or is stopped before N gives back what it started
# from. In the checkpoint the trained weights are only under the key "current_model_state".
#
# Why it matters: a late start is the usual way to keep early weights out of an average. Short trial runs of such a
# config, and time limits, then lose their training in silence, and a curve of held-out rewards is flat for N steps.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 lightning==2.6.6
cat > "$folder/check.py" <<'PY'
import logging
import os
import sys
import tempfile

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
print(f"lightning {lightning.__version__}, torch {torch.__version__}")


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.layer.weight)

    def training_step(self, batch, index):
        return (self.layer(batch) - 1).square().mean()

    def validation_step(self, batch, index):
        self.log("loss", (self.layer(batch) - 1).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def numbers(callbacks):
    module, path = Module(), tempfile.mkdtemp(dir=sys.argv[1])
    save = ModelCheckpoint(path, every_n_train_steps=90, save_last=True)
    trainer = lightning.Trainer(max_steps=100, accelerator="cpu", logger=False, enable_progress_bar=False,
                                enable_model_summary=False, callbacks=[*callbacks, save])
    ones = torch.utils.data.DataLoader(torch.ones(100, 1), batch_size=1)
    trainer.fit(module, ones, ones)
    saved = torch.load(os.path.join(path, "last.ckpt"), weights_only=False)["state_dict"]["layer.weight"].item()
    return module.layer.weight.item(), trainer.callback_metrics["loss"].item(), saved


def average(start):
    return EMAWeightAveraging(decay=0.9, update_starting_at_step=start)


results = {"without": numbers([]), "from step 50": numbers([average(50)]), "from step 200": numbers([average(200)])}
for name, (weight, loss, saved) in results.items():
    print(f"{name}: weight after fit {weight:.3f}, validation loss {loss:.3f}, weight in the checkpoint {saved:.3f}")
for name in ("without", "from step 50"):
    assert results[name][0] > 0.99 and results[name][1] < 0.01, name
assert results["from step 200"] == (0, 1, 0), "changed: an average that has not started is not used"
print("as described: the run gives back its initial weights")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
