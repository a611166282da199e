"""Small tokenizers and frozen random text encoders, in the formats that transformers loads."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedModel,
    T5EncoderModel,
    T5Tokenizer,
    UMT5EncoderModel,
)

from lit_vgrpo.tiny.shapes import CHOICES

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
_END = "</w>"
_Model = TypeVar("_Model", bound=PreTrainedModel)


def task_words() -> list[str]:
    """Return every word of the task's prompts, once, in a fixed order."""
    values = [word for choices in CHOICES.values() for value in choices for word in value.split()]
    return list(dict.fromkeys(["a", *values]))


def byte_symbols() -> list[str]:
    """Return the printable character that byte-level BPE writes for each of the 256 bytes, in GPT-2's order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]


def learn_merges(words: list[str], letters: str = "", end: str = _END) -> list[tuple[str, str]]:
    """Return byte-pair merges, most frequent pair first, until each word is a single symbol.

    Args:
        words: lower case.
        letters: lower case; no merge is of these alone, so that any text written in them stays letter by letter.
        end: what marks a word's last letter.

    Raises:
        ValueError: a word of several letters has no other letter to grow from.
    """
    apart = {*letters, *(letter + end for letter in letters)}
    for word in words:
        if len(word) > 1 and set(word) <= set(letters):
            raise ValueError(f"word {word!r} has only letters that stay apart. Use a word with another letter.")
    splits = [[*word[:-1], word[-1] + end] for word in words]
    merges = []
    while any(len(split) > 1 for split in splits):
        pairs = Counter(pair for split in splits for pair in pairwise(split) if not apart.issuperset(pair))
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        for split in splits:
            i = 0
            while i < len(split) - 1:
                if (split[i], split[i + 1]) == best:
                    split[i : i + 2] = ["".join(best)]
                i += 1
    return merges


def clip_tokenizer(
    max_length: int = 12, pad_token: str = EOS, words: list[str] | None = None, letters: str = ""
) -> CLIPTokenizer:
    """Return a byte-level tokenizer in which each word of the task is one token; it takes any other text too.

    Args:
        max_length: in tokens.
        pad_token: one of the byte symbols, or the end token.
        words: the task's, lower case; ``None`` takes those of the shapes.
        letters: see :func:`learn_merges`.
    """
    merges = learn_merges(task_words() if words is None else words, letters)
    symbols = byte_symbols()
    tokens = [*symbols, *(s + _END for s in symbols), *dict.fromkeys("".join(pair) for pair in merges), BOS, EOS]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    return CLIPTokenizer(
        vocab=vocabulary,
        merges=merges,  # pairs, whatever the annotation says
        bos_token=BOS,
        eos_token=EOS,
        pad_token=pad_token,
        model_max_length=max_length,
    )


def text_config(tokenizer: CLIPTokenizer, hidden_size: int, projection_dim: int) -> CLIPTextConfig:
    """Return the configuration of a two-layer CLIP text encoder that agrees with its tokenizer on every special id."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        projection_dim=projection_dim,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,  # pooling looks for this id
        pad_token_id=tokenizer.pad_token_id,
    )


def text_encoder(tokenizer: CLIPTokenizer, hidden_size: int = 32, seed: int = 0) -> CLIPTextModel:
    """Return a frozen random CLIP text encoder, without projection."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _spread(CLIPTextModel(text_config(tokenizer, hidden_size, hidden_size)))


def text_encoder_with_projection(
    tokenizer: CLIPTokenizer, hidden_size: int = 32, seed: int = 0
) -> CLIPTextModelWithProjection:
    """Return a frozen random CLIP text encoder, with projection."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _spread(CLIPTextModelWithProjection(text_config(tokenizer, hidden_size, hidden_size)))


def t5_tokenizer(max_length: int = 12, words: list[str] | None = None) -> T5Tokenizer:
    """Return a unigram tokenizer: each word of the task is one token, and so is each letter of any other word."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    known = [("▁" + word, -3.0) for word in (task_words() if words is None else words)]
    letters = [(chr(c), -6.0) for c in range(33, 127)]
    return T5Tokenizer(vocab=[*special, *known, *letters], extra_ids=0, model_max_length=max_length)


def t5_encoder(tokenizer: T5Tokenizer, hidden_size: int, seed: int = 0, kind: Any = T5EncoderModel) -> Any:
    """Return a frozen random T5 encoder."""
    sizes = {"d_model": hidden_size, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(kind.config_class(vocab_size=len(tokenizer), **sizes)).eval().requires_grad_(False)


def umt5_encoder(tokenizer: T5Tokenizer, hidden_size: int, seed: int = 0) -> Any:
    """Return a frozen random UMT5 encoder."""
    return t5_encoder(tokenizer, hidden_size, seed, UMT5EncoderModel)


@torch.no_grad()
def _spread(model: _Model) -> _Model:
    """Draw weights of unit gain: with CLIP's own small ones every prompt would get nearly the same embedding."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.normal_(0, 1)
        elif isinstance(module, nn.Linear):
            module.weight.normal_(0, 1 / math.sqrt(module.in_features))
    for name, weight in model.named_parameters():
        if name.endswith("position_embedding.weight"):
            weight.mul_(0.5)
        elif name.endswith(("v_proj.weight", "out_proj.weight")):
            weight.mul_(1.5)  # a token's own word must not drown the words before it
    return model.eval().requires_grad_(False)
