#!/usr/bin/env bash
# diffusers: AutoencoderTiny called as a network rounds its latents to 8 bits, and its encoder gets no gradient
#
# One would guess: vae(images) is vae.decode(vae.encode(images).latents), as in AutoencoderKL without sampling, and a
# reconstruction loss on it trains encoder and decoder.
#
# What happens (diffusers 0.42.1, torch 2.13.0): forward clips the latents to [-3, 3], rounds them to 256 levels and
# goes on from the integers, so that the graph ends there. Norm of the gradient of a reconstruction loss:
#                                      AutoencoderKL         AutoencoderTiny
#                                      encoder   decoder     encoder   decoder
#   vae(images)                        0.38      0.92        none      3.76
#   vae.decode(vae.encode(images))     0.38      0.92        0.34      3.76
# With latents up to 6, beyond the clipping, the two pictures differ by 6%. A comment in the source names the rounding.
# Nothing is logged.
#
# Why it matters: tiny autoencoders are trained for previews and for rewards that need pixels. The usual loop with
# vae(images) trains the decoder on the encoder that was there at the start, and the loss still falls. Call encode and
# decode instead.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import AutoencoderKL, AutoencoderTiny

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")


def build(kind):
    torch.manual_seed(0)
    if kind is AutoencoderTiny:
        return AutoencoderTiny(encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
                               num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1))
    return AutoencoderKL(block_out_channels=(8, 8), norm_num_groups=4, down_block_types=("DownEncoderBlock2D",) * 2,
                         up_block_types=("UpDecoderBlock2D",) * 2)


def latents(vae, images):
    encoded = vae.encode(images)
    return encoded.latents if isinstance(vae, AutoencoderTiny) else encoded.latent_dist.mode()


def norm(part):
    grads = [weight.grad for weight in part.parameters() if weight.grad is not None]
    return torch.stack([grad.norm() for grad in grads]).norm().item() if grads else None


generator = torch.Generator().manual_seed(0)
images = torch.rand(4, 3, 32, 32, generator=generator) * 2 - 1
found = {}
for kind in (AutoencoderKL, AutoencoderTiny):
    for way in ("call", "encode, decode"):
        vae = build(kind)
        output = vae(images).sample if way == "call" else vae.decode(latents(vae, images)).sample
        (output - images).square().mean().backward()
        found[kind, way] = norm(vae.encoder), norm(vae.decoder)
        print(f"{kind.__name__:15} {way:14} gradient of encoder and decoder: {found[kind, way]}")
kl = found[AutoencoderKL, "call"], found[AutoencoderKL, "encode, decode"]
assert torch.allclose(torch.tensor(kl[0]), torch.tensor(kl[1]), rtol=1e-3)
tiny = found[AutoencoderTiny, "call"], found[AutoencoderTiny, "encode, decode"]
assert tiny[0][0] is None, "changed: the encoder has a gradient"
assert tiny[1][0] > 0.01 and tiny[0][1] > 0.01

vae = build(AutoencoderTiny)
optimizer = torch.optim.Adam(vae.parameters(), 1e-3)
before = [weight.clone() for weight in vae.encoder.parameters()]
losses = []
for _ in range(50):
    loss = (vae(images).sample - images).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
moved = any(not torch.equal(old, new) for old, new in zip(before, vae.encoder.parameters()))
print(f"50 steps of Adam: loss {losses[0]:.3f} to {losses[-1]:.3f}, encoder moved: {moved}")
assert losses[-1] < losses[0] and not moved, "changed: the encoder is trained"

with torch.no_grad():
    last = [layer for layer in vae.encoder.layers if isinstance(layer, torch.nn.Conv2d)][-1]
    scale = 6 / latents(vae, images).abs().max()
    last.weight.mul_(scale)
    last.bias.mul_(scale)
    both = vae.decode(latents(vae, images)).sample
    difference = ((vae(images).sample - both).norm() / both.norm()).item()
print(f"latents up to {latents(vae, images).abs().max():.1f}: the two ways differ by {difference:.1%}")
assert difference > 0.01, "changed: latents are not clipped"
print("as described: the encoder gets no gradient")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
