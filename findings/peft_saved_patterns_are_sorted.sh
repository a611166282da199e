#!/usr/bin/env bash
# peft, diffusers: a LoRA with alpha_pattern has another strength after saving and loading
#
# One would guess: alpha_pattern and rank_pattern come back as they were saved, so that a loaded LoRA computes what the
# trained one did. Where two patterns fit a layer, the order of the dict, or the longer pattern, decides in both.
#
# What happens (peft 0.21.2, diffusers 0.42.1, torch 2.13.0): the first pattern that fits counts, and both libraries
# write the config with its keys sorted. Stable Diffusion 3, rank 4, alpha 4, strength (alpha / rank) of to_q in blocks
# 0 and 1 with {"transformer_blocks.0.attn.to_q": 16, "attn.to_q": 2}:
#   as trained                                             4.0   0.5
#   peft's save_pretrained, then from_pretrained           0.5   0.5
#   diffusers' save_lora_adapter, then load_lora_adapter   0.5   0.5
# With the patterns the other way round it is 0.5 and 0.5 from the start. Nothing is logged. For rank_pattern the shapes
# do not fit, and loading raises RuntimeError.
#
# Why it matters: the exported policy is not the one that was trained and evaluated: one block's change is an eighth of
# it, though all weights of the file are right. With rank_pattern a finished run cannot be loaded. Write patterns of
# which only one fits each layer.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import sys

import diffusers
import peft
import torch
from diffusers import SD3Transformer2DModel

print(f"peft {peft.__version__}, diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
folder = sys.argv[1]
patterns = {"transformer_blocks.0.attn.to_q": 16, "attn.to_q": 2}


def network():
    torch.manual_seed(0)
    return SD3Transformer2DModel(
        sample_size=8, in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=8,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, pos_embed_max_size=8).eval()


def config(**options):
    return peft.LoraConfig(r=4, lora_alpha=4, target_modules=["attn.to_q"], init_lora_weights=False, **options)


def strengths(name, network):
    layers = [layer for path, layer in network.named_modules() if path.endswith("attn.to_q")]
    result = [next(iter(layer.scaling.values())) for layer in layers]
    print(f"{name:42}", *result)
    return result


added = network()
added.add_adapter(config(alpha_pattern=patterns))
assert strengths("as trained", added) == [4.0, 0.5], "changed: which pattern counts"
added.save_lora_adapter(f"{folder}/diffusers")
loaded = network()
loaded.load_lora_adapter(f"{folder}/diffusers", prefix=None, weight_name="pytorch_lora_weights.safetensors")
assert strengths("save_lora_adapter, load_lora_adapter", loaded) == [0.5, 0.5], "changed: diffusers keeps the order"
wrapped = peft.get_peft_model(network(), config(alpha_pattern=patterns))
assert strengths("peft, as trained", wrapped) == [4.0, 0.5]
wrapped.save_pretrained(f"{folder}/peft")
loaded = peft.PeftModel.from_pretrained(network(), f"{folder}/peft")
assert strengths("save_pretrained, from_pretrained", loaded) == [0.5, 0.5], "changed: peft keeps the order"
same = all(torch.equal(value, loaded.state_dict()[name]) for name, value in wrapped.state_dict().items())
print("all weights are equal:", same)
assert same
other = network()
other.add_adapter(config(alpha_pattern=dict(reversed(patterns.items()))))
assert strengths("the other way round", other) == [0.5, 0.5], "changed: the longer pattern counts"
peft.get_peft_model(network(), config(rank_pattern=patterns)).save_pretrained(f"{folder}/rank")
try:
    peft.PeftModel.from_pretrained(network(), f"{folder}/rank")
except RuntimeError as error:
    print("rank_pattern:", str(error).splitlines()[0], "...")
else:
    raise SystemExit("changed: the ranks come back")
print("as described: the patterns are sorted when they are saved")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
