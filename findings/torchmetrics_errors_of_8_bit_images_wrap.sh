#!/usr/bin/env bash
# torchmetrics: MSE, MAE, PSNR-B and total variation of 8-bit images wrap around, while PSNR is right and SSIM raises
#
# One would guess: a metric that takes two uint8 images, as the FID and PSNR of torchmetrics do, computes with their
# values; or it raises, as its SSIM does.
#
# What happens (torchmetrics 1.9.0, torch 2.13.0): the differences are taken in 8 bits, modulo 256, and so are squares.
# Two smooth images with normal noise of size 5 and 60 between them, as uint8 and as float:
#                                     noise 5               noise 60
#                                     uint8      float      uint8      float
#   MeanSquaredError                  24.1       24.5       104        2,895
#   MeanAbsoluteError                 116        3.9        125        42.9
#   PSNR with blocked effect, dB      34.3       34.2       28.0       13.5
#   TotalVariation of the noisy one   1.93e6     0.14e6     1.95e6     0.97e6
#   PeakSignalNoiseRatio, dB          34.2       34.2       13.5       13.5
#   StructuralSimilarityIndexMeasure  raises     0.93       raises     0.17
# Nothing is logged.
#
# Why it matters: images are rounded to 8 bits before rewards and metrics, and stay uint8 for FID. An error that is
# computed next to it, for reconstructions of an autoencoder or distances between the samples of a group, saturates: MSE
# cannot exceed 255, and MAE hardly tells a small error from a large one. Convert with .float() first.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 torchmetrics==1.9.0
cat > "$folder/check.py" <<'PY'
import torch
import torchmetrics
from torchmetrics import MeanAbsoluteError, MeanSquaredError
from torchmetrics.image import (
    PeakSignalNoiseRatio, PeakSignalNoiseRatioWithBlockedEffect, StructuralSimilarityIndexMeasure, TotalVariation,
)

print(f"torchmetrics {torchmetrics.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
smooth = torch.nn.functional.interpolate(torch.rand(2, 1, 6, 6), size=64, mode="bicubic").clamp(0, 1)
image = (smooth * 255).round().byte()


def value(metric, *images):
    try:
        metric.update(*images)
        return metric.compute().item()
    except RuntimeError:
        return "raises"


METRICS = {
    "MeanSquaredError": MeanSquaredError, "MeanAbsoluteError": MeanAbsoluteError,
    "PeakSignalNoiseRatioWithBlockedEffect": lambda: PeakSignalNoiseRatioWithBlockedEffect(data_range=255.0),
    "PeakSignalNoiseRatio": lambda: PeakSignalNoiseRatio(data_range=255.0),
    "StructuralSimilarityIndexMeasure": lambda: StructuralSimilarityIndexMeasure(data_range=255.0),
}
found = {}
for size in (5, 60):
    other = (image + size * torch.randn(image.shape)).clamp(0, 255).round().byte()
    for name, build in METRICS.items():
        found[name, size] = value(build(), other, image), value(build(), other.float(), image.float())
    found["TotalVariation", size] = value(TotalVariation(), other), value(TotalVariation(), other.float())
for (name, size), (eight, exact) in found.items():
    print(f"{name:38} noise {size:2}: uint8 {eight if isinstance(eight, str) else round(eight, 2)}, float {exact:.2f}")

for size in (5, 60):
    eight, exact = found["MeanAbsoluteError", size]
    assert eight > 100 and exact < 60, "changed: MeanAbsoluteError"
    eight, exact = found["TotalVariation", size]
    assert eight > 1.2 * exact, "changed: TotalVariation"
    eight, exact = found["PeakSignalNoiseRatio", size]
    assert abs(eight - exact) < 0.01
    assert found["StructuralSimilarityIndexMeasure", size][0] == "raises", "changed: SSIM takes uint8"
eight, exact = found["MeanSquaredError", 60]
assert eight < 255 < 1000 < exact, "changed: MeanSquaredError"
eight, exact = found["PeakSignalNoiseRatioWithBlockedEffect", 60]
assert eight > exact + 5, "changed: PSNR-B"
print("as described: errors of 8-bit images wrap around")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
