#!/usr/bin/env bash
# Lightning: with several optimizer steps per batch, every_n_train_steps saves seldom, and after one skipped step never
#
# One would guess: ModelCheckpoint(every_n_train_steps=10) with manual optimization saves at the end of the first batch
# in which ten more optimizer steps have been taken, so every 10 to 13 steps if a batch takes four.
#
# What happens (lightning 2.6.6, torch 2.13.0), 60 batches:
#   steps per batch                               checkpoints, by optimizer steps
#   1                                             10, 20, 30, 40, 50, 60
#   4                                             20, 40, 60, ... 240: half as many
#   3                                             30, 60, 90, ... 180: a third
#   2                                             10, 20, 30, ... 120
#   2, of which one is left out in batch 3        none in the whole run
# The callback runs at the end of a batch and saves only if the trainer's count of steps is then a multiple of N.
# No message says that fewer are saved.
#
# By time, ModelCheckpoint(train_time_interval=timedelta(0)) saves no checkpoint at all, in any of these runs.
#
# Why it matters: PPO and GRPO take several steps per batch of rollouts, and skip one whose gradient is not finite, or
# whose KL is too large. From the first skip on such a run has no checkpoint, and its end or a crash loses everything.
# Save by epochs, or count skipped steps.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 lightning==2.6.6
cat > "$folder/check.py" <<'PY'
import logging
import re
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
said = []
warnings.showwarning = lambda message, *rest: said.append(str(message))
print(f"lightning {lightning.__version__}, torch {torch.__version__}")


class Module(lightning.LightningModule):
    def __init__(self, steps, left_out):
        super().__init__()
        self.automatic_optimization = False
        self.layer = torch.nn.Linear(1, 1)
        self.steps, self.left_out = steps, left_out

    def training_step(self, batch, index):
        for step in range(self.steps):
            if (index, step) != self.left_out:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(self.layer(batch).sum())
                optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def saved(steps, left_out=None, **when):
    path = Path(tempfile.mkdtemp(dir=sys.argv[1]))
    save = ModelCheckpoint(path, **(when or {"every_n_train_steps": 10}), save_top_k=-1)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False,
                                enable_model_summary=False, callbacks=[save])
    trainer.fit(Module(steps, left_out), torch.utils.data.DataLoader(torch.ones(60, 1), batch_size=1))
    found = sorted(int(re.search(r"step=(\d+)", file.name)[1]) for file in path.glob("*.ckpt"))
    print(f"{steps} steps per batch{', one left out' if left_out else ''}{', by time' if when else ''}: {found}")
    return found


assert saved(1) == list(range(10, 61, 10)), "changed: one step per batch does not save every 10 steps"
assert saved(4) == list(range(20, 241, 20)), "changed: 4 steps per batch do not save every 20 steps"
assert saved(3) == list(range(30, 181, 30)), "changed: 3 steps per batch do not save every 30 steps"
assert saved(2) == list(range(10, 121, 10)), "changed: 2 steps per batch do not save every 10 steps"
assert saved(2, (3, 0)) == [], "changed: a run with a skipped step saves"
assert saved(1, train_time_interval=timedelta(0)) == [], "changed: a run saves by time"
assert not [line for line in said if "every_n_train_steps=10" in line], "changed: it warns"
print("as described")
PY
"$folder/venv/bin/python" "$folder/check.py" "$folder"
