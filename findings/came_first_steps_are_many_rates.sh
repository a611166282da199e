#!/usr/bin/env bash
# came-pytorch: CAME's first steps on a matrix are 10 to 50 times the learning rate, and on a vector a tenth of it
#
# One would guess: like Adafactor's and Adam's, a step of CAME is about the learning rate per weight.
# clip_threshold=1.0 is documented as the "threshold of root-mean-square of final gradient update".
#
# What happens (came-pytorch 0.1.3, torch 2.13.0): the update is clipped, averaged and then divided by the root of the
# average of its instability, which starts at 0 with a factor of 0.9999 and is not corrected for that start. In step 1
# this is a division by 0.009. Vectors are not divided, and their average is not corrected either. Root mean square of a
# step in units of the learning rate, for gradients that are half signal and half noise, and for noise alone:
#   step                               1       10      100     1,000   3,000
#   64 x 64, CAME                      11.1    19.5    10.8    3.6     2.2
#   64 x 64, CAME, noise alone         11.1    7.5     2.5     0.8     0.5
#   64 x 64, CAME, no noise            11.1    33.7    48.7    50.9    56.3
#   64 x 64, AdamW                     1.0     0.6     0.6     0.6     0.6
#   64, CAME                           0.1     0.4     0.6     0.6     0.6
#   64, AdamW                          1.0     0.6     0.6     0.6     0.6
# Nothing is logged.
#
# Why it matters: Sana and several trainers of LoRAs use CAME. A learning rate that was found in a short run is too
# small for a long one, and a warm-up for AdamW is too short. Where the state is not restored, a resumed run jumps. Warm
# up over thousands of steps, or set betas[2] lower: with 0.99, step 1 is 1.1 times the learning rate.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6 came-pytorch==0.1.3
cat > "$folder/check.py" <<'PY'
from importlib.metadata import version

import torch
from came_pytorch import CAME

print(f"came-pytorch {version('came-pytorch')}, torch {torch.__version__}")
RATE, LOGGED = 1e-4, (1, 10, 100, 1000, 3000)


def came(weights, last=0.9999):
    return CAME(weights, lr=RATE, betas=(0.9, 0.999, last))


def adamw(weights):
    return torch.optim.AdamW(weights, lr=RATE, weight_decay=0.0)


def sizes(make, shape, noise, steps=LOGGED):
    """Return the root mean square of some steps, in units of the learning rate."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(shape))
    optimizer, signal, found = make([weight]), torch.randn(shape), []
    for step in range(1, steps[-1] + 1):
        before = weight.detach().clone()
        weight.grad = (1 - noise) * signal + noise * torch.randn(shape)
        optimizer.step()
        if step in steps:
            found.append((weight - before).square().mean().sqrt().item() / RATE)
    return found


found = {}
for shape in ((64, 64), (64,)):
    for make in (came, adamw):
        for noise in (0.5, 1.0, 0.0):
            found[shape, make, noise] = sizes(make, shape, noise)
            print(f"{shape}, {make.__name__}, share of noise {noise}:",
                  *(f"{size:.1f}" for size in found[shape, make, noise]))
matrix, vector = (64, 64), (64,)
for noise, low, high in ((0.5, 8, 15), (0.0, 40, 60)):
    assert abs(found[matrix, came, noise][0] - 100 / 9) < 0.1, "changed: the first step of a matrix"
    assert low < found[matrix, came, noise][2] < high, "changed: the hundredth step of a matrix"
    assert found[matrix, came, noise][3] > 3, "changed: the thousandth step of a matrix"
for key, values in found.items():
    if key[1] is adamw:
        assert max(values) < 1.01, "changed: AdamW"
    elif key[0] == vector:
        assert abs(values[0] - 0.1) < 0.01 and max(values) < 1.01, "changed: a vector"
lower = sizes(lambda weights: came(weights, last=0.99), matrix, 0.5, steps=(1,))
print(f"betas[2] = 0.99: step 1 is {lower[0]:.1f} times the learning rate")
assert abs(lower[0] - 10 / 9) < 0.02, "changed: betas[2]"
print("as described: CAME's first steps are many times the learning rate")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
