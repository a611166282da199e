#!/usr/bin/env bash
# diffusers: the guider of a modular pipeline does nothing, or fails, where a negative prompt or guidance is left out
#
# One would guess: without `negative_prompt`, StableDiffusion3ModularPipeline guides away from an empty prompt, as
# StableDiffusion3Pipeline does. And `guider.new(enabled=False)`, or a scale of 1, samples without guidance.
#
# What happens (diffusers 0.42.1, torch 2.13.0):
#  1. StableDiffusion3ModularPipeline without `negative_prompt` runs both passes with the prompt itself. The image is the
#     one without guidance at every scale, for twice the time, and nothing says so. With `negative_prompt=""` it guides.
#  2. WanModularPipeline with a guider that is turned off, or of scale 1, ends with an UnboundLocalError. So do LTX's,
#     Hunyuan Video 1.5's and SDXL's (enabled=False only), with other errors: their later blocks need the embeddings that
#     are only computed for an enabled guider. `guider.new(stop=0.0)` works: it is enabled, but guides at no step.
#
# Why it matters: images and rewards of an unguided model are compared with those of a guided one. Pass
# negative_prompt="" always, and turn guidance off by stop=0.0.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 ftfy==6.3.1
cat > "$folder/check.py" <<'PY'
import logging

import diffusers
import torch
from diffusers import ClassifierFreeGuidance
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer, T5Tokenizer, UMT5Config
from transformers import UMT5EncoderModel

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
for name in ("diffusers", "transformers"):
    logging.getLogger(name).setLevel(logging.CRITICAL)
torch.manual_seed(0)
symbols = [chr(code) for code in range(97, 123)]
vocab = {token: i for i, token in enumerate([*symbols, *(s + "</w>" for s in symbols), "<|startoftext|>", "<|endoftext|>"])}
special = dict(bos_token="<|startoftext|>", eos_token="<|endoftext|>", pad_token="<|endoftext|>")
words = CLIPTokenizer(vocab=vocab, merges=[], model_max_length=12, **special)


def clip():
    config = CLIPTextConfig(vocab_size=len(vocab), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                            num_attention_heads=2, max_position_embeddings=12, projection_dim=16, bos_token_id=52,
                            eos_token_id=53, pad_token_id=53)
    return CLIPTextModelWithProjection(config).eval()


def vae():
    return diffusers.AutoencoderKL(latent_channels=4, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1,
                                   down_block_types=("DownEncoderBlock2D",) * 2,
                                   up_block_types=("UpDecoderBlock2D",) * 2, scaling_factor=1.0, shift_factor=0.0).eval()


network = diffusers.SD3Transformer2DModel(
    sample_size=16, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=32,
    caption_projection_dim=16, pooled_projection_dim=32, out_channels=4, pos_embed_max_size=16).eval()
for weight in network.parameters():
    weight.data.normal_(0, 0.3)
sd3 = diffusers.StableDiffusion3ModularPipeline()
sd3.update_components(transformer=network, vae=vae(), tokenizer=words, tokenizer_2=words, text_encoder=clip(),
                      text_encoder_2=clip(), scheduler=diffusers.FlowMatchEulerDiscreteScheduler())


def draw(scale, **more):
    sd3.update_components(guider=ClassifierFreeGuidance(guidance_scale=scale))
    return sd3(prompt="a cat", height=32, width=32, num_inference_steps=2, output_type="pt", output="images",
               generator=torch.Generator().manual_seed(0), max_sequence_length=12, **more)


plain, guided, with_empty = draw(1.0), draw(7.5), draw(7.5, negative_prompt="")
first, second = ((other - plain).abs().max().item() for other in (guided, with_empty))
print(f"scale 7.5 changes the image by {first:.5f}, and with negative_prompt='' by {second:.5f}")
assert first < 1e-5, "changed: it guides without a negative prompt"
assert second > 1e-3, "changed: it does not guide with an empty negative prompt"

pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in symbols)]
texts = T5Tokenizer(vocab=pieces, model_max_length=12, extra_ids=0)
encoder = UMT5EncoderModel(UMT5Config(vocab_size=len(pieces), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2))
video_vae = diffusers.AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 1, 2], num_res_blocks=1,
                                       temperal_downsample=[False, True], scale_factor_temporal=2, scale_factor_spatial=4,
                                       latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
denoiser = diffusers.WanTransformer3DModel(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
                                           text_dim=16, freq_dim=16, ffn_dim=32, num_layers=1, rope_max_seq_len=32)
wan = diffusers.WanModularPipeline()
wan.update_components(
    transformer=denoiser.eval(), vae=video_vae.eval(), tokenizer=texts, text_encoder=encoder.eval(),
    scheduler=diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True))


def filmed(**options):
    wan.update_components(guider=ClassifierFreeGuidance(**options))
    try:
        wan(prompt="a cat", height=32, width=32, num_frames=5, num_inference_steps=2, output_type="pt", output="videos",
            max_sequence_length=12)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "a video"


off, one, stopped = filmed(enabled=False), filmed(guidance_scale=1.0), filmed(stop=0.0)
print(f"Wan, enabled=False: {off}\nWan, guidance_scale=1.0: {one}\nWan, stop=0.0: {stopped}")
assert "UnboundLocalError" in off, "changed: Wan's modular pipeline samples with the guider turned off"
assert "UnboundLocalError" in one, "changed: Wan's modular pipeline samples at a scale of 1"
assert stopped == "a video", "changed: stop=0.0 does not work"
print('as described: pass negative_prompt="", and turn guidance off by stop=0.0')
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
