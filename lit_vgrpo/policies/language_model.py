"""Shared code of families whose text encoder is a language model."""

from __future__ import annotations

from abc import ABC
from typing import Any, ClassVar

from torch import Tensor

from lit_vgrpo.policies.flow import FlowPolicy
from lit_vgrpo.policies.prompt_encoder import masked_rows


class LanguageModelPolicy(FlowPolicy, ABC):
    """A policy whose text encoder is a causal language model with one tokenizer.

    Each prompt is encoded alone and without padding, which such a model would not attend to. The network gets a mask.
    """

    text_layer: ClassVar[int] = -2
    """The encoder's hidden states that form the embedding."""

    @property
    def tokenizer(self) -> Any:
        return self.pipeline.tokenizer

    def templated(self, prompt: str) -> str:
        """Return the text that the encoder reads for a prompt."""
        return prompt

    def tokens_dropped(self) -> int:
        """Return the number of tokens at the start of the text whose embeddings the network does not get."""
        return 0

    def prompt_length(self) -> int | None:
        return self.max_sequence_length

    def prompt_limit(self) -> tuple[Any, int, str]:
        empty, text = (len(self.tokenizer(text)["input_ids"]) for text in ("", self.templated("")))
        limit = self.max_sequence_length + self.tokens_dropped() + empty - text
        return self.tokenizer, limit, type(self.pipeline.text_encoder).__name__

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        return self.encode_texts([self.templated(prompt) for prompt in prompts])

    def encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        """Return the embeddings of texts, the template included, and their mask."""
        return masked_rows([self.embedding(self.token_ids(text))[self.tokens_dropped() :] for text in texts])

    def token_ids(self, text: str) -> Tensor:
        """Return the ids of a text, ``(1, L)``; a long one is truncated at its end, which changes no earlier token."""
        length = self.max_sequence_length + self.tokens_dropped()
        ids = self.tokenizer(text, max_length=length, truncation=True, return_tensors="pt")["input_ids"]
        return ids.to(self.device)

    def embedding(self, ids: Tensor) -> Tensor:
        """Return the embedding of each token of ``ids (1, L)``: ``(L, ...)``."""
        return self.pipeline.text_encoder(ids, output_hidden_states=True).hidden_states[self.text_layer][0]


def unpadded(tokens: Tensor, mask: Tensor) -> list[Tensor]:
    """Return each prompt's tokens ``(L, D)``; on the meta device, where a mask has no values, with the padding."""
    if mask.is_meta:
        return list(tokens)
    lengths = mask.sum(dim=1).int().tolist()
    return [row[:length] for row, length in zip(tokens, lengths, strict=True)]
