#!/usr/bin/env bash
# Lightning: EMAWeightAveraging(update_starting_at_epoch=N) averages from the first step, and counts later ends twice
#
# One would guess: update_starting_at_epoch=3 leaves the average alone for three epochs, as update_starting_at_step does
# for steps, and then averages after each step.
#
# What happens (lightning 2.6.6, torch 2.13.0): an update needs the condition on steps or the one on epochs, and without
# update_starting_at_step the first holds for each step. With three steps per epoch, decay 0.5 and a weight that grows
# by 1 per step, the average after each step is:
#                                  steps 1 to 3      4 to 6            updates after 1, 2, 3 and 4 epochs
#   without the option             1.0  1.5  2.2     3.1  4.1  5.0     3  6  9  12
#   update_starting_at_epoch=3     1.0  1.5  2.2     3.1  4.1  5.0     3  6  9  13
# From epoch 3 on, the weights at the end of an epoch enter once more: the final average is 11.5 and not 11.0. With both
# update_starting_at_step=9 and update_starting_at_epoch=3 the steps wait, and the end of each epoch still counts twice.
# Nothing is logged.
#
# Why it matters: a late start keeps the random weights of the beginning out of an average of decay 0.9999. With this
# option they are in it, and a comparison of starting epochs finds none of its effect. Give update_starting_at_step.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 lightning==2.6.6
cat > "$folder/check.py" <<'PY'
import logging

import lightning
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader

print(f"lightning {lightning.__version__}, torch {torch.__version__}")
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, index):
        return -self.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Recorded(EMAWeightAveraging):
    def __init__(self, **options):
        super().__init__(decay=0.5, **options)
        self.averages, self.counts = [], []

    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)
        self.averages.append(round(self._average_model.module.weight.item(), 1))

    def on_train_epoch_end(self, *args):
        super().on_train_epoch_end(*args)
        self.counts.append(self._average_model.n_averaged.item())


def run(**options):
    callback, module = Recorded(**options), Module()
    Trainer(max_epochs=4, accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False).fit(module, DataLoader(torch.zeros(3, 1)))
    print(f"{options}: averages {callback.averages[:6]}, updates after each epoch {callback.counts}, "
          f"final weight {module.weight.item():.1f}")
    return callback, module.weight.item()


(plain, first), (late, second) = run(), run(update_starting_at_epoch=3)
assert plain.counts == [3, 6, 9, 12]
assert late.counts[0] == 3 and late.averages == plain.averages, "changed: the average starts late"
assert late.counts[-1] == 13 and second > first + 0.4, "changed: the end of an epoch counts once"
by_step, _ = run(update_starting_at_step=9)
both, _ = run(update_starting_at_step=9, update_starting_at_epoch=3)
assert by_step.counts == [0, 0, 0, 3] and both.counts == [0, 0, 0, 4]
print("as described: the first epoch is ignored")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
