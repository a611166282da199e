#!/usr/bin/env bash
# torchmetrics: reading KID or the Inception Score advances torch's random numbers, so that logging changes the run
#
# One would guess: compute() only reads a metric. The same images give the same score, and a run that logs it trains as
# one that does not.
#
# What happens (torchmetrics 1.9.0, torch 2.13.0): KID chooses its subsets, and the Inception Score shuffles the images
# before it splits them, with torch's global generator. After torch.manual_seed(0):
#                        next torch.rand(1)      score of the same 64 images, read twice
#   nothing read             0.496
#   KID                      0.035                   44.84, 40.63
#   InceptionScore           0.651                   1.400, 1.389
#   FID                      0.496                   2.049, 2.049
# Neither takes a seed or a generator. Nothing is logged.
#
# Why it matters: the noise of the next rollout comes from the same random numbers. Of two runs of one seed, the one
# that logs KID, or logs it more often, draws other images from then on. A comparison of them is then one of two seeds.
# Read these metrics inside torch.random.fork_rng(), with a fixed seed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 torchmetrics==1.9.0
cat > "$folder/check.py" <<'PY'
import torch
import torchmetrics
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.inception import InceptionScore
from torchmetrics.image.kid import KernelInceptionDistance

print(f"torchmetrics {torchmetrics.__version__}, torch {torch.__version__}")


class Features(torch.nn.Module):
    """Stands for the Inception network: the first pixels of an image."""

    num_features = 8

    def forward(self, images):
        return 4 * images.float().flatten(1)[:, :8]


torch.manual_seed(1)
real, drawn = torch.rand(64, 3, 8, 8), torch.rand(64, 3, 8, 8) + 0.1


def fid():
    metric = FrechetInceptionDistance(feature=Features(), input_img_size=(3, 8, 8))
    metric.update(real, real=True)
    metric.update(drawn, real=False)
    return metric


def kid():
    metric = KernelInceptionDistance(feature=Features(), subsets=10, subset_size=16)
    metric.update(real, real=True)
    metric.update(drawn, real=False)
    return metric


def inception_score():
    metric = InceptionScore(feature=Features())
    metric.update(drawn)
    return metric


def first(score):
    return (score[0] if isinstance(score, tuple) else score).item()


torch.manual_seed(0)
untouched = torch.rand(1).item()
for make, is_random in ((kid, True), (inception_score, True), (fid, False)):
    metric, again = make(), make()
    torch.manual_seed(0)
    score = first(metric.compute())
    following = torch.rand(1).item()
    second = first(again.compute())
    print(f"{make.__name__}: score {score:.4f}, read again {second:.4f}; next random number {following:.4f}, "
          f"{untouched:.4f} if nothing is read")
    assert (following != untouched) == is_random, f"changed: {make.__name__} and the random numbers"
    assert (score != second) == is_random, f"changed: two scores of {make.__name__}"
print("as described: reading KID and the Inception Score draws random numbers")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
