#!/usr/bin/env bash
# diffusers: in Z-Image and Krea 2, guidance_scale 4 is 5 elsewhere, and 1 is guidance at double cost, not none
#
# One would guess: in all pipelines guidance_scale w means n + w (c - n), for the predictions c of the prompt and n of the
# negative prompt, and 1 switches guidance off. Z-Image's documentation says that too: w is that of the Imagen paper,
# and guidance "is enabled by setting guidance_scale > 1".
#
# What happens (diffusers 0.42.1, torch 2.13.0): Z-Image and Krea 2 compute c + w (c - n). Number of predictions in one
# step, and the factor of (c - n), measured from what the scheduler gets:
#   guidance_scale             0        0.5      1        2        4
#   Stable Diffusion 3         1        1        1        2: 2     2: 4
#   Z-Image, Krea 2            1        2: 1.5   2: 2     2: 3     2: 5
# Krea 2 documents it. Cosmos (text to world, and 2) and Kandinsky 3 have the same formula in their code.
#
# Why it matters: RL without guidance is often asked for by guidance_scale=1.0. On Z-Image that samples with a factor of
# 2 and takes two passes a step; a trainer that recomputes the log-probability with its own n + w (c - n), or without
# guidance, computes that of another policy. Scales of papers and of other families move by one. The off value is 0.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import (
    AutoencoderKL, AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, Krea2Pipeline, Krea2Transformer2DModel,
    SD3Transformer2DModel, StableDiffusion3Pipeline, ZImagePipeline, ZImageTransformer2DModel,
)

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
torch.manual_seed(0)
vae = AutoencoderKL(latent_channels=4, block_out_channels=(8, 8), norm_num_groups=4, scaling_factor=0.8,
                    shift_factor=0.1, down_block_types=["DownEncoderBlock2D"] * 2,
                    up_block_types=["UpDecoderBlock2D"] * 2)
sd3 = StableDiffusion3Pipeline(SD3Transformer2DModel(
    sample_size=8, in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2, attention_head_dim=8,
    joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, pos_embed_max_size=8,
), FlowMatchEulerDiscreteScheduler(), vae, None, None, None, None, None, None)
z_image = ZImagePipeline(FlowMatchEulerDiscreteScheduler(), vae, None, None, ZImageTransformer2DModel(
    in_channels=4, dim=32, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16,
    axes_dims=[4, 6, 6], axes_lens=[64, 64, 64]))
krea = Krea2Pipeline(FlowMatchEulerDiscreteScheduler(), AutoencoderKLQwenImage(
    base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
), None, None, Krea2Transformer2DModel(
    in_channels=16, num_layers=1, attention_head_dim=8, num_attention_heads=2, num_key_value_heads=2,
    intermediate_size=32, timestep_embed_dim=16, text_hidden_dim=16, num_text_layers=2, text_num_attention_heads=2,
    text_num_key_value_heads=2, text_intermediate_size=16, num_layerwise_text_blocks=1, num_refiner_text_blocks=1,
    axes_dims_rope=(4, 2, 2)))
positive, negative = torch.randn(2, 1, 8, 16)
layers, mask = (1, 8, 2, 16), torch.ones(1, 8, dtype=torch.bool)
texts = {
    sd3: dict(prompt_embeds=positive, negative_prompt_embeds=negative, pooled_prompt_embeds=torch.ones(1, 16),
              negative_pooled_prompt_embeds=torch.zeros(1, 16)),
    z_image: dict(prompt_embeds=[positive[0]], negative_prompt_embeds=[negative[0]]),
    krea: dict(prompt_embeds=positive[:, :, None].expand(layers), prompt_embeds_mask=mask,
               negative_prompt_embeds=negative[:, :, None].expand(layers), negative_prompt_embeds_mask=mask),
}


def factor(pipeline, scale):
    outputs, used, step = [], [], pipeline.scheduler.step
    hook = pipeline.transformer.register_forward_hook(lambda network, given, result: outputs.extend(result[0]))
    pipeline.scheduler.step = lambda velocity, *rest, **more: (used.append(velocity), step(velocity, *rest, **more))[1]
    pipeline.set_progress_bar_config(disable=True)
    pipeline(height=32, width=32, num_inference_steps=1, guidance_scale=scale, output_type="latent", **texts[pipeline])
    hook.remove()
    pipeline.scheduler.step = step
    if len(outputs) == 1:
        return None
    first, second = (output.flatten() for output in outputs)
    c, n = (second, first) if pipeline is sd3 else (first, second)
    if pipeline is z_image:  # its pipeline changes the network's sign
        c, n = -c, -n
    moved, difference = used[0].flatten() - n, c - n
    weight = (moved @ difference / difference.square().sum()).item()
    assert torch.allclose(moved, weight * difference, atol=1e-5), "changed: not on the line through both predictions"
    return round(weight, 3)


factors = {}
for pipeline in texts:
    found = factors[type(pipeline).__name__] = [factor(pipeline, scale) for scale in (0.0, 0.5, 1.0, 2.0, 4.0)]
    print(f"{type(pipeline).__name__:25} scales 0, 0.5, 1, 2, 4: factors", found)
assert factors["StableDiffusion3Pipeline"] == [None, None, None, 2.0, 4.0]
for name in ("ZImagePipeline", "Krea2Pipeline"):
    assert factors[name] == [None, 1.5, 2.0, 3.0, 5.0], f"changed: {name}"
print("as described: the factor is one more than guidance_scale")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
