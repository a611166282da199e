#!/usr/bin/env bash
# diffusers: LTX-Video masks padding in its network, but its text encoder reads it, so the length changes the video
#
# One would guess: LTXPipeline pads a prompt to max_sequence_length and passes its mask on, so the length only has to be
# enough: embeddings of the prompt's own tokens, and the video, are those of any other length. So it is in PixArt-Sigma
# and Mochi, whose pipelines return a mask too.
#
# What happens (diffusers 0.42.1, transformers 5.24.0, torch 2.13.0): the mask does not reach T5. Change of the
# embeddings of a prompt's three tokens, relative to their size, from max_sequence_length 16 to 128 (small random T5):
#   LTXPipeline          0.37
#   PixArtSigmaPipeline  0.00
#   MochiPipeline        0.00
# The latents after three steps of a small random LTX network move by 0.03 of their largest value.
#
# Why it matters: a shorter max_sequence_length is the usual way to save memory and time in training. With LTX the
# adapter then learns other embeddings than those that it gets from the pipeline's default of 128. Encodings cached at
# one length, or cut to the longest prompt of a batch, are wrong in the same way. Use 128 throughout.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
import transformers
from diffusers import (
    FlowMatchEulerDiscreteScheduler, LTXPipeline, LTXVideoTransformer3DModel, MochiPipeline, PixArtSigmaPipeline,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

print(f"diffusers {diffusers.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
vocabulary = {word: number for number, word in enumerate("<pad> </s> two red cats".split())}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="two"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", model_max_length=512)
torch.manual_seed(0)
t5 = T5EncoderModel(T5Config(vocab_size=5, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)).eval()
network = LTXVideoTransformer3DModel(in_channels=8, out_channels=8, num_layers=2, num_attention_heads=2,
                                     attention_head_dim=16, cross_attention_dim=32, caption_channels=16).eval()
shared = dict(tokenizer=tokenizer, text_encoder=t5, vae=None)
empty = dict(shared, transformer=None, scheduler=None)
ltx = LTXPipeline(transformer=network, scheduler=FlowMatchEulerDiscreteScheduler(), **shared)
ltx.set_progress_bar_config(disable=True)
changes = {}
for pipeline in (ltx, PixArtSigmaPipeline(**empty), MochiPipeline(**empty)):
    found = []
    for length in (16, 128):
        with torch.no_grad():
            embeddings, mask = pipeline.encode_prompt("two red cats", do_classifier_free_guidance=False, device="cpu",
                                                      max_sequence_length=length)[:2]
        assert mask.sum() == 4, "changed: the mask does not have three words and the end"
        found.append(embeddings[0, :3])
    name = type(pipeline).__name__
    changes[name] = ((found[1] - found[0]).norm() / found[0].norm()).item()
    print(f"{name}: {changes[name]:.2f}")
noise = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(0))
ends = [ltx("two red cats", latents=noise.clone(), height=64, width=128, num_frames=1, num_inference_steps=3,
            guidance_scale=1.0, max_sequence_length=length, output_type="latent").frames for length in (16, 128)]
moved = ((ends[1] - ends[0]).abs().max() / ends[0].abs().max()).item()
print(f"latents of LTX-Video move by {moved:.2f} of their largest value")
assert changes["LTXPipeline"] > 0.3 and moved > 0.02, "changed: LTX-Video does not read padding"
assert max(changes["PixArtSigmaPipeline"], changes["MochiPipeline"]) < 1e-4, "changed: others read padding"
print("as described")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
