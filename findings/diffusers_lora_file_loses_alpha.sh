#!/usr/bin/env bash
# diffusers: a LoRA written with save_lora_weights comes back at half its strength
#
# One would guess: PIPELINE.save_lora_weights(folder, transformer_lora_layers=get_peft_model_state_dict(network)), the
# call of many training scripts, followed by load_lora_weights(folder) gives the same network.
#
# What happens (diffusers 0.42.1, peft 0.21.2, torch 2.13.0): the file holds the factors but neither lora_alpha nor
# use_rslora, and the loader then assumes alpha = rank. Change of the network's output after the round trip, relative
# to the change before, for rank 4:
#   lora_alpha 8: 0.498    lora_alpha 4, use_rslora: 0.498    lora_alpha 4: 1.000
#   network.save_lora_adapter, lora_alpha 8: 1.000
# No warning names alpha. Passing transformer_lora_adapter_metadata=... as well, or network.save_lora_adapter, keeps
# it.
#
# Why it matters: alpha = 2 x rank is a usual setting in reinforcement learning on diffusion models (Flow-GRPO and its
# followers). A policy exported this way loses half of what it learned, and the images still look plausible.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import tempfile

import diffusers
import peft
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open

print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()


def network():
    torch.manual_seed(0)
    return SD3Transformer2DModel(sample_size=8, num_layers=2, attention_head_dim=8, num_attention_heads=2, in_channels=4,
                                 out_channels=4, joint_attention_dim=16, caption_projection_dim=16,
                                 pooled_projection_dim=16, pos_embed_max_size=8).eval()


noise = torch.Generator().manual_seed(1)
inputs = dict(hidden_states=torch.randn(1, 4, 8, 8, generator=noise), timestep=torch.tensor([500.0]),
              encoder_hidden_states=torch.randn(1, 3, 16, generator=noise),
              pooled_projections=torch.randn(1, 16, generator=noise))


@torch.no_grad()
def output(model):
    return model(**inputs)[0]


base = output(network())
parts = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")


def strength(way, **options):
    trained = network()
    torch.manual_seed(3)
    trained.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False, **options))
    before, loaded = output(trained) - base, network()
    with tempfile.TemporaryDirectory() as folder:
        if way == "pipeline":
            StableDiffusion3Pipeline.save_lora_weights(folder, transformer_lora_layers=get_peft_model_state_dict(trained))
            StableDiffusion3Pipeline(transformer=loaded, scheduler=FlowMatchEulerDiscreteScheduler(), vae=None,
                                     **dict.fromkeys(parts)).load_lora_weights(folder)
            with safe_open(f"{folder}/pytorch_lora_weights.safetensors", "pt") as file:
                assert not [key for key in file.keys() if "alpha" in key] and "r" not in (file.metadata() or {})
        else:
            trained.save_lora_adapter(folder)
            loaded.load_lora_adapter(folder, prefix=None, weight_name="pytorch_lora_weights.safetensors")
    ratio = ((output(loaded) - base).norm() / before.norm()).item()
    print(f"{way}, rank 4, {options}: {ratio:.3f} of the change is left")
    return ratio


assert abs(strength("pipeline", lora_alpha=4) - 1) < 1e-3
assert 0.4 < strength("pipeline", lora_alpha=8) < 0.6, "changed: alpha is kept"
assert 0.4 < strength("pipeline", lora_alpha=4, use_rslora=True) < 0.6, "changed: use_rslora is kept"
assert abs(strength("network", lora_alpha=8) - 1) < 1e-3
print("as described: the pipeline's file loses alpha")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
