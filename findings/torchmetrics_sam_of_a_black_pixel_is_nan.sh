#!/usr/bin/env bash
# torchmetrics: one black pixel in one picture makes the spectral angle (SAM) of a whole validation set NaN
#
# One would guess: the spectral angle of a black pixel, which has no direction, is taken for 0 or left out of the mean.
#
# What happens (torchmetrics 1.9.0, torch 2.13.0): SpectralAngleMapper divides by the lengths of both colours without a
# guard. Mean over 100 pictures of 32 x 32 pixels, in 10 batches:
#                                             SAM       SSIM     UQI      PSNR
#   no pixel is black                         0.0725    finite   finite   finite
#   one pixel of one picture is (0, 0, 0)     NaN       finite   finite   finite
#   the pixel is (1, 1, 1) / 255              0.0725    finite   finite   finite
# reduction="none" gives NaN for that pixel only. Nothing is logged.
#
# Why it matters: SAM is reported for colour fidelity, in colouring, restoration and super-resolution with diffusion
# models. Clipped shadows, letterboxes and outpainting masks have such pixels, so that one picture costs the number
# of the whole epoch. Keep the result of reduction="none", and average where it is finite.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 torchmetrics==1.9.0
cat > "$folder/check.py" <<'PY'
import torch
import torchmetrics
from torchmetrics.functional.image import spectral_angle_mapper
from torchmetrics.image import (
    PeakSignalNoiseRatio, SpectralAngleMapper, StructuralSimilarityIndexMeasure, UniversalImageQualityIndex,
)

print(f"torchmetrics {torchmetrics.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
target = 0.2 + 0.6 * torch.rand(100, 3, 32, 32)
pictures = (target + 0.05 * torch.randn_like(target)).clamp(0.05, 1)


def measure(value):
    """Return the metrics of all pictures, where one pixel of one picture has the given value in all channels."""
    drawn = pictures.clone()
    if value is not None:
        drawn[57, :, 3, 4] = value
    metrics = dict(SAM=SpectralAngleMapper(), SSIM=StructuralSimilarityIndexMeasure(data_range=1.0),
                   UQI=UniversalImageQualityIndex(), PSNR=PeakSignalNoiseRatio(data_range=1.0))
    results = {}
    for name, metric in metrics.items():
        for some, goals in zip(drawn.split(10), target.split(10)):
            metric.update(some, goals)
        results[name] = metric.compute()
    print(f"pixel {value}:", {name: round(result.item(), 4) for name, result in results.items()})
    return results


plain, black, nearly = measure(None), measure(0.0), measure(1 / 255)
for results in (plain, black, nearly):
    assert all(results[name].isfinite() for name in ("SSIM", "UQI", "PSNR")), "changed: another metric is not finite"
assert plain["SAM"].isfinite() and torch.isclose(plain["SAM"], nearly["SAM"], atol=1e-4)
assert black["SAM"].isnan(), "changed: a black pixel has an angle"

dark = pictures.clone()
dark[57, :, 3, 4] = 0
angles = spectral_angle_mapper(dark, target, reduction="none")
print("angles that are NaN with reduction='none':", angles.isnan().sum().item(), "of", angles.numel())
assert angles.isnan().sum() == 1, "changed: NaN of other pixels"
print("as described: one black pixel makes the mean NaN")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
