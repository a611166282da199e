#!/usr/bin/env bash
# torch, diffusers: FSDP2 with param_dtype=bfloat16 rounds the times that a network is given, and rotary embeddings
#
# One would guess: MixedPrecisionPolicy(param_dtype=torch.bfloat16) computes matrix products in bfloat16, as autocast
# does, and a network given a float32 time embeds that time.
#
# What happens (torch 2.13.0, diffusers 0.42.1): fully_shard casts each floating-point tensor among the arguments of
# each sharded module, unless cast_forward_inputs=False. What Stable Diffusion 3 embeds of the 1,000 times 0.5, 1.5, ...
# and the type of the rotary embedding in FLUX.1's blocks:
#                                      distinct times   largest error   rotary embedding
#   bfloat16 autocast                  1,000            0               float32
#   FSDP2, param_dtype=bfloat16        443              1.5             bfloat16
#   FSDP2, cast_forward_inputs=False   1,000            0               float32
# For the last line, latents and text were given in bfloat16. Integer times are not cast. Nothing is logged.
#
# Why it matters: sharded training takes up to four of these noise levels for one, and the pipeline that draws with the
# trained weights passes the exact time. One GPU with autocast and eight with FSDP2 train different losses. Set
# cast_forward_inputs=False and cast latents and text in the training step.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import sys
from dataclasses import replace

import diffusers
import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

print(f"torch {torch.__version__}, diffusers {diffusers.__version__}")
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
mesh, bfloat16 = init_device_mesh("cpu", (1,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
exact = replace(bfloat16, cast_forward_inputs=False)
heads = dict(num_layers=1, num_attention_heads=2, attention_head_dim=8, pooled_projection_dim=16)
text, pooled, times = torch.randn(1, 8, 16), torch.randn(1, 16), torch.arange(1000) + 0.5


def shard(network, policy):
    if policy:
        for module in (*network.transformer_blocks, network):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    return network


def run(name, policy, autocast=False, dtype=torch.float32):
    torch.manual_seed(0)
    sd3 = shard(SD3Transformer2DModel(
        sample_size=8, in_channels=4, out_channels=4, joint_attention_dim=16, caption_projection_dim=16,
        pos_embed_max_size=8, **heads), policy)
    flux = shard(FluxTransformer2DModel(patch_size=1, in_channels=16, num_single_layers=1, joint_attention_dim=16,
                                        axes_dims_rope=(2, 2, 4), **heads), policy)
    seen, rotary = [], []
    sd3.time_text_embed.time_proj.register_forward_pre_hook(lambda module, given: seen.append(given[0].float().clone()))
    attend = flux.transformer_blocks[0].attn.forward

    def look(*given, **options):
        rotary.append(options["image_rotary_emb"][0].dtype)
        return attend(*given, **options)

    flux.transformer_blocks[0].attn.forward = look
    latents, words, summary = (tensor.to(dtype) for tensor in (torch.zeros(1, 16, 16), text, pooled))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for some in times.split(100):
            count = len(some)
            sd3(hidden_states=latents.view(1, 4, 8, 8).expand(count, -1, -1, -1), timestep=some,
                encoder_hidden_states=words.expand(count, -1, -1), pooled_projections=summary.expand(count, -1))
        flux(hidden_states=latents, encoder_hidden_states=words, pooled_projections=summary,
             timestep=torch.tensor([0.5]), img_ids=torch.ones(16, 3), txt_ids=torch.zeros(8, 3))
    embedded = torch.cat(seen)
    result = len(embedded.unique()), (embedded - times).abs().max().item(), str(rotary[0])
    print(f"{name:30}", *result)
    return result


assert run("autocast", None, autocast=True) == (1000, 0.0, "torch.float32"), "changed: autocast"
assert run("FSDP2", bfloat16) == (443, 1.5, "torch.bfloat16"), "changed: FSDP2 keeps float32 arguments"
assert run("FSDP2, without casts", exact, dtype=torch.bfloat16) == (1000, 0.0, "torch.float32"), "changed: no casts"
kept = fully_shard(torch.nn.Identity(), mesh=mesh, mp_policy=bfloat16)(torch.tensor([999])).dtype
print("integer times:", kept)
assert kept == torch.int64, "changed: integer times"
dist.destroy_process_group()
print("as described: FSDP2 rounds the time")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
