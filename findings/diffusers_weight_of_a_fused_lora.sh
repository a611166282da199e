#!/usr/bin/env bash
# diffusers, peft: set_adapters on a fused LoRA changes nothing at once, and unfuse_lora then leaves a part of the LoRA
#
# One would guess: while a LoRA is fused, set_adapters either takes it out or raises, as peft's own set_adapter warns
# and unmerges. And unfuse_lora() followed by unload_lora_weights() restores the base network in any case.
#
# What happens (diffusers 0.42.1, peft 0.21.2, torch 2.13.0): set_adapters after fuse_lora has no effect on the output.
# unfuse_lora then subtracts the LoRA at the new weight, not at the one that was fused. Change of the base network's
# weights that is left after unfuse_lora() and unload_lora_weights(), as a multiple of the LoRA:
#   weight given while fused     none     0.5      0        2        -1
#   output after set_adapters    LoRA     LoRA     LoRA     LoRA     LoRA
#   left in the base             0        0.5      1        -1       2
# Choosing another adapter while the first one is fused also has no effect: get_active_adapters() names the second, and
# the output is that of the first. disable_lora() gives the base network, and enable_lora() then the second adapter.
# Nothing is logged and no warning is given.
#
# Why it matters: a script that fuses for speed and then compares LoRAs or weights draws the same pictures each time.
# Unfusing to go on training or to load the next LoRA leaves the base network changed, and everything that is trained
# on it fits another network. A second unfuse_lora() does not help. Call unfuse_lora() before set_adapters.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import warnings

import diffusers
import peft
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()


def network():
    torch.manual_seed(0)
    return SD3Transformer2DModel(
        sample_size=8, in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=8,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, pos_embed_max_size=8,
    ).eval()


files = {}
for seed, name in enumerate(("first", "second")):
    trained = network()
    torch.manual_seed(10 + seed)
    trained.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    files[name] = {f"transformer.{key}": value for key, value in get_peft_model_state_dict(trained).items()}
inputs = dict(hidden_states=torch.randn(1, 4, 8, 8), encoder_hidden_states=torch.randn(1, 5, 16),
              pooled_projections=torch.randn(1, 16), timestep=torch.tensor([500]))
key = "transformer_blocks.0.attn.to_q.weight"


def pipeline(*names):
    vae = AutoencoderKL(latent_channels=4, block_out_channels=(8,), norm_num_groups=4)
    pipe = StableDiffusion3Pipeline(network(), FlowMatchEulerDiscreteScheduler(), vae, *[None] * 6)
    for name in names:
        pipe.load_lora_weights(dict(files[name]), adapter_name=name)
    return pipe


@torch.no_grad()
def output(pipe):
    return pipe.transformer(**inputs).sample


def distance(one, other):
    return (one - other).abs().max().item()


base, first, second = output(pipeline()), output(pipeline("first")), output(pipeline("second"))
print(f"change of the output: first LoRA {distance(first, base):.3f}, second LoRA {distance(second, base):.3f}")
weight = network().state_dict()[key]
loaded = files["first"]
delta = loaded[f"transformer.{key.replace('weight', 'lora_B.weight')}"] @ loaded[
    f"transformer.{key.replace('weight', 'lora_A.weight')}"]

for given, expected in ((None, 0), (0.5, 0.5), (0.0, 1), (2.0, -1), (-1.0, 2)):
    pipe = pipeline("first")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        pipe.fuse_lora()
        if given is not None:
            pipe.set_adapters("first", given)
        moved = distance(output(pipe), first)
        pipe.unfuse_lora()
        pipe.unload_lora_weights()
    left = pipe.transformer.state_dict()[key] - weight
    multiple = (left.flatten() @ delta.flatten() / delta.square().sum()).item()
    print(f"weight {given}: output differs from the fused one by {moved:.1e}; left in the base: {multiple:+.2f} LoRAs, "
          f"output off by {distance(output(pipe), base):.3f}; warnings: {len(seen)}")
    assert moved < 1e-5 and abs(multiple - expected) < 1e-3 and not seen, "changed"

pipe = pipeline("first", "second")
pipe.set_adapters("first")
pipe.fuse_lora()
pipe.set_adapters("second")
names = pipe.get_active_adapters()
print(f"first fused, second chosen: active {names}, output differs from the first one's by "
      f"{distance(output(pipe), first):.1e}, from the second one's by {distance(output(pipe), second):.3f}")
assert names == ["second"] and distance(output(pipe), first) < 1e-5 < 1e-2 < distance(output(pipe), second), "changed"
pipe.disable_lora()
assert distance(output(pipe), base) < 1e-5, "changed: disable_lora()"
pipe.enable_lora()
assert distance(output(pipe), second) < 1e-5, "changed: enable_lora()"
print("as described: set_adapters does not reach a fused LoRA, and unfuse_lora subtracts another weight")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
