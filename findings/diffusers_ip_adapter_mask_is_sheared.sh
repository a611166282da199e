#!/usr/bin/env bash
# diffusers: at sizes such as 528 x 1024, an IP-Adapter's mask is read with rows of another length in some layers
#
# One would guess: a mask of the size of the image confines an IP-Adapter's image to its white part in every layer. If
# the two have different aspect ratios, there is a warning.
#
# What happens (diffusers 0.42.1, torch 2.13.0): an attention layer knows the number of its positions, not their height
# and width. IPAdapterMaskProcessor.downsample computes those from the mask's aspect ratio, rounded down, and adds 1 to
# the height only if the number is not divisible by it. Where an odd size was rounded up on the way down, and the height
# too small by 1 divides the width, this goes wrong: at 528 x 1024 pixels, SDXL's inner layers have 17 x 32 positions
# and use a mask of 16 x 34. Each row of it is two columns further to the side than the last one. The share of the
# effect of a mask of the left half that is in the right half:
#   image (height x width)    positions    mask       right half
#   512 x 1024                16 x 32      16 x 32    0.00
#   528 x 1024                17 x 32      16 x 34    0.48
#   1040 x 1024               33 x 32      32 x 33    0.49
# Of the 16,641 sizes from 512 to 1536 in steps of 8, 338 are affected in SDXL and 880 in Stable Diffusion 1.5, and none
# of those whose sides are multiples of 64. There is no warning, as the number of positions is right.
#
# Why it matters: two people or styles that masks keep apart are mixed, by the layers that decide most about content.
# Use heights and widths that are multiples of 64.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import contextlib
import warnings

import diffusers
import torch
from diffusers import UNet2DConditionModel
from diffusers.image_processor import IPAdapterMaskProcessor
from PIL import Image

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
warnings.simplefilter("error", UserWarning)
torch.manual_seed(0)
unet = UNet2DConditionModel(  # attention at a half and a quarter of the latents' size, as in SDXL
    sample_size=64, in_channels=4, out_channels=4, block_out_channels=(4, 4, 4), layers_per_block=1,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    cross_attention_dim=8, attention_head_dim=1, norm_num_groups=2).eval()
layers = {}
names = [name.removesuffix(".processor") for name in unet.attn_processors if "attn2" in name]
for number, name in enumerate(names):
    for part in ("k", "v"):
        layers[f"{2 * number + 1}.to_{part}_ip.weight"] = torch.randn(unet.get_submodule(name).to_k.weight.shape)
projection = {"proj.weight": torch.randn(32, 8), "proj.bias": torch.zeros(32), "norm.weight": torch.ones(8),
              "norm.bias": torch.zeros(8)}
unet._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": layers}])
prompt, picture = torch.randn(1, 4, 8), torch.randn(1, 1, 8)


def shares(height, width):
    """Return the sides of the layers, and the share of the masked image's effect that is in the right half."""
    left = Image.new("L", (width, height))
    left.paste(255, (0, 0, width // 2, height))
    mask = IPAdapterMaskProcessor().preprocess([left], height=height, width=width)
    assert mask.shape[-2:] == (height, width)
    sides, calls, found = {}, {}, {}
    hooks = []
    for name in names:
        block = unet.get_submodule(name.split(".transformer_blocks")[0])
        hooks.append(block.register_forward_pre_hook(
            lambda module, inputs, name=name: sides.update({name: tuple(inputs[0].shape[-2:])})))
        hooks.append(unet.get_submodule(name).register_forward_pre_hook(
            lambda module, inputs, options, name=name: calls.update({name: (inputs, options)}), with_kwargs=True))
    with torch.no_grad():
        unet(torch.randn(1, 4, height // 8, width // 8), 500, prompt, added_cond_kwargs={"image_embeds": [picture]},
             cross_attention_kwargs={"ip_adapter_masks": [mask]})
        for hook in hooks:
            hook.remove()
        for name, (inputs, options) in calls.items():
            layer, nothing = unet.get_submodule(name), {"ip_adapter_masks": [torch.zeros_like(mask)]}
            effect = (layer(*inputs, **options) - layer(*inputs, **options | nothing)).abs().sum(dim=-1)
            effect = effect.view(sides[name])
            share = (effect[:, effect.shape[1] // 2:].sum() / effect.sum()).item()
            assert abs(found.setdefault(sides[name], share) - share) < 0.1
    return found


for height, width, wrong in ((512, 1024, []), (1024, 1024, []), (528, 1024, [(17, 32)]), (1040, 1024, [(33, 32)])):
    found = shares(height, width)
    text = ", ".join(f"{side[0]} x {side[1]} positions: {share:.2f}" for side, share in found.items())
    print(f"{height} x {width}, a mask of the left half; share of its effect in the right half: {text}")
    for side, share in found.items():
        assert share > 0.4 if side in wrong else share < 0.05, f"changed: {height} x {width}, {side}"

SIZES = range(512, 1537, 8)
sizes = []


def record(mask, size, mode):
    sizes.append(size)
    return torch.empty(1, 1, *size, device="meta")


def used_sides(height, width, positions):
    """Return the height and width to which downsample() resizes a mask."""
    with contextlib.suppress(UserWarning):
        IPAdapterMaskProcessor.downsample(torch.empty(1, height, width, device="meta"), 1, positions, 1)
    return sizes[-1]


torch.nn.functional.interpolate = record
for network, levels in (("Stable Diffusion 1.5", (0, 1, 2, 3)), ("SDXL", (1, 2))):
    affected = set()
    for height in SIZES:
        for width in SIZES:
            for level in levels:
                rows, columns = -(-height // 8 // 2**level), -(-width // 8 // 2**level)
                used = used_sides(height, width, rows * columns)
                if used != (rows, columns) and used[0] * used[1] == rows * columns:
                    affected.add((height, width))
    print(f"{network}: {len(affected)} of {len(SIZES) ** 2} sizes without a warning")
    assert len(affected) == {"SDXL": 338}.get(network, 880), "changed: the affected sizes"
    assert not any(height % 64 == width % 64 == 0 for height, width in affected)
print("as described: masks are sheared at some sizes")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
