#!/usr/bin/env bash
# peft, diffusers: with a PiSSA or OLoRA initialisation, the network without its adapter is not the base network
#
# One would guess: disable_adapter() (disable_lora() in diffusers) gives the base network, whatever the initialisation
# of the adapter; that is how the reference for a KL penalty is computed without a second network.
#
# What happens (peft 0.21.2, diffusers 0.42.1, torch 2.13.0): init_lora_weights="pissa" and "olora" subtract the
# adapter's first product from the base weights. With the adapter, the start is right; without it, the rest of the
# weights is used. Error of the output without the adapter, relative to the base network's output, before any training
# (a small Stable Diffusion 3 network with random weights, layers of width 32):
#   rank                     4       8
#   gaussian, orthogonal   0.00    0.00
#   pissa                  0.50    0.60
#   olora                  0.59    0.56
# Nothing is logged, though peft warns about disabling an adapter that was trained with `bias`, which has the same
# effect.
#
# Why it matters: the KL penalty is large at the first step, though the policy is still the base network, and pulls it
# towards a network that nobody trained. A reward or a picture "of the base" comes from that network, too. Compute the
# reference with a frozen copy of the initial adapter.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import warnings

import diffusers
import peft
import torch
from diffusers import SD3Transformer2DModel
from peft import LoraConfig, get_peft_model

print(f"peft {peft.__version__}, diffusers {diffusers.__version__}, torch {torch.__version__}")
torch.manual_seed(1)
inputs = dict(hidden_states=torch.randn(1, 4, 8, 8), encoder_hidden_states=torch.randn(1, 3, 32),
              pooled_projections=torch.randn(1, 32), timestep=torch.tensor([500]))


def build():
    torch.manual_seed(0)
    network = SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=3, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=32, out_channels=4).eval()
    with torch.no_grad():
        for weight in network.transformer_blocks.parameters():
            weight.mul_(3)  # random weights are small: the blocks would hardly matter
    return network


@torch.no_grad()
def draw(network):
    return network(**inputs, return_dict=False)[0]


def error(output):
    return ((output - base).norm() / base.norm()).item()


base = draw(build())
targets = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in"]
for rank in (4, 8):
    for kind in ("gaussian", "orthogonal", "pissa", "pissa_niter_4", "olora"):
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, init_lora_weights=kind)
        network = build()
        network.add_adapter(config)
        start = error(draw(network))
        network.disable_adapters()
        disabled = error(draw(network))
        model = get_peft_model(build(), config)
        with warnings.catch_warnings(record=True) as caught, model.disable_adapter():
            in_peft = error(draw(model))
        print(f"rank {rank}, {kind}: at the start {start:.2f}, without the adapter {disabled:.2f}, "
              f"in peft {in_peft:.2f}")
        assert start < 1e-3 and not caught
        keeps = kind in ("gaussian", "orthogonal")
        assert (disabled < 1e-3) == keeps and (in_peft < 1e-3) == keeps, f"changed: {kind}"
print("as described: without the adapter, it is another network")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/check.py"
