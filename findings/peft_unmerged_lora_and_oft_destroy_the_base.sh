#!/usr/bin/env bash
# peft: merging and unmerging a LoRA and an OFT adapter leaves another base network behind
#
# One would guess: merge_adapter() computes what the two active adapters computed, as merge_and_unload() does, and
# unmerge_adapter() or disable_adapter() gives the network as it was, up to rounding.
#
# What happens (peft 0.21.2, torch 2.13.0): a layer with two types of adapter is a layer in a layer. Merging and
# unmerging both go from the outer to the inner one, so that unmerging takes the sum of the LoRA off before the rotation
# of the OFT that was applied after it. Distances of the output of two linear layers, relative to the base's output:
#                                     LoRA and LoHa    LoRA and OFT    OFT and LoRA
#   change by both adapters           1.6              1.8             2.1
#   merged against active             0.0              0.8             2.0
#   unmerged against active           0.0              0.8             2.0
#   disable_adapter() against base    0.0              2.2             0.7
# merge_and_unload() merges from the inside and is right. LoHa or LoKr with OFT are as LoRA with OFT. The base weights
# stay changed, also for adapters loaded later. Nothing is logged.
#
# Why it matters: a network is merged for the speed of drawing, and unmerged to train or for the reference of a KL
# penalty. The reference is then another network, and drifts with each turn. Use merge_and_unload() on a copy.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import peft
import torch
from peft import LoHaConfig, LoraConfig, OFTConfig, get_peft_model
from torch import nn

print(f"peft {peft.__version__}, torch {torch.__version__}")
targets = ["0", "2"]
configs = {"LoRA": lambda: LoraConfig(r=4, init_lora_weights=False, target_modules=targets),
           "LoHa": lambda: LoHaConfig(r=4, alpha=64, init_weights=False, target_modules=targets),
           "OFT": lambda: OFTConfig(r=0, oft_block_size=4, init_weights=False, target_modules=targets)}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)).eval()


inputs = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
base = network()(inputs)


@torch.no_grad()
def build(first, second):
    model = get_peft_model(network(), configs[first](), "one", mixed=True)
    model.add_adapter("two", configs[second]())
    generator = torch.Generator().manual_seed(2)
    for name, weight in model.named_parameters():
        if "oft" in name:
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
        elif "lora" in name or "hada" in name:
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    model.set_adapter(["one", "two"])
    return model.eval()


@torch.no_grad()
def disabled(model):
    with model.disable_adapter():
        return model(inputs)


def distance(first, second):
    return ((first - second).norm() / base.norm()).item()


@torch.no_grad()
def compare(first, second):
    model = build(first, second)
    active = model(inputs)
    assert distance(disabled(model), base) < 1e-6 and distance(model(inputs), active) < 1e-6
    unloaded = build(first, second).merge_and_unload()(inputs)
    assert distance(unloaded, active) < 1e-5
    model.merge_adapter()
    merged = model(inputs)
    model.unmerge_adapter()
    return {"change": distance(active, base), "merged against active": distance(merged, active),
            "unmerged against active": distance(model(inputs), active),
            "disabled against base": distance(disabled(model), base)}


for pair in (("LoRA", "LoHa"), ("LoRA", "OFT"), ("OFT", "LoRA"), ("LoHa", "OFT")):
    found = compare(*pair)
    print(f"{pair[0]} and {pair[1]}: {', '.join(f'{name} {value:.2f}' for name, value in found.items())}")
    changed = [value for name, value in found.items() if name != "change"]
    if "OFT" in pair:
        assert min(changed) > 0.1, "changed: unmerging restores the network"
    else:
        assert max(changed) < 1e-5
print("as described: unmerging a LoRA and an OFT adapter leaves another network")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
