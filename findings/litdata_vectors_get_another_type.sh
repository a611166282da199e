#!/usr/bin/env bash
# litdata: a vector whose type differs from that of the first sample is read back as other numbers
#
# One would guess: optimize() stores each tensor or array with its type, or raises an error where the samples differ. It
# does the first for tensors of two or more dimensions.
#
# What happens (litdata 0.2.76, torch 2.13.0, numpy 2.4.6): vectors are stored as bare bytes, and the type is that of
# the first sample. The bytes of all others are read as that type, whatever they were:
#   first sample              second sample                        second sample read back
#   float32 [1, 2]            float64 [0.5, 0.25]                  float32 [0, 1.75, 0, 1.625]
#   int64 [1, 0]              float32 [0.25, 0.5]                  int64 [4539628425438035968]
#   float64 [1, 2]            float32 [0.5, 0.25]                  float64 [5.3e-08], one number
#   float32 [1, 2]            float64 [[0.5, 0.25]]                float32 [0, 1.75, 0, 1.625], one dimension
#   float32 [[1, 2]]          float64 [[0.5, 0.25]]                float64 [[0.5, 0.25]], as it should be
# numpy arrays and tensors do the same. Writing prints one line with the formats that it inferred; no error is raised.
#
# Why it matters: vectors are what is stored with pictures: rewards per model, pooled embeddings, boxes, labels. Their
# types differ easily: [1, 0] of one sample is int64 and [0.5, 0.25] of another float32, and numpy's means are float64
# where a model's scores are float32. Training then reads garbage that is often small and plausible. Cast to one type.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6 litdata==0.2.76
cat > "$folder/check.py" <<'PY'
import os
import tempfile
from importlib.metadata import version

import litdata
import numpy as np
import torch

print(f"litdata {version('litdata')}, torch {torch.__version__}, numpy {np.__version__}")
SINGLE, DOUBLE, WHOLE = np.float32, np.float64, np.int64
SAMPLES = [
    {"longer": np.array([1, 2], SINGLE), "whole": np.array([1, 0], WHOLE), "shorter": np.array([1, 2], DOUBLE),
     "shape": np.array([1, 2], SINGLE), "matrix": np.array([[1, 2]], SINGLE)},
    {"longer": np.array([0.5, 0.25], DOUBLE), "whole": np.array([0.25, 0.5], SINGLE),
     "shorter": np.array([0.5, 0.25], SINGLE), "shape": np.array([[0.5, 0.25]], DOUBLE),
     "matrix": np.array([[0.5, 0.25]], DOUBLE)},
]


def arrays(number):
    return SAMPLES[number]


def tensors(number):
    return {name: torch.from_numpy(array) for name, array in SAMPLES[number].items()}


def stored(make, folder):
    litdata.optimize(fn=make, inputs=[0, 1], output_dir=folder, chunk_bytes="1MB", num_workers=1)
    return list(litdata.StreamingDataset(folder, shuffle=False))


if __name__ == "__main__":
    for make in (arrays, tensors):
        with tempfile.TemporaryDirectory() as folder:
            # The cache of what is read stays inside the folder too.
            os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = f"{folder}/cache"
            first, second = stored(make, f"{folder}/data")
        for name, array in SAMPLES[1].items():
            print(f"{make.__name__}, {name}: {SAMPLES[0][name].dtype} {SAMPLES[0][name].tolist()}, then {array.dtype} "
                  f"{array.tolist()}, read back {second[name].dtype} {second[name].tolist()}")
            assert np.array_equal(np.asarray(first[name]), SAMPLES[0][name])
        second = {name: np.asarray(array) for name, array in second.items()}
        assert second["matrix"].dtype == DOUBLE and second["matrix"].tolist() == [[0.5, 0.25]]
        for name in ("longer", "shape"):
            assert second[name].dtype == SINGLE and second[name].tolist() == [0, 1.75, 0, 1.625], "changed: " + name
        assert second["whole"].dtype == WHOLE and second["whole"].shape == (1,), "changed: whole numbers first"
        assert second["shorter"].shape == (1,) and 0 < second["shorter"][0] < 1e-6, "changed: double precision first"
    print("as described: vectors are read with the type of the first sample")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
