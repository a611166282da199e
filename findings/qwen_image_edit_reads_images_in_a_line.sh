#!/usr/bin/env bash
# diffusers, transformers: Qwen-Image-Edit's text encoder gets the picture as a line of tokens, not as rows and columns
#
# One would guess: Qwen2.5-VL computes the positions of image tokens in rows and columns (M-RoPE) from input_ids and
# image_grid_thw, or it says what is missing. The editing pipelines of diffusers, which pass these two, encode a picture
# in that way.
#
# What happens (transformers 5.24.0, diffusers 0.42.1, torch 2.15.0): version 5 needs mm_token_type_ids, too. Without
# it, Qwen2.5-VL numbers all tokens in one line, in silence. Qwen2-VL and Qwen3-VL raise ValueError. Positions (row,
# column) of a picture of 4 x 6 tokens after 48 tokens of text, and that of the next token:
#                                                  1st      2nd      7th      last     next
#   model(**processor(...))                        48, 48   48, 49   49, 48   51, 53   54
#   input_ids, attention_mask, pixel_values
#   and image_grid_thw, transformers 4.57.6        48, 48   48, 49   49, 48   51, 53   54
#   the same four, transformers 5.24.0             48, 48   49, 49   54, 54   71, 71   72
#   QwenImageEditPipeline.encode_prompt            48, 48   49, 49   54, 54   71, 71   72
# QwenImageEditPlusPipeline does the same with two pictures. QwenImageEditInpaintPipeline, the modular Qwen-Image-Edit
# blocks and LongCat-Image's editing pipeline pass the same four arguments in their code.
#
# Why it matters: a picture of 384 x 384 pixels is 14 x 14 tokens, so that the instruction behind it stands 182
# positions too far, and a token's row and column are not given. Pictures are edited, and editing models trained, with
# embeddings that the text encoder was not trained to give (relative error 0.71 here, with random weights). Judges and
# rewards written for version 4 that pass these four arguments change their scores in silence. Pass everything that the
# processor returns.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 torchvision==0.29.2 diffusers==0.42.1 \
  transformers==5.24.0
"$folder/venv/bin/pip" install --quiet --no-compile --target "$folder/old" --no-deps transformers==4.57.6 \
  tokenizers==0.22.1 huggingface-hub==0.36.0
cat > "$folder/check.py" <<'PY'
import numpy as np
import torch
import transformers
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

old = transformers.__version__.startswith("4.")
print(f"transformers {transformers.__version__}, torch {torch.__version__}")
transformers.logging.set_verbosity_error()
rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
config = Qwen2_5_VLConfig(
    text_config=dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                     num_key_value_heads=1, vocab_size=6, bos_token_id=None, eos_token_id=None,
                     **({"rope_scaling": rope} if old else {"rope_parameters": rope})),
    vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32,
                       fullatt_block_indexes=[0]),
    image_token_id=1, video_token_id=2, vision_start_token_id=3, vision_end_token_id=4)
torch.manual_seed(0)
encoder = Qwen2_5_VLForConditionalGeneration(config).eval()
for weight in encoder.parameters():
    weight.data *= 5  # larger weights than at the start of training, so that positions count as in a trained network
seen = []


def look(module, given, options):
    found = given[1] if len(given) > 1 else options["position_ids"]
    seen.append(list(zip(*found[-2:, 0].tolist())))


encoder.model.language_model.rotary_emb.register_forward_pre_hook(look, with_kwargs=True)


def show(name, start):
    positions = [seen[-1][start + offset] for offset in (0, 1, 6, 23, 24)]
    print(f"{name:45}", *positions)
    return positions


SQUARE = [(48, 48), (48, 49), (49, 48), (51, 53), (54, 54)]
LINE = [(48, 48), (49, 49), (54, 54), (71, 71), (72, 72)]
FOUR = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")
pixels = np.random.default_rng(0).integers(0, 255, (112, 168, 3), dtype=np.uint8)
if old:
    words = torch.tensor([[0] * 47 + [3] + [1] * 24 + [4, 5, 0, 0]])
    given = dict(zip(FOUR, (words, torch.ones_like(words), torch.randn(96, 1176), torch.tensor([[1, 8, 12]]))))
    with torch.no_grad():
        encoder(**given)
    assert show("four arguments", 48) == SQUARE
    raise SystemExit

import diffusers  # noqa: E402, the part below needs version 5
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from tokenizers.pre_tokenizers import WhitespaceSplit  # noqa: E402
from transformers import (  # noqa: E402
    PreTrainedTokenizerFast, Qwen2_5_VLProcessor, Qwen2VLConfig, Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor, Qwen2VLVideoProcessor,
)

print(f"diffusers {diffusers.__version__}")
words = ["<|endoftext|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "sunset"]
tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
tokenizer.pre_tokenizer = WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=words[0],
                                    additional_special_tokens=words[1:5])
processor = Qwen2_5_VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor())
image = Image.fromarray(pixels)
plus = QwenImageEditPlusPipeline(None, None, encoder, tokenizer, processor, None)
with torch.no_grad():
    plus.encode_prompt("sunset sunset", image=[image, image])
assert seen[-1] == [(index, index) for index in range(len(seen[-1]))], "changed: QwenImageEditPlusPipeline"
print(f"QwenImageEditPlusPipeline, two pictures: all {len(seen[-1])} tokens in a line")

pipeline = QwenImageEditPipeline(None, None, encoder, tokenizer, processor, None)
text = [pipeline.prompt_template_encode.format("sunset sunset")]
inputs = processor(text=text, images=image, return_tensors="pt")
with torch.no_grad():
    embeds, _ = pipeline.encode_prompt("sunset sunset", image=image)
    assert show("QwenImageEditPipeline.encode_prompt", 48) == LINE, "changed: the pipeline"
    right = encoder(**inputs, output_hidden_states=True).hidden_states[-1]
    assert show("everything that the processor returns", 48) == SQUARE
    encoder(**{name: inputs[name] for name in FOUR})
    assert show("four arguments", 48) == LINE, "changed: four arguments"
right = right[:, pipeline.prompt_template_encode_start_idx:]
error = ((embeds - right).norm() / right.norm()).item()
print(f"relative error of the prompt's embeddings, with random weights: {error:.2f}")
assert error > 0.01

earlier = Qwen2VLForConditionalGeneration(Qwen2VLConfig(
    text_config=config.text_config.to_dict(), image_token_id=1, video_token_id=2, vision_start_token_id=3,
    vision_config=dict(depth=1, embed_dim=16, hidden_size=32, mlp_ratio=1, num_heads=2)))
try:
    earlier(**{name: inputs[name] for name in FOUR})
    raise AssertionError("changed: Qwen2-VL takes four arguments")
except ValueError as error:
    print("Qwen2-VL: ValueError:", str(error)[:90])
print("as described: the picture is read as a line")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
OMP_NUM_THREADS=1 PYTHONPATH="$folder/old" "$folder/venv/bin/python" -W ignore "$folder/check.py"
