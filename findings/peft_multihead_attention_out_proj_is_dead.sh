#!/usr/bin/env bash
# peft: a LoRA on the out_proj of torch's MultiheadAttention is not trained and has no effect, until it is merged
#
# One would guess: a LoRA on a linear layer named in target_modules, or found by "all-linear", is trained; and merging
# it leaves the output as it is.
#
# What happens (peft 0.21.2, torch 2.13.0, transformers 5.24.0): nn.MultiheadAttention never calls its out_proj, but
# passes the weight on. The LoRA around it is counted as trainable, gets no gradient, and is left out. Relative change
# of the output by random LoRAs, and by merging them:
#                                                                     LoRA     merging
#   TransformerEncoderLayer, "out_proj"                               0        0.43
#   TransformerEncoderLayer, "all-linear"                             0.81     0.43
#   TransformerEncoderLayer, "self_attn" (the whole module)           0.99     0
#   SigLIP's vision model, "out_proj": of the pooling head            0        1.10
#   SigLIP's vision model, "out_proj": of the encoder's layers        0.67     0
# "all-linear" does not take the projection of queries, keys and values of such a layer, which is no nn.Linear. Nothing
# is logged.
#
# Why it matters: open_clip's transformers, SigLIP's pooling head and many small heads are made of this module, and are
# fine-tuned with LoRA as reward models. A part of the adapter is dead. If it is not zero, as with init_lora_weights
# "pissa", "olora" or False, or after a merge of adapters, the merged model is another one. Name the attention module
# itself as the target, for which peft has a layer of its own.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import copy

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import SiglipVisionConfig, SiglipVisionModel

print(f"peft {peft.__version__}, torch {torch.__version__}, transformers {transformers.__version__}")
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
siglip = SiglipVisionModel(SiglipVisionConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8))
sequence, images = torch.randn(2, 6, 32), torch.randn(2, 3, 32, 32)


def relative(new, old):
    return ((new - old).norm() / old.norm()).item()


def measure(name, base, call, targets):
    """Return the effect of random LoRAs, the effect of merging them, and the names of those without a gradient."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False)
    model = get_peft_model(copy.deepcopy(base), config).train()
    output = call(model)
    dead = []
    if output.requires_grad:
        output.square().sum().backward()
    for key, weight in model.named_parameters():
        if weight.requires_grad and weight.grad is None:
            dead.append(key.removeprefix("base_model.model.").split(".lora_")[0])
    with torch.no_grad():
        effect = relative(call(model), call(base))
        model.merge_adapter()
        merging = relative(call(model), output)
    dead = sorted(set(dead))
    print(f"{name:36} effect {effect:.2f}, merging {merging:.2f}; without a gradient: {', '.join(dead) or 'none'}")
    return effect, merging, dead


def encode(model):
    return model(sequence)


def pool(model):
    return model(pixel_values=images).pooler_output


effect, merging, dead = measure("out_proj", layer, encode, ["out_proj"])
assert effect < 1e-5 and merging > 0.1 and dead == ["self_attn.out_proj"], "changed: out_proj"
effect, merging, dead = measure("all-linear", layer, encode, "all-linear")
assert effect > 0.1 and merging > 0.1 and dead == ["self_attn.out_proj"], "changed: all-linear"
effect, merging, dead = measure("self_attn", layer, encode, ["self_attn"])
assert effect > 0.1 and merging < 1e-4 and not dead
effect, merging, dead = measure("SigLIP, out_proj of the head", siglip, pool, ["attention.out_proj"])
assert effect < 1e-5 and merging > 0.05 and len(dead) == 1, "changed: SigLIP's head"
effect, merging, dead = measure("SigLIP, out_proj of the layers", siglip, pool, ["self_attn.out_proj"])
assert effect > 0.05 and merging < 1e-4 and not dead
print("as described: the LoRA on out_proj is dead")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
