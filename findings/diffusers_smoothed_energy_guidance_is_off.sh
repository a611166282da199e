#!/usr/bin/env bash
# diffusers: SmoothedEnergyGuidance has no effect, for half as many passes more, and its blur is the wrong way round
#
# One would guess: SmoothedEnergyGuidance adds to classifier-free guidance, as SkipLayerGuidance does, here by a third
# pass with blurred queries. seg_blur_sigma=1 blurs a little, and 9999999, the default, takes the mean.
#
# What happens (diffusers 0.42.1, torch 2.13.0): its prepare_models, unlike that of all other guiders, does not count
# the passes, so that the hooks are never put on and the third pass repeats the first. Stable Diffusion 3's modular
# pipeline, ten steps, compared with ClassifierFreeGuidance:
#                                              passes     relative change of the latents
#   classifier-free guidance                   20
#   SmoothedEnergyGuidance, any scale, blur    29         0 (bit for bit)
#   SkipLayerGuidance, scale 2.8               29         0.90
# The hook itself, SmoothedEnergyGuidanceHook, takes the mean of all queries at any sigma up to 9999.9, and blurs above
# that: spread of 64 queries 0 at sigma 0.1, 1 and 100, and 0.12 of 1.02 at sigma 9999999. Nothing is logged.
#
# Why it matters: a search over its scale, layers or blur finds no difference between any of them, at 1.5 times the
# cost.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import ClassifierFreeGuidance, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from diffusers.guiders import SkipLayerGuidance, SmoothedEnergyGuidance
from diffusers.hooks import LayerSkipConfig
from diffusers.hooks.hooks import HookRegistry
from diffusers.hooks.smoothed_energy_guidance_utils import SmoothedEnergyGuidanceConfig, SmoothedEnergyGuidanceHook
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
texts = {name: torch.randn(1, 6, 32) for name in ("prompt_embeds", "negative_prompt_embeds")}
texts |= {name: torch.randn(1, 32) for name in ("pooled_prompt_embeds", "negative_pooled_prompt_embeds")}
passes = []
network.register_forward_hook(lambda *given: passes.append(None))


def draw(guider):
    passes.clear()
    pipeline.update_components(transformer=network, scheduler=FlowMatchEulerDiscreteScheduler(), guider=guider)
    latents = pipeline(**texts, height=64, width=64, num_inference_steps=10, output="latents",
                       generator=torch.Generator().manual_seed(0))
    return latents, len(passes)


plain, count = draw(ClassifierFreeGuidance(guidance_scale=4.0))
print(f"classifier-free guidance: {count} passes")
changes = {}
for name, guider in {
    "smoothed energy, scale 2.8": SmoothedEnergyGuidance(
        guidance_scale=4.0, seg_guidance_scale=2.8, seg_guidance_config=SmoothedEnergyGuidanceConfig([1, 2])),
    "smoothed energy, scale 100, blur 1": SmoothedEnergyGuidance(
        guidance_scale=4.0, seg_guidance_scale=100.0, seg_blur_sigma=1.0,
        seg_guidance_config=SmoothedEnergyGuidanceConfig([0, 1, 2, 3])),
    "skipped layers, scale 2.8": SkipLayerGuidance(
        guidance_scale=4.0, skip_layer_guidance_scale=2.8, skip_layer_config=LayerSkipConfig([1, 2]),
        skip_layer_guidance_start=0.0, skip_layer_guidance_stop=1.0),
}.items():
    latents, count = draw(guider)
    changes[name] = ((latents - plain).norm() / plain.norm()).item()
    print(f"{name}: {count} passes, relative change of the latents {changes[name]}")
    assert count == 29, "changed: number of passes"
*smoothed, skipped = changes.values()
assert smoothed == [0, 0], "changed: smoothed energy guidance does something"
assert skipped > 0.1

queries = torch.randn(1, 64, 8, generator=torch.Generator().manual_seed(1))
spreads = {}
for sigma in (0.1, 1.0, 100.0, 9999999.0):
    projection = torch.nn.Identity()
    HookRegistry.check_if_exists_or_initialize(projection).register_hook(SmoothedEnergyGuidanceHook(sigma), "blur")
    try:
        spreads[sigma] = round(projection(queries.clone()).std(dim=1).mean().item(), 3)
    except RuntimeError as error:
        spreads[sigma] = f"RuntimeError: {error}"
    print(f"the hook with blur {sigma}: spread of the queries {spreads[sigma]} of {queries.std(dim=1).mean():.3f}")
assert spreads[0.1] == spreads[1.0] == spreads[100.0] == 0, "changed: small blurs"
assert spreads[9999999.0] != 0, "changed: an infinite blur"
print("as described: smoothed energy guidance has no effect")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
