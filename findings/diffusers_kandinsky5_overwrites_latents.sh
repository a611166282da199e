#!/usr/bin/env bash
# diffusers: Kandinsky 5's video pipeline writes each step into the latents that it was given
#
# One would guess: a pipeline reads `latents`, and leaves the caller's tensor as it is; and the latents of
# `callback_on_step_end` may be kept, since each step makes new ones. 58 other small pipelines of diffusers do so.
#
# What happens (diffusers 0.42.1, torch 2.13.0): Kandinsky5T2VPipeline assigns every step to a slice of one tensor. After
# the call the given noise holds the result, so a second call with it draws another video, and latents kept by a
# callback are the same tensor three times: all of them are the last.
#
# Why it matters: reinforcement learning keeps the latents of a trajectory, and draws several samples from one noise.
# The stored steps are silently the final latents. Pass a clone, and clone what a callback gives.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Kandinsky5T2VPipeline, Kandinsky5Transformer3DModel

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
network = Kandinsky5Transformer3DModel(
    in_visual_dim=4, out_visual_dim=4, in_text_dim=16, in_text_dim2=16, ff_dim=64, time_dim=16, model_dim=32,
    num_text_blocks=1, num_visual_blocks=1, axes_dims=(4, 6, 6)).eval()
pipeline = Kandinsky5T2VPipeline(transformer=network, vae=None, text_encoder=None, tokenizer=None, text_encoder_2=None,
                                 tokenizer_2=None, scheduler=FlowMatchEulerDiscreteScheduler())
pipeline.set_progress_bar_config(disable=True)
kept = []


def keep(pipeline, index, time, values):
    kept.append(values["latents"])
    return {}


def draw(latents):
    kept.clear()
    return pipeline(
        prompt_embeds_qwen=torch.ones(1, 5, 16), prompt_embeds_clip=torch.ones(1, 16),
        prompt_cu_seqlens=torch.tensor([0, 5], dtype=torch.int32), height=32, width=32, num_frames=5,
        num_inference_steps=3, guidance_scale=1.0, latents=latents, output_type="latent", callback_on_step_end=keep,
    ).frames


noise = torch.randn(1, 2, 4, 4, 4)
given = noise.clone()
first = draw(given).clone()
print(f"the given noise changed by {(given - noise).abs().max():.2f}")
assert not torch.equal(given, noise), "changed: the given latents are left as they are"
steps = len({step.data_ptr() for step in kept})
print(f"latents that the callback kept: {len(kept)}, different tensors: {steps}")
assert len(kept) == 3 and steps == 1, "changed: each step makes new latents"
again = draw(given)
print(f"a second call with the same tensor differs by {(again - first).abs().max():.2f}")
assert not torch.allclose(again, first)
assert torch.equal(draw(noise.clone()), first), "changed: a clone does not help"
print("as described: pass a clone, and clone what is kept")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
