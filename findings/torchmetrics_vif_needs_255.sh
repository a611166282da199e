#!/usr/bin/env bash
# torchmetrics: visual information fidelity of images in [0, 1] hardly sees noise, and ranks pictures another way round
#
# One would guess: VisualInformationFidelity takes images in [0, 1], as SSIM does, or its value does not depend on the
# scale of the pixels.
#
# What happens (torchmetrics 1.9.0, torch 2.13.0): the noise of the visual system, sigma_n_sq=2.0, is a variance for
# pixels in [0, 255]. In [0, 1] it is larger than all variance of the picture. There is no data_range. VIF of one
# picture with noise or blur:
#                                   in [0, 1]    in [0, 255]
#   noise of 0.02                   1.00         0.66
#   noise of 0.1                    0.99         0.26
#   noise of 0.3                    0.74         0.09
#   mean of 5 x 5 pixels            0.30         0.24
# In [0, 1] the picture that noise of 0.3 destroys is better than the blurred one, in [0, 255] it is worse. Neither the
# documentation nor its examples, which use torch.randn, give a range. Nothing is logged. sigma_n_sq=2 / 255 ** 2
# gives the values of [0, 255]. SSIM with data_range ranks the blurred picture above the noisy one on both scales.
#
# Why it matters: networks and pipelines give pictures in [0, 1]. As a score of an autoencoder or of restoration, VIF
# then prefers noisy pictures to smooth ones. Multiply by 255, or pass sigma_n_sq.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 torchmetrics==1.9.0
cat > "$folder/check.py" <<'PY'
import torch
import torchmetrics
from torch.nn.functional import avg_pool2d
from torchmetrics.image import StructuralSimilarityIndexMeasure, VisualInformationFidelity

print(f"torchmetrics {torchmetrics.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
y, x = torch.meshgrid(torch.linspace(0, 6, 128), torch.linspace(0, 9, 128), indexing="ij")
grey = 0.5 + 0.3 * torch.sin(3 * x) * torch.cos(2 * y) + 0.15 * torch.sin(17 * x + 5 * y)
picture = torch.stack([grey, 0.9 * grey, 0.8 * grey])[None]
assert picture.min() >= 0 and picture.max() <= 1
pictures = {f"noise of {size}": (picture + size * torch.randn_like(picture)).clamp(0, 1) for size in (0.02, 0.1, 0.3)}
pictures["mean of 5 x 5"] = avg_pool2d(picture, 5, stride=1, padding=2, count_include_pad=False)


def vif(first, second, **options):
    return VisualInformationFidelity(**options)(first, second).item()


small, large = {}, {}
for name, changed in pictures.items():
    small[name], large[name] = vif(changed, picture), vif(255 * changed, 255 * picture)
    scaled = vif(changed, picture, sigma_n_sq=2 / 255 ** 2)
    similarity = [StructuralSimilarityIndexMeasure(data_range=float(size))(size * changed, size * picture).item()
                  for size in (1, 255)]
    print(f"{name:14} VIF in [0, 1] {small[name]:.2f}, in [0, 255] {large[name]:.2f}, "
          f"in [0, 1] with sigma_n_sq=2/255**2 {scaled:.2f}; SSIM {similarity[0]:.2f}, {similarity[1]:.2f}")
    assert abs(scaled - large[name]) < 0.01 and abs(similarity[0] - similarity[1]) < 0.01
assert small["noise of 0.1"] > 0.9 and large["noise of 0.1"] < 0.4, "changed: VIF does not depend on the scale"
assert small["noise of 0.3"] > small["mean of 5 x 5"] and large["noise of 0.3"] < large["mean of 5 x 5"]
print("as described: VIF expects [0, 255]")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
