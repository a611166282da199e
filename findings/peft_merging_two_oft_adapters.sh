#!/usr/bin/env bash
# peft: merging two active OFT adapters gives another network than the one that was evaluated
#
# One would guess: merge_and_unload() computes what the adapters computed before, as for one OFT adapter and for any two
# others; and as rotations do not commute, it applies the two in the order in which they were active.
#
# What happens (peft 0.21.2, torch 2.13.0): a pass rotates its input by the first and then by the second adapter, so
# that the weight is W @ R2 @ R1. Merging multiplies the weight by R1 first and gives W @ R1 @ R2. Change of the output
# of two linear layers, relative to the output, by two adapters and then by merging them:
#                            both active    merged against active    merged against the other order
#   OFT and OFT              0.8            0.44                     0.00
#   LoRA, LoHa, LoKr with each other or with OFT: 0.00
# merge_adapter() does the same to two OFT adapters. BOFT and HRA, which also rotate, merge in the right order. Nothing
# is logged.
#
# Why it matters: a style and a subject, or a trained adapter on top of another, are tried out as active adapters, and
# the merged network is released. It draws other pictures than those that were approved or rewarded. Activate the
# adapters in reverse order before merging two, or merge and compare.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import peft
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, get_peft_model
from torch import nn

print(f"peft {peft.__version__}, torch {torch.__version__}")
targets = ["0", "2"]
configs = {"LoRA": lambda: LoraConfig(r=4, init_lora_weights=False, target_modules=targets),
           "LoHa": lambda: LoHaConfig(r=4, alpha=64, init_weights=False, target_modules=targets),
           "LoKr": lambda: LoKrConfig(r=4, init_weights=False, target_modules=targets),
           "OFT": lambda: OFTConfig(r=0, oft_block_size=4, init_weights=False, target_modules=targets)}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)).eval()


inputs = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
base = network()(inputs)


def build(first, second):
    model = get_peft_model(network(), configs[first](), "a", mixed=True)
    model.add_adapter("b", configs[second]())
    generator = torch.Generator().manual_seed(2)
    for name, weight in model.named_parameters():
        if "oft" in name:
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
        elif "lora" in name or "lokr" in name or "hada" in name:
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    return model.eval()


def size(change):
    return (change.norm() / base.norm()).item()


@torch.no_grad()
def compare(first, second):
    """Return the change by both adapters, and how far the merged network is from both orders of them."""
    model = build(first, second)
    model.set_adapter(["b", "a"])
    turned = model(inputs)
    model.set_adapter(["a", "b"])
    active = model(inputs)
    if first == second:
        again = build(first, second)
        again.set_adapter(["a", "b"])
        again.merge_adapter()
        kept = again(inputs)
    merged = model.merge_and_unload()(inputs)
    assert first != second or torch.allclose(kept, merged, atol=1e-5)
    return size(active - base), size(merged - active), size(merged - turned)


pairs = [("OFT", "OFT"), ("LoRA", "OFT"), ("OFT", "LoRA"), ("LoHa", "OFT"), ("OFT", "LoKr"), ("LoRA", "LoRA"),
         ("LoHa", "LoKr")]
for pair in pairs:
    change, active, turned = compare(*pair)
    print(f"{pair[0]} and {pair[1]}: change {change:.2f}, merged against active {active:.2f}, against the other order "
          f"{turned:.2f}")
    if pair == ("OFT", "OFT"):
        assert active > 0.1 and turned < 1e-5, "changed: merging keeps the order"
    else:
        assert active < 1e-5
print("as described: two merged OFT adapters change places")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
