#!/usr/bin/env bash
# diffusers, peft: after disable_lora(), set_adapters and load_lora_weights choose a LoRA that has no effect
#
# One would guess: set_adapters(["a"]) switches LoRA a on, and a LoRA that is loaded is active, as the documentation of
# both describes; so does the next load_lora_weights or set_adapters after disable_lora().
#
# What happens (diffusers 0.42.1, peft 0.21.2, torch 2.13.0): the layers remember that they are disabled, and no choice
# of an adapter changes that. get_active_adapters() names the chosen one all the same. Norm of the change of the
# latents:
#   load_lora_weights(a)                      0.012   get_active_adapters() ["a"]
#   disable_lora()                            0.000   get_active_adapters() ["a"]
#   set_adapters(["a"], [1.0])                0.000   get_active_adapters() ["a"]
#   load_lora_weights(b)                      0.000   get_active_adapters() ["b"]
#   set_adapters(["b"]), enable_lora()        0.020   get_active_adapters() ["b"]
# network.set_adapter and add_adapter behave in the same way. Nothing is logged.
#
# Why it matters: a comparison draws the base network with disable_lora() and then each LoRA with set_adapters or
# load_lora_weights. All its pictures are the base network's, and so are the scores: no LoRA has learned anything. An
# adapter that is added for training while LoRAs are disabled gets no gradient. Call enable_lora() first.
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
from peft import LoraConfig, get_peft_model_state_dict

print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
diffusers.logging.set_verbosity_error()


def build():
    torch.manual_seed(0)
    return SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4).eval()


def saved_lora(seed):
    network = build()
    torch.manual_seed(seed)
    network.add_adapter(LoraConfig(r=2, lora_alpha=8, target_modules=["to_q", "to_v"], init_lora_weights=False))
    folder = tempfile.mkdtemp()
    StableDiffusion3Pipeline.save_lora_weights(folder, transformer_lora_layers=get_peft_model_state_dict(network))
    return folder


pipeline = StableDiffusion3Pipeline(
    build(), FlowMatchEulerDiscreteScheduler(), None, None, None, None, None, None, None)
pipeline.set_progress_bar_config(disable=True)
torch.manual_seed(1)
prompt = dict(prompt_embeds=torch.randn(1, 3, 16), pooled_prompt_embeds=torch.randn(1, 16))


def draw():
    return pipeline(**prompt, guidance_scale=0.0, height=8, width=8, num_inference_steps=2, output_type="latent",
                    generator=torch.Generator().manual_seed(0)).images


base = draw()


def change(call):
    size = (draw() - base).norm().item()
    active = pipeline.get_active_adapters()
    print(f"{call}: change of the latents {size:.3f}, get_active_adapters() {active}")
    return size, active


pipeline.load_lora_weights(saved_lora(2), adapter_name="a")
assert change("load_lora_weights(a)")[0] > 0.01
pipeline.disable_lora()
assert change("disable_lora()")[0] == 0
pipeline.set_adapters(["a"], [1.0])
assert change('set_adapters(["a"], [1.0])') == (0, ["a"]), "changed: set_adapters enables the LoRA"
pipeline.load_lora_weights(saved_lora(3), adapter_name="b")
assert change("load_lora_weights(b)") == (0, ["b"]), "changed: load_lora_weights enables the LoRA"
pipeline.transformer.set_adapter("a")
assert change('transformer.set_adapter("a")') == (0, ["a"]), "changed: set_adapter enables the LoRA"
pipeline.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False), "c")
assert change("transformer.add_adapter(c)") == (0, ["c"]), "changed: add_adapter enables the LoRA"
pipeline.set_adapters(["b"])
pipeline.enable_lora()
assert change('set_adapters(["b"]), enable_lora()')[0] > 0.01
print("as described: a LoRA that is chosen while LoRAs are disabled has no effect")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
