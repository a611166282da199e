#!/usr/bin/env bash
# diffusers: making a ControlNet from Stable Diffusion 3's network changes the network's own configuration
#
# One would guess: SD3ControlNetModel.from_transformer(network, num_layers=12) reads the network and leaves it alone, as
# the same call does for FLUX.1 and Qwen-Image. A configuration of diffusers is frozen in any case: its class is called
# FrozenDict, and its methods update() and pop() raise an error.
#
# What happens (diffusers 0.42.1, torch 2.13.0): from_transformer() writes num_layers, 12 by default, and
# extra_conditioning_channels into the configuration of the network. FrozenDict does not refuse that: config["x"] = y
# and config.x = y both work. A network of 4 blocks, and a ControlNet of 2:
#   len(network.transformer_blocks)                       4
#   network.config.num_layers                             4
#   network.config["num_layers"]                          2
#   SD3Transformer2DModel.from_config(network.config)     2 blocks
#   network.save_pretrained(folder)                       config.json says 2 layers
#   SD3Transformer2DModel.from_pretrained(folder)         ValueError: expected shape [64], got [192]
# Neither the call nor saving logs anything.
#
# Why it matters: a network that is trained, or saved, in the process that made its ControlNet cannot be loaded any
# more, and a copy made from its configuration, such as an EMA or a reference, has half the blocks. The weights in the
# file are whole: set num_layers in config.json back. Give from_transformer() a copy, or restore
# network.config["num_layers"].
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 \
    accelerate==1.15.0
cat > "$folder/check.py" <<'PY'
import json
import sys

import diffusers
import torch
from diffusers import SD3ControlNetModel, SD3Transformer2DModel

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
folder = f"{sys.argv[1]}/network"


def make_network():
    return SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=4, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4)


def saved_layers(network):
    network.save_pretrained(folder)
    with open(f"{folder}/config.json") as file:
        return json.load(file)["num_layers"]


network = make_network()
assert saved_layers(network) == 4 and len(SD3Transformer2DModel.from_pretrained(folder).transformer_blocks) == 4
SD3ControlNetModel.from_transformer(network, num_layers=2)
copy = SD3Transformer2DModel.from_config(network.config)
layers = saved_layers(network)
print(f"after from_transformer(num_layers=2): {len(network.transformer_blocks)} blocks, config.num_layers "
      f"{network.config.num_layers}, config['num_layers'] {network.config['num_layers']}, {layers} in config.json; "
      f"a copy made from the configuration has {len(copy.transformer_blocks)} blocks")
assert len(network.transformer_blocks) == network.config.num_layers == 4
assert network.config["num_layers"] == layers == len(copy.transformer_blocks) == 2, "changed: the configuration"
assert network.config["extra_conditioning_channels"] == 1
try:
    SD3Transformer2DModel.from_pretrained(folder)
except ValueError as error:
    print(f"loading what was saved: ValueError: {str(error).split('.', 4)[0]}... {str(error)[20:130]}")
else:
    raise AssertionError("changed: the saved network can be loaded")
network.config["num_layers"] = 4
saved_layers(network)
assert len(SD3Transformer2DModel.from_pretrained(folder).transformer_blocks) == 4, "changed: restoring does not help"

for method in (lambda: network.config.update(num_layers=4), lambda: network.config.pop("num_layers")):
    try:
        method()
    except Exception as error:
        assert "You cannot use" in str(error)
    else:
        raise AssertionError("changed: update() and pop() raise an error")
print("as described: the network's configuration becomes that of the ControlNet")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
