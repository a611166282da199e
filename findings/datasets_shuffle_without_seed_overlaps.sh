#!/usr/bin/env bash
# datasets: an iterable dataset shuffled without a seed gives ranks the same rows twice and others to none of them
#
# One would guess: split_dataset_by_node gives each row to one rank. shuffle() without a seed either agrees between
# ranks or follows seed_everything, as it does for a Dataset with all rows at hand.
#
# What happens (datasets 5.2.0, lightning 2.6.6): IterableDataset.shuffle() takes a new seed from the operating system
# in each process, and the split deals out each rank's own order. Distinct rows of 1,024 that four ranks see together
# in one epoch, after seed_everything(7) in each of them (three tries):
#                                               shuffle()                shuffle(seed=0)
#   Dataset                                     1,024, 1,024, 1,024      1,024
#   IterableDataset in 64 files, buffer of 100    752, 688, 720          1,024
#   IterableDataset in 1 file, buffer of 100      719, 695, 704          1,024
# The numbers without a seed vary a little. Each rank gets 256 rows, as it should, and nothing is logged. A note at
# split_dataset_by_node asks for a fixed seed, for the order of files; shuffle() itself says nothing about ranks.
#
# Why it matters: large sets of captions and images are read this way on several GPUs. About three rows in ten are left
# out of the epoch and as many are seen more than once; a validation set that is shuffled this way gives another
# metric in each run, and no seed of the run makes it repeatable. Give shuffle a seed that all ranks share.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 datasets==5.2.0 lightning==2.6.6
cat > "$folder/check.py" <<'PY'
import logging

import datasets
import lightning
from datasets import Dataset
from datasets.distributed import split_dataset_by_node

logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.ERROR)
print(f"datasets {datasets.__version__}, lightning {lightning.__version__}")
rows, ranks = Dataset.from_dict({"row": range(1024)}), 4


def seen(kind, files, seed):
    """Return the number of distinct rows that all ranks see in one epoch."""
    found = []
    for rank in range(ranks):  # what each process does
        lightning.seed_everything(7)
        if kind == "Dataset":
            shuffled = rows.shuffle(seed=seed)
        else:
            shuffled = rows.to_iterable_dataset(num_shards=files).shuffle(seed=seed, buffer_size=100)
        mine = [row["row"] for row in split_dataset_by_node(shuffled, rank=rank, world_size=ranks)]
        assert len(mine) == 256
        found += mine
    return len(set(found))


for kind, files, low, high in (("Dataset", 1, 1024, 1024), ("IterableDataset", 64, 550, 850),
                               ("IterableDataset", 1, 600, 800)):
    without, seeded = [seen(kind, files, None) for _ in range(3)], seen(kind, files, 0)
    print(f"{kind} in {files} file(s): without a seed {without}, with seed=0 {seeded}")
    assert all(low <= number <= high for number in without), f"changed: {kind} without a seed"
    assert seeded == 1024, f"changed: {kind} with a seed"
print("as described: ranks shuffle in orders of their own before the split")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
