#!/usr/bin/env bash
# deepspeed: weights frozen after initialize() are still changed by momentum and weight decay
#
# One would guess: requires_grad_(False) freezes weights in mid-training, as with a torch optimizer, which passes over
# weights without a gradient.
#
# What happens (deepspeed 0.19.8, torch 2.13.0): ZeRO and bfloat16 training give the optimizer a gradient of zeros for
# them, and AdamW then applies its momentum and the weight decay. A layer trained for five steps and frozen for 200
# (AdamW, lr=0.01, weight_decay=0.1); norm of its weights, as a part of the norm when it was frozen:
#                                 frozen with requires_grad_(False)   not used in the forward pass   frozen, and lr=0
#   torch                                      1.00                             1.00                      1.00
#   no ZeRO, float32                           1.00                             0.84                      1.00
#   ZeRO 1, ZeRO 2                             0.84                             0.84                      1.00
#   bfloat16, no ZeRO or ZeRO 1         0.82 or 0.84                     0.82 or 0.84                     1.00
# Nothing is logged.
#
# Why it matters: training in stages, or by turns of two adapters or of generator and discriminator, freezes a part for
# a while. That part decays towards 0 for as long as it is frozen. Set the learning rate of its parameter group to 0.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 deepspeed==0.19.8
cat > "$folder/check.py" <<'PY'
import logging
import sys

import deepspeed
import torch

print(f"deepspeed {deepspeed.__version__}, torch {torch.__version__}")
deepspeed.utils.logger.setLevel(logging.ERROR)
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # a faster all-reduce, whose compilation takes a minute
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
deepspeed.init_distributed("gloo", verbose=False)


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.kept, self.trained = torch.nn.Linear(16, 1), torch.nn.Linear(16, 1)

    def forward(self, images, uses_kept):
        return self.trained(images) + (self.kept(images) if uses_kept else 0)


class Plain:
    """torch alone, with the engine's methods."""

    def __init__(self, network, optimizer):
        self.module, self.optimizer = network, optimizer

    def __call__(self, *inputs):
        return self.module(*inputs)

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def build(stage, bfloat16):
    torch.manual_seed(0)
    network = Two()
    groups = [dict(params=list(part.parameters())) for part in (network.kept, network.trained)]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    if stage is None:
        return Plain(network, optimizer)
    return deepspeed.initialize(
        model=network, optimizer=optimizer,
        config=dict(train_micro_batch_size_per_gpu=4, zero_optimization=dict(stage=stage),
                    zero_allow_untested_optimizer=True, bf16=dict(enabled=bfloat16)))[0]


def step(engine, uses_kept=True):
    images = torch.ones(4, 16, dtype=engine.module.kept.weight.dtype)
    engine.backward(engine(images, uses_kept).float().square().mean())
    engine.step()


def freeze(engine):
    engine.module.kept.requires_grad_(False)


def freeze_and_stop(engine):
    freeze(engine)
    engine.optimizer.param_groups[0]["lr"] = 0.0


def norm_left(stage, bfloat16, change=None):
    engine = build(stage, bfloat16)
    for _ in range(5):
        step(engine)
    before = engine.module.kept.weight.float().norm().item()
    if change:
        change(engine)
    for _ in range(200):
        step(engine, uses_kept=change is not None)
    return engine.module.kept.weight.float().norm().item() / before


settings = {"torch": (None, False), "no ZeRO, float32": (0, False), "no ZeRO, bfloat16": (0, True),
            "ZeRO 1": (1, False), "ZeRO 2": (2, False), "ZeRO 1, bfloat16": (1, True)}
for name, setting in settings.items():
    frozen, unused, stopped = (norm_left(*setting, change) for change in (freeze, None, freeze_and_stop))
    print(f"{name:18} frozen {frozen:.3f}, unused {unused:.3f}, frozen with lr=0 {stopped:.3f}")
    assert stopped == 1, f"changed: {name} with lr=0"
    assert frozen == 1 if name in ("torch", "no ZeRO, float32") else 0.7 < frozen < 0.9, f"changed: {name}, frozen"
    assert unused == 1 if name == "torch" else 0.7 < unused < 0.9, f"changed: {name}, unused"
torch.distributed.destroy_process_group()
print("as described: frozen weights decay")
PY
OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 \
    "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
