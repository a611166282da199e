#!/usr/bin/env bash
# diffusers: a feed-forward layer that LayerSkipConfig skips adds its input to the features, instead of nothing
#
# One would guess: LayerSkipConfig(indices=[1], skip_attention=False), for SkipLayerGuidance, AutoGuidance or
# apply_layer_skip, leaves block 1's feed-forward layer out, so that the block adds only what its attention gives.
#
# What happens (diffusers 0.42.1, torch 2.13.0): the layer returns its input. That is right for a whole block, which
# contains its own sum. A feed-forward layer stands inside of the sum: its normalised input, times the gate of the
# block, is added in its place. The prediction is bit for bit that of a network with the layer replaced by the identity.
# Relative change of the prediction of tiny networks with random weights:
#                                  Wan     LTX-Video   SD 3    FLUX.1  PixArt
#   feed-forward gives zero        0.21    0.19        0.22    0.37    0.13
#   skip_ff only                   0.53    0.35        0.34    0.45    0.39
#   attention gives zero           0.10    0.09        0.13    0.26    0.05
#   skip_attention only            raises  raises      raises  raises  0.19
# In PixArt, whose attention processor is known to the hook, the attention is replaced by the identity too. Wan and SD 3
# raise ValueError ("not registered"), LTX-Video and FLUX.1 AttributeError, and so they do with the options that
# PerturbedAttentionGuidance sets. For feed-forward layers nothing is logged.
#
# Why it matters: a search for the layers to skip compares "no layer" with "another layer". A guess about which part of
# a block matters is answered wrongly. To leave a layer out, let a forward hook return zeros.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import (
    FluxTransformer2DModel, LTXVideoTransformer3DModel, PixArtTransformer2DModel, SD3Transformer2DModel,
    WanTransformer3DModel,
)
from diffusers.hooks import LayerSkipConfig, apply_layer_skip

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
text, latents, time = torch.randn(2, 6, 32), torch.randn(2, 4, 2, 8, 8), torch.tensor([500.0, 500.0])
small = dict(in_channels=4, out_channels=4, num_layers=3, num_attention_heads=2)
networks = {  # a tiny network, how it is called, its stack of blocks, and the names of the two layers
    "Wan": (lambda: WanTransformer3DModel(
        **small, attention_head_dim=12, text_dim=32, freq_dim=32, ffn_dim=64, rope_max_seq_len=32),
        lambda n: n(latents, time, text), "blocks", ["ffn"], "attn1"),
    "LTX-Video": (lambda: LTXVideoTransformer3DModel(
        **small, attention_head_dim=8, cross_attention_dim=16, caption_channels=32),
        lambda n: n(latents.flatten(2).mT, text, time, torch.ones(2, 6), num_frames=2, height=8, width=8),
        "transformer_blocks", ["ff"], "attn1"),
    "SD 3": (lambda: SD3Transformer2DModel(
        **small, sample_size=8, patch_size=2, attention_head_dim=8, joint_attention_dim=32, caption_projection_dim=16,
        pooled_projection_dim=32, pos_embed_max_size=8), lambda n: n(latents[:, :, 0], text, text[:, 0], time),
        "transformer_blocks", ["ff", "ff_context"], "attn"),
    "FLUX.1": (lambda: FluxTransformer2DModel(
        in_channels=4, num_layers=3, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8)),
        lambda n: n(latents[:, :, 0].flatten(2).mT, text, text[:, 0], time / 1000, torch.zeros(64, 3),
                    torch.zeros(6, 3)), "transformer_blocks", ["ff", "ff_context"], "attn"),
    "PixArt": (lambda: PixArtTransformer2DModel(
        **small, attention_head_dim=8, cross_attention_dim=16, caption_channels=32, sample_size=8, norm_num_groups=1),
        lambda n: n(latents[:, :, 0], text, time, added_cond_kwargs=dict(resolution=None, aspect_ratio=None)),
        "transformer_blocks", ["ff"], "attn1"),
}


def predict(kind, config=None, layers=(), make=None):
    """Return a prediction with layers skipped, or with what some layers of block 1 return replaced."""
    torch.manual_seed(1)
    build, call, stack, _, _ = networks[kind]
    network = build().eval()
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.15)
    if config:
        apply_layer_skip(network, LayerSkipConfig(indices=[1], fqn=stack, **config))
    for layer in layers:
        network.get_submodule(f"{stack}.1.{layer}").register_forward_hook(make)
    with torch.no_grad():
        return call(network).sample


def zero(layer, inputs, output):
    return tuple(0 * x for x in output) if isinstance(output, tuple) else 0 * output


for kind, (_, _, _, forward_layers, attention) in networks.items():
    plain = predict(kind)
    skipped = predict(kind, dict(skip_attention=False, skip_ff=True))
    without = predict(kind, layers=forward_layers, make=zero)
    identity = predict(kind, layers=forward_layers, make=lambda layer, inputs, output: inputs[0])
    no_attention = predict(kind, layers=[attention], make=zero)
    far = [((x - plain).norm() / plain.norm()).item() for x in (without, skipped, no_attention)]
    print(f"{kind:10} feed-forward zero {far[0]:.2f}, skip_ff only {far[1]:.2f}, attention zero {far[2]:.2f}", end=", ")
    assert torch.equal(skipped, identity), f"changed: what a skipped feed-forward layer of {kind} returns"
    assert (skipped - without).norm() > 0.2 * (without - plain).norm(), f"changed: skip_ff in {kind}"
    for options in (dict(skip_attention=True, skip_ff=False),
                    dict(skip_attention=False, skip_attention_scores=True, skip_ff=False)):
        try:
            changed = predict(kind, options)
            print(f"{list(options)[-2]} only {(changed - plain).norm() / plain.norm():.2f}", end=", ")
            assert kind == "PixArt", f"changed: {options} in {kind}"
        except (AttributeError, ValueError) as error:
            print(type(error).__name__, end=", ")
            assert kind != "PixArt", f"changed: {options} in {kind}"
    print()
print("as described: a skipped feed-forward layer is the identity")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
