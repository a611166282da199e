#!/usr/bin/env bash
# diffusers: video autoencoders encode 16 frames by leaving out the last ones
#
# One would guess: encode of a clip whose length does not fit the autoencoder, such as 16 frames where it takes 1 plus a
# multiple of 4, raises, or repeats the last frame as padding.
#
# What happens (diffusers 0.42.1, torch 2.13.0), small random weights: which of 16 frames change the latents
#   AutoencoderKLWan            the first 13 of 16, decoded as 13
#   AutoencoderKLLTXVideo       the first  9 of 16, decoded as  9
#   AutoencoderKLMochi          the first 13 of 16, decoded as 13
#   AutoencoderKLHunyuanVideo   all 16, decoded as 13
#   AutoencoderKLLTX2Video      raises
# Nothing is logged. A pipeline does not meet this, since it rounds num_frames itself.
#
# Why it matters: clips of 16, 24, 48 or 80 frames are what data sets have. Latents cached for training then end before
# the clip does: of 16 frames LTX-Video keeps 9. A caption or reward of the whole clip no longer fits its latents, and
# metrics that compare decoded frames with the clip are shifted or cut. Cut clips to 4k + 1 or 8k + 1 frames first.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
narrow = dict(latent_channels=8, block_out_channels=(8,) * 4, layers_per_block=(1,) * 5,
              decoder_block_out_channels=(8,) * 4, decoder_layers_per_block=(1,) * 5)
kinds = {
    "AutoencoderKLWan": dict(base_dim=8, z_dim=4, num_res_blocks=1, dim_mult=[1, 1, 1, 1], latents_mean=[0.0] * 4,
                             latents_std=[1.0] * 4),
    "AutoencoderKLLTXVideo": narrow,
    "AutoencoderKLMochi": dict(encoder_block_out_channels=(32,) * 4, decoder_block_out_channels=(32,) * 4,
                               layers_per_block=(1,) * 5, add_attention_block=(False,) * 5),
    "AutoencoderKLHunyuanVideo": dict(block_out_channels=(8,) * 4, layers_per_block=1, latent_channels=4,
                                      norm_num_groups=2, mid_block_add_attention=False),
    "AutoencoderKLLTX2Video": dict(latent_channels=8, block_out_channels=(8, 8, 16, 32), layers_per_block=(1,) * 5,
                                   decoder_block_out_channels=(8, 16, 32), decoder_layers_per_block=(1,) * 4),
}
LENGTH, found = 16, {}
for name, config in kinds.items():
    torch.manual_seed(0)
    vae = getattr(diffusers, name)(**config).eval()
    clip = torch.rand(1, 3, LENGTH, 64, 64) * 2 - 1
    with torch.no_grad():
        try:
            latents = vae.encode(clip).latent_dist.mode()
        except Exception as error:
            found[name] = None
            print(f"{name}: raises {type(error).__name__}")
            continue
        used = []
        for frame in range(LENGTH):
            changed = clip.clone()
            changed[:, :, frame] = 0
            used.append(not torch.equal(vae.encode(changed).latent_dist.mode(), latents))
        assert used == sorted(used, reverse=True)  # the first ones
        found[name] = (sum(used), vae.decode(latents).sample.shape[2])
    print(f"{name}: the first {found[name][0]} of {LENGTH} frames, decoded as {found[name][1]}")
assert found["AutoencoderKLWan"] == found["AutoencoderKLMochi"] == (13, 13), "changed: Wan or Mochi"
assert found["AutoencoderKLLTXVideo"] == (9, 9), "changed: LTX-Video"
assert found["AutoencoderKLHunyuanVideo"] == (16, 13), "changed: HunyuanVideo"
assert found["AutoencoderKLLTX2Video"] is None, "changed: LTX-2 does not raise"
print("as described")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
