#!/usr/bin/env bash
# torch: for a negative metric, ReduceLROnPlateau takes a value that is worse by up to the threshold for a new best one
#
# One would guess: threshold=0.05 asks for an improvement by 5 %, whatever the sign of the metric; a metric that stays
# or gets worse reduces the learning rate after `patience` steps.
#
# What happens (torch 2.13.0): the relative threshold, which is the default, is best * (1 + threshold) for mode "max".
# For a negative best value it lies below that value, so that equal and worse values count as an improvement and become
# the best one. Learning rate after 100 steps with patience 3, from 1:
#   metric                                       threshold     mean 1     mean -1
#   mean, constant                                 1e-4         1e-08      1
#   mean, constant                                 0.05         1e-08      1
#   normal noise of 1 % around it                  1e-4         1e-08      1e-08
#   normal noise of 1 % around it                  0.05         1e-08      1
#   lower by 0.2 % at each step, same noise        0.05         1e-08      1       best value -1.21 at the end
#   the same with threshold_mode="abs"             0.05         1e-08      1e-08
# Mode "min" does the same for negative losses. Nothing is logged. Lightning's ReduceLROnPlateau is the same class.
#
# Why it matters: rewards and policy losses are often negative (a negated distance, the ImageReward of a weak model, a
# surrogate that is maximised), and noisy, so that one asks for more than 1e-4. The schedule then does nothing for the
# whole run, even while the reward falls. Use threshold_mode="abs".
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0
cat > "$folder/check.py" <<'PY'
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

print(f"torch {torch.__version__}")


def after(mean, noise=0.0, slope=0.0, mode="max", **options):
    """Return the learning rate and the best value after 100 steps."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = ReduceLROnPlateau(optimizer, mode=mode, patience=3, **options)
    for step in range(100):
        scheduler.step(mean + slope * step + noise * torch.randn((), generator=generator).item())
    rate = optimizer.param_groups[0]["lr"]
    print(f"mean {mean}, noise {noise}, slope {slope}, {mode}, {options}: learning rate {rate:.3g}, "
          f"best value {scheduler.best:.3f}")
    return rate, scheduler.best


for threshold, noise, fails in ((1e-4, 0.0, True), (0.05, 0.0, True), (1e-4, 0.01, False), (0.05, 0.01, True)):
    for mode in ("max", "min"):
        assert after(1.0, noise, mode=mode, threshold=threshold)[0] < 1e-7
        rate, _ = after(-1.0, noise, mode=mode, threshold=threshold)
        assert rate == 1 if fails else rate < 1e-7, "changed: a negative metric"
assert after(1.0, 0.01, -0.002, threshold=0.05)[0] < 1e-7
rate, best = after(-1.0, 0.01, -0.002, threshold=0.05)
assert rate == 1 and best < -1.19, "changed: a falling reward is not the best one"
assert after(-1.0, 0.01, -0.002, threshold=0.05, threshold_mode="abs")[0] < 1e-7
print("as described: a negative metric that is slightly worse counts as the best one")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
