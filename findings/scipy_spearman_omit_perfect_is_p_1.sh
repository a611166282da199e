#!/usr/bin/env bash
# scipy: spearmanr with nan_policy="omit" gives p = 1 to perfect agreement of 4, 8, 12 and other numbers of values
#
# One would guess: the correlation of the values that are left, and the p-value that they have without the NaN.
#
# What happens (scipy 1.17.1, numpy 2.4.6): "omit" takes another code path, whose correlation can be 1.0000000000000002.
# 1 - r is then negative and is clipped to 0, so that the t statistic is 0. Two equal rankings of N values, with one
# value more that is NaN in the first of them:
#   N                       statistic                p-value      without the NaN
#   4                       1.0000000000000002       1.0          1.0, 0.0
#   5                       0.9999999999999998       4e-24        0.9999999999999999, 1e-24
#   6                       1.0                      0.0          1.0, 0.0
#   8                       1.0000000000000002       1.0          1.0, 0.0
# One-sided p-values are 0.5. Opposite rankings do the same with -1.0000000000000002. Of the N from 4 to 100, 20 have
# p = 1: 4, 8, 12, 17, 19, 22, 31 and so on (rounding decides which ones). There is no warning.
#
# Why it matters: the rank correlation of a reward with people, or of two rewards over a few checkpoints or models, is
# often over 4 to 20 values with gaps, and may be perfect. The strongest result is then reported as no evidence at all.
# Drop the pairs with a NaN before the call.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile numpy==2.4.6 scipy==1.17.1
cat > "$folder/check.py" <<'PY'
import numpy as np
import scipy
from scipy.stats import spearmanr

print(f"scipy {scipy.__version__}, numpy {np.__version__}")


def rankings(count, sign=1):
    """Return two rankings, of which the first has one NaN more at its end."""
    first = np.arange(count + 1.0)
    second = sign * first**2
    first[-1] = np.nan
    return first, second


for count in (4, 5, 6, 8):
    first, second = rankings(count)
    omitted, plain = spearmanr(first, second, nan_policy="omit"), spearmanr(first[:-1], second[:-1])
    print(f"{count} values: statistic {omitted.statistic!s}, p {omitted.pvalue:.3g}; without the NaN "
          f"{plain.statistic!s}, p {plain.pvalue:.3g}")
    assert plain.pvalue < 1e-20
for sign in (1, -1):
    found = [count for count in range(4, 101) if spearmanr(*rankings(count, sign), nan_policy="omit").pvalue > 0.9]
    print(f"sign {sign}: p is 1 for {len(found)} of 97 numbers of values:", found)
    assert len(found) > 5, "changed: perfect agreement is found"
sides = [spearmanr(*rankings(found[0]), nan_policy="omit", alternative=side).pvalue for side in ("greater", "less")]
print("one-sided:", [float(side) for side in sides])
assert sides == [0.5, 0.5], "changed: one-sided"
print("as described: perfect agreement has p = 1")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W error "$folder/check.py"
