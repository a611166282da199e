#!/usr/bin/env bash
# webdataset: the order of shuffle() is another one in each run, whatever is seeded
#
# One would guess: after seed_everything (Python's, numpy's and torch's seeds), or with WebDataset(..., seed=3), a
# dataset with .shuffle(n) yields its samples in the same order in each run, as its shuffled shards do.
#
# What happens (webdataset 1.0.2, torch 2.13.0): shuffle() makes a new generator, seeded from the process number and the
# time. The same loop twice, with random.seed(0), numpy.random.seed(0) and torch.manual_seed(0) before each:
#   .shuffle(20)                             another order each time
#   WebDataset(..., seed=3) and .shuffle(20) another order each time
#   shardshuffle=10 alone                    the same order
#   .shuffle(20, seed=0)                     the same order
#   .compose(detshuffle(20, seed=0))         the same order
# Nothing is logged.
#
# Why it matters: two runs of one recipe and one seed see other prompts and images at each step, so that a comparison of
# two settings is one of two orders as well, and a resumed run cannot continue where it stopped. Use detshuffle, or
# shuffle(n, seed=...).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 webdataset==1.0.2
cat > "$folder/check.py" <<'PY'
import importlib.metadata
import random
import sys

import numpy
import torch
import webdataset
from webdataset.filters import detshuffle

print(f"webdataset {importlib.metadata.version('webdataset')}, torch {torch.__version__}")
shards = [f"{sys.argv[1]}/{shard}.tar" for shard in range(12)]
for shard, path in enumerate(shards):
    with webdataset.TarWriter(path) as writer:
        for sample in range(4):
            writer.write({"__key__": f"{shard}_{sample}", "txt": str(4 * shard + sample)})


def order(shuffle=lambda dataset: dataset, **options):
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    dataset = webdataset.WebDataset(shards, **{"shardshuffle": False, **options})
    return [int(text) for (text,) in shuffle(dataset).decode().to_tuple("txt")]


cases = {
    ".shuffle(20)": (lambda: order(lambda dataset: dataset.shuffle(20)), False),
    "seed=3, .shuffle(20)": (lambda: order(lambda dataset: dataset.shuffle(20), seed=3), False),
    "shardshuffle=10": (lambda: order(shardshuffle=10), True),
    ".shuffle(20, seed=0)": (lambda: order(lambda dataset: dataset.shuffle(20, seed=0)), True),
    ".compose(detshuffle(20, seed=0))": (lambda: order(lambda dataset: dataset.compose(detshuffle(20, seed=0))), True),
}
for name, (run, repeats) in cases.items():
    first, second = run(), run()
    assert sorted(first) == sorted(second) == list(range(48)) and first != sorted(first)
    print(f"{name}: {first[:6]}... and {second[:6]}...")
    assert (first == second) == repeats, f"changed: {name}"
print("as described: shuffle() ignores all seeds")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
