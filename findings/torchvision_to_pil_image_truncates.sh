#!/usr/bin/env bash
# torchvision: to_pil_image cuts floats off where diffusers rounds, and an 8-bit picture does not survive [-1, 1]
#
# One would guess: torchvision's to_pil_image makes of a float image the picture that diffusers' image processor makes,
# up to ties, and gives an 8-bit picture back unchanged after it was scaled to a VAE's [-1, 1] and back.
#
# What happens (torchvision 0.29.2, torch 2.15.0, diffusers 0.42.1):
#   random floats: to_pil_image is darker by 0.50 grey levels on average, the image processor by 0.00
#   all 256 levels, scaled to [-1, 1] and back in float32: 63 of 256 come back one level lower, and after 20 rounds
#   the mean is lower by 4.2 levels. The image processor returns all of them, also after 20 rounds.
#   convert_image_dtype to uint8, of the same package, returns all of them too, and is not darker.
#
# Why it matters: rewards that get PIL images, and images saved for evaluation, differ with the function that made them.
# Scores of JPEG size, FID and sharpness of the same latents then differ between a pipeline's pictures and a training
# loop's, in the same direction for every image, which averaging does not remove. Round: (255 * x).round().
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 torchvision==0.29.2 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
import torchvision
from diffusers.image_processor import VaeImageProcessor
from torchvision.transforms.functional import convert_image_dtype, pil_to_tensor, to_pil_image

print(f"torchvision {torchvision.__version__}, torch {torch.__version__}, diffusers {diffusers.__version__}")
processor = VaeImageProcessor()
ways = {
    "to_pil_image": lambda x: pil_to_tensor(to_pil_image(x)),
    "image processor": lambda x: pil_to_tensor(processor.postprocess(2 * x[None] - 1)[0]),
    "convert_image_dtype": lambda x: convert_image_dtype(x, torch.uint8),
}
floats = torch.rand(3, 256, 256, generator=torch.Generator().manual_seed(0))
levels = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(3, 1, 1)
found = {}
for name, way in ways.items():
    darker = 255 * floats.mean().item() - way(floats).float().mean().item()
    now = levels
    for round_ in range(20):
        now = way(((now / 255 * 2 - 1) / 2 + 0.5).clamp(0, 1))
        first = now if round_ == 0 else first
    lost = [256 * (one != levels).float().mean().item() for one in (first, now)]
    drift = (levels.float() - now.float()).mean().item()
    found[name] = (darker, *lost, drift)
    print(f"{name}: darker by {darker:.2f}, levels lost {lost[0]:.0f}, after 20 rounds {lost[1]:.0f}, drift {drift:.2f}")
assert abs(found["to_pil_image"][0] - 0.5) < 0.02, "changed: to_pil_image does not cut off"
assert found["to_pil_image"][1] > 30, "changed: levels come back"
assert abs(found["image processor"][0]) < 0.02 and found["image processor"][2] == 0, "changed: diffusers does not round"
assert found["convert_image_dtype"][1] == 0, "changed: convert_image_dtype loses levels"
print("as described")
PY
"$folder/venv/bin/python" "$folder/check.py"
