#!/usr/bin/env bash
# diffusers: at guidance_scale=1, skip-layer and perturbed-attention guiders skip nothing and use the negative prompt
#
# One would guess: SkipLayerGuidance and PerturbedAttentionGuidance push the prediction away from that of a network
# with layers left out, given the same prompt. They need no classifier-free guidance: PAG was published for models
# without it. At guidance_scale=1, or outside of start and stop, that part alone is left.
#
# What happens (diffusers 0.42.1, torch 2.13.0): the hooks are put on for the third pass only, and the second pass takes
# the negative prompt. Without classifier-free guidance there are two passes. Stable Diffusion 3's modular pipeline,
# skip_layer_guidance_scale=2.8 or perturbed_guidance_scale=2.8:
#   guidance_scale=4         prompt, negative prompt, prompt with the layers left out
#   guidance_scale=1         prompt, negative prompt
#   guidance_scale=4, stop=0 prompt, negative prompt
# In the last two lines, and for perturbed attention at guidance_scale=1, the latents of ten steps are bit for bit those
# of ClassifierFreeGuidance(2.8, start=0.1): the guidance that was switched off, at the other one's scale. Nothing is
# logged.
#
# Why it matters: distilled models are sampled at guidance_scale=1, and guidance is often stopped early. An ablation of
# these guiders then compares classifier-free guidance with itself.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import ClassifierFreeGuidance, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from diffusers.guiders import PerturbedAttentionGuidance, SkipLayerGuidance
from diffusers.hooks import LayerSkipConfig
from diffusers.modular_pipelines.stable_diffusion_3.modular_blocks_stable_diffusion_3 import (
    StableDiffusion3T2ICoreDenoiseStep,
)

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
torch.manual_seed(0)
network = SD3Transformer2DModel(
    sample_size=16, in_channels=4, num_layers=4, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=32,
    caption_projection_dim=16, pooled_projection_dim=32, out_channels=4, pos_embed_max_size=16).eval()
for weight in network.parameters():
    weight.data.normal_(0, 0.3)
pipeline = StableDiffusion3T2ICoreDenoiseStep().init_pipeline()
pipeline.set_progress_bar_config(disable=True)
texts = dict(prompt_embeds=torch.randn(1, 6, 32), pooled_prompt_embeds=torch.randn(1, 32))
negatives = [dict(negative_prompt_embeds=torch.randn(1, 6, 32), negative_pooled_prompt_embeds=torch.randn(1, 32))
             for _ in range(2)]
seen, skipped, passes = [], [], []
network.register_forward_pre_hook(
    lambda module, given, options: seen.append(options["encoder_hidden_states"]), with_kwargs=True)
network.register_forward_hook(lambda module, given, result: passes.append(result[0]))
network.transformer_blocks[1].attn.register_forward_hook(lambda *given: skipped.append(len(passes)))


def draw(guider, negative=negatives[0]):
    """Return the latents of ten steps, and for each pass of a step its prompt, and whether the blocks ran."""
    for record in (seen, skipped, passes):
        record.clear()
    pipeline.update_components(transformer=network, scheduler=FlowMatchEulerDiscreteScheduler(), guider=guider)
    latents = pipeline(**texts, **negative, height=64, width=64, num_inference_steps=10, output="latents",
                       generator=torch.Generator().manual_seed(0))
    per_step = len(passes) // 10 + (len(passes) % 10 > 0)
    first = len(passes) - per_step
    kinds = ["prompt" if torch.equal(given, texts["prompt_embeds"]) else "negative" for given in seen]
    return latents, [f"{kinds[number]}{'' if number in skipped else ', blocks skipped'}"
                     for number in range(first, len(passes))]


def skip(**options):
    return SkipLayerGuidance(skip_layer_config=LayerSkipConfig(indices=[1, 2]), skip_layer_guidance_start=0.0,
                             skip_layer_guidance_stop=1.0, skip_layer_guidance_scale=2.8, **options)


def perturb(**options):
    return PerturbedAttentionGuidance(perturbed_guidance_layers=[1, 2], perturbed_guidance_start=0.0,
                                      perturbed_guidance_stop=1.0, perturbed_guidance_scale=2.8, **options)


def distance(first, second):
    return ((first - second).norm() / second.norm()).item()


_, three = draw(skip(guidance_scale=4.0))
print("skip-layer guidance, guidance_scale=4:", three)
assert three == ["prompt", "negative", "prompt, blocks skipped"], "changed: with guidance"
# classifier-free guidance of the same scale, from the second step on, as skip-layer guidance starts after step 0
plain, _ = draw(ClassifierFreeGuidance(guidance_scale=2.8, start=0.1))
for name, guider in (("skip-layer guidance, guidance_scale=1", skip(guidance_scale=1.0)),
                     ("skip-layer guidance, stop=0", skip(guidance_scale=4.0, stop=0.0)),
                     ("perturbed attention, guidance_scale=1", perturb(guidance_scale=1.0))):
    latents, kinds = draw(guider)
    error = distance(latents, plain)
    other, _ = draw(guider, negatives[1])
    moved = distance(other, latents)
    print(f"{name}: {kinds}, distance to classifier-free guidance {error:.1e}, another negative prompt: {moved:.2f}")
    assert kinds == ["prompt", "negative"], f"changed: passes of {name}"
    assert error < 1e-5 and moved > 0.1, f"changed: {name}"
print("as described: without guidance these guiders are classifier-free guidance")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
