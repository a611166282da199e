#!/usr/bin/env bash
# diffusers, transformers: of a textual inversion whose name has a capital letter, only the first vector is used
#
# One would guess: load_textual_inversion(file, token="EasyNegative") with an embedding of 8 vectors, and a prompt with
# that word, put all 8 vectors into the prompt, as with the name "easynegative".
#
# What happens (diffusers 0.42.1, transformers 5.24.0, torch 2.13.0): the pipeline replaces the word by EasyNegative
# EasyNegative_1 ... EasyNegative_7. To find it, it looks up the tokens of the prompt among the added ones. transformers
# 5's CLIP tokenizer returns the token in lower case, "easynegative", which is not among them. So the word is left
# alone, and becomes the first vector. A tiny Stable Diffusion pipeline, the prompt "a photo, NAME":
#   name           word in the prompt    vectors used
#   easynegative   easynegative          8
#   easynegative   EasyNegative          1
#   EasyNegative   EasyNegative          1
#   EasyNegative   easynegative          1
# Angle brackets make no difference. All 8 vectors are loaded, and no message says that 7 are left out.
#
# Why it matters: published embeddings, above all those for negative prompts, have many vectors and names such as
# EasyNegative, and files of Automatic1111 name themselves. The result looks as if the embedding had little effect. Pass
# token= with a name in lower case, and write it so in the prompt.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
import transformers
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

print(f"diffusers {diffusers.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_warning()
VECTORS = 8
symbols = [chr(code) for code in range(33, 127)]
vocab = [*symbols, *(symbol + "</w>" for symbol in symbols), "<|startoftext|>", "<|endoftext|>"]
END = len(vocab) - 1


def make_pipeline():
    torch.manual_seed(0)
    tokenizer = CLIPTokenizer(
        vocab={token: number for number, token in enumerate(vocab)}, merges=[], bos_token="<|startoftext|>",
        eos_token="<|endoftext|>", pad_token="<|endoftext|>", model_max_length=60)
    encoder = CLIPTextModel(CLIPTextConfig(
        vocab_size=len(vocab), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=60, bos_token_id=END - 1, eos_token_id=END, pad_token_id=END)).eval()
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(8,), layers_per_block=1, down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",), cross_attention_dim=16, attention_head_dim=2, norm_num_groups=4)
    vae = AutoencoderKL(latent_channels=4, block_out_channels=(8,), norm_num_groups=4)
    return StableDiffusionPipeline(vae, encoder, tokenizer, unet, DDIMScheduler(), None, None,
                                   requires_safety_checker=False)


def used(name, word):
    """Return how many of the embedding's vectors the text encoder reads, and the embedded prompt."""
    pipeline = make_pipeline()
    embedding = torch.randn(VECTORS, 16, generator=torch.Generator().manual_seed(1))
    pipeline.load_textual_inversion({name: embedding})
    table = pipeline.text_encoder.get_input_embeddings()
    assert torch.equal(table.weight[-VECTORS:], embedding)
    seen = []
    table.register_forward_hook(lambda module, inputs, output: seen.append(output[0].detach()))
    with torch.no_grad():
        prompt = pipeline.encode_prompt(f"a photo, {word}", "cpu", 1, False)[0]
    return sum(bool((seen[0] == vector).all(dim=-1).any()) for vector in embedding), prompt


whole = used("easynegative", "easynegative")[1]
for name, word, expected in (
    ("easynegative", "easynegative", VECTORS), ("easynegative", "EasyNegative", 1), ("EasyNegative", "EasyNegative", 1),
    ("EasyNegative", "easynegative", 1), ("<my-style>", "<my-style>", VECTORS), ("<My-Style>", "<My-Style>", 1),
):
    count, prompt = used(name, word)
    difference = ((prompt - whole).norm() / whole.norm()).item()
    print(f"loaded as {name}, prompt with {word}: {count} of {VECTORS} vectors used; the embedded prompt differs from "
          f"the first line's by {difference:.3f}")
    assert count == expected, f"changed: {name} in a prompt with {word}"
    assert (difference > 0.1) == (expected == 1)
print("as described: with a capital letter, only the first vector is used")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
