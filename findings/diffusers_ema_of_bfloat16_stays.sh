#!/usr/bin/env bash
# diffusers: the moving average that EMAModel keeps of a bfloat16 network stays where it started, without a warning
#
# One would guess: EMAModel, which is made for decays such as 0.9999, keeps its averages in float32, as optimizers with
# master weights do, and after five times 1 / (1 - decay) steps less than 1% of the way to the network is left.
#
# What happens (diffusers 0.42.1, torch 2.13.0): the averages have the type of the parameters. The step towards them is
# smaller than half the distance of two bfloat16 numbers and is rounded away. 2,000 random weights are moved by a tenth
# of their size and then held. Part of the way that the average has not gone after 5 / (1 - decay) steps:
#   decay                      0.9      0.99     0.999    0.9999 (20,000 steps)
#   float32                    0.5%     0.7%     0.7%     14%
#   float16                    3.5%     32%      88%      99%
#   bfloat16                   24%      84%      99%      100%
# The default foreach=False and foreach=True give the same. Nothing is logged. A copy of the parameters in float32 that
# is given to EMAModel instead is averaged exactly; step() takes the bfloat16 parameters then.
#
# Why it matters: a full fine-tuning in bfloat16 with EMA validates and saves the network of its first steps, at any
# length of the run, and a comparison of decays compares roundings. The averages that are saved look like weights of
# the run. Give EMAModel float32 copies, or call ema.to(dtype=torch.float32) before the first step.
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


def left(dtype, decay, kind="parameters", foreach=False):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(2000).to(dtype))
    given = [torch.nn.Parameter(weight.detach().float())] if kind == "float32 copies" else [weight]
    ema = EMAModel(given, decay=decay, min_decay=decay, foreach=foreach)
    if kind == "ema.to(float32)":
        ema.to(dtype=torch.float32)
    ema.step([weight])  # the first step has decay 0
    start = weight.detach().float().clone()
    with torch.no_grad():
        weight.add_(0.1 * torch.randn(2000).to(dtype))
    for _ in range(min(round(5 / (1 - decay)), 20_000)):
        ema.step([weight])
    end = weight.detach().float()
    return ((ema.shadow_params[0].float() - end).norm() / (start - end).norm()).item()


decays = (0.9, 0.99, 0.999, 0.9999)
rest = {dtype: [left(dtype, decay) for decay in decays] for dtype in (torch.float32, torch.float16, torch.bfloat16)}
for dtype, parts in rest.items():
    print(f"{str(dtype):15} decays {decays}: left of the way", [f"{part:.1%}" for part in parts])
assert max(rest[torch.float32][:3]) < 0.01 and 0.1 < rest[torch.float32][3] < 0.2
bfloat16 = rest[torch.bfloat16]
assert bfloat16[0] > 0.2 and bfloat16[1] > 0.8 and bfloat16[2] > 0.98 and bfloat16[3] > 0.999, "changed: bfloat16"
assert abs(left(torch.bfloat16, 0.999, foreach=True) - bfloat16[2]) < 1e-3, "changed: foreach"
for kind in ("float32 copies", "ema.to(float32)"):
    part = left(torch.bfloat16, 0.999, kind)
    print(f"bfloat16 network, {kind}, decay 0.999: left {part:.1%}")
    assert part < 0.01, f"changed: {kind}"
print("as described: averages of a bfloat16 network do not move")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
