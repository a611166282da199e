#!/usr/bin/env bash
# peft, diffusers: a LoRA put into a network in eval mode has its dropout on, also when it is loaded to draw images
#
# One would guess: from_pretrained returns a network in eval mode, so a LoRA with lora_dropout that is added to it or
# loaded into it drops nothing until network.train() is called. load_lora_weights gives a pipeline that draws images.
#
# What happens (diffusers 0.42.1, peft 0.21.2, torch 2.13.0): the new layers are in training mode inside a network that
# says training=False. Two passes of one input, largest difference divided by the output's deviation:
#   from_pretrained, then add_adapter with lora_dropout=0.1:                     0.115
#   load_lora_weights of that LoRA, saved with its metadata:                     0.131
#   load_lora_weights, then network.eval():                                      0
#   peft's PeftModel.from_pretrained of the same LoRA, which calls eval():       0
# Nothing is logged. For a new LoRA the difference is 0, since lora_B is 0, so a first test shows nothing.
#
# Why it matters: a LoRA trained with dropout draws its images with dropout on, and the same seed draws another one each
# time. In RL the policy that samples is not the one whose probability is computed, so the ratio is not 1 before the
# first update. Call eval() after each LoRA that is added or loaded.
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
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from diffusers.training_utils import _collate_lora_metadata

print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
torch.manual_seed(0)
folder = sys.argv[1]
SD3Transformer2DModel(
    sample_size=8, in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=8,
    joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, pos_embed_max_size=8,
).save_pretrained(f"{folder}/network")
inputs = dict(hidden_states=torch.randn(1, 4, 8, 8), encoder_hidden_states=torch.randn(1, 4, 16),
              pooled_projections=torch.randn(1, 16), timestep=torch.tensor([500.0]))
config = peft.LoraConfig(r=4, lora_alpha=16, lora_dropout=0.1, target_modules=["to_q", "to_v"], init_lora_weights=False)


def network():
    network = SD3Transformer2DModel.from_pretrained(f"{folder}/network")
    assert not network.training
    return network


def difference(name, network):
    with torch.no_grad():
        first, second = (network(**inputs)[0] for _ in range(2))
    result = ((first - second).abs().max() / first.std()).item()
    print(f"{name:35} training={network.training}, difference {result:.3f}")
    return result


added = network()
added.add_adapter(config)
assert not added.training and difference("add_adapter", added) > 0.01, "changed: add_adapter follows eval mode"
StableDiffusion3Pipeline.save_lora_weights(
    f"{folder}/lora", peft.get_peft_model_state_dict(added), **_collate_lora_metadata({"transformer": added}))
pipeline = StableDiffusion3Pipeline(network(), None, None, None, None, None, None, None, None)
pipeline.load_lora_weights(f"{folder}/lora")
loaded = pipeline.transformer
assert not loaded.training and difference("load_lora_weights", loaded) > 0.01, "changed: a loaded LoRA is in eval mode"
assert difference("load_lora_weights, then eval()", loaded.eval()) == 0, "changed"
peft.get_peft_model(network(), config).save_pretrained(f"{folder}/peft")
model = peft.PeftModel.from_pretrained(network(), f"{folder}/peft")
assert difference("PeftModel.from_pretrained", model) == 0, "changed: PeftModel"
print("as described: dropout is on in a network in eval mode")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
