"""Small tokenizers and frozen random language models that encode prompts, as those of the newer families do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from tiny_text import byte_symbols, learn_merges, task_words
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralImageProcessor,
    PixtralProcessor,
    PixtralVisionConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
PARTS = "{% for part in message.content %}{{ part.text }}{% endfor %}"
PARTS_TEMPLATE = TEMPLATE.replace("{{ message.content }}", PARTS)
QWEN_IMAGE = (
    "system Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of "
    "the objects and background: user assistant"
)
"""The words of Qwen-Image's system prompt, each a token, so that its pipeline drops whole words."""
QWEN_IMAGE_EDIT = (
    "system Describe the key features of the input image (color, shape, size, texture, objects, background), then "
    "explain how the user's text instruction should alter or modify the image. Generate a new image that meets the "
    "user's requirements while maintaining consistency with the original input where appropriate. user assistant "
    "Picture"
)
WORD = r"\w+|'s|\(|\),"
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def chat_tokenizer(
    max_length: int = 4096, *, edits: bool = False, special: Sequence[str] = (), text: str = ""
) -> Qwen2Tokenizer:
    """Return a byte-level tokenizer with a chat template, in which each word of the tasks is one token.

    Args:
        edits: know the words of Qwen-Image-Edit's system prompt instead of Qwen-Image's, and the tokens of a picture.
        special: further special tokens.
        text: whose words are known, too.
    """
    words = [*task_words(), *re.findall(WORD, (QWEN_IMAGE_EDIT if edits else QWEN_IMAGE) + text)]
    special = [START, END, *(VISION if edits else ()), *special]
    merges = learn_merges([form for word in words for form in (word, "Ġ" + word)], end="")
    tokens = list(dict.fromkeys([*byte_symbols(), *map("".join, merges)]))
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate([*tokens, PAD, *special])},
        merges=merges,  # pairs, whatever the annotation says
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=special,
        model_max_length=max_length,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _options(tokenizer: Any, width: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.5,  # so that prompts show
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }


def _frozen(kind: Any, config: Any, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(config).eval().requires_grad_(False)


def qwen3(tokenizer: Any, width: int, seed: int = 0, layers: int = 3) -> nn.Module:
    """Return a frozen random Qwen3 without a language head, as Z-Image has."""
    return _frozen(Qwen3Model, Qwen3Config(**_options(tokenizer, width, layers), head_dim=8), seed)


def deep_qwen3(tokenizer: Any, width: int, seed: int = 0) -> nn.Module:
    """Return a frozen random Qwen3 with the 27 layers that FLUX.2's pipeline reads."""
    return _frozen(Qwen3ForCausalLM, Qwen3Config(**_options(tokenizer, width, 27), head_dim=8), seed)


def gemma_tokenizer(text: str = "", max_length: int = 4096) -> GemmaTokenizer:
    """Return a tokenizer in which each word of the tasks and of a text is one token."""
    words = ["▁" + word for word in dict.fromkeys([*task_words(), *text.split()])]
    merges: Any = dict.fromkeys((word[:i], word[i]) for word in words for i in range(1, len(word)))
    letters = dict.fromkeys(["▁", *map(chr, range(33, 127)), *"".join(words)])
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokens = dict.fromkeys([*special, *letters, *map("".join, merges)])
    vocab = {token: i for i, token in enumerate(tokens)}
    return GemmaTokenizer(vocab=vocab, merges=list(merges), model_max_length=max_length, add_bos_token=True)


def gemma2(tokenizer: Any, width: int, seed: int = 0) -> nn.Module:
    """Return a frozen random Gemma 2, as Lumina 2 and Sana have."""
    return _frozen(Gemma2Model, Gemma2Config(**_options(tokenizer, width, 2), head_dim=16), seed)


def mistral3(tokenizer: Any, width: int, seed: int = 0) -> nn.Module:
    """Return a frozen random Mistral 3 with the 30 layers that FLUX.2-dev's pipeline reads."""
    text = MistralConfig(**_options(tokenizer, width, 30), head_dim=8)
    vision: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    config = Mistral3Config(text_config=text, vision_config=PixtralVisionConfig(**vision, image_size=32))
    return _frozen(Mistral3ForConditionalGeneration, config, seed)


def pixtral_processor(tokenizer: Any) -> PixtralProcessor:
    """Return the processor of Mistral 3, with the tokens of a picture."""
    return PixtralProcessor(PixtralImageProcessor(), tokenizer, chat_template=PARTS_TEMPLATE)


def qwen25_vl(tokenizer: Any, width: int, seed: int = 0) -> nn.Module:
    """Return a frozen random Qwen2.5-VL whose vision tower is as small as can be."""
    half = width // 4  # of a head's dimension
    rope = {"rope_type": "default", "mrope_section": [half // 4, half // 4, half // 2], "rope_theta": 1e4}
    vision = {
        "depth": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_heads": 1,
        "out_hidden_size": width,
        "fullatt_block_indexes": [0],
    }
    text = {**_options(tokenizer, width, 2), "rope_parameters": rope}
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    known = tokenizer.get_vocab()
    special: dict[str, Any] = {name: known.get(token, 0) for name, token in zip(names, VISION, strict=True)}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special)
    return _frozen(Qwen2_5_VLForConditionalGeneration, config, seed)


def qwen3_vl(tokenizer: Any, width: int, seed: int = 0, layers: int = 2, *, head: bool = True) -> nn.Module:
    """Return a frozen random Qwen3-VL whose vision tower is as small as can be."""
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4, "mrope_interleaved": True}
    text = {**_options(tokenizer, width, layers), "head_dim": 8, "rope_parameters": rope}
    text.pop("bos_token_id")
    vision = {
        "depth": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_heads": 1,
        "out_hidden_size": width,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(text_config=text, vision_config=vision)
    return _frozen(Qwen3VLForConditionalGeneration if head else Qwen3VLModel, config, seed)


def qwen3_vl_processor(tokenizer: Any) -> Qwen3VLProcessor:
    """Return the processor of Qwen3-VL."""
    sizes = {"shortest_edge": 32 * 32, "longest_edge": 512 * 512}
    pictures = Qwen2VLImageProcessor(size=sizes, patch_size=16)
    return Qwen3VLProcessor(pictures, tokenizer, Qwen3VLVideoProcessor(size=sizes), chat_template=PARTS_TEMPLATE)


def picture_processor(tokenizer: Any) -> Qwen2VLProcessor:
    """Return the processor of Qwen2.5-VL, which keeps pictures of 28 x 28 pixels, one token each."""
    sizes = {"shortest_edge": 28 * 28, "longest_edge": 512 * 512}
    pictures = Qwen2VLImageProcessor(size=sizes)
    return Qwen2VLProcessor(pictures, tokenizer, Qwen2VLVideoProcessor(size=sizes), chat_template=TEMPLATE)
