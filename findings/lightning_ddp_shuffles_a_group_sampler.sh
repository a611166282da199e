#!/usr/bin/env bash
# Lightning: with two devices a sampler that repeats each prompt for a group is shuffled, and the groups are torn apart
#
# One would guess: a sampler of one's own, which yields each index four times in a row so that a batch of four is a
# group, keeps its order under DDP: Lightning leaves it alone, or deals it out to the ranks in order.
#
# What happens (lightning 2.6.6, torch 2.13.0): with Trainer's use_distributed_sampler=True, its default, the indices
# that the sampler yields are put into a random order, then dealt out.
#   1 device     [0, 0, 0, 0]  [1, 1, 1, 1]  [2, 2, 2, 2]  [3, 3, 3, 3]
#   2 devices    rank 0: [3, 2, 2, 3]  [0, 3, 1, 1]      rank 1: [2, 1, 2, 1]  [3, 0, 0, 0]
# A sampler is kept in order only if it is torch's SequentialSampler. Nothing is logged.
#
# Why it matters: group-relative advantages of such batches compare images of different prompts, which trains towards
# easy prompts. Code that works on one GPU still runs on eight. The same holds for a curriculum, or batches by length.
# Pass use_distributed_sampler=False and let the sampler give each rank its groups.
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
from torch.utils.data import DataLoader, Sampler

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", ".*num_workers.*")


class Groups(Sampler):
    def __iter__(self):
        return iter([index for index in range(4) for _ in range(4)])

    def __len__(self):
        return 16


class Module(lightning.LightningModule):
    def __init__(self, folder):
        super().__init__()
        self.layer, self.seen, self.folder = torch.nn.Linear(1, 1), [], Path(folder)

    def training_step(self, batch, index):
        self.seen.append(batch.tolist())
        return self.layer(batch.float()[:, None]).mean()

    def on_train_end(self):
        (self.folder / f"{self.global_rank}.json").write_text(json.dumps(self.seen))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def batches(devices, **options):
    folder = tempfile.mkdtemp(dir=sys.argv[1])
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=devices, logger=False,
                                strategy="ddp_spawn" if devices > 1 else "auto", enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False, **options)
    trainer.fit(Module(folder), DataLoader(torch.arange(4), sampler=Groups(), batch_size=4))
    seen = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(devices)]
    print(f"{devices} devices {options}: {seen}")
    return [batch for one in seen for batch in one]


if __name__ == "__main__":
    print(f"lightning {lightning.__version__}, torch {torch.__version__}")
    whole = lambda found: sum(len(set(batch)) == 1 for batch in found) / len(found)
    assert whole(batches(1)) == 1, "changed: one device does not keep the order"
    assert whole(batches(2, use_distributed_sampler=False)) == 1, "changed: the sampler itself is not kept"
    assert whole(batches(2)) < 0.5, "changed: groups stay whole"
    print("as described")
PY
"$folder/venv/bin/python" "$folder/check.py" "$folder"
