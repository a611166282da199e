#!/usr/bin/env bash
# torchmetrics: CLIPScore gives every prompt beyond 77 tokens the same score
#
# One would guess: a prompt that is too long is cut to its first 75 words plus the end token, as CLIP's own processor
# does with truncation=True, so that the score still depends on how the prompt begins.
#
# What happens (torchmetrics 1.9.0, transformers 4.57.6, torch 2.13.0): the token ids are cut after the tokenizer has
# added the end token, so the end token is lost. CLIP pools at the first end token, or in old configurations (eos id
# 2) at the largest id; without an end token both mean position 0, the start token, which sees no word of the prompt:
#   'a cat' 29.44, 'a dog' 19.82, 'table ...' (75 words) 18.51         (a random network, made below)
#   'red cat ...' (101 words) 30.88, 'blue dog ...' (101 words) 30.88, 'table ...' (76 words) 30.88
# A warning says that the caption is truncated; it does not say that nothing of it is left.
#
# Why it matters: CLIPScore is a common reward and a common check of text alignment. Prompts written by language
# models are often longer than 77 tokens; for them this reward does not depend on the prompt. Cut prompts before
# scoring.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==4.57.6 torchmetrics==1.9.0
cat > "$folder/check.py" <<'PY'
import torch
import torchmetrics
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torchmetrics.functional.multimodal import clip_score
from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast

print(f"torchmetrics {torchmetrics.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
words = "a red blue cat dog car on the table".split() + ["<s>", "</s>"]  # as in CLIP, start and end ids are the largest
ids = {word: i for i, word in enumerate(words)}
fast = Tokenizer(models.WordLevel(ids, unk_token="a"))
fast.pre_tokenizer = pre_tokenizers.Whitespace()
fast.post_processor = processors.TemplateProcessing(
    single="<s> $A </s>", special_tokens=[("<s>", ids["<s>"]), ("</s>", ids["</s>"])])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="</s>", eos_token="</s>", bos_token="<s>")


class Processor:
    """The two calls that torchmetrics makes, with the tokenizer above."""

    def __call__(self, text=None, images=None, return_tensors="pt", padding=True):
        if text is not None:
            return tokenizer(text, return_tensors="pt", padding=True)
        return {"pixel_values": torch.stack([image.float() / 255 for image in images])}


def network(eos, seed):
    torch.manual_seed(seed)
    text = dict(vocab_size=len(ids), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                bos_token_id=ids["<s>"], eos_token_id=eos, pad_token_id=ids["</s>"])
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32,
                  patch_size=16)
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).eval(), Processor()


short = ["a cat", "a dog"]
long = ["red " + "cat " * 100, "blue " + "dog " * 100, "table " * 76]
edge = "table " * 75  # 77 tokens with start and end: fits
for eos in (ids["</s>"], 2):
    image = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for seed in range(40):  # a network whose scores are not clipped at zero
        scores = {}
        for prompt in [*short, *long, edge]:
            scores[prompt] = clip_score(image, prompt, model_name_or_path=lambda: network(eos, seed)).item()
        if min(scores.values()) > 1:
            break
    print(f"end id {eos}:", *(f"{p[:9].strip()!r} ({len(p.split())} words) {s:.4f}" for p, s in scores.items()))
    assert min(scores.values()) > 1, "no network with positive scores"
    assert abs(scores[short[0]] - scores[short[1]]) > 0.1 and abs(scores[edge] - scores[long[2]]) > 0.1
    assert max(scores[p] for p in long) - min(scores[p] for p in long) < 1e-4, "changed: long prompts differ"
print("as described: all prompts beyond 77 tokens have one score")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
