#!/usr/bin/env bash
# peft, diffusers: a DoRA at weight 0 is not the base network, and at weight 0.5 it is not half of the change
#
# One would guess: set_adapters(["a"], [0.0]), and a LoRA scale of 0 in a call, give the base network's output for each
# kind of LoRA that has this weight.
#
# What happens (peft 0.21.2, diffusers 0.42.1, torch 2.13.0): the weight scales only the product B A of a DoRA. Its
# trained magnitudes stay in force at any weight. Share of the change of the output that is left, after 50 training steps
# of a small Stable Diffusion 3 network:
#   weight    1.0     0.5     0.1     0.0   scale 0 in the call
#   LoRA     1.000   0.617   0.129   0.000   0.000
#   DoRA     1.000   0.895   0.469   0.144   0.144
# Nothing is logged. With disable_adapters the output is that of the base network.
#
# Why it matters: a sweep over LoRA weights starts from another network than the base, so "tuned against base" pictures
# and a KL reference made with scale 0 are off; a DoRA that is switched off in a mix by weight 0 still changes the mix.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import diffusers
import peft
import torch

print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
network = diffusers.SD3Transformer2DModel(
    sample_size=8, patch_size=1, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
    joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4)
inputs = dict(hidden_states=torch.randn(4, 4, 8, 8), encoder_hidden_states=torch.randn(4, 3, 16),
              pooled_projections=torch.randn(4, 16), timestep=torch.tensor([500] * 4), return_dict=False)
target = torch.randn(4, 4, 8, 8)


@torch.no_grad()
def draw(**kwargs):
    return network(**inputs, **kwargs)[0]


base = draw()
results = {}
for name, kind in (("LoRA", {}), ("DoRA", dict(use_dora=True))):
    torch.manual_seed(1)
    layers = "transformer_blocks.*(to_[qkv]|net.2)"
    network.add_adapter(peft.LoraConfig(r=2, lora_alpha=2, target_modules=layers, **kind), adapter_name="a")
    optimizer = torch.optim.AdamW([weight for weight in network.parameters() if weight.requires_grad], lr=1e-2)
    for _ in range(50):
        (network(**inputs)[0] - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = (draw() - base).norm()
    shares = {}
    for weight in (1.0, 0.5, 0.1, 0.0):
        network.set_adapters(["a"], [weight])
        shares[weight] = ((draw() - base).norm() / whole).item()
    network.set_adapters(["a"], [1.0])
    shares["scale 0 in the call"] = ((draw(joint_attention_kwargs={"scale": 0.0}) - base).norm() / whole).item()
    network.disable_adapters()
    shares["disabled"] = ((draw() - base).norm() / whole).item()
    network.enable_adapters()
    print(f"{name}, share of the change by weight:", *(f"{key}: {share:.3f}" for key, share in shares.items()))
    results[name] = shares
    network.delete_adapters("a")
assert results["LoRA"][0.0] == results["LoRA"]["scale 0 in the call"] == results["DoRA"]["disabled"] == 0
assert results["LoRA"][0.5] < 0.7, "a LoRA at weight 0.5 makes about half of the change"
assert results["DoRA"][0.0] > 0.05 and results["DoRA"]["scale 0 in the call"] > 0.05, "changed: weight 0 is the base"
assert results["DoRA"][0.5] > 0.8, "changed: DoRA at weight 0.5"
print("as described: a DoRA at weight 0 still changes the output")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
