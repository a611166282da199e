#!/usr/bin/env bash
# webdataset: with_epoch(n) starts each epoch at the start of a shard, so that its rows after the first n are never read
#
# One would guess: with_epoch sets where an epoch ends in a stream that goes on; with resampled=True or shuffled shards
# each row is read sooner or later.
#
# What happens (webdataset 1.0.2, torch 2.13.0): the next epoch opens its shards anew. Four shards of 100 rows, 100
# epochs of 60 rows; number of rows that were read at least once, and the highest row of a shard:
#                                          rows of 400    highest row of 0 to 99
#   fixed order                            60             59
#   shardshuffle=4                         60             59       (the order of the shards is always the same)
#   shardshuffle=4, detshuffle=True        240            59
#   resampled=True                         240            59
#   resampled=True, .shuffle(20)           about 315      at most 79
#   the same, two workers with 60 each     about 315      at most 79
#   WebLoader(...).with_epoch(60)          240            59
#   resampled=True, with_epoch(1000)       400            99
# One iterator that the caller stops and goes on with reads all. Nothing is logged.
#
# Why it matters: shards have thousands of rows, and an epoch of RL, or the time between two validations, some hundreds.
# The prompts and pictures behind them are missing from training, and nothing shows it. Make epochs several shards long,
# or keep one iterator.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6 webdataset==1.0.2
cat > "$folder/check.py" <<'PY'
import io
import itertools
import random
import sys
import tarfile

import torch
import webdataset

print(f"webdataset {webdataset.__version__}, torch {torch.__version__}")
SHARDS, ROWS, EPOCH, EPOCHS = 4, 100, 60, 100
urls = [f"{sys.argv[1]}/{shard}.tar" for shard in range(SHARDS)]
for shard, url in enumerate(urls):
    with tarfile.open(url, "w") as file:
        for row in range(ROWS):
            text = str(shard * ROWS + row).encode()
            member = tarfile.TarInfo(f"{shard:02}{row:04}.cls")
            member.size = len(text)
            file.addfile(member, io.BytesIO(text))


def rows(shuffle=0, epoch=EPOCH, **options):
    options.setdefault("shardshuffle", False)
    dataset = webdataset.WebDataset(urls, **options)
    if shuffle:
        dataset = dataset.shuffle(shuffle)
    dataset = dataset.decode().to_tuple("cls")
    return dataset.with_epoch(epoch) if epoch else dataset


def loader(dataset, workers):
    options = dict(persistent_workers=True) if workers else {}
    return webdataset.WebLoader(dataset, batch_size=None, num_workers=workers, **options)


WAYS = {
    "fixed order": (rows(), 60, 59),
    "shardshuffle=4": (rows(shardshuffle=4), 60, 59),
    "shardshuffle=4, detshuffle": (rows(shardshuffle=4, detshuffle=True), 240, 59),
    "resampled": (rows(resampled=True), 240, 59),
    "resampled, shuffle(20)": (rows(20, resampled=True), 320, 79),
    "the same, two workers": (loader(rows(20, resampled=True), 2), 320, 79),
    "WebLoader.with_epoch": (loader(rows(epoch=None, resampled=True), 0).with_epoch(EPOCH), 240, 59),
    "epochs of 1,000 rows": (rows(resampled=True, epoch=1000), 400, 99),
    "one iterator": (list(itertools.islice(rows(resampled=True, epoch=10**9), EPOCH * EPOCHS)), 400, 99),
}
random.seed(0)
for name, (data, number, highest) in WAYS.items():
    seen = set()
    for _ in range(EPOCHS):
        seen.update(int(row[0]) for row in data)
    print(f"{name:27} {len(seen)} of {SHARDS * ROWS} rows, the highest of a shard is {max(row % ROWS for row in seen)}")
    if "two workers" in name or "shuffle(20)" in name:  # a row of the buffer is read by chance
        assert 280 < len(seen) <= number and 70 < max(row % ROWS for row in seen) <= highest, f"changed: {name}"
    else:
        assert len(seen) == number and max(row % ROWS for row in seen) == highest, f"changed: {name}"
print("as described: the ends of shards are not read")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
