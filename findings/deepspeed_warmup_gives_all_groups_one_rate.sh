#!/usr/bin/env bash
# deepspeed, peft: WarmupLR and WarmupDecayLR give all parameter groups one rate, so that LoRA+ becomes plain LoRA
#
# One would guess: a warm-up multiplies the rates that the optimizer's groups have, as torch's and transformers'
# schedulers and DeepSpeed's own WarmupCosineLR do.
#
# What happens (deepspeed 0.19.8, peft 0.21.2, torch 2.13.0): warmup_max_lr, one number, is a rate, not a factor, and is
# written into every group. Rates after the warm-up of a LoRA+ optimizer with lr=1e-4 and loraplus_lr_ratio=16, and of
# one whose text encoder is to be trained at a tenth:
#                                                  A          B          network    text encoder
#   before                                         0.0001     0.0016     0.0001     0.00001
#   LambdaLR, get_linear_schedule_with_warmup      0.0001     0.0016     0.0001     0.00001
#   WarmupCosineLR                                 0.0001     0.0016     0.0001     0.00001
#   WarmupLR, WarmupDecayLR                        0.0001     0.0001     0.0001     0.0001
# Without warmup_max_lr all groups get its default 0.001. A list with a rate for each group is kept. All of
# DeepSpeed's warm-ups begin with two updates at rate 0, others with one or none. Nothing is logged about either.
#
# Why it matters: WarmupDecayLR is the linear schedule of DeepSpeed's configurations. With it LoRA+ is plain LoRA, and a
# text encoder that was to move slowly moves ten times as fast. Give warmup_max_lr a list in
# the order of the groups, or use WarmupCosineLR.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2 \
    deepspeed==0.19.8
cat > "$folder/check.py" <<'PY'
import logging

import deepspeed
import peft
import torch
import transformers
from deepspeed.runtime.lr_schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from torch.optim.lr_scheduler import LambdaLR

print(f"deepspeed {deepspeed.__version__}, peft {peft.__version__}, torch {torch.__version__}")
deepspeed.utils.logger.setLevel(logging.ERROR)
RATE, WARM, END = 1e-4, 4, 1_000_000


def loraplus():
    network = get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(target_modules=["0"]))
    return create_loraplus_optimizer(network, torch.optim.AdamW, lr=RATE, loraplus_lr_ratio=16)


def two_networks():
    network, text_encoder = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    return torch.optim.AdamW([{"params": network.parameters()},
                              {"params": text_encoder.parameters(), "lr": RATE / 10}], lr=RATE)


SCHEDULERS = {
    "LambdaLR": lambda o: LambdaLR(o, lambda step: min(1.0, (step + 1) / WARM)),
    "get_linear_schedule_with_warmup": lambda o: transformers.get_linear_schedule_with_warmup(o, WARM, END),
    "WarmupCosineLR": lambda o: WarmupCosineLR(o, END, warmup_num_steps=WARM),
    "WarmupLR": lambda o: WarmupLR(o, warmup_max_lr=RATE, warmup_num_steps=WARM),
    "WarmupDecayLR": lambda o: WarmupDecayLR(o, END, warmup_max_lr=RATE, warmup_num_steps=WARM),
    "WarmupDecayLR without warmup_max_lr": lambda o: WarmupDecayLR(o, END, warmup_num_steps=WARM),
    "WarmupDecayLR with a list": lambda o: WarmupDecayLR(
        o, END, warmup_min_lr=[0.0] * len(o.param_groups), warmup_max_lr=[group["lr"] for group in o.param_groups],
        warmup_num_steps=WARM),
}
for build in (loraplus, two_networks):
    rates = [group["lr"] for group in build().param_groups if group["params"]]
    print(f"{build.__name__}: groups have", [f"{rate:.5f}" for rate in rates])
    for name, scheduler in SCHEDULERS.items():
        optimizer = build()
        schedule, still = scheduler(optimizer), 0
        for _ in range(WARM + 1):
            still += optimizer.param_groups[0]["lr"] == 0
            optimizer.step()
            schedule.step()
        after = [group["lr"] for group in optimizer.param_groups if group["params"]]
        print(f"  {name:36}", [f"{rate:.5f}" for rate in after], f"updates at rate 0: {still}")
        after = torch.tensor(after)
        if name in ("WarmupLR", "WarmupDecayLR"):
            assert torch.allclose(after, torch.full_like(after, RATE), rtol=1e-3), f"changed: {name}"
            assert still == 2, f"changed: {name} starts sooner"
        elif name.endswith("without warmup_max_lr"):
            assert torch.allclose(after, torch.full_like(after, 1e-3), rtol=1e-3), f"changed: {name}"
        else:
            assert torch.allclose(after, torch.tensor(rates), rtol=1e-3), name
print("as described: all groups have one rate")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
