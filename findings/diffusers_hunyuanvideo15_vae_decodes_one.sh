#!/usr/bin/env bash
# diffusers: the VAE of HunyuanVideo 1.5 decodes one video at a time, and raises for two
#
# One would guess: AutoencoderKLHunyuanVideo15.decode takes a batch, as every other autoencoder of diffusers does, and
# gives each video what it gives it alone.
#
# What happens (diffusers 0.42.1, torch 2.13.0): a batch of one is decoded; a batch of two raises
#   RuntimeError: output with shape [2, 1, 32, 32] doesn't match the broadcast shape [2, 2, 32, 32]
# The middle block's attention passes queries (B, 1, S, C) with a mask (B, S, S), whose first dimension is then
# broadcast against the heads. encode has the same block and raises alike.
#
# Why it matters: a trainer that decodes the images of a group together stops at its first rollout, although the same
# code decodes HunyuanVideo, Wan and LTX in batches. Decode one video per call, or enable slicing, which splits batches.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import AutoencoderKLHunyuanVideo15

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
vae = AutoencoderKLHunyuanVideo15(latent_channels=4, block_out_channels=(8, 8), layers_per_block=1,
                                  spatial_compression_ratio=2, temporal_compression_ratio=2).eval()


def outcome(act, batch):
    try:
        with torch.no_grad():
            return tuple(act(batch).shape)
    except RuntimeError as error:
        return f"RuntimeError: {error}"


def decoded(latents):
    return vae.decode(latents).sample


def encoded(videos):
    return vae.encode(videos).latent_dist.mode()


latents, videos = torch.randn(2, 4, 2, 4, 4), torch.randn(2, 3, 3, 8, 8)
for name, act, batch in (("decode", decoded, latents), ("encode", encoded, videos)):
    one, two = outcome(act, batch[:1]), outcome(act, batch)
    print(f"{name}: one {one}, two {two}")
    assert isinstance(one, tuple) and isinstance(two, str), f"changed: {name} takes a batch of two"
vae.enable_slicing()
assert isinstance(outcome(decoded, latents), tuple), "changed: slicing no longer helps"
print("as described: two videos need slicing")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
