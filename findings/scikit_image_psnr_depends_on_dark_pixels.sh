#!/usr/bin/env bash
# scikit-image: PSNR of pictures in [-1, 1] is 6 dB lower for a picture without a pixel below 0
#
# One would guess: peak_signal_noise_ratio has one data range for all float pictures, and equal errors give equal PSNR.
#
# What happens (scikit-image 0.26.0, numpy 2.4.6): without data_range, the range is 2 if the first picture has a pixel
# below 0, and 1 if it has none. Pictures in [-1, 1] with equal errors of 0.02 per pixel:
#                                                         PSNR      with data_range=2
#   random picture                                       40.00           40.00
#   the same, brighter, all pixels above 0               33.98           40.00
#   the same, and one pixel of it is -0.001              40.00           40.00
# So the order of a pair matters, where only one of its two pictures has such a pixel: 39.67 and 33.65. Signed integers
# do the same. There is no warning, while structural_similarity raises an error for floats without data_range.
#
# Why it matters: diffusion networks and autoencoders work in [-1, 1]. Ranking pictures by PSNR, or a reconstruction
# reward, takes 6 dB from bright pictures, such as drawings on white, and the mean of a set follows the share of
# bright pictures in it. Always set data_range.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile numpy==2.4.6 scikit-image==0.26.0
cat > "$folder/check.py" <<'PY'
import numpy as np
import skimage
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

print(f"scikit-image {skimage.__version__}, numpy {np.__version__}")
random = np.random.default_rng(0)
picture = random.uniform(-0.9, 0.9, (64, 64, 3))
bright = 0.5 + 0.4 * picture
nearly = bright.copy()
nearly[0, 0, 0] = -0.001
error = 0.02 * np.sign(random.standard_normal(picture.shape))


def measure(name, true, test):
    default, fixed = (peak_signal_noise_ratio(true, test, **options) for options in ({}, {"data_range": 2}))
    print(f"{name}: from {true.min():.3f} to {true.max():.3f}, PSNR {default:.2f}, with data_range=2 {fixed:.2f}")
    assert abs(fixed - 40) < 0.1
    return default - fixed


assert measure("random picture", picture, picture + error) == 0
loss = measure("bright picture", bright, bright + error)
assert abs(loss + 20 * np.log10(2)) < 1e-6, "changed: a bright picture has the same range"
assert measure("one pixel below 0", nearly, nearly + error) == 0
exchanged = np.abs(bright) + error
assert exchanged.min() > 0
pair = [peak_signal_noise_ratio(nearly, exchanged), peak_signal_noise_ratio(exchanged, nearly)]
print("both orders of one pair:", [round(float(value), 2) for value in pair])
assert pair[0] - pair[1] > 6, "changed: the order does not matter"
darker = bright - 0.2
signed = [(100 * values).astype(np.int8) for values in (bright, bright + error, darker, darker + error)]
whole = [peak_signal_noise_ratio(*signed[start:start + 2]) for start in (0, 2)]
print("int8, bright and darker:", [round(float(value), 2) for value in whole])
assert whole[1] - whole[0] > 5.5, "changed: integers"
try:
    structural_similarity(bright, bright + error, channel_axis=2)
except ValueError as reason:
    print("structural_similarity:", str(reason)[:60])
else:
    raise AssertionError("changed: structural_similarity takes floats without data_range")
print("as described: the data range depends on the picture")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W error "$folder/check.py"
