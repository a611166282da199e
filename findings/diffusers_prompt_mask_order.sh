#!/usr/bin/env bash
# diffusers: several prompts with several images each get the attention mask of another prompt
#
# One would guess: encode_prompt(["p0", "p1"], num_images_per_prompt=2) returns the text embeddings and the attention
# masks in the same order, p0 p0 p1 p1.
#
# What happens (diffusers 0.42.1, transformers 5.24.0, torch 2.13.0): the embeddings come as p0 p0 p1 p1, the masks as
# p0 p1 p0 p1, in the pipelines of Sana, LTX-Video, Mochi, AuraFlow and Lumina 2. With prompts of 2 and 7 tokens:
#   SanaPipeline: embeddings belong to prompts [0, 0, 1, 1], masks have [2, 7, 2, 7] tokens
#   PixArtSigmaPipeline: embeddings belong to prompts [0, 0, 1, 1], masks have [2, 2, 7, 7] tokens  (as guessed)
# A whole Sana run from the same latents, both prompts together against one prompt at a time:
#   largest difference of each image: 0.0000 0.0987 0.2712 0.0000
# The second image sees padding, and the third only the first two tokens of its prompt. Nothing is logged.
#
# Why it matters: group-relative reinforcement learning asks for a group of images of each of several prompts. With
# num_images_per_prompt all but the first and last image of such a batch may be conditioned on a wrongly cut prompt,
# so that the reward is compared with a prompt the network did not read. Repeat the prompts in the list instead.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import inspect

import diffusers
import torch
import transformers
from diffusers import (
    AuraFlowPipeline, FlowMatchEulerDiscreteScheduler, LTXPipeline, Lumina2Pipeline, MochiPipeline,
    PixArtSigmaPipeline, SanaPipeline, SanaTransformer2DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import Gemma2Config, Gemma2Model, PreTrainedTokenizerFast, T5Config, T5EncoderModel

print(f"diffusers {diffusers.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
vocabulary = {w: i for i, w in enumerate("<pad> </s> <bos> a cat dog red on the table two".split())}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", bos_token="<bos>",
                                    model_max_length=12)
torch.manual_seed(0)
t5 = T5EncoderModel(T5Config(vocab_size=len(vocabulary), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)).eval()
gemma = Gemma2Model(Gemma2Config(vocab_size=len(vocabulary), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                 num_attention_heads=2, num_key_value_heads=1, head_dim=8)).eval()
network = SanaTransformer2DModel(
    patch_size=1, in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=8,
    num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=16, sample_size=8,
).eval()
rest = dict(tokenizer=tokenizer, vae=None)
empty = dict(rest, transformer=None, scheduler=None)
sana = SanaPipeline(text_encoder=gemma, transformer=network, scheduler=FlowMatchEulerDiscreteScheduler(), **rest)
pipelines = [sana, LTXPipeline(text_encoder=t5, **empty), MochiPipeline(text_encoder=t5, **empty),
             AuraFlowPipeline(text_encoder=t5, **empty), Lumina2Pipeline(text_encoder=gemma, **empty),
             PixArtSigmaPipeline(text_encoder=t5, **empty)]
prompts = ["cat", "two red cat on the table"]


@torch.no_grad()
def encode(pipeline, texts, number):
    accepted = inspect.signature(pipeline.encode_prompt).parameters
    wanted = dict(num_images_per_prompt=number, num_videos_per_prompt=number, max_sequence_length=12,
                  complex_human_instruction=None, system_prompt="", do_classifier_free_guidance=False, device="cpu")
    embeddings, mask = pipeline.encode_prompt(texts, **{k: v for k, v in wanted.items() if k in accepted})[:2]
    if mask.shape[1] > embeddings.shape[1]:  # AuraFlow repeats its mask over the channels
        mask = mask.reshape(*embeddings.shape)[..., 0]
    return embeddings, mask.long().sum(1).tolist()


for pipeline in pipelines:
    single, lengths = encode(pipeline, prompts, 1)
    embeddings, masks = encode(pipeline, prompts, 2)
    owners = [0 if torch.allclose(row, single[0], atol=1e-6) else 1 for row in embeddings]
    name = type(pipeline).__name__
    print(f"{name}: embeddings belong to prompts {owners}, masks have {masks} tokens")
    short, long = lengths
    assert short < long and owners == [0, 0, 1, 1], (lengths, owners)
    expected = [short, short, long, long] if name == "PixArtSigmaPipeline" else [short, long, short, long]
    assert masks == expected, f"changed: {name} gives {masks}"

sana.set_progress_bar_config(disable=True)
latents = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(0))
options = dict(num_images_per_prompt=2, num_inference_steps=2, guidance_scale=1.0, output_type="latent", height=64,
               width=64, use_resolution_binning=False, complex_human_instruction=None, max_sequence_length=12)
together = sana(prompts, latents=latents.clone(), **options).images
alone = torch.cat([sana([p], latents=latents[2 * i:2 * i + 2].clone(), **options).images for i, p in enumerate(prompts)])
difference = (together - alone).abs().amax((1, 2, 3)).tolist()
print("largest difference of each image:", *(f"{d:.4f}" for d in difference))
assert difference[0] < 1e-4 and difference[3] < 1e-4 and min(difference[1:3]) > 1e-2, "changed"
print("as described: the masks are in another order than the embeddings")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
