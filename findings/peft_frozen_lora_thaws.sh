#!/usr/bin/env bash
# peft, diffusers: a frozen LoRA is trained again once it was switched off and on
#
# One would guess: requires_grad_(False) freezes an adapter until it is undone. Switching adapters off for a reference
# pass and on again leaves requires_grad as it was.
#
# What happens (peft 0.21.2, diffusers 0.42.1, torch 2.13.0): switching off sets requires_grad=False on all adapters,
# and switching on sets it to True on all active ones. requires_grad of two active adapters, of which "style" was
# frozen:
#                                                              "style"   "policy"
#   before                                                      False      True
#   after disable_adapters() and enable_adapters()              True       True
#   after disable_lora() and enable_lora()                      True       True
# In peft, `with model.disable_adapter()` does the same. Largest change of a weight in ten steps of an AdamW that has
# all weights of the network, with a reference pass before each step:
#   switched off and on                                         0.0102     0.0102
#   the same, and "style" frozen again                          0.0000     0.0102
# Nothing is logged.
#
# Why it matters: a LoRA is often trained on top of one that is kept (a style, a few-step sampler, an earlier stage),
# with a KL penalty against the network without them. The kept one is trained too if the optimizer has it, and its
# gradients count in clipping in any case. Freeze it again after each reference pass.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import diffusers
import peft
import torch
from diffusers import SD3Transformer2DModel
from peft import LoraConfig, get_peft_model

print(f"peft {peft.__version__}, diffusers {diffusers.__version__}, torch {torch.__version__}")
torch.manual_seed(1)
inputs = dict(hidden_states=torch.randn(1, 4, 8, 8), encoder_hidden_states=torch.randn(1, 3, 16),
              pooled_projections=torch.randn(1, 16), timestep=torch.tensor([500]))
config = LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
NAMES = ("style", "policy")


def base():
    torch.manual_seed(0)
    return SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4)


def weights(network, adapter):
    return [weight for name, weight in network.named_parameters() if f".{adapter}." in name]


def build():
    """Return a network with two active adapters, of which the first is frozen, as is the network itself."""
    network = base().requires_grad_(False)
    for name in NAMES:
        network.add_adapter(config, name)
    network.set_adapters(list(NAMES), [1.0, 1.0])
    for weight in weights(network, "style"):
        weight.requires_grad_(False)
    return network


def trained(network):
    return {name: {weight.requires_grad for weight in weights(network, name)} for name in NAMES}


def draw(network):
    return network(**inputs, return_dict=False)[0]


def by_adapters(network):
    network.disable_adapters()
    reference = draw(network)
    network.enable_adapters()
    return reference


def by_lora(network):
    network.disable_lora()
    reference = draw(network)
    network.enable_lora()
    return reference


frozen = {"style": {False}, "policy": {True}}
for reference in (by_adapters, by_lora):
    network = build()
    assert trained(network) == frozen
    reference(network)
    print(f"requires_grad after {reference.__name__}: {trained(network)}")
    assert trained(network) == {"style": {True}, "policy": {True}}, "changed: it stays frozen"

model = get_peft_model(base(), config, adapter_name="policy").requires_grad_(False)
with model.disable_adapter():
    pass
print("requires_grad after disable_adapter() of peft:", {weight.requires_grad for weight in weights(model, "policy")})
assert all(weight.requires_grad for weight in weights(model, "policy")), "changed: peft"


def changes(freezes_again):
    network = build()
    start = {name: [weight.detach().clone() for weight in weights(network, name)] for name in NAMES}
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(10):
        with torch.no_grad():
            reference = by_adapters(network)
        if freezes_again:
            for weight in weights(network, "style"):
                weight.requires_grad_(False)
        output = draw(network)
        ((output - 1).square().mean() + 0.1 * (output - reference).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: max((weight - old).abs().max().item() for weight, old in zip(weights(network, name), start[name]))
            for name in NAMES}


thawed, kept = changes(False), changes(True)
print(f"largest change of a weight in ten steps: {thawed}, if frozen again in each step: {kept}")
assert thawed["style"] > 0.5 * thawed["policy"] > 0, "changed: the frozen adapter is not trained"
assert kept["style"] == 0 and kept["policy"] > 0
print("as described: a frozen adapter is trained again")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
