#!/usr/bin/env bash
# diffusers: TaylorSeer's cache saves nothing in Wan, LTX-Video and CogVideoX, and its lite mode blanks Kandinsky 5
#
# One would guess: enable_cache(TaylorSeerCacheConfig()) makes a network predict the outputs of its attention layers in
# most steps ("all attention-like modules are hooked by default"), and use_lite_mode=True those of its last layer.
#
# What happens (diffusers 0.42.1, torch 2.13.0): layers are found by whole names. The default patterns end in "attn",
# and so leave out attn1 and attn2. The lite mode lets blocks return zeros and predicts the layer that is called
# proj_out. Where the last layer has another name, it is computed from zeros. Twelve steps, interval 3:
#                   attention layers computed     prediction of the lite mode between two full steps
#   FLUX.1          10 of 24                      extrapolated
#   Wan             48 of 48                      extrapolated
#   CogVideoX       24 of 24                      extrapolated
#   LTX-Video       48 of 48                      extrapolated
#   LTX-2           116 of 144                    video extrapolated, audio the same at each of its times
#   Kandinsky 5     60 of 60                      the same at each patch of the picture
# In Wan, CogVideoX, LTX-Video and Kandinsky 5 each prediction is bit for bit that without a cache. is_cache_enabled is
# True, and nothing is logged.
#
# Why it matters: a comparison of caches finds TaylorSeer perfect and slow, and the lite mode fills most steps with a
# prediction without content. Pass cache_identifiers=[r"blocks\.\d+\.attn[12]"], or the names of the network at hand.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import (
    CogVideoXTransformer3DModel, FluxTransformer2DModel, Kandinsky5Transformer3DModel, LTX2VideoTransformer3DModel,
    LTXVideoTransformer3DModel, TaylorSeerCacheConfig, WanTransformer3DModel,
)

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
text, video, noise = torch.randn(1, 6, 32), torch.randn(1, 4, 2, 8, 8), torch.randn(1, 4, 2, 8, 8)
places = tuple(torch.arange(n) for n in (2, 4, 4))
small = dict(in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2)
sizes = dict(num_frames=2, height=8, width=8)
networks = {  # a tiny network of each kind, and how it is called with latents of shape (1, 4, 2, 8, 8) and a time
    "FLUX.1": (lambda: FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8)),
        lambda n, x, t: n(x.flatten(2).mT, text, text[:, 0], t / 1000, torch.zeros(128, 3), torch.zeros(6, 3))),
    "Wan": (lambda: WanTransformer3DModel(
        **small, attention_head_dim=12, text_dim=32, freq_dim=32, ffn_dim=32, rope_max_seq_len=32),
        lambda n, x, t: n(x, t, text)),
    "CogVideoX": (lambda: CogVideoXTransformer3DModel(
        **small, attention_head_dim=16, time_embed_dim=2, text_embed_dim=32, sample_width=8, sample_height=8,
        sample_frames=5, max_text_seq_length=6), lambda n, x, t: n(x.transpose(1, 2), text, t)),
    "LTX-Video": (lambda: LTXVideoTransformer3DModel(
        **small, attention_head_dim=8, cross_attention_dim=16, caption_channels=32),
        lambda n, x, t: n(x.flatten(2).mT, text, t, torch.ones(1, 6), **sizes)),
    "LTX-2": (lambda: LTX2VideoTransformer3DModel(
        **small, attention_head_dim=12, cross_attention_dim=24, audio_in_channels=4, audio_out_channels=4,
        audio_num_attention_heads=2, audio_attention_head_dim=6, audio_cross_attention_dim=12, caption_channels=32),
        lambda n, x, t: n(x.flatten(2).mT, x.flatten(2).mT[:, :8], text, text, t, **sizes, audio_num_frames=8)),
    "Kandinsky 5": (lambda: Kandinsky5Transformer3DModel(
        in_visual_dim=4, out_visual_dim=4, in_text_dim=32, in_text_dim2=32, ff_dim=64, time_dim=16, model_dim=32,
        num_text_blocks=1, num_visual_blocks=2, axes_dims=(4, 6, 6)),
        lambda n, x, t: n(x.permute(0, 2, 3, 4, 1), text, t, text[:, 0], places, torch.arange(6))),
}


def run(kind, **options):
    """Return the predictions of 12 steps, and how many attention layers were computed."""
    torch.manual_seed(1)
    build, call = networks[kind]
    network = build().eval()
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    computed = []
    for name, module in network.named_modules():
        if name.endswith(("to_q", "to_query")):
            module.register_forward_hook(lambda *_: computed.append(1))
    if options:
        network.enable_cache(TaylorSeerCacheConfig(cache_interval=3, disable_cache_before_step=2, **options))
        assert network.is_cache_enabled
    found = []
    with torch.no_grad(), network.cache_context("prompt"):
        for step in range(12):
            share = 1 - step / 40
            found.append(call(network, (1 - share) * video + share * noise, torch.tensor([1000 * share])).to_tuple())
    return found, len(computed)


for kind in networks:
    plain, layers = run(kind)
    cached, cached_layers = run(kind, use_lite_mode=False)
    same = all(torch.equal(a, b) for pair in zip(plain, cached) for a, b in zip(*pair))
    lite, _ = run(kind, use_lite_mode=True)
    output = lite[5][-1]  # step 5 is not a full one; of LTX-2, the audio
    if kind == "Kandinsky 5":
        output = output[:, :, ::2, ::2].flatten(1, 3)  # one element of each patch
    spread = (output.flatten(2).mT if output.ndim > 3 else output).std(1)
    print(f"{kind:12} {cached_layers:3} of {layers:3} attention layers computed, as without a cache: {same}; "
          f"lite mode: standard deviation over places {spread.mean():.3f}")
    hooked = {"FLUX.1": 10, "LTX-2": 116}
    assert cached_layers == hooked.get(kind, layers), f"changed: layers that are found in {kind}"
    assert same == (kind not in hooked), f"changed: predictions of {kind}"
    assert (spread.max() < 1e-6) == (kind in ("LTX-2", "Kandinsky 5")), f"changed: lite mode of {kind}"

network = networks["Wan"][0]()
network.enable_cache(TaylorSeerCacheConfig(cache_identifiers=[r"blocks\.\d+\.attn[12]"]))
hooked = [name for name, module in network.named_modules()
          if getattr(module, "_diffusers_hook", None) and module._diffusers_hook.get_hook("taylorseer_cache")]
assert hooked == ["blocks.0.attn1", "blocks.0.attn2", "blocks.1.attn1", "blocks.1.attn2"], "changed: cache_identifiers"
print("as described: TaylorSeer finds no layer in four of six networks")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
