#!/usr/bin/env bash
# diffusers: kl() of a video's latent distribution gives one number per column of latents, so that its mean is too small
#
# One would guess: vae.encode(x).latent_dist.kl() gives one number per sample, as for images, and kl().mean() is the
# KL loss of a batch.
#
# What happens (diffusers 0.42.1, torch 2.13.0): kl() and nll() of DiagonalGaussianDistribution always sum over
# dimensions 1 to 3. With a time axis the width is left over. Two inputs each, with latents of width 8:
#                              latents              shape of kl()    kl().mean() / mean KL per sample
#   AutoencoderKL (images)     (2, 4, 4, 8)         (2,)             1
#   Wan                        (2, 4, 2, 4, 8)      (2, 8)           1 / 8
#   CogVideoX                  (2, 4, 2, 4, 8)      (2, 8)           1 / 8
# nll() has a dims argument, kl() has none. Nothing is logged.
#
# Why it matters: in fine-tuning a video autoencoder, the weight of the KL term depends on the width of the videos. With
# Wan's latents at 832 x 480 it is 1/104 of what was set, and 1/60 for 480 x 832. Take kl().sum() / batch size, which
# is right for images too.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import AutoencoderKL, AutoencoderKLCogVideoX, AutoencoderKLWan

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
image = AutoencoderKL(latent_channels=4, block_out_channels=(8, 8, 8, 8), norm_num_groups=4,
                      down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4)
wan = AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
cogvideo = AutoencoderKLCogVideoX(
    latent_channels=4, block_out_channels=(8, 8, 8, 8), norm_num_groups=4, layers_per_block=1,
    down_block_types=["CogVideoXDownBlock3D"] * 4, up_block_types=["CogVideoXUpBlock3D"] * 4)

for vae in (image, wan, cogvideo):
    pixels = torch.randn(2, 3, 32, 64) if vae is image else torch.randn(2, 3, 5, 32, 64)
    with torch.no_grad():
        latents = vae.encode(pixels).latent_dist
        per_sample = 0.5 * (latents.mean.square() + latents.var - 1 - latents.logvar).flatten(1).sum(1)
        divergence = latents.kl()
        ratio = (divergence.mean() / per_sample.mean()).item()
        negative_log_likelihood = latents.nll(latents.mean)
    print(f"{type(vae).__name__:24} latents {tuple(latents.mean.shape)}: kl() {tuple(divergence.shape)}, "
          f"mean / mean per sample {ratio:.4f}; nll() {tuple(negative_log_likelihood.shape)}")
    if vae is image:
        assert torch.allclose(divergence, per_sample) and negative_log_likelihood.shape == (2,)
    else:
        assert divergence.shape == (2, 8), "changed: shape"
        assert abs(ratio - 1 / 8) < 1e-4, "changed: mean"
        assert torch.allclose(divergence.sum(1), per_sample)
        assert negative_log_likelihood.shape == (2, 8), "changed: nll"
print("as described: one number per column of a video's latents")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
