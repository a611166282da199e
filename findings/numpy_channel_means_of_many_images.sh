#!/usr/bin/env bash
# numpy: the channel means of 4,096 float32 images are 0.25 instead of 0.5 if channels come last, and right if first
#
# One would guess: images.mean(axis=(0, 1, 2)) of float32 images is exact to about six digits, as images.mean() and
# torch's mean are, since numpy adds in pairs to keep rounding small.
#
# What happens (numpy 2.3.5, torch 2.13.0): numpy adds in pairs only along the axis that is last in memory. Along the
# others it adds one number after another in float32, until the sum is too large to grow. Mean and standard deviation of
# the red channel of random images in [0, 1], of 128 x 128 pixels; the exact ones are 0.4994 and 0.2887:
#   images                         256               1,024              4,096
#   channels last            0.4994, 0.2883     0.4994, 0.2856     0.2500, 0.3561
#   channels first           0.4994, 0.2887     0.4994, 0.2887     0.4994, 0.2887
#   last, dtype=float64      0.4994, 0.2887     0.4994, 0.2887     0.4994, 0.2887
#   torch, channels last     0.4994, 0.2887     0.4994, 0.2887     0.4994, 0.2887
# Nothing is logged. numpy's documentation of mean and sum notes that float32 may be inaccurate, and that pairs are not
# used along all axes. 4,096 images of 128 x 128 have as many pixels as 64 of 1,024 x 1,024.
#
# Why it matters: the mean and standard deviation per channel of a data set or of its latents normalise the network's
# input, and are often computed so, once. The standard deviation is 1 % off long before the mean shows it.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile numpy==2.3.5 torch==2.13.0
cat > "$folder/check.py" <<'PY'
import numpy
import torch

print(f"numpy {numpy.__version__}, torch {torch.__version__}")
few = numpy.random.default_rng(0).random((16, 128, 128, 3), dtype=numpy.float32)
exact = few[..., 0].astype(numpy.float64).mean(), few[..., 0].astype(numpy.float64).std()
print(f"exact                     mean {exact[0]:.4f}, standard deviation {exact[1]:.4f}")
last, first = (0, 1, 2, 3), (0, 1, 3, 4)


def repeat(images, count):
    """Return a view in which the images are repeated, so that little memory is needed."""
    return numpy.broadcast_to(images, (count // len(few), *images.shape))


def show(name, mean, deviation):
    print(f"{name:25} mean {mean[0]:.4f}, standard deviation {deviation[0]:.4f}")
    return float(mean[0]), float(deviation[0])


def is_exact(found):
    return all(abs(value - right) < 1e-4 for value, right in zip(found, exact))


for count, expected in ((256, (0.4994, 0.2883)), (1024, (0.4994, 0.2856)), (4096, (0.25, 0.3561))):
    images = repeat(few, count)
    found = show(f"{count} images, last", images.mean(axis=last), images.std(axis=last))
    assert all(abs(value - wrong) < 1e-3 for value, wrong in zip(found, expected)), "changed: channels last"
    if count == 256:
        copy = numpy.concatenate([few] * (count // len(few)))
        assert found == show("the same, copied", copy.mean(axis=(0, 1, 2)), copy.std(axis=(0, 1, 2))), "changed: views"
    planes = repeat(few.transpose(0, 3, 1, 2).copy(), count)
    double = dict(axis=last, dtype=numpy.float64)
    pixels = torch.from_numpy(few).expand(count // len(few), *few.shape)
    assert is_exact(show("channels first", planes.mean(axis=first), planes.std(axis=first))), "changed: channels first"
    assert is_exact(show("last, dtype=float64", images.mean(**double), images.std(**double)))
    assert is_exact(show("torch, channels last", pixels.mean(last), pixels.std(last, correction=0))), "changed: torch"
print("as described: channel means are wrong if channels come last")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
