#!/usr/bin/env bash
# diffusers: UNet2DConditionModel empties the list of T2I-Adapter features it is given, and a second pass has no adapter
#
# One would guess: a forward pass leaves its arguments alone. The same noisy latents and adapter features give the same
# prediction twice.
#
# What happens (diffusers 0.42.1, torch 2.13.0): the network pops the features off the list that is passed as
# down_intrablock_additional_residuals. Passes with one list of 2 features, as T2IAdapter returns it:
#                               features left    distance from the output without the adapter, relative
#   first pass                        0                                    0.30
#   second pass                       0                                    0
#   second pass, given a copy         0                                    0.30
# A checkpointed pass, torch.utils.checkpoint(unet, ...), is recomputed without the adapter: the gradient of the U-Net's
# weights has a relative error of 0.49. Residuals of a ControlNet stay. Nothing is logged. diffusers' pipelines copy the
# list before each pass.
#
# Why it matters: for a policy and a reference pass, two noise levels or guidance in two passes, features are computed
# once, and a network with the adapter is compared to one without. Pass list(features) in each pass.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import T2IAdapter, UNet2DConditionModel
from torch.utils.checkpoint import checkpoint

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
unet = UNet2DConditionModel(
    sample_size=8, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=8, norm_num_groups=4,
    attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"))
adapter = T2IAdapter(in_channels=3, channels=[8, 16], num_res_blocks=1, downscale_factor=8)
latents, text, control = torch.randn(2, 4, 8, 8), torch.randn(2, 3, 8), torch.rand(2, 3, 64, 64)


def predict(features):
    return unet(latents, 500, text, down_intrablock_additional_residuals=features).sample


def far(first, second):
    return ((first - second).norm() / second.norm()).item()


with torch.no_grad():
    plain, features = unet(latents, 500, text).sample, adapter(control)
    assert isinstance(features, list) and len(features) == 2
    copy = list(features)
    first = predict(features)
    left = len(features)
    second, again = predict(features), predict(list(copy))
    print(f"first pass: {far(first, plain):.2f} from no adapter, {left} of {len(copy)} features left")
    print(f"second pass: {far(second, plain):.2f} from no adapter; with a copy: {far(again, plain):.2f}")
assert left == 0 and torch.equal(second, plain), "changed: the list is left alone"
assert torch.equal(again, first) and far(first, plain) > 0.1


def gradient(features, checkpointed):
    unet.zero_grad()
    run = checkpoint if checkpointed else lambda network, *given, use_reentrant, **more: network(*given, **more)
    prediction = run(unet, latents, 500, text, down_intrablock_additional_residuals=features, use_reentrant=False)
    prediction.sample.square().mean().backward()
    return torch.cat([weight.grad.flatten() for weight in unet.parameters() if weight.grad is not None])


exact, checkpointed = gradient(list(copy), False), gradient(list(copy), True)
print(f"checkpointed: error of the gradient {far(checkpointed, exact):.2f}")
assert far(checkpointed, exact) > 0.1, "changed: gradient"
without = [torch.zeros_like(feature) for feature in copy]
assert far(gradient(without, True), gradient(list(without), False)) < 1e-5  # features of zero: nothing to lose

residuals = tuple(torch.randn(shape) for shape in ((2, 8, 8, 8), (2, 8, 8, 8), (2, 8, 4, 4), (2, 16, 4, 4)))
middle = torch.randn(2, 16, 4, 4)
with torch.no_grad():
    pair = [unet(latents, 500, text, down_block_additional_residuals=residuals,
                 mid_block_additional_residual=middle).sample for _ in range(2)]
assert torch.equal(*pair) and far(pair[0], plain) > 0.1
print("as described: the second pass has no adapter; residuals of a ControlNet stay")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
