#!/usr/bin/env bash
# diffusers: in SDXL and SD 3, clip_skip=1 leaves out two layers, and none of it reaches the negative prompt
#
# One would guess: clip_skip chooses the layer of the text encoders for both prompts. "A value of 1 means that the
# output of the pre-final layer will be used", says the documentation of all three families.
#
# What happens (diffusers 0.42.1, transformers 5.24.0): layers left out at the end of the encoder, and the relative
# difference between the embeddings of one text given as the prompt and as the negative prompt:
#   clip_skip                     None     0        1        2
#   SDXL, SD 3, prompt            1        1        2        3
#   SDXL, SD 3, negative          1        1        1        1
#   difference of the same text   0        0        0.75     1.14
#   Stable Diffusion 1.5          0        AttributeError with transformers 5: no "text_model" in CLIPTextModel
# So without clip_skip it is the pre-final layer already, and 1 means one more. Nothing is logged.
#
# Why it matters: guidance goes from the negative prompt's embedding to the prompt's. With clip_skip that is partly the
# step from one layer to another, which has nothing to do with the prompts. The layer is not the documented one either.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 ftfy==6.3.1
cat > "$folder/check.py" <<'PY'
import logging

import diffusers
import torch
import transformers
from diffusers import (
    DDIMScheduler, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline,
    StableDiffusionPipeline, StableDiffusionXLPipeline,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

print(f"diffusers {diffusers.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
logging.getLogger("transformers").setLevel(logging.CRITICAL)
symbols = [chr(code) for code in range(97, 123)]
tokens = [*symbols, *(symbol + "</w>" for symbol in symbols), "<|startoftext|>", "<|endoftext|>"]
vocab = {token: number for number, token in enumerate(tokens)}
words = CLIPTokenizer(vocab=vocab, merges=[], model_max_length=12, bos_token="<|startoftext|>",
                      eos_token="<|endoftext|>", pad_token="<|endoftext|>")
LAYERS = 6


def clip(kind=CLIPTextModelWithProjection):
    torch.manual_seed(0)
    encoder = kind(CLIPTextConfig(
        vocab_size=len(vocab), hidden_size=16, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=2,
        max_position_embeddings=12, projection_dim=16, bos_token_id=52, eos_token_id=53, pad_token_id=53)).eval()
    for weight in encoder.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return encoder


encoder = clip()
ids = words("a cat", padding="max_length", max_length=12, return_tensors="pt").input_ids
with torch.no_grad():
    states = encoder(ids, output_hidden_states=True).hidden_states
network = SD3Transformer2DModel(
    sample_size=8, in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2, attention_head_dim=8,
    joint_attention_dim=32, caption_projection_dim=16, pooled_projection_dim=32, pos_embed_max_size=8)
pipelines = {
    "SDXL": StableDiffusionXLPipeline(None, encoder, encoder, words, words, None, DDIMScheduler()),
    "SD 3": StableDiffusion3Pipeline(network, FlowMatchEulerDiscreteScheduler(), None, encoder, words, encoder, words,
                                     None, None),
}


def layer(embeddings):
    """Return which of the encoder's layers, counted from its end, gave the embeddings."""
    first = embeddings[:, :12, :16]
    found = [number for number, state in enumerate(states) if torch.allclose(first, state, atol=1e-5)]
    return LAYERS - found[0]


found = {}
for name, pipeline in pipelines.items():
    more = dict(prompt_2=None, prompt_3=None) if name == "SD 3" else {}
    for skip in (None, 0, 1, 2):
        with torch.no_grad():
            prompt, negative, *_ = pipeline.encode_prompt("a cat", **more, negative_prompt="a cat", clip_skip=skip,
                                                          device="cpu", do_classifier_free_guidance=True)
        difference = ((prompt - negative).norm() / prompt.norm()).item()
        found[name, skip] = layer(prompt), layer(negative), difference
        print(f"{name}, clip_skip={skip}: layers left out for the prompt {layer(prompt)}, for the negative prompt "
              f"{layer(negative)}; relative difference of the same text {difference:.2f}")
for name in pipelines:
    assert [found[name, skip][:2] for skip in (None, 0, 1, 2)] == [(1, 1), (1, 1), (2, 1), (3, 1)], f"changed: {name}"
    assert found[name, None][2] == 0 and found[name, 1][2] > 0.3

older = StableDiffusionPipeline(None, clip(CLIPTextModel), words, None, DDIMScheduler(), None, None,
                                requires_safety_checker=False)
try:
    older.encode_prompt("a cat", "cpu", 1, False, clip_skip=1)
except AttributeError as error:
    print(f"SD 1.5, clip_skip=1: AttributeError: {error}")
else:
    raise AssertionError("changed: clip_skip works in StableDiffusionPipeline")
print("as described: clip_skip leaves the negative prompt as it is")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
