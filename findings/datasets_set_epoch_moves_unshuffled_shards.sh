#!/usr/bin/env bash
# datasets, accelerate: a streamed dataset that is not shuffled is read in another order from its second pass on
#
# One would guess: a streamed dataset without shuffle() is read from its first row to its last, in every pass.
# set_epoch() changes the order of shuffled data only.
#
# What happens (datasets 5.2.0, accelerate 1.15.0, torch 2.13.0): for every epoch but 0, the files or shards of any
# streamed dataset are put into a random order that depends on the epoch. A loader that accelerate prepared calls
# set_epoch() with the number of its pass, also for validation data. First rows of six shards of two rows, and two
# streams of the same rows, in six and in three shards, read side by side:
#                                       first rows                       rows beside themselves
#   plain DataLoader, each pass         0 1 2 3 4 5 6 7 8 9 10 11        12 of 12
#   accelerate, first pass              0 1 2 3 4 5 6 7 8 9 10 11        12 of 12
#   accelerate, second pass             8 9 0 1 4 5 2 3 10 11 6 7        2 of 12
#   accelerate, third pass              6 7 10 11 4 5 8 9 0 1 2 3        2 of 12
#   accelerate, skip(0), each pass      0 1 2 3 4 5 6 7 8 9 10 11        12 of 12
# set_epoch() alone does the same. A dataset with one shard keeps its order. Nothing is logged.
#
# Why it matters: prompts that are given noise by their position get other noise at each evaluation, and pictures that
# are stored beside their latents or captions in another stream are paired wrongly. Only the first pass, which is the
# one that is looked at, is right. skip(0) keeps the order. Store what belongs together in one row.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 datasets==5.2.0 accelerate==1.15.0
cat > "$folder/check.py" <<'PY'
import json
import pathlib
import tempfile

import accelerate
import datasets
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

print(f"datasets {datasets.__version__}, accelerate {accelerate.__version__}, torch {torch.__version__}")
datasets.disable_progress_bars()
temporary = tempfile.TemporaryDirectory()
folder = pathlib.Path(temporary.name)


def stream(shards):
    """Return 12 rows that are streamed from the given number of files."""
    names = []
    for shard in range(shards):
        count = 12 // shards
        names.append(str(folder / f"{shards}-{shard}.jsonl"))
        lines = [json.dumps({"row": row}) for row in range(shard * count, (shard + 1) * count)]
        pathlib.Path(names[-1]).write_text("\n".join(lines))
    return datasets.load_dataset("json", data_files=names, split="train", streaming=True, cache_dir=str(folder))


def passes(prepare, change=lambda dataset: dataset, count=3):
    """Return the rows of some passes over both streams."""
    loaders = [prepare(DataLoader(change(stream(shards)), batch_size=2)) for shards in (6, 3)]
    found = []
    for _ in range(count):
        rows = [[int(row) for batch in loader for row in batch["row"]] for loader in loaders]
        found.append((rows[0], sum(a == b for a, b in zip(*rows))))
    return found


accelerator = Accelerator(cpu=True)
in_order = list(range(12))
plain = passes(lambda loader: loader)
prepared = passes(accelerator.prepare)
kept = passes(accelerator.prepare, lambda dataset: dataset.skip(0))
for name, found in (("plain", plain), ("accelerate", prepared), ("accelerate, skip(0)", kept)):
    for number, (rows, beside) in enumerate(found):
        print(f"{name}, pass {number}: {rows}, {beside} of 12 beside themselves")
assert all(rows == in_order and beside == 12 for rows, beside in plain + kept), "changed: passes in order"
assert prepared[0] == (in_order, 12), "changed: the first pass"
for rows, beside in prepared[1:]:
    assert sorted(rows) == in_order and rows != in_order and beside < 12, "changed: later passes keep their order"

dataset = stream(6)
for epoch in (0, 1, 0):
    dataset.set_epoch(epoch)
    rows = [example["row"] for example in dataset]
    assert rows == prepared[epoch][0], f"changed: set_epoch({epoch})"
single = stream(1)
single.set_epoch(1)
assert [example["row"] for example in single] == in_order, "changed: one shard"
print("as described: set_epoch moves the shards of an unshuffled dataset")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
