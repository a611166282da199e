#!/usr/bin/env bash
# diffusers: PRXPipeline calls callback_on_step_end and throws away the latents that it returns
#
# One would guess: a callback_on_step_end that returns {"latents": ...} replaces the latents, as diffusers documents for
# its pipelines. The 64 other pipeline classes with this argument that were tried do so.
#
# What happens (diffusers 0.42.1, torch 2.13.0): PRXPipeline (and PRXPixelPipeline) calls the callback with the latents
# after each step and ignores what it returns, so the image has the same bits as without it. ZImagePipeline, with the
# same kind of call, draws what the callback returned. Nothing is logged.
#   callback that halves the latents after each of 3 steps, largest change of the final latents:   PRX 0, Z-Image > 0.5
#
# Why it matters: such a callback is how noise is added in the loop without forking a pipeline (SDE sampling for
# GRPO), and how latents are masked or replaced. With PRX the exploration is missing: all images of a group with one
# start are the same image, and no error says so.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    PRXPipeline,
    PRXTransformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
diffusers.utils.logging.disable_progress_bar()
torch.manual_seed(0)
vae = AutoencoderKL(latent_channels=4, block_out_channels=(8, 8), norm_num_groups=4, scaling_factor=0.8, shift_factor=0.1,
                    down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2)
prx = PRXPipeline(PRXTransformer2DModel(in_channels=4, patch_size=2, context_in_dim=16, hidden_size=32, num_heads=2,
                                        depth=1, axes_dim=[8, 8]), FlowMatchEulerDiscreteScheduler(), None, None, vae)
z_image = ZImagePipeline(FlowMatchEulerDiscreteScheduler(), vae, None, None, ZImageTransformer2DModel(
    in_channels=4, dim=32, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16,
    axes_dims=[4, 6, 6], axes_lens=[64, 64, 64]))
text = torch.randn(1, 8, 16)
inputs = {
    prx: dict(prompt_embeds=text, prompt_attention_mask=torch.ones(1, 8, dtype=torch.bool), guidance_scale=1.0,
              use_resolution_binning=False),
    z_image: dict(prompt_embeds=[text[0]], guidance_scale=0.0),
}
changes, calls = {}, 0


def halve(pipeline, step, timestep, tensors):
    global calls
    calls += 1
    return {"latents": tensors["latents"] * 0.5}


for pipeline, options in inputs.items():
    for module in (pipeline.vae, pipeline.transformer):
        module.eval()
    def draw(**more):
        generator = torch.Generator().manual_seed(0)
        return pipeline(height=32, width=32, num_inference_steps=3, generator=generator, output_type="latent", **options,
                        **more)[0]
    changes[type(pipeline).__name__] = (draw(callback_on_step_end=halve) - draw()).abs().max().item()
print("largest change of the final latents:", changes)
assert calls == 6, "changed: the callback is called otherwise"
assert changes["PRXPipeline"] == 0 and changes["ZImagePipeline"] > 0.5, "changed: PRXPipeline uses the callback's latents"
print("as described: PRXPipeline ignores the latents that a callback returns")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
