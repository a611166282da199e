#!/usr/bin/env bash
# diffusers: prompt_embeds from encode_prompt(prompt) draw another image than the prompt in Wan and Sana
#
# One would guess: pipeline(prompt_embeds=pipeline.encode_prompt(prompt)) is pipeline(prompt). encode_prompt has the
# defaults of the call.
#
# What happens (diffusers 0.42.1, torch 2.13.0): in 48 pipelines it has others.
#                                                       in the call       in encode_prompt
#   16 (Wan, SkyReels V2, Helios, ...)                  512 tokens        226 tokens
#    9 (Qwen-Image)                                     512 tokens        1024 tokens
#   12 (PixArt, Latte, Lumina, Allegro, IF)             clean_caption     no clean_caption
#    7 (Sana)                                           an instruction    no instruction
#    4 (DreamLite, JoyImage, I2VGen-XL)                 other numbers of tokens or layers
# FLUX.1 and Stable Diffusion 3 have the same defaults. Relative difference of the latents of a prompt of five words:
#   Wan, encode_prompt's defaults         0.09      with max_sequence_length=512          0
#   Sana, encode_prompt's defaults        0.12      with the call's instruction           0
# (four steps, random weights). Wan's network reads the zeros behind the prompt, so that their number counts for short
# prompts too. Nothing is logged.
#
# Why it matters: trainers encode all prompts once and free the text encoder. They then train on embeddings that the
# pipeline never makes at inference. Pass the call's values on.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import inspect
from collections import Counter

import diffusers
import torch
from diffusers import (
    AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, SanaPipeline, SanaTransformer2DModel, WanPipeline,
    WanTransformer3DModel,
)
from transformers import Gemma2Config, Gemma2Model, T5Tokenizer, UMT5Config, UMT5EncoderModel

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()

# the defaults of all pipelines
different = {}
for name in dir(diffusers):
    if not name.endswith("Pipeline"):
        continue
    pipeline = getattr(diffusers, name)
    if "encode_prompt" not in dir(pipeline) or type(pipeline).__name__ == "DummyObject":
        continue
    call, encode = (inspect.signature(part).parameters for part in (pipeline.__call__, pipeline.encode_prompt))
    for option in ("max_sequence_length", "clean_caption", "complex_human_instruction", "clip_skip"):
        required = encode[option].default is inspect.Parameter.empty if option in encode else True
        if option in call and not required and call[option].default != encode[option].default:
            different[name, option] = (call[option].default, encode[option].default)
counts = Counter((option, *("instruction" if isinstance(value, list) else value for value in values))
                 for (_, option), values in different.items())
for (option, call, encode), count in counts.most_common():
    print(f"{count:2} pipelines: {option} is {call} in the call and {encode} in encode_prompt")
assert different["WanPipeline", "max_sequence_length"] == (512, 226), "changed: WanPipeline"
assert different["QwenImagePipeline", "max_sequence_length"] == (512, 1024), "changed: QwenImagePipeline"
assert different["PixArtSigmaPipeline", "clean_caption"] == (True, False), "changed: PixArtSigmaPipeline"
assert different["SanaPipeline", "complex_human_instruction"][1] is None, "changed: SanaPipeline"
assert ("StableDiffusion3Pipeline", "max_sequence_length") not in different

# what it does to a prompt of five words
pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
tokenizer = T5Tokenizer(vocab=[*pieces, *((chr(code), -3.0) for code in range(33, 127))], extra_ids=0)


def randomised(network):
    torch.manual_seed(1)
    for weight in network.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return network.eval()


torch.manual_seed(0)
wan = WanPipeline(
    tokenizer, randomised(UMT5EncoderModel(UMT5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2))),
    AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 4,
                     latents_std=[1.0] * 4),
    FlowMatchEulerDiscreteScheduler(), transformer=randomised(WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32,
        ffn_dim=32, num_layers=2, rope_max_seq_len=32)))
sana_tokenizer = T5Tokenizer(vocab=[*pieces, *((chr(code), -3.0) for code in range(33, 127))], extra_ids=0)
sana = SanaPipeline(
    sana_tokenizer, randomised(Gemma2Model(Gemma2Config(
        vocab_size=len(sana_tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8))),
    diffusers.AutoencoderDC(in_channels=3, latent_channels=4, attention_head_dim=2, encoder_block_out_channels=(8, 8),
                            decoder_block_out_channels=(8, 8), encoder_layers_per_block=(1, 1),
                            decoder_layers_per_block=(1, 1), encoder_block_types="ResBlock",
                            decoder_block_types="ResBlock", encoder_qkv_multiscales=((), ()),
                            decoder_qkv_multiscales=((), ())),
    randomised(SanaTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2, attention_head_dim=4,
        num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=16,
        sample_size=32)),
    FlowMatchEulerDiscreteScheduler())
PROMPT = "a red fox in snow"


def draw(pipeline, scale, **given):
    frames = dict(num_frames=5) if pipeline is wan else dict(use_resolution_binning=False)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(**given, **frames, height=64, width=64, num_inference_steps=4, guidance_scale=scale,
                    output_type="latent", generator=torch.Generator().manual_seed(0))[0]


def compare(pipeline, **options):
    alone = dict(do_classifier_free_guidance=False)
    expected = draw(pipeline, 1.0, prompt=PROMPT)
    encoded = pipeline.encode_prompt(PROMPT, **alone, **options)
    masks = dict(prompt_attention_mask=encoded[1]) if pipeline is sana else {}
    found = draw(pipeline, 1.0, prompt_embeds=encoded[0], **masks)
    return encoded[0].shape[1], ((found - expected).norm() / expected.norm()).item()


instruction = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
results = {
    "Wan, encode_prompt's defaults": compare(wan),
    "Wan, max_sequence_length=512": compare(wan, max_sequence_length=512),
    "Sana, encode_prompt's defaults": compare(sana),
    "Sana, the call's instruction": compare(sana, complex_human_instruction=instruction),
}
for name, (length, error) in results.items():
    print(f"{name}: {length} tokens, relative difference to a call with the prompt {error:.2f}")
first, second, third, fourth = (error for _, error in results.values())
assert first > 0.01 and third > 0.01 and max(second, fourth) < 1e-5, "changed: embeddings of encode_prompt"
print("as described: encode_prompt does not give what the call uses")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
