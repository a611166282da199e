#!/usr/bin/env bash
# peft: create_loraplus_optimizer ignores weight_decay, and trains norms, biases and DoRA's magnitudes at B's high rate
#
# One would guess: LoRA+ trains the factors B at loraplus_lr_ratio times the rate, and all else at the rate itself; and
# weight_decay, like any other argument, is passed on to the optimizer.
#
# What happens (peft 0.21.2, torch 2.13.0): each trained tensor with one dimension gets the high rate. All groups have a
# weight_decay of their own, from loraplus_weight_decay, 0 by default. Rates in units of lr, with ratio 16:
#   lora_A                                                            1
#   lora_B                                                            16
#   DoRA's magnitudes of a linear layer                               16, and decayed
#   DoRA's magnitudes of a convolution                                1
#   norm layers and biases in modules_to_save                         16
#   weights of linear layers in modules_to_save                       1
#   with AdamW's weight_decay=0.1: weight_decay of all groups         0
# Nothing is logged. The docstring does not name loraplus_weight_decay.
#
# Why it matters: the raised rate is chosen for factors that start at 0. Norms that are trained along, and magnitudes,
# which multiply whole rows of the pretrained weights, take steps 16 times as large as intended, and the weight decay of
# a recipe is gone. Build the groups by hand.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import peft
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer

print(f"peft {peft.__version__}, torch {torch.__version__}")
LR, RATIO = 1e-4, 16


def network():
    return torch.nn.ModuleDict({
        "conv": torch.nn.Conv2d(4, 8, 3), "to_q": torch.nn.Linear(8, 8), "norm": torch.nn.LayerNorm(8),
        "head": torch.nn.Linear(8, 8)})


def groups(decay=None, **options):
    """Return the rate, in units of LR, and the weight decay of each trained tensor."""
    model = get_peft_model(network(), LoraConfig(r=4, target_modules=["conv", "to_q"], **options))
    arguments = {"loraplus_weight_decay": 0.01} if decay is None else {"weight_decay": decay}
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=LR, loraplus_lr_ratio=RATIO, **arguments)
    names = {weight: name.removeprefix("base_model.model.").replace(".default", "").replace(".modules_to_save", "")
             for name, weight in model.named_parameters()}
    found = {names[weight]: (round(group["lr"] / LR), group["weight_decay"])
             for group in optimizer.param_groups for weight in group["params"]}
    assert all(weight.requires_grad == (names[weight] in found) for weight in names)
    return found


dora, saved, decayed = groups(use_dora=True), groups(modules_to_save=["norm", "head"]), groups(decay=0.1)
for title, found in (("DoRA", dora), ("modules_to_save", saved), ("weight_decay=0.1", decayed)):
    print(title)
    for name, (rate, decay) in found.items():
        print(f"  {name:36} rate {rate:2} x lr, weight decay {decay}")

assert {dora[f"{layer}.lora_{factor}.weight"][0] for layer in ("conv", "to_q") for factor in "A"} == {1}
assert {dora[f"{layer}.lora_{factor}.weight"][0] for layer in ("conv", "to_q") for factor in "B"} == {RATIO}
assert dora["to_q.lora_magnitude_vector.weight"] == (RATIO, 0.01), "changed: magnitudes of a linear layer"
assert dora["conv.lora_magnitude_vector.weight"] == (1, 0.01), "changed: magnitudes of a convolution"
for name in ("norm.weight", "norm.bias", "head.bias"):
    assert saved[name] == (RATIO, 0), f"changed: {name}"
assert saved["head.weight"] == (1, 0.01)
assert {decay for _, decay in decayed.values()} == {0}, "changed: weight_decay counts"
print("as described: other tensors are trained at the high rate")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
