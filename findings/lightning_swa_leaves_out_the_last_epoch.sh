#!/usr/bin/env bash
# Lightning: StochasticWeightAveraging leaves the last epoch out, so that one epoch of it gives untrained weights
#
# One would guess: StochasticWeightAveraging averages the weights at the end of each epoch from swa_epoch_start on, as
# the paper does, and a run of one epoch ends with the weights of that epoch.
#
# What happens (lightning 2.6.6, torch 2.13.0): it takes the weights at the beginning of each of these epochs. A weight
# that grows by 1 in each of 10 steps per epoch, so that the epochs end at 10, 20, 30, 40 and 50:
#   Trainer                           swa_epoch_start      final weight   mean of ends of epochs from the start on
#   max_epochs=5                      0.8, the default     35             45
#   max_epochs=5                      3                    30             40
#   max_epochs=5                      5                    40             50
#   max_epochs=1                      0.8, the default     0              10
#   max_epochs=5, max_steps=20        1                    20             15
# So one epoch of SWA trains for an epoch and gives the untrained weights back. Where max_steps ends the run before
# max_epochs, nothing is averaged. In no line do a ModelCheckpoint or a validation see averaged weights: their last
# value is that of the end of the last epoch. No message says so.
#
# Why it matters: diffusion models are trained for few epochs, often for one, or for a number of steps. The folder's
# checkpoints are not averaged, and a model saved after fit() has lost its last epoch. The newer callback
# WeightAveraging averages after steps.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 lightning==2.6.6
cat > "$folder/check.py" <<'PY'
import logging
import sys
import tempfile
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from torch.utils.data import DataLoader

print(f"lightning {L.__version__}, torch {torch.__version__}")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Growing(L.LightningModule):
    """A module whose weight grows by the learning rate in each step."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.validated = []

    def training_step(self, batch, index):
        return -self.weight

    def validation_step(self, batch, index):
        self.validated.append(self.weight.item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Ends(Callback):
    def __init__(self):
        self.weights = []

    def on_train_epoch_end(self, trainer, module):
        self.weights.append(module.weight.item())


def train(start, **options):
    module, ends = Growing(), Ends()
    folder = tempfile.mkdtemp(dir=sys.argv[1])
    averaging = StochasticWeightAveraging(swa_lrs=1.0, **({} if start is None else {"swa_epoch_start": start}))
    trainer = L.Trainer(
        callbacks=[averaging, ends, ModelCheckpoint(folder, save_last=True)], logger=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, **options)
    trainer.fit(module, DataLoader(torch.zeros(10, 1)), DataLoader(torch.zeros(1, 1)))
    saved = torch.load(Path(folder, "last.ckpt"), weights_only=True)["state_dict"]["weight"].item()
    print(f"{options}, swa_epoch_start {start}: ends of epochs {ends.weights}, final weight {module.weight.item()}, "
          f"last.ckpt {saved}, last validation {module.validated[-1]}")
    assert saved == module.validated[-1] == ends.weights[-1], "changed: checkpoints or validation are averaged"
    return module.weight.item()


for start, options, expected in (
    (None, dict(max_epochs=5), 35.0), (3, dict(max_epochs=5), 30.0), (5, dict(max_epochs=5), 40.0),
    (None, dict(max_epochs=1), 0.0), (1, dict(max_epochs=5, max_steps=20), 20.0),
):
    assert train(start, **options) == expected, "changed: the average"
print("as described: the last epoch is not in the average")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
