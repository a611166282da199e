#!/usr/bin/env bash
# webdataset: shardshuffle puts the shards into one order for the whole run, and each epoch reads them in that order
#
# One would guess: WebDataset(..., shardshuffle=100) shuffles the shards anew in each epoch, as a DataLoader with
# shuffle=True does with rows.
#
# What happens (webdataset 1.0.2, torch 2.13.0): the dataset draws one number when it is made and seeds the shuffle with
# it in each epoch. Shards in the order in which three epochs read them:
#                                                          epoch 1       epoch 2       epoch 3
#   shardshuffle=6                                         5 1 0 3 4 2   5 1 0 3 4 2   5 1 0 3 4 2
#   the same with workers, also persistent ones            one order in all epochs
#   shardshuffle=6, detshuffle=True                        0 5 3 4 1 2   2 4 3 0 5 1   1 3 4 5 2 0
#   the same with persistent workers                       another order in each epoch
#   the same with workers that start in each epoch         one order in all epochs
# resampled=True draws anew in each epoch. .shuffle(n) of rows is another order each time, but rows move by no more than
# about n places. Nothing is logged.
#
# Why it matters: shards are often sorted by source, size or score and have thousands of rows. The network then sees the
# sources in one order, again and again, and the last one has the last word in each epoch. Use resampled=True, or
# detshuffle=True with persistent workers.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6 webdataset==1.0.2
cat > "$folder/check.py" <<'PY'
import io
import random
import sys
import tarfile

import torch
import webdataset

print(f"webdataset {webdataset.__version__}, torch {torch.__version__}")
SHARDS, ROWS, EPOCHS = 6, 5, 6
urls = [f"{sys.argv[1]}/{shard}.tar" for shard in range(SHARDS)]
for shard, url in enumerate(urls):
    with tarfile.open(url, "w") as file:
        for row in range(ROWS):
            text = str(shard * ROWS + row).encode()
            member = tarfile.TarInfo(f"{shard:02}{row:04}.cls")
            member.size = len(text)
            file.addfile(member, io.BytesIO(text))


def orders(workers=None, persistent=False, **options):
    """Return the order of the shards in each epoch; workers None iterates the dataset itself."""
    data = webdataset.WebDataset(urls, shardshuffle=SHARDS, **options).decode().to_tuple("cls")
    if workers is not None:
        data = webdataset.WebLoader(data, batch_size=None, num_workers=workers, persistent_workers=persistent)
    return [[int(row[0]) // ROWS for row in data][::ROWS] for _ in range(EPOCHS)]


WAYS = {
    "shardshuffle": ({}, True),
    "shardshuffle, a loader without workers": ({"workers": 0}, True),
    "shardshuffle, a worker": ({"workers": 1}, True),
    "shardshuffle, a persistent worker": ({"workers": 1, "persistent": True}, True),
    "detshuffle": ({"detshuffle": True}, False),
    "detshuffle, a worker": ({"detshuffle": True, "workers": 1}, True),
    "detshuffle, a persistent worker": ({"detshuffle": True, "workers": 1, "persistent": True}, False),
}
random.seed(0)
for name, (options, is_same) in WAYS.items():
    found = orders(**options)
    print(f"{name:38}", *("".join(map(str, order)) for order in found[:3]))
    assert all(sorted(order) == list(range(SHARDS)) for order in found)
    assert all(order == found[0] for order in found) == is_same, f"changed: {name}"
print("as described: the order of the shards is drawn once")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
