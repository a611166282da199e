#!/usr/bin/env bash
# datasets: with_indices of a streamed dataset counts from 0 in each worker and rank, so that a split by index leaks
#
# One would guess: the index that map and filter pass with with_indices=True is the row's number in the dataset, as in
# a dataset that is not streamed.
#
# What happens (datasets 5.2.0, torch 2.13.0): each worker of a DataLoader counts the rows that it reads itself, and so
# does each rank after split_dataset_by_node. 1,000 rows in 8 files; map stores the index, and filter keeps each tenth
# row for validation (index % 10 == 0) and the others for training:
#                                          read by   one process   4 workers   2 ranks
#   distinct indices                                    1,000          250        500
#   rows whose index is the row's number                1,000          125        125
#   training rows that one process validates on             0           50         50
# Within one loader the two parts do not overlap. Nothing is logged. A dataset that is not streamed gives the row's
# number in each case.
#
# Why it matters: held-out rows are kept back by index, and half of them are trained on as soon as training is read by
# workers. An index that seeds the noise, or names a row's stored latents or rewards, stands for four rows.
# Write the number into the rows before they are streamed.
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
rows, files = 1000, 8
size = rows // files
paths = [f"{sys.argv[1]}/{number}.parquet" for number in range(files)]
for number, path in enumerate(paths):
    Dataset.from_dict({"row": list(range(number * size, (number + 1) * size))}).to_parquet(path)
options = dict(data_files=paths, split="train", cache_dir=f"{sys.argv[1]}/cache")
stream = load_dataset("parquet", streaming=True, **options)


def add_index(dataset):
    return dataset.map(lambda row, index: {"index": index}, with_indices=True)


def split(dataset):
    return (dataset.filter(lambda row, index: index % 10 == 0, with_indices=True),
            dataset.filter(lambda row, index: index % 10 > 0, with_indices=True))


def read(dataset, workers=0, ranks=1):
    parts = [split_dataset_by_node(dataset, rank, ranks) for rank in range(ranks)] if ranks > 1 else [dataset]
    return [{name: int(value) for name, value in row.items()}
            for part in parts for row in DataLoader(part, batch_size=None, num_workers=workers)]


def measure(name, dataset, validated, **how):
    found = read(add_index(dataset), **how)
    validation, training = ([row["row"] for row in read(part, **how)] for part in split(dataset))
    assert sorted(validation + training) == list(range(rows)), "changed: the parts of one loader overlap"
    counts = (len({row["index"] for row in found}), sum(row["index"] == row["row"] for row in found),
              len(validated.intersection(training)))
    print(f"{name:28} indices {counts[0]}, right {counts[1]}, validated rows in training {counts[2]}")
    return counts


validated = {row["row"] for row in read(split(stream)[0])}
assert validated == set(range(0, rows, 10))
assert measure("one process", stream, validated) == (1000, 1000, 0)
assert measure("4 workers", stream, validated, workers=4) == (250, 125, 50), "changed: workers"
assert measure("2 ranks", stream, validated, ranks=2) == (500, 125, 50), "changed: ranks"
whole = load_dataset("parquet", **options)
assert measure("not streamed, 4 workers", whole, validated, workers=4) == (1000, 1000, 0)
print("as described: the index restarts in each worker and rank")
PY
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
