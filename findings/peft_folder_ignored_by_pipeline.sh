#!/usr/bin/env bash
# peft and diffusers: load_lora_weights takes a LoRA that peft saved, and loads nothing
#
# One would guess: PIPELINE.load_lora_weights on the folder of get_peft_model(network).save_pretrained(...) loads the
# adapter, since diffusers runs its LoRA through peft, or raises an error.
#
# What happens (diffusers 0.42.1, peft 0.21.2, torch 2.13.0), with Stable Diffusion 3: the keys begin with
# "base_model.model.", no key begins with "transformer.", and the call returns normally:
#   change of the output by the trained adapter 0.475, after load_lora_weights 0.0, adapters of the pipeline {}
# One line of the log says that no keys were found and that this "is safe to ignore" in some cases; equal lines appear
# for each absent text encoder also when a LoRA loads well. With the prefix replaced by "transformer." it loads.
#
# Why it matters: trainers for reinforcement learning that use get_peft_model (Flow-GRPO does) write such folders.
# Whoever evaluates one with a pipeline measures the untrained model. Compare get_list_adapters() with what was
# expected.
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
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
parts = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")


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


def load(source, **options):
    fresh = network()
    pipeline = StableDiffusion3Pipeline(transformer=fresh, scheduler=FlowMatchEulerDiscreteScheduler(),
                                        **dict.fromkeys(parts))
    pipeline.load_lora_weights(source, **options)
    return output(fresh), pipeline.get_list_adapters()


base, plain = output(network()), network()
torch.manual_seed(3)
trained = get_peft_model(plain, LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_v"], init_lora_weights=False)).eval()
wanted = output(trained)
with tempfile.TemporaryDirectory() as folder:
    trained.save_pretrained(folder)
    weights = load_file(f"{folder}/adapter_model.safetensors")
    got, adapters = load(folder, weight_name="adapter_model.safetensors")
assert all(key.startswith("base_model.model.") for key in weights)
print(f"change by the trained adapter {(wanted - base).norm():.3f}, after load_lora_weights {(got - base).norm():.3f}, "
      f"adapters of the pipeline {adapters}")
renamed, known = load({key.replace("base_model.model.", "transformer."): value for key, value in weights.items()})
print(f"with renamed keys: {(renamed - base).norm():.3f}, adapters {known}")
assert (wanted - base).norm() > 0.05 and torch.allclose(renamed, wanted, atol=1e-5) and known
assert torch.equal(got, base) and not adapters, "changed: peft's keys are loaded"
print("as described: nothing was loaded and nothing was raised")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
