#!/usr/bin/env bash
# Lightning: after seed_everything all ranks of DDP draw the same noise and the same times
#
# One would guess: seed_everything(0, workers=True) makes a run reproducible, and each rank of DDP gets a seed of its
# own, as each worker of a DataLoader does. So torch.randn in training_step differs between ranks.
#
# What happens (lightning 2.6.6, torch 2.13.0), two ranks, torch.rand(1) in three training steps:
#   ddp, seed_everything(0, workers=True)   both ranks: 0.0885 0.132 0.3074
#   ddp_spawn, also without a seed          both ranks the same, since they get the random state of the first process
#   ddp without a seed                      the ranks differ
# Nothing is logged.
#
# Why it matters: a diffusion loss draws noise and times in training_step. With a seed, N ranks estimate the gradient
# with one rank's draws: the data are N times as many, the noise levels are not. Online RL draws its latents so too:
# the same prompt on two ranks then gives the same image twice, and a group spread over ranks has copies instead of
# samples. The loss looks the same. Draw from a generator with a seed for each rank, or for each image.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 lightning==2.6.6
cat > "$folder/check.py" <<'PY'
import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", ".*num_workers.*")


class Module(lightning.LightningModule):
    def __init__(self, folder):
        super().__init__()
        self.layer, self.drawn, self.folder = torch.nn.Linear(1, 1), [], Path(folder)

    def training_step(self, batch, index):
        self.drawn.append(round(torch.rand(1).item(), 4))
        return self.layer(batch[:, None]).mean()

    def on_train_end(self):
        (self.folder / f"{self.global_rank}.json").write_text(json.dumps(self.drawn))
        self.trainer.strategy.barrier()  # the first process ends the others

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    folder, strategy, seed = sys.argv[1:]
    if seed != "none":
        lightning.seed_everything(int(seed), workers=True, verbose=False)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy=strategy, logger=False,
                                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Module(folder), DataLoader(torch.rand(6)))
    if trainer.is_global_zero:
        print(f"lightning {lightning.__version__}, torch {torch.__version__}: {strategy}, seed {seed}")
PY
draw() {
    mkdir "$folder/$1-$2"
    "$folder/venv/bin/python" "$folder/check.py" "$folder/$1-$2" "$1" "$2" 2>/dev/null
    echo "ranks: $(cat "$folder/$1-$2/0.json") $(cat "$folder/$1-$2/1.json")"
}
differ() { ! cmp --silent "$folder/$1/0.json" "$folder/$1/1.json"; }
draw ddp 0
draw ddp_spawn none
draw ddp none
differ ddp-0 && { echo "changed: seeded ranks differ"; exit 1; }
differ ddp_spawn-none && { echo "changed: spawned ranks differ"; exit 1; }
differ ddp-none || { echo "changed: ranks draw the same without a seed"; exit 1; }
echo "as described"
