#!/usr/bin/env bash
# safetensors: numpy arrays that are transposed, cropped or strided are written with other numbers, without an error
#
# One would guess: a file written from a numpy array holds the array, whatever its order in memory, as numpy.save does.
# Or it raises ValueError, as safetensors does for such a torch tensor.
#
# What happens (safetensors 0.8.0, numpy 2.3.5, torch 2.13.0): the shape and type are right, and the numbers are those
# that lie in memory from the array's first element on. Part of the numbers at their place, and of numbers that are the
# array's at all, after safetensors.numpy.save_file and load_file of float32 images of shape 4 x 6 x 6 x 3:
#                                              at their place   of the array     numpy.save   safetensors.torch
#   as they are                                     1.00            1.00          equal         equal
#   channels first, transpose(0, 3, 1, 2)           0.02            1.00          equal         ValueError
#   cropped, images[:, 1:5, 1:5]                    0.06            0.50          equal         ValueError
#   each second image, images[::2]                  0.50            0.50          equal         ValueError
#   in Fortran's order, asfortranarray              0.01            1.00          equal         ValueError
# No error, no warning. The docstring asks for contiguous arrays; only the version for torch checks it.
#
# Why it matters: latents, embeddings and images are stored by numpy after a transpose, a crop or a choice of every
# n-th. The file loads, has the right names, shapes and types, and a network trains on scrambled pictures. Call
# numpy.ascontiguousarray on each array.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile safetensors==0.8.0 numpy==2.3.5 torch==2.13.0 packaging
cat > "$folder/check.py" <<'PY'
import sys

import numpy
import safetensors
import torch
from safetensors import numpy as by_numpy
from safetensors import torch as by_torch

print(f"safetensors {safetensors.__version__}, numpy {numpy.__version__}, torch {torch.__version__}")
path, dump = f"{sys.argv[1]}/arrays.safetensors", f"{sys.argv[1]}/array.npy"
images = numpy.arange(4 * 6 * 6 * 3, dtype=numpy.float32).reshape(4, 6, 6, 3)
arrays = {
    "as they are": images, "channels first": images.transpose(0, 3, 1, 2), "cropped": images[:, 1:5, 1:5],
    "each second image": images[::2], "Fortran's order": numpy.asfortranarray(images),
}
for name, array in arrays.items():
    by_numpy.save_file({"images": array}, path)
    found = by_numpy.load_file(path)["images"]
    numpy.save(dump, array)
    assert numpy.array_equal(numpy.load(dump), array) and found.shape == array.shape
    place, kept = (found == array).mean(), numpy.isin(found, array).mean()
    print(f"{name:18} at their place {place:.2f}, of the array {kept:.2f}: {found.flatten()[:4]}")
    whole = name == "as they are"
    assert (place == 1) == whole, f"changed: {name}"
    by_numpy.save_file({"images": numpy.ascontiguousarray(array)}, path)
    assert numpy.array_equal(by_numpy.load_file(path)["images"], array)
    try:
        by_torch.save_file({"images": torch.from_numpy(array)}, path)
    except ValueError as error:
        print(f"{'':18} by torch: ValueError, {str(error)[:40]}")
        assert not whole
    else:
        assert whole, f"changed: torch takes {name}"
print("as described: other numbers are written")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
