#!/usr/bin/env bash
# peft: a new OFT adapter on a 3 x 3 convolution multiplies the layer's input by up to 9, until it is merged
#
# One would guess: a new OFT adapter rotates by nothing, so that a network with a new adapter is the base network; and a
# merged adapter does what the unmerged one did.
#
# What happens (peft 0.21.2, torch 2.13.0, diffusers 0.42.1): for a convolution, OFT cuts the input into overlapping
# patches, rotates each patch and adds the patches up again, without dividing by the number of patches that cover a
# pixel. Without any rotation, what a 3 x 3 convolution gets from an input of ones, 6 x 6 pixels:
#   1 in the corners, 2 and 3 along the edges, 9 in the middle
# Relative change of a small Stable Diffusion UNet's prediction by a new adapter, and of that of a trained adapter
# (random weights) by merging it:
#                                  new adapter     by merging
#   OFT on conv1 and conv2         0.96            0.96
#   OFT on attention layers        0               0
#   OFT on 1 x 1 convolutions      0               0
#   BOFT, HRA on conv1, conv2      0               0
# No warning. A merged layer has rotated weights, without that factor.
#
# Why it matters: OFT is offered for keeping what a network can draw, and its configuration takes any convolution. With
# the residual blocks among the targets, training starts from a network that no longer draws; what is learned makes up
# for that, and the merged network is another one again. Leave 3 x 3 convolutions out, or use BOFT.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import copy

import diffusers
import peft
import torch
from diffusers import UNet2DConditionModel
from peft import BOFTConfig, HRAConfig, OFTConfig, get_peft_model

print(f"peft {peft.__version__}, torch {torch.__version__}, diffusers {diffusers.__version__}")
seen = []
layer = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, padding=1))
layer[0].register_forward_pre_hook(lambda module, given: seen.append(given[0]))
with torch.no_grad():
    get_peft_model(layer, OFTConfig(oft_block_size=4, target_modules=["0"]))(torch.ones(1, 8, 6, 6))
counts = seen[0][0, 0].round().int().tolist()
print("what the convolution gets from an input of ones:", *counts, sep="\n  ")
assert counts[0] == [1, 2, 3, 3, 2, 1] and counts[2] == [3, 6, 9, 9, 6, 3], "changed: the input"

torch.manual_seed(0)
base = UNet2DConditionModel(
    sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=4,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    cross_attention_dim=16, attention_head_dim=8).eval()
inputs = torch.randn(1, 4, 8, 8), torch.tensor([500]), torch.randn(1, 5, 16)
residual, attention, small = ["conv1", "conv2"], ["to_q", "to_k", "to_v"], ["proj_in", "conv_shortcut"]


@torch.no_grad()
def draw(network):
    return network(*inputs).sample


def change(new, old):
    return ((new - old).norm() / old.norm()).item()


def changes(kind, targets, init, **options):
    """Return what a new adapter changes, and what merging changes for one with random weights."""
    torch.manual_seed(1)
    new = get_peft_model(copy.deepcopy(base), kind(target_modules=targets, **options)).eval()
    trained = get_peft_model(copy.deepcopy(base), kind(target_modules=targets, **{init: False}, **options)).eval()
    before = draw(trained)
    trained.merge_adapter()
    return change(draw(new), draw(base)), change(draw(trained), before)


oft = dict(kind=OFTConfig, init="init_weights", oft_block_size=4)
found = {
    "OFT on conv1, conv2": changes(targets=residual, **oft),
    "OFT on attention": changes(targets=attention, **oft),
    "OFT on 1 x 1 convolutions": changes(targets=small, **oft),
    "BOFT on conv1, conv2": changes(BOFTConfig, residual, "init_weights", boft_block_size=4),
    "HRA on conv1, conv2": changes(HRAConfig, residual, "init_weights", r=4),
}
for name, (started, merged) in found.items():
    print(f"{name:28} relative change by a new adapter {started:.3f}, by merging {merged:.3f}")
    wrong = name == "OFT on conv1, conv2"
    assert (started > 0.1) == wrong and (merged > 0.1) == wrong, f"changed: {name}"
    assert wrong or max(started, merged) < 1e-4, f"changed: {name}"
print("as described: a new OFT adapter on 3 x 3 convolutions changes the network")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
