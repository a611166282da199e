#!/usr/bin/env bash
# diffusers: with FreeInit, video-to-video applies its strength anew in each iteration, down to a single pass at time 0
#
# One would guess: enable_free_init(num_iters=3) of AnimateDiffVideoToVideoPipeline denoises three times with the times
# that strength gives, each time from noise of the first of them.
#
# What happens (diffusers 0.42.1, torch 2.13.0): the number of steps that strength leaves is taken for the full number
# in the next iteration, and multiplied by strength again, also in the first one. From the second iteration on, noise
# is added for time 999, whatever time the passes start at. 20 steps at strength 0.5, with the noise that the first
# latents of an iteration have, by that of their time (1 is right):
#                         times of the passes                        noise
#   without FreeInit      450 400 350 300 250 200 150 100 50 0        1.0
#   first iteration       400 300 200 100 0                           1.1
#   second iteration      200 0                                       2.3
#   third iteration       0                                           48.7
# For a network that knows the video, the result's correlation with it is 1.00 without FreeInit and 0.01 with it. At
# strength 0.8, iterations have 12, 9 and 7 passes instead of 16. At strength 1 all are whole. Nothing is logged.
#
# Why it matters: FreeInit seems to ruin video editing, in a fraction of the time it should take. Scores of the method
# at strengths below 1 are those of undenoised latents. Leave FreeInit off in both video-to-video pipelines.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import (
    AnimateDiffVideoToVideoPipeline, AutoencoderKL, DDIMScheduler, MotionAdapter, UNet2DConditionModel, UNetMotionModel)

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
torch.manual_seed(0)
scheduler = DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="linear", clip_sample=False)
vae = AutoencoderKL(latent_channels=4, block_out_channels=(8, 8), norm_num_groups=4,
                    down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2)
unet = UNet2DConditionModel(sample_size=16, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1,
                            cross_attention_dim=16, attention_head_dim=2,
                            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"))
adapter = MotionAdapter(block_out_channels=(8, 8), motion_layers_per_block=1, motion_norm_num_groups=4,
                        motion_num_attention_heads=2)
pipeline = AnimateDiffVideoToVideoPipeline(vae, None, None, UNetMotionModel.from_unet2d(unet, adapter), adapter,
                                           scheduler)
pipeline.set_progress_bar_config(disable=True)
video = torch.randn(1, 4, 8, 16, 16)  # latents of 8 frames
passes = []


class Output:
    def __init__(self, sample):
        self.sample = sample


def network(latents, timestep, **_):
    """Return what latents of this time have beside the video, with a deviation of 1 as all noise in training."""
    alpha = scheduler.alphas_cumprod[int(timestep)]
    noise = (latents - alpha.sqrt() * video) / (1 - alpha).sqrt()
    passes.append((int(timestep), noise.std().item()))
    return Output(noise / noise.std())


def run(strength, iterations):
    """Return each iteration's times, the noise in its first latents, and the result's correlation with the video."""
    passes.clear()
    pipeline.disable_free_init()
    if iterations:
        pipeline.enable_free_init(num_iters=iterations)
    scheduler.set_timesteps(20)
    start = scheduler.timesteps[20 - round(20 * strength):][:1]
    generator = torch.Generator().manual_seed(0)
    noisy = scheduler.add_noise(video, torch.randn(video.shape, generator=generator), start)
    result = pipeline(prompt_embeds=torch.zeros(1, 4, 16), latents=noisy, strength=strength, num_inference_steps=20,
                      guidance_scale=1.0, generator=generator, output_type="latent")[0]
    times, noise, last = [], [], -1
    for time, deviation in passes:
        if not times or last == 0:
            times.append([])
            noise.append(deviation)
        times[-1].append(time)
        last = time
    found = torch.corrcoef(torch.stack([result.flatten(), video.flatten()]))[0, 1].item()
    print(f"strength {strength}, {iterations} iterations: times {times}, noise {[round(n, 1) for n in noise]}, "
          f"correlation with the video {found:.2f}")
    return times, noise, found


pipeline.unet.forward = network
for strength in (1.0, 0.8, 0.5):
    times, noise, found = run(strength, 0)
    whole = list(range(50 * round(20 * strength) - 50, -1, -50))
    assert times == [whole] and abs(noise[0] - 1) < 0.1 and found > 0.99, "changed: without FreeInit"
    times, noise, found = run(strength, 3)
    if strength == 1:
        assert times == [whole] * 3 and max(noise) < 1.1 and found > 0.9, "changed: strength 1"
    else:
        assert [len(part) for part in times] == {0.8: [12, 9, 7], 0.5: [5, 2, 1]}[strength], "changed: the passes"
assert times == [[400, 300, 200, 100, 0], [200, 0], [0]], "changed: the times"
assert found < 0.3 and noise[2] > 20, "changed: strength 0.5"
print("as described: each iteration has fewer passes, and noise is left")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
