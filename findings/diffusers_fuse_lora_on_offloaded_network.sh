#!/usr/bin/env bash
# diffusers, accelerate: fuse_lora() on a network with sequential CPU offload removes the LoRA instead of fusing it
#
# One would guess: fuse_lora() adds the LoRA to the weights wherever they are, or raises an error. peft's own
# merge_adapter() fetches offloaded weights first.
#
# What happens (diffusers 0.42.1, peft 0.21.2, accelerate 1.15.0, torch 2.13.0): the parameters of an offloaded network
# are on the meta device, and its values are in the hooks. fuse_lora adds the LoRA to the meta tensors, which does
# nothing, and switches the layers to "merged", where the LoRA is no longer computed. Change of the output of Stable
# Diffusion 3's network by a LoRA:
#                                                    not offloaded       offloaded
#   LoRA loaded                                          0.420             0.420
#   pipeline.fuse_lora()                                 0.420             0.000
#   then pipeline.unload_lora_weights()                  0.420             0.000
#   merge_adapter() of peft's model                      0.420             0.420
#   EMAModel.copy_to() of other weights                  13.55             0.000
# unfuse_lora() brings the LoRA back. Nothing is logged. The offload is accelerate's cpu_offload, which
# enable_sequential_cpu_offload calls for each network; the order offload, load, fuse is the usual one of a script.
#
# Why it matters: whoever draws samples of a trained LoRA on a small GPU gets those of the base model, and compares the
# base model with itself. The same holds for any other write into the weights. Fuse first, and offload afterwards.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6 diffusers==0.42.1 \
    transformers==5.24.0 peft==0.21.2 accelerate==1.15.0
cat > "$folder/check.py" <<'PY'
import warnings

import accelerate
import diffusers
import peft
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from diffusers.training_utils import EMAModel
from peft import LoraConfig, get_peft_model

print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, accelerate {accelerate.__version__}, "
      f"torch {torch.__version__}")
PARTS = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
CONFIG = LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
random = torch.Generator().manual_seed(1)
inputs = dict(hidden_states=torch.randn(1, 4, 8, 8, generator=random), timestep=torch.tensor([500.0]),
              encoder_hidden_states=torch.randn(1, 3, 16, generator=random),
              pooled_projections=torch.randn(1, 16, generator=random))


def network(seed=0):
    torch.manual_seed(seed)
    return SD3Transformer2DModel(
        sample_size=8, num_layers=1, attention_head_dim=8, num_attention_heads=2, in_channels=4, out_channels=4,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, pos_embed_max_size=8).eval()


@torch.no_grad()
def output(model):
    return model(**inputs, return_dict=False)[0]


base = output(network())


def change(model):
    return round((output(model) - base).norm().item(), 3)


def offload(model, offloaded):
    if offloaded:
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert all(weight.device.type == "meta" for weight in model.parameters())
    return model


def measure(offloaded):
    """Return the changes of the output by a LoRA and by other weights."""
    model, changes = network(), {}
    torch.manual_seed(3)
    model.add_adapter(CONFIG)
    pipeline = StableDiffusion3Pipeline(transformer=offload(model, offloaded),
                                        scheduler=FlowMatchEulerDiscreteScheduler(), **dict.fromkeys(PARTS))
    changes["loaded"] = change(model)
    pipeline.fuse_lora(components=["transformer"])
    changes["fused"] = change(model)
    pipeline.unfuse_lora(components=["transformer"])
    changes["unfused"] = change(model)
    pipeline.fuse_lora(components=["transformer"])
    pipeline.unload_lora_weights()
    changes["fused and unloaded"] = change(model)
    model = network()
    torch.manual_seed(3)
    merged = offload(get_peft_model(model, CONFIG).eval(), offloaded)
    merged.merge_adapter()
    changes["merge_adapter"] = change(merged)
    averaged = offload(network(), offloaded)
    EMAModel(network(seed=5).parameters()).copy_to(averaged.parameters())
    changes["copy_to"] = change(averaged)
    print(f"offloaded {offloaded}:", changes)
    return changes


with warnings.catch_warnings():
    warnings.filterwarnings("error", message=".*meta.*")
    plain, offloaded = measure(False), measure(True)
assert all(abs(value - plain["loaded"]) < 0.002 for name, value in plain.items() if name != "copy_to")
for name in ("loaded", "unfused", "merge_adapter"):
    assert abs(offloaded[name] - plain["loaded"]) < 0.002, name
for name in ("fused", "fused and unloaded", "copy_to"):
    assert plain[name] > 0.1 and offloaded[name] == 0, f"changed: {name}"
print("as described: writing into offloaded weights has no effect")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
