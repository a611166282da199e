#!/usr/bin/env bash
# diffusers: what ".alpha" does in a LoRA file depends on the model family and on how the factors are called
#
# One would guess: in a LoRA with diffusers' names (transformer.BLOCK.lora_A.weight, .lora_B.weight) an entry
# transformer.BLOCK.alpha scales the change by alpha / rank in every family, and so it does beside the older names
# lora_down and lora_up, where it comes from.
#
# What happens (diffusers 0.42.1, peft 0.21.2, torch 2.13.0), for one layer of rank 4 with alpha 8:
#   FLUX.1, lora_A and lora_B:          scaled by 2.0
#   FLUX.1, lora_down and lora_up:      scaled by 1.0, alpha is dropped in silence
#   SD3, Wan, Sana:                     ValueError: Invalid LoRA checkpoint. ... all LoRA param names contain `'lora'`
#   FLUX.2:                             ValueError: Invalid adapter checkpoint. ...
#   FLUX.2, lora_down and lora_up:      nothing is loaded, one line in the log
#   Qwen-Image:  NoMatchingPeftModuleError for 'transformer.transformer_blocks...': prefix doubled
# Without alpha all of them load lora_A and lora_B at strength 1.
#
# Why it matters: a policy trained with alpha = 2 x rank and exported with its alphas works in one family, halves its
# effect in silence in the next and cannot be loaded in a third. Multiply alpha / rank into lora_B and write no alpha.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import diffusers
import peft
import torch
from diffusers import (
    Flux2Pipeline, Flux2Transformer2DModel, FluxPipeline, FluxTransformer2DModel, QwenImagePipeline,
    QwenImageTransformer2DModel, SanaPipeline, SanaTransformer2DModel, SD3Transformer2DModel, StableDiffusion3Pipeline,
    WanPipeline, WanTransformer3DModel,
)

print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
heads = dict(num_attention_heads=2, attention_head_dim=8)
small = dict(heads, num_layers=1, in_channels=4)
one = dict(scheduler=None, vae=None, text_encoder=None, tokenizer=None)
two = dict(one, text_encoder_2=None, tokenizer_2=None)
three = dict(two, text_encoder_3=None, tokenizer_3=None)
block = "transformer_blocks.0.attn.to_q"
families = {
    "FLUX.1": (FluxPipeline, two, block, lambda: FluxTransformer2DModel(
        patch_size=1, num_single_layers=1, joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(2, 2, 4),
        **small)),
    "SD3": (StableDiffusion3Pipeline, three, block, lambda: SD3Transformer2DModel(
        sample_size=8, out_channels=4, joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16,
        pos_embed_max_size=8, **small)),
    "Wan": (WanPipeline, one, "blocks.0.attn1.to_q", lambda: WanTransformer3DModel(
        out_channels=4, text_dim=16, freq_dim=16, ffn_dim=16, **small)),
    "Sana": (SanaPipeline, one, "transformer_blocks.0.attn2.to_q", lambda: SanaTransformer2DModel(
        patch_size=1, out_channels=4, num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16,
        caption_channels=16, sample_size=8, **small)),
    "FLUX.2": (Flux2Pipeline, one, block, lambda: Flux2Transformer2DModel(
        patch_size=1, num_single_layers=1, joint_attention_dim=16, timestep_guidance_channels=8,
        axes_dims_rope=(2, 2, 2, 2), **small)),
    "Qwen-Image": (QwenImagePipeline, one, block, lambda: QwenImageTransformer2DModel(
        patch_size=2, out_channels=4, joint_attention_dim=16, axes_dims_rope=(2, 2, 4), **small)),
}
noise = torch.Generator().manual_seed(0)
first, second = torch.randn(4, 16, generator=noise), torch.randn(16, 4, generator=noise)


def load(family, names, alpha):
    pipeline, parts, path, make = families[family]
    network, weights = make(), {f"transformer.{path}.{n}.weight": w.clone() for n, w in zip(names, (first, second))}
    if alpha:
        weights[f"transformer.{path}.alpha"] = torch.tensor(float(alpha))
    try:
        pipeline(transformer=network, **parts).load_lora_weights(weights, adapter_name="a")
        layer = network.get_submodule(path)
        strength = (layer.get_delta_weight("a").norm() / (second @ first).norm()).item() if "a" in getattr(
            layer, "lora_A", {}) else 0.0
        result = f"strength {strength:.1f}"
    except Exception as error:  # which class is raised is part of what is shown
        result = f"{type(error).__name__}: {error}"
    print(f"{family}, {names[0]} and {names[1]}, alpha {alpha}: {result[:110]}")
    return result


diffusers.utils.logging.set_verbosity_error()
letters, older = ("lora_A", "lora_B"), ("lora_down", "lora_up")
for family in families:
    assert load(family, letters, None) == "strength 1.0", family
assert load("FLUX.1", letters, 8) == "strength 2.0"
assert load("FLUX.1", older, 8) == "strength 1.0", "changed"
for family in ("SD3", "Wan", "Sana"):
    assert load(family, letters, 8).startswith("ValueError: Invalid LoRA checkpoint"), "changed"
assert load("FLUX.2", letters, 8).startswith("ValueError: Invalid adapter checkpoint"), "changed"
assert load("FLUX.2", older, 8) == "strength 0.0", "changed"
assert "'transformer.transformer_blocks.0.attn.to_q'" in load("Qwen-Image", letters, 8), "changed"
print("as described: alpha is scaled, dropped or refused")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
