#!/usr/bin/env bash
# piq: one flat patch in a picture makes gradients of FSIM, GMSD, MS-GMSD and DSS NaN, while their values look right
#
# One would guess: metrics that piq offers as losses have finite gradients for any picture with values in [0, 1].
#
# What happens (piq 0.8.0, torch 2.15.0): a square of 32 x 32 pixels of one colour in a picture of 192 x 192 pixels,
# such as a clipped highlight or a logo, gives NaN in the gradient, at least in and around the square. The rest of the
# picture and the reference are ordinary. Values, and the share of the picture's gradient that is NaN:
#                                     without a square     with a white square    picture = reference
#   fsim                              0.541     0%         0.546     2.8%         1        0%
#   gmsd                              0.070     0%         0.126     2.1%         0        100%
#   multi_scale_gmsd                  0.079     0%         0.145     2.8%         0        100%
#   dss                               0.820     0%         0.600     2.8%         1        0%
#   mdsi                              0.371     0%         0.372     0%           0        100%
#   ssim, multi_scale_ssim, vif_p, vsi, haarpsi: 0% in each case
# Nothing is logged. Square roots (and a power in FSIM) at zero are the cause.
#
# Why it matters: as a reward that is differentiated, or as a loss of an autoencoder, one such picture in a batch gives
# NaN in the gradient of every weight that made it, and clipping by the norm spreads that to all weights. Early pictures
# and graphics have flat areas often. Use HaarPSI or SSIM, add faint noise, or check gradients before each step.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 torchvision==0.29.2 piq==0.8.0
cat > "$folder/check.py" <<'PY'
import piq
import torch
from torch.nn.functional import interpolate

print(f"piq {piq.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
small = interpolate(torch.rand(1, 3, 192, 192) * 0.5 + 0.2, scale_factor=0.125, mode="area")
reference = interpolate(small, size=192, mode="bicubic").clamp(0, 1)
plain = (reference + 0.05 * torch.randn_like(reference)).clamp(0, 1)
square = plain.clone()
square[..., 40:72, 40:72] = 1
NAN_WITH_SQUARE, NAN_IF_EQUAL = {"fsim", "gmsd", "multi_scale_gmsd", "dss"}, {"gmsd", "multi_scale_gmsd", "mdsi"}
NAMES = "fsim gmsd multi_scale_gmsd dss mdsi ssim multi_scale_ssim vif_p vsi haarpsi".split()


def look(name, picture):
    """Return the metric's value and the share of its gradient that is NaN."""
    picture = picture.clone().requires_grad_()
    value = getattr(piq, name)(picture, reference, data_range=1.0, reduction="mean")
    value.backward()
    assert value.isfinite()
    return value.item(), picture.grad.isnan().float().mean().item()


for name in NAMES:
    results = [look(name, picture) for picture in (plain, square, reference)]
    print(f"{name:17}", ", ".join(f"{value:.3f} ({share:.1%} NaN)" for value, share in results))
    (_, without), (_, flat), (_, equal) = results
    assert without == 0, f"changed: {name} of an ordinary picture"
    assert (flat > 0.01) == (name in NAN_WITH_SQUARE), f"changed: {name} with a flat square"
    assert (equal > 0.9) == (name in NAN_IF_EQUAL), f"changed: {name} of equal pictures"

weight = torch.ones(3, 1, 1, requires_grad=True)
piq.dss(square * weight, reference, data_range=1.0).backward()
print("gradient of a factor per colour channel:", weight.grad.flatten().tolist())
assert weight.grad.isnan().all(), "changed: the gradient of a weight"
print("as described: a flat patch gives NaN")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
