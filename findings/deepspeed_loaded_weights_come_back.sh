#!/usr/bin/env bash
# deepspeed: the next step undoes loading weights after initialize(), also with the engine's load_module_state_dict
#
# One would guess: load_state_dict of the network, or the engine's load_module_state_dict, replaces the weights, and
# training continues from them, as with a torch optimizer.
#
# What happens (deepspeed 0.19.8, torch 2.13.0): ZeRO and bfloat16 training keep a second copy of the weights in the
# optimizer, also where all is float32. Loading does not reach it, and a step writes it over the network. All weights
# loaded as 3 in mid-training; mean weight after loading, and after the next step (AdamW, lr=0.01):
#                                           loaded    no ZeRO, float32    ZeRO 1 or 2, or bfloat16 without ZeRO
#   module.load_state_dict                     3            3.00                             -0.01
#   engine.load_module_state_dict              3            3.00                             -0.01
#   load_state_dict, refresh_fp32_params()     3              -                       2.99 to 3.00
# Nothing is logged. deepspeed documents functions that set one parameter of the optimizer's copy, and load_checkpoint
# for its own checkpoints, but load_module_state_dict has no such note.
#
# Why it matters: going back to the best policy, training on from averaged weights, or loading a pretrained network
# after the strategy has set up the engine. An evaluation right after loading shows the loaded weights; training
# continues from the others. The method that mends it is not documented.
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
settings = {"no ZeRO, float32": (0, False), "no ZeRO, bfloat16": (0, True), "ZeRO 1": (1, False), "ZeRO 2": (2, False),
            "ZeRO 1, bfloat16": (1, True)}


def build(stage, bfloat16):
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
    engine, *_ = deepspeed.initialize(
        model=network, optimizer=torch.optim.AdamW(network.parameters(), lr=0.01, weight_decay=0.0),
        config=dict(train_micro_batch_size_per_gpu=4, zero_optimization=dict(stage=stage),
                    zero_allow_untested_optimizer=True, bf16=dict(enabled=bfloat16)))
    return engine


def step(engine):
    images = torch.ones(4, 16, dtype=engine.module[0].weight.dtype)
    engine.backward(engine(images).float().square().mean())
    engine.step()


def load_network(engine, weights):
    engine.module.load_state_dict(weights)


def load_engine(engine, weights):
    engine.load_module_state_dict({"module": weights})


def load_and_refresh(engine, weights):
    engine.module.load_state_dict(weights)
    engine.optimizer.refresh_fp32_params()


for load in (load_network, load_engine, load_and_refresh):
    for name, (stage, bfloat16) in settings.items():
        plain = stage == 0 and not bfloat16
        if plain and load is load_and_refresh:
            continue
        engine = build(stage, bfloat16)
        step(engine)
        load(engine, {key: torch.full_like(value, 3.0) for key, value in engine.module.state_dict().items()})
        loaded = engine.module[0].weight.float().mean().item()
        step(engine)
        after = engine.module[0].weight.float().mean().item()
        print(f"{load.__name__:17} {name:18} loaded {loaded:.2f}, after a step {after:.2f}")
        assert loaded == 3
        if plain or load is load_and_refresh:
            assert abs(after - 3) < 0.02, f"changed: {name} with {load.__name__}"
        else:
            assert abs(after) < 0.1, f"changed: {name} keeps the loaded weights"
torch.distributed.destroy_process_group()
print("as described: the next step brings the old weights back")
PY
OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 \
    "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
