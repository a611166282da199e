#!/usr/bin/env bash
# diffusers, peft: a LoRA loaded after enable_layerwise_casting is kept in float8 itself; loaded before, it is not
#
# One would guess: layerwise casting stores the network's own layers in 8 bits, and a LoRA keeps its type, whichever of
# the two comes first.
#
# What happens (diffusers 0.42.1, peft 0.21.2, torch 2.13.0): here peft creates an adapter in the type of its base
# layer, also if that is float8. So a LoRA that is loaded into a cast network is rounded to float8, by 3 % of its
# largest weight, without a warning. add_adapter for training gives float8 parameters too, in whose steps an Adam update
# of 1e-4 is lost or raises an error. Loaded or added first, a LoRA stays float32.
#
# Why it matters: to sample a trained LoRA on a small card one casts the pipeline and loads the LoRA, in this order.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 peft==0.21.2 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import logging
from tempfile import TemporaryDirectory

import diffusers
import peft
import torch
from peft import LoraConfig

print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
for name in ("diffusers", "peft"):
    logging.getLogger(name).setLevel(logging.CRITICAL)
CONFIG = LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False)


def network():
    torch.manual_seed(0)
    return diffusers.SD3Transformer2DModel(
        sample_size=8, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=16,
        caption_projection_dim=16, pooled_projection_dim=16, out_channels=4)


def cast(model):
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def lora(model):
    return [weight.detach() for name, weight in model.named_parameters() if "lora_" in name]


def loaded(order, folder):
    model = network()
    if order == "after":
        cast(model)
    model.load_lora_adapter(folder, prefix=None, weight_name="pytorch_lora_weights.safetensors")
    if order == "before":
        cast(model)
    return lora(model)


trained = network()
trained.add_adapter(CONFIG)
saved = lora(trained)
with TemporaryDirectory() as folder:
    trained.save_lora_adapter(folder)
    for order, expected in (("before", torch.float32), ("after", torch.float8_e4m3fn)):
        weights = loaded(order, folder)
        error = max(((new.float() - old).abs().max() / old.abs().max()).item() for new, old in zip(weights, saved))
        print(f"loaded {order} the cast: {weights[0].dtype}, changed by up to {error:.1%} of the largest weight")
        assert {weight.dtype for weight in weights} == {expected}, "changed: the type of a loaded LoRA"
        assert (error == 0) == (order == "before")
model = network()
cast(model)
model.add_adapter(CONFIG)
print(f"added for training after the cast: {lora(model)[0].dtype}")
assert lora(model)[0].dtype == torch.float8_e4m3fn, "changed: the type of an added LoRA"
print("as described: load or add the LoRA first")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
