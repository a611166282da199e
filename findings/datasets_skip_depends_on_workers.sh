#!/usr/bin/env bash
# datasets: skip(n) of a streamed dataset leaves out other rows with workers or ranks, so that take and skip overlap
#
# One would guess: stream.take(100) and stream.skip(100), the documented way to split a stream into validation and
# training, have no row in common, however each of them is read.
#
# What happens (datasets 5.2.0, torch 2.13.0): each worker of a DataLoader and each rank of split_dataset_by_node takes
# or skips a part of n in its own files. 1,000 rows in 8 files; rows of skip(100) that are also in take(100), which is
# read without workers:
#   skip(100) is read by                                      no shuffle   shuffle(seed=0, buffer_size=100) before both
#   one process, no workers                                        0              0
#   1 worker                                                       0             32
#   2 workers, or 2 ranks                                         50             47, or 50
#   4 workers, or 4 ranks                                         75             75, or 60
#   one process, after set_epoch(1) of skip's result               0             30
# take and skip always give 100 and 900 rows, and do not overlap if both are read with the same numbers of workers and
# ranks, in the same epoch. Nothing is logged. The docstrings of take and skip do not mention workers or ranks.
#
# Why it matters: validation is often read by one process or rank, and training by many. Most of the held-out prompts
# or images are then trained on, and the validation score hides it. Split by a column, or by files.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 datasets==5.2.0
cat > "$folder/check.py" <<'PY'
import sys

import datasets
import torch
from datasets import Dataset, load_dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

print(f"datasets {datasets.__version__}, torch {torch.__version__}")
datasets.disable_progress_bars()
rows, files, held_out = 1000, 8, 100
size = rows // files
paths = [f"{sys.argv[1]}/{number}.parquet" for number in range(files)]
for number, path in enumerate(paths):
    Dataset.from_dict({"row": list(range(number * size, (number + 1) * size))}).to_parquet(path)
stream = load_dataset("parquet", data_files=paths, split="train", cache_dir=f"{sys.argv[1]}/cache", streaming=True)


def numbers(dataset, workers=0, ranks=1):
    parts = [split_dataset_by_node(dataset, rank, ranks) for rank in range(ranks)] if ranks > 1 else [dataset]
    return [int(row["row"]) for part in parts for row in DataLoader(part, batch_size=None, num_workers=workers)]


def common(whole, epoch=0, **how):
    validated = set(numbers(whole.take(held_out)))
    validation, training = whole.take(held_out), whole.skip(held_out)
    for part in (validation, training):
        part.set_epoch(epoch)
    taken, skipped = numbers(validation, **how), numbers(training, **how)
    assert sorted(taken + skipped) == list(range(rows)), "changed: take and skip read alike overlap"
    assert len(validated) == len(taken) == held_out
    return len(validated.intersection(skipped))


readers = {
    "one process": dict(), "1 worker": dict(workers=1), "2 workers": dict(workers=2), "4 workers": dict(workers=4),
    "2 ranks": dict(ranks=2), "4 ranks": dict(ranks=4), "epoch 1": dict(epoch=1),
}
found = {}
for name, how in readers.items():
    found[name] = common(stream, **how), common(stream.shuffle(seed=0, buffer_size=100), **how)
    print(f"skip({held_out}) read by {name:12} rows of take({held_out}): {found[name][0]}, shuffled {found[name][1]}")
assert found == {
    "one process": (0, 0), "1 worker": (0, 32), "2 workers": (50, 47), "4 workers": (75, 75),
    "2 ranks": (50, 50), "4 ranks": (75, 60), "epoch 1": (0, 30),
}, "changed: other numbers"
print("as described: what take kept for validation is in skip, if that is read by more workers or ranks")
PY
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
