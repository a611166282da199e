#!/usr/bin/env bash
# torchmetrics: MIFID does not see a generator that only copies a few training pictures, and penalises many new ones
#
# One would guess: the memorization penalty is the mean distance of each generated picture to its nearest real one, as
# in the paper of the metric and in the code of its competition, and a generator of copies gets the worst score.
#
# What happens (torchmetrics 1.9.0, torch 2.13.0): it is the mean distance of each real picture to its nearest generated
# one. Penalty, 1 / distance, for 1,000 real pictures, with distances over 0.1 taken for 1:
#                                                                       torchmetrics    generated to real
#   1,000 pictures: 10 real ones, each copied 100 times                 1               infinite
#   1,000 new pictures                                                  1               1
#   20,000 new pictures, and each real one once                         infinite        1
# update(pictures, real=True) for the generated ones and real=False for the training ones gives the last column, as the
# FID is the same both ways. Nothing is logged.
#
# Why it matters: memorization means that what a model draws is in its training set, above all a small part of it. This
# score calls such a model original. One that is new in 95 % of its pictures is called a copy once enough are drawn.
# Exchange the two sets, or compute the distance by hand.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 torchmetrics==1.9.0 scipy==1.17.1
cat > "$folder/check.py" <<'PY'
import torch
import torchmetrics
from torch import nn
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.mifid import MemorizationInformedFrechetInceptionDistance as MIFID

print(f"torchmetrics {torchmetrics.__version__}, torch {torch.__version__}")
generator = torch.Generator().manual_seed(0)


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3 * 8 * 8, 32).requires_grad_(False)

    def forward(self, images):
        return self.layer(images.flatten(1).float()).relu()


features = Features()


def pictures(count):
    return torch.randn(count, 3, 8, 8, generator=generator)


@torch.no_grad()
def distance(first, second):
    """Return the mean cosine distance of each picture of the first set to its nearest one in the second."""
    first, second = (nn.functional.normalize(features(images).double(), dim=1) for images in (first, second))
    return (1 - first @ second.T).min(dim=1).values.mean().item()


def score(real, generated):
    metric = MIFID(feature=features)
    for images, is_real in ((real, True), (generated, False)):
        for batch in images.split(1000):
            metric.update(batch, real=is_real)
    return metric.compute().item()


def frechet(real, generated):
    metric = FrechetInceptionDistance(feature=features, input_img_size=(3, 8, 8))
    metric.update(real, real=True)
    metric.update(generated, real=False)
    return metric.compute().item()


real = pictures(1000)
cases = {"10 real pictures, copied 100 times": real[:10].repeat(100, 1, 1, 1), "1,000 new pictures": pictures(1000),
         "20,000 new pictures and the real ones": torch.cat([pictures(20000), real])}
found = {}
for name, generated in cases.items():
    plain = frechet(real, generated)
    found[name] = score(real, generated) / plain, score(generated, real) / plain
    print(f"{name}: FID {plain:.3g}, penalty {found[name][0]:.3g}, with the sets exchanged {found[name][1]:.3g}; "
          f"distance of real to generated {distance(real, generated):.2f}, of generated to real "
          f"{distance(generated, real):.2f}")
copies, new, mixed = found.values()
assert abs(copies[0] - 1) < 1e-3 and mixed[0] > 1e3, "changed: MIFID goes by the generated pictures"
assert copies[1] > 1e3 and abs(mixed[1] - 1) < 1e-3 and all(abs(value - 1) < 1e-3 for value in new)
print("as described: MIFID looks for the real pictures among the generated ones")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
