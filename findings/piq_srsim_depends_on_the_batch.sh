#!/usr/bin/env bash
# piq: the SR-SIM of one pair of images depends on the other pairs of its batch
#
# One would guess: a metric with reduction="none" gives each pair of a batch the value that it has alone.
#
# What happens (piq 0.8.0, torch 2.15.0): the saliency map of SR-SIM is scaled by the lowest and highest value of the
# whole batch. Four pairs of smooth images and their copies with noise:
#   each alone                                            0.893   0.932   0.917   0.878
#   in one batch                                          0.909   0.925   0.918   0.899
#   the first in a batch with a black and a white image   0.865
# The order of these four stays, but with the last line's batch the first pair moves below the fourth. SSIM, MS-SSIM,
# IW-SSIM, VIF, FSIM, GMSD, VSI, MDSI, HaarPSI and DSS give the same alone and in a batch. Nothing is logged.
#
# Why it matters: as a reward, one bad sample changes the scores of all others of its batch, and scores of two batches
# or ranks are not comparable. As a metric, the mean depends on the batch size. Compute it one pair at a time.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 torchvision==0.29.2 piq==0.8.0
cat > "$folder/check.py" <<'PY'
import functools

import piq
import torch

print(f"piq {piq.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
images = torch.nn.functional.interpolate(torch.rand(4, 3, 12, 12), size=96, mode="bicubic").clamp(0, 1)
noisy = (images + 0.1 * torch.randn_like(images)).clamp(0, 1)
METRICS = {
    "SR-SIM": piq.srsim, "SSIM": piq.ssim, "VIF": piq.vif_p,
    "MS-SSIM": functools.partial(piq.multi_scale_ssim, kernel_size=5),
    "IW-SSIM": functools.partial(piq.information_weighted_ssim, kernel_size=5),
    "FSIM": piq.fsim, "GMSD": piq.gmsd, "VSI": piq.vsi, "MDSI": piq.mdsi, "HaarPSI": piq.haarpsi, "DSS": piq.dss,
}


def values(metric, first, second):
    return metric(first, second, reduction="none").flatten()


for name, metric in METRICS.items():
    together = values(metric, images, noisy)
    alone = torch.cat([values(metric, *pair) for pair in zip(images.split(1), noisy.split(1))])
    difference = (together - alone).abs().max().item()
    print(f"{name:8} largest difference {difference:.4f}")
    assert (difference > 0.005) == (name == "SR-SIM"), f"changed: {name}"
    assert name == "SR-SIM" or difference < 1e-4
    if name == "SR-SIM":
        print("  alone   ", *(f"{value:.3f}" for value in alone.tolist()))
        print("  together", *(f"{value:.3f}" for value in together.tolist()))
        white, black = torch.ones(1, 3, 96, 96), torch.zeros(1, 3, 96, 96)
        moved = values(metric, torch.cat([images[:1], white]), torch.cat([noisy[:1], black]))[0]
        print(f"  the first pair with a black and a white image {moved:.3f}")
        assert moved < alone[3] < alone[0], "changed: a bad pair in the batch"
print("as described: SR-SIM depends on the batch")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
