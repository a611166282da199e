#!/usr/bin/env bash
# diffusers: after a pipeline's call, scale_noise and add_noise of its scheduler add no noise
#
# One would guess: scale_noise(image, timesteps, noise) and add_noise(image, noise, timesteps) mix image and noise at
# the given timesteps, whatever was sampled before.
#
# What happens (diffusers 0.42.1, torch 2.13.0): 32 pipelines call scheduler.set_begin_index(0), among them those of
# FLUX.1, FLUX.2, Qwen-Image, SDXL, Wan and Z-Image. From then on the two methods ignore the given timesteps and use the
# scheduler's step counter. After the last step it points at noise level 0. Noise level of the result at the timesteps
# of a call of FLUX.1 with 4 steps:
#   timestep                          1000   750   500   250
#   before the call                   1.00  0.75  0.50  0.25
#   in the callback of the 2nd step   0.50  0.50  0.50  0.50
#   after the call                    0.00  0.00  0.00  0.00
# So do the Euler, Heun, DPM-Solver, UniPC, DEIS, KDPM2 and EDM schedulers. DDIM, DDPM, LCM and TCD are right, and so is
# Stable Diffusion 3's pipeline, which does not call set_begin_index. Nothing is logged.
#
# Why it matters: forward-process reinforcement learning (a flow-matching loss on the sampled images) noises the images
# at the sampler's timesteps right after sampling them. The network is then told a time and sees clean images, and the
# loss still falls. Call set_timesteps again before it, or keep a second scheduler for the loss.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.logging.set_verbosity_error()
WRONG = ["FlowMatchEulerDiscrete", "FlowMatchLCM", "EulerDiscrete", "EulerAncestralDiscrete", "HeunDiscrete",
         "KDPM2Discrete", "DPMSolverMultistep", "DPMSolverSinglestep", "UniPCMultistep", "DEISMultistep", "EDMEuler"]
RIGHT = ["DDIM", "DDPM", "LCM", "TCD"]


def levels(scheduler, timesteps):
    """Return the weight of the noise at each of the timesteps."""
    clean, noise = torch.zeros(len(timesteps), 4, 2, 2), torch.ones(len(timesteps), 4, 2, 2)
    if hasattr(scheduler, "scale_noise"):
        return scheduler.scale_noise(clean, timesteps, noise)[:, 0, 0, 0]
    return scheduler.add_noise(clean, noise, timesteps)[:, 0, 0, 0]


def text(values):
    return " ".join(f"{value:.2f}" for value in values.tolist())


torch.manual_seed(0)
transformer = FluxTransformer2DModel(
    patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
    joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(2, 2, 4))
pipeline = FluxPipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, None, None, transformer)
pipeline.set_progress_bar_config(disable=True)
within = []


def record(pipeline, step, timestep, tensors):
    within.append(levels(pipeline.scheduler, pipeline.scheduler.timesteps))
    return tensors


before = FlowMatchEulerDiscreteScheduler()
before.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25])
pipeline(prompt_embeds=torch.randn(1, 3, 16), pooled_prompt_embeds=torch.randn(1, 16), height=16, width=16,
         num_inference_steps=4, output_type="latent", callback_on_step_end=record)
timesteps = pipeline.scheduler.timesteps
assert torch.equal(timesteps, before.timesteps)
print("timesteps", timesteps.tolist())
print("before the call:", text(levels(before, timesteps)))
print("in the callback of the 2nd step:", text(within[1]))
print("after the call:", text(levels(pipeline.scheduler, timesteps)))
assert torch.allclose(levels(before, timesteps), timesteps / 1000)
assert torch.allclose(within[1], torch.full((4,), 0.5)), "changed: the given timesteps count during a call"
assert not levels(pipeline.scheduler, timesteps).any(), "changed: the given timesteps count after a call"
pipeline.scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25])
assert torch.equal(levels(pipeline.scheduler, timesteps), levels(before, timesteps)), "set_timesteps resets it"

for name in WRONG + RIGHT:
    scheduler = getattr(diffusers, f"{name}Scheduler")()
    scheduler.set_timesteps(8)
    timesteps = scheduler.timesteps.clone()
    chosen = timesteps[:6:2]
    before = levels(scheduler, chosen)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)  # as the pipelines do
    sample = torch.randn(1, 4, 2, 2)
    for timestep in timesteps:
        sample = scheduler.step(torch.randn(1, 4, 2, 2), timestep, sample, return_dict=False)[0]
    after = levels(scheduler, chosen)
    print(f"{name}: before {text(before)}, after sampling {text(after)}")
    assert before.min() > 0.3
    assert torch.equal(before, after) if name in RIGHT else after.max() < 0.02, f"changed: {name}"
print("as described: after a call, no noise is added")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
