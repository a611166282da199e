#!/usr/bin/env bash
# accelerate: prepare() splits a loader with a DistributedSampler once more, so that half of the data is never seen
#
# One would guess: accelerator.prepare(loader) recognises a loader whose sampler is torch's DistributedSampler, as
# Lightning does, and leaves the choice of its samples alone; or it raises an error.
#
# What happens (accelerate 1.15.0, torch 2.13.0): the batches that a rank's sampler yields are divided among the ranks
# again. With N ranks, 1 / N of the data is seen. 16 samples, batch size 2, two ranks, no shuffling:
#                    rank 0                  rank 1                   samples seen in all
#   not prepared     0 2 4 6 8 10 12 14      1 3 5 7 9 11 13 15       16
#   prepared         0 2 8 10                5 7 13 15                 8
# A batch sampler that gives each rank its part of a group of images of one prompt is split in the same way. Nothing is
# logged.
#
# Why it matters: reinforcement learning with groups uses such samplers. Split again, rank 0 draws its part of the first
# group while rank 1 draws its part of the second, so groups are incomplete and advantages are relative to other
# prompts. Leave such a loader out of prepare().
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 accelerate==1.15.0
cat > "$folder/check.py" <<'PY'
import accelerate
import torch
from accelerate.utils import gather_object
from torch.utils.data import DataLoader, DistributedSampler

IMAGES_PER_RANK = 2


class GroupSampler:
    """For each prompt, this rank's part of the group: a batch that repeats the prompt's index."""

    def __init__(self, prompts):
        self.prompts = prompts

    def __iter__(self):
        return ([prompt] * IMAGES_PER_RANK for prompt in range(self.prompts))

    def __len__(self):
        return self.prompts


accelerator = accelerate.Accelerator(cpu=True)
data = list(range(16))
sampler = DistributedSampler(data, accelerator.num_processes, accelerator.process_index, shuffle=False)
loaders = {"samples": DataLoader(data, batch_size=2, sampler=sampler),
           "groups": DataLoader(data, batch_sampler=GroupSampler(8))}
ranks = {}
for name, loader in loaders.items():
    ranks[name] = gather_object([[batch.tolist() for batch in loader]])
    ranks[name + ", prepared"] = gather_object([[batch.tolist() for batch in accelerator.prepare(loader)]])
if accelerator.is_main_process:
    print(f"accelerate {accelerate.__version__}, torch {torch.__version__}")
    for name, (first, second) in ranks.items():
        print(f"{name}: rank 0 {first}, rank 1 {second}")
    seen = {name: {sample for rank in pair for batch in rank for sample in batch} for name, pair in ranks.items()}
    first, second = ranks["groups"]
    assert len(seen["samples"]) == 16 and first == second
    assert len(seen["samples, prepared"]) == 8, "changed: all samples are seen"
    assert all(one != two for one, two in zip(*ranks["groups, prepared"])), "changed: both ranks draw one prompt"
    print("as described: a loader that is sharded is sharded again")
accelerator.end_training()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/check.py"
