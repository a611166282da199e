#!/usr/bin/env bash
# diffusers: fuse_qkv_projections() switches a LoRA off
#
# One would guess: fusing the query, key and value projections changes the speed and not the output, also with an
# adapter on these projections, or refuses where it cannot.
#
# What happens (diffusers 0.42.1, peft 0.21.2, torch 2.13.0): the fused layer is made of the base weights, and the
# adapter, though still listed as active, has no effect any more. Distance of the output from that of the base
# network:
#   SD3:  with the adapter 0.713, after fuse_qkv_projections() 0.000, after unfuse_qkv_projections() 0.713
#   FLUX: with the adapter 0.090, after fuse_qkv_projections() 0.000, after unfuse_qkv_projections() 0.090
# Nothing is logged.
#
# Why it matters: rollouts are most of the cost of online reinforcement learning, and fusing is a known way to speed
# them up. With it the images come from the base network and not from the policy, so the rewards never improve. Merge
# the adapter first, or do not fuse.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import diffusers
import peft
import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel
from peft import LoraConfig

print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
sd3 = SD3Transformer2DModel(sample_size=8, num_layers=2, attention_head_dim=8, num_attention_heads=2, in_channels=4,
                            out_channels=4, joint_attention_dim=16, caption_projection_dim=16,
                            pooled_projection_dim=16, pos_embed_max_size=8).eval()
flux = FluxTransformer2DModel(patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
                              num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=16,
                              axes_dims_rope=(4, 4, 8)).eval()
text = dict(encoder_hidden_states=torch.randn(1, 3, 16), pooled_projections=torch.randn(1, 16))
inputs = {"SD3": dict(text, hidden_states=torch.randn(1, 4, 8, 8), timestep=torch.tensor([500.0])),
          "FLUX": dict(text, hidden_states=torch.randn(1, 4, 4), timestep=torch.tensor([0.5]),
                       img_ids=torch.zeros(4, 3), txt_ids=torch.zeros(3, 3))}
for name, network in (("SD3", sd3), ("FLUX", flux)):
    @torch.no_grad()
    def output():
        return network(**inputs[name])[0]

    base = output()
    network.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False))
    distances = [(output() - base).norm().item()]
    network.fuse_qkv_projections()
    distances.append((output() - base).norm().item())
    active = network.active_adapters()
    network.unfuse_qkv_projections()
    distances.append((output() - base).norm().item())
    print(f"{name}: adapter / fused / unfused, distance from the base network:", *(f"{d:.3f}" for d in distances),
          "- active while fused:", active)
    assert distances[0] > 0.01 and distances[2] > 0.01 and active == ["default"]
    assert distances[1] < 1e-4, f"changed: {name} keeps its adapter"
print("as described: the fused network is the base network")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
