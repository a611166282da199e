#!/usr/bin/env bash
# diffusers: unfuse_lora() does not undo the lora_scale of fuse_lora, so that the next fusion multiplies it in again
#
# One would guess: fuse_lora(lora_scale=0.5) merges half of the LoRA, and unfuse_lora() restores the network as it was
# before, with the LoRA at its weight.
#
# What happens (diffusers 0.42.1, peft 0.21.2, torch 2.13.0): fuse_lora multiplies the weight of the adapter itself and
# then merges it. unfuse_lora only subtracts the merged weights again. Norm of the LoRA's change of the output:
#   unfused                                0.674
#   fuse_lora(lora_scale=0.5)              0.354
#   unfuse_lora()                          0.354
#   fuse_lora(lora_scale=0.5)              0.181
#   unfuse_lora(), fuse_lora(lora_scale=1) 0.181
# With two adapters, fuse_lora(lora_scale=0.5, adapter_names=["a"]) halves the weight of the active adapter b as well.
# Nothing is logged.
#
# Why it matters: a search for the best LoRA scale fuses, draws, unfuses and continues with the next scale. From the
# second scale on, all pictures are drawn with the product of the scales. A network that is fused for fast sampling and
# unfused for training trains a LoRA of another weight. Call set_adapters with the weight after unfuse_lora().
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
from peft import LoraConfig

print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
torch.manual_seed(1)
inputs = dict(hidden_states=torch.randn(1, 4, 8, 8), encoder_hidden_states=torch.randn(1, 3, 16),
              pooled_projections=torch.randn(1, 16), timestep=torch.tensor([500]))


def build(*adapters):
    torch.manual_seed(0)
    network = SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4).eval()
    config = LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    for name in adapters:
        network.add_adapter(config, name)
    return network


@torch.no_grad()
def draw(network):
    return network(**inputs, return_dict=False)[0]


def weights(network, name):
    return {module.scaling[name] for module in network.modules() if hasattr(module, "scaling")}


base = draw(build())
network = build("a")
sizes = []


def show(call):
    sizes.append((draw(network) - base).norm().item())
    print(f"{call}: change of the output {sizes[-1]:.3f}, weight of the adapter {weights(network, 'a')}")


show("unfused")
network.fuse_lora(lora_scale=0.5)
show("fuse_lora(lora_scale=0.5)")
network.unfuse_lora()
show("unfuse_lora()")
network.fuse_lora(lora_scale=0.5)
show("fuse_lora(lora_scale=0.5)")
network.unfuse_lora()
network.fuse_lora(lora_scale=1.0)
show("unfuse_lora(), fuse_lora(lora_scale=1)")
network.unfuse_lora()
network.set_adapters(["a"], [1.0])
show("unfuse_lora(), set_adapters")
whole, half, unfused, again, last, reset = sizes
assert 0.4 < half / whole < 0.6 and abs(reset - whole) < 1e-4
assert abs(unfused - half) < 1e-4, "changed: unfuse_lora restores the weight"
assert 0.2 < again / whole < 0.3 and abs(last - again) < 1e-4, "changed: scales are not multiplied"

network = build("a", "b")
network.set_adapters(["a", "b"], [1.0, 1.0])
network.fuse_lora(lora_scale=0.5, adapter_names=["a"])
network.unfuse_lora()
print("two adapters, after fusing a at 0.5 and unfusing: weights", weights(network, "a"), weights(network, "b"))
assert weights(network, "a") == weights(network, "b") == {0.5}, "changed: b keeps its weight"
print("as described: the scale of a fusion stays")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
