#!/usr/bin/env bash
# diffusers: under float16 autocast Sana returns NaN, though its weights may be float16
#
# One would guess: a network whose attention converts to float32 before it sums, and which is right with float16 weights
# and inputs, is at least as safe with float32 weights under torch.autocast(float16).
#
# What happens (diffusers 0.42.1, torch 2.13.0): Sana's linear attention converts queries, keys and values with
# .float(), and then calls torch.matmul, which autocast casts back to float16. The sums over all tokens overflow, and
# infinity divided by infinity is NaN. Largest difference from float32, of its largest value (2 layers, 4 heads of 32,
# 1024 tokens, random weights of twice the usual standard deviation):
#   float16 weights and inputs, no autocast     0.016
#   float32 weights under float16 autocast      all values are NaN
#   float32 weights under bfloat16 autocast     0.12
# Nothing is logged. With weights of the usual size all are finite, so a test on a fresh network shows nothing.
#
# Why it matters: the pipeline in float16 draws good pictures, and mixed precision in float16 (Accelerate, Lightning's
# 16-mixed) may train the same checkpoint to NaN.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import copy

import diffusers
import torch

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
network = diffusers.SanaTransformer2DModel(
    in_channels=4, out_channels=4, num_layers=2, num_attention_heads=4, attention_head_dim=32,
    num_cross_attention_heads=4, cross_attention_head_dim=32, cross_attention_dim=128, caption_channels=16,
    sample_size=32, patch_size=1).eval()
normal = copy.deepcopy(network)
for weight in network.parameters():
    if weight.ndim > 1:
        weight.data.normal_(0, 2 * weight[0].numel() ** -0.5)
latents, text = torch.randn(1, 4, 32, 32), torch.randn(1, 6, 16)


@torch.no_grad()
def output(network, dtype=None):
    own = network.dtype
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        return network(latents.to(own), encoder_hidden_states=text.to(own), timestep=torch.tensor([500.0]),
                       return_dict=False)[0].float()


exact = output(network)
half = output(copy.deepcopy(network).half())
mixed, wide = output(network, torch.float16), output(network, torch.bfloat16)
for name, value in {"float16 weights": half, "float16 autocast": mixed, "bfloat16 autocast": wide}.items():
    error = ((value - exact).abs().max() / exact.abs().max()).item()
    print(f"{name}: {value.isnan().float().mean():.0%} NaN, largest difference {error:.3f}")
assert half.isfinite().all() and wide.isfinite().all() and mixed.isnan().all(), "changed"
assert output(normal, torch.float16).isfinite().all(), "changed: weights of the usual size"
print("as described")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
