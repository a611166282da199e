#!/usr/bin/env bash
# diffusers: EMAModel with use_ema_warmup=False warms up, so that a decay of 0.9999 is not reached in 80,000 steps
#
# One would guess: EMAModel(parameters, decay=0.9999) averages with decay 0.9999, and use_ema_warmup, which is False by
# default, is what makes the decay grow from 0.
#
# What happens (diffusers 0.42.1, torch 2.13.0): use_ema_warmup chooses between two warmups. Without it the decay of
# update n > 1 is n / (9 + n), until decay is reached. inv_gamma and power have no effect then. Decay used:
#   update                          1      2      100     1,000    10,000   80,000
#   use_ema_warmup=False            0      0.18   0.917   0.991    0.9991   0.99989
#   use_ema_warmup=True             0      0.37   0.953   0.990    0.9978   0.99946
# min_decay=0.9999 gives the constant decay from the second update on. The first update copies the weights.
# Nothing is logged.
#
# Why it matters: online RL takes hundreds of steps. An EMA meant as an old policy or a slow reference (0.9999 over
# 300 steps keeps 97 % of the start) has then forgotten the start: a network whose weights go from 0 to 1 in 300 equal
# steps has an EMA of 0.900 instead of 0.018. Two decays compared in such a run, 0.999 and 0.9999, are the same EMA.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers.training_utils import EMAModel

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")


def decays(**options):
    weight = torch.nn.Parameter(torch.zeros(1))
    ema, used = EMAModel([weight], decay=0.9999, **options), {}
    for update in range(1, 80001):
        ema.step([weight])
        if update in (1, 2, 100, 1000, 10000, 80000):
            used[update] = round(ema.cur_decay_value, 5)
    print(options, used)
    return used


def average(steps=300, **options):
    weight = torch.nn.Parameter(torch.zeros(1))
    ema = EMAModel([weight], **options)
    for step in range(1, steps + 1):
        weight.data.fill_(step / steps)
        ema.step([weight])
    result = ema.shadow_params[0].item()
    print(f"after {steps} steps from 0 to 1, {options}: {result:.3f}")
    return result


without, warmed = decays(), decays(use_ema_warmup=True)
assert without == decays(inv_gamma=100.0, power=0.5), "changed: inv_gamma or power has an effect without the warmup"
assert [without[n] for n in (1, 2, 100, 1000)] == [0, 0.18182, 0.91743, 0.99108], "changed: the decay is constant"
assert without[80000] < 0.9999 and warmed[1000] < without[1000], "changed: the decay"
assert abs(average(decay=0.9999) - 0.9) < 0.005 and average(decay=0.999) == average(decay=0.9999), "changed"
assert average(decay=0.9999, min_decay=0.9999) < 0.03, "changed: min_decay"
print("as described: the decay grows from 0 though use_ema_warmup is False")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
