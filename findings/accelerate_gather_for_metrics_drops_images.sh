#!/usr/bin/env bash
# accelerate: gather_for_metrics drops the images of whole prompts if each prompt of a loader has several images
#
# One would guess: gather_for_metrics removes what was added to make the last batch even, and nothing else.
#
# What happens (accelerate 1.15.0, torch 2.13.0): at the last batch it keeps as many rows as the loader's last batch had
# prompts, in every tensor it is given. Two processes, batches of 4 prompts, 4 images for each prompt:
#                                       prompts in the last step    rows kept      prompts without any image
#   16 prompts                          8                           64 of 64       0
#   12 prompts                          4                           36 of 48       3
#   13 prompts                          5                           37 of 52       3
#   10 prompts                          2                           34 of 40       1
# One row per prompt comes back complete in all cases. Its documentation is about duplicates in the last batch.
# Nothing is logged.
#
# Why it matters: mean rewards, FID and win rates over a prompt set leave out up to three quarters of the images of the
# last step, always those of the same prompts. In RL the groups of a prompt are torn apart. Gather tensors of shape
# (prompts, images), or repeat the prompts in the data set.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 accelerate==1.15.0
cat > "$folder/check.py" <<'PY'
import accelerate
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

IMAGES = 4
EXPECTED = {16: (64, 0), 12: (36, 3), 13: (37, 3), 10: (34, 1)}
accelerator = Accelerator(cpu=True)
say = accelerator.print
say(f"accelerate {accelerate.__version__}, torch {torch.__version__}")
assert accelerator.num_processes == 2
for count, (rows, missing) in EXPECTED.items():
    loader = accelerator.prepare(DataLoader(range(count), batch_size=4))
    single, several, grouped = [], [], []
    for prompts in loader:
        single.append(accelerator.gather_for_metrics(prompts))
    for prompts in loader:
        several.append(accelerator.gather_for_metrics(prompts.repeat_interleave(IMAGES)))
    for prompts in loader:
        grouped.append(accelerator.gather_for_metrics(prompts[:, None].expand(-1, IMAGES).contiguous()))
    single, several, grouped = (torch.cat(parts) for parts in (single, several, grouped))
    images = torch.bincount(several, minlength=count)
    say(f"{count} prompts: {len(single)} rows with one per prompt; {len(several)} of {count * IMAGES} with {IMAGES}; "
        f"images per prompt {images.tolist()}")
    assert sorted(single.tolist()) == list(range(count)) and grouped.shape == (count, IMAGES)
    assert len(several) == rows and (images == 0).sum() == missing, "changed: other rows are kept"
say("as described: images of whole prompts are dropped")
accelerator.end_training()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/check.py"
