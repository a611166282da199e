#!/usr/bin/env bash
# diffusers: LCMScheduler with given timesteps and a strength below 1 adds noise after the last step
#
# One would guess: set_timesteps(timesteps=[999, 739, 499, 259], strength=0.75) keeps the last three times, and the last
# step's prev_sample is the picture, as it is without strength, or with strength and a number of steps.
#
# What happens (diffusers 0.42.1, torch 2.13.0): the schedule is cut, but the scheduler goes on waiting for step 4 of 4.
# The last step that is taken gets noise like any other, and of its own time, as there is no next one. Deviation of the
# noise in the last prev_sample, for a network that knows the picture:
#   four steps, strength 1                          0.00
#   three steps, strength 0.75                      0.00
#   four times given, strength 1                    0.00
#   four times given, strength 0.75                 0.61
# Nothing is logged.
#
# Why it matters: loops that keep prev_sample, as those of RL training do to reuse or score the trajectory, decode a
# picture with the noise of time 259, and rewards fall with strength. LCM's own pipelines hide it, as they take
# "denoised", but callback_on_step_end gets the noisy latents. Cut the list yourself and leave strength at 1; what is
# then logged about the first time does no harm.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import (
    AutoencoderKL, LatentConsistencyModelImg2ImgPipeline, LCMScheduler, TCDScheduler, UNet2DConditionModel)

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
torch.manual_seed(0)
picture = torch.randn(1, 4, 64, 64)


def noise_left(scheduler, **options):
    """Return the times, and the deviation of the noise in the last prev_sample and in the denoised latents."""
    scheduler.set_timesteps(**options)
    times = scheduler.timesteps
    latents = scheduler.add_noise(picture, torch.randn(picture.shape), times[:1])
    for time in times:
        alpha = scheduler.alphas_cumprod[time]
        noise = (latents - alpha.sqrt() * picture) / (1 - alpha).sqrt()
        latents, denoised = scheduler.step(noise, time, latents, return_dict=False)
    found = (latents - picture).std().item()
    print(f"{type(scheduler).__name__} {options}: times {times.tolist()}, noise left {found:.2f}, in the denoised "
          f"latents {(denoised - picture).std().item():.2f}")
    return times.tolist(), found


given = [999, 739, 499, 259]
lcm, tcd = LCMScheduler(), TCDScheduler()
for options in (dict(num_inference_steps=4), dict(timesteps=given), dict(num_inference_steps=3, strength=0.75)):
    assert noise_left(lcm, **options)[1] < 1e-3, f"changed: {options}"
level = (1 - lcm.alphas_cumprod[259]).sqrt().item()
times, left = noise_left(lcm, timesteps=given, strength=0.75)
assert times == given[1:] and lcm.num_inference_steps == 4, "changed: the times"
assert left > 0.5 and abs(left - level) < 0.1, "changed: the noise"
assert noise_left(tcd, timesteps=given, strength=0.75)[1] < 0.1, "changed: TCD"

vae = AutoencoderKL(latent_channels=4, block_out_channels=(8, 8), norm_num_groups=4,
                    down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2)
unet = UNet2DConditionModel(sample_size=64, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1,
                            cross_attention_dim=16, attention_head_dim=2, time_cond_proj_dim=8,
                            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"))
kept = []


def ideal(latents, timestep, **_):
    alpha = lcm.alphas_cumprod[int(timestep)]
    return ((latents - alpha.sqrt() * picture) / (1 - alpha).sqrt(),)


def keep(_, __, ___, values):
    kept.append(values["latents"])
    return values


unet.forward = ideal
pipeline = LatentConsistencyModelImg2ImgPipeline(vae, None, None, unet, lcm, None, None, requires_safety_checker=False)
pipeline.set_progress_bar_config(disable=True)
result = pipeline(prompt_embeds=torch.zeros(1, 4, 16), image=picture, strength=0.75, timesteps=given,
                  output_type="latent", callback_on_step_end=keep)[0]
in_result, in_callback = (result - picture).std().item(), (kept[-1] - picture).std().item()
print(f"LCM's pipeline: noise in the result {in_result:.2f}, in the callback's last latents {in_callback:.2f}")
assert in_result < 1e-3 and in_callback > 0.5, "changed: the pipeline"
print("as described: the last step adds noise")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
