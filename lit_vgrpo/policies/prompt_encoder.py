"""Prompts to embeddings, each encoded once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

from lit_vgrpo.core.rollout import Conditioning
from lit_vgrpo.policies.contract import PolicyContract
from lit_vgrpo.policies.embeddings import EmbeddingCache
from lit_vgrpo.policies.fingerprint import encoder_fingerprint
from lit_vgrpo.policies.placement import place, placed
from lit_vgrpo.system.hub import quiet_libraries
from lit_vgrpo.system.paths import resolve_path

Encode = Callable[[list[str]], Mapping[str, Tensor]]


class PromptEncoder:
    """A policy's text encoders at work: looked up before they are asked, and on the network's device only when asked.

    Prompts are encoded one at a time: a matrix product of one row may take another kernel than one of several, which
    rounds otherwise. So a prompt has the same embedding bit for bit alone and beside others, on every rank, and with a
    cold cache, a warm one or none. A text encoder's pass is short beside the images', of which each prompt has many.
    """

    def __init__(self, policy: PolicyContract) -> None:
        self.policy = policy
        self._negative: Conditioning | None = None
        self._warned_of_long_prompts = False

    @cached_property
    def cache(self) -> EmbeddingCache | None:
        policy = self.policy
        if policy.embedding_cache is None:
            return None
        size = int(policy.embedding_cache_gb * 1e9)
        return EmbeddingCache(resolve_path(policy.embedding_cache), size, encoder_fingerprint(policy))

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """One row a prompt, float32, on the network's device; equal prompts are encoded once."""
        self._warn_of_long_prompts(prompts)
        distinct = list(dict.fromkeys(prompts))
        embeddings = Conditioning(self._looked_up("prompt", distinct, self.policy.encode_prompts))
        if len(distinct) == len(prompts):
            return embeddings
        row_of = {prompt: row for row, prompt in enumerate(distinct)}
        return embeddings.select(torch.tensor([row_of[prompt] for prompt in prompts], device=self.policy.device))

    def negative(self) -> Conditioning:
        """The embedding of the negative prompt, one row."""
        policy = self.policy
        if self._negative is None or next(iter(self._negative.tensors.values())).device != policy.device:
            # apart from prompts: a family may have something else for an empty one
            tensors = self._looked_up("negative", [policy.negative_prompt], lambda _: policy.encode_negative())
            self._negative = Conditioning(tensors)
        return self._negative

    def _looked_up(self, kind: str, prompts: list[str], encode: Encode) -> dict[str, Tensor]:
        """Embeddings of different prompts, from the cache as far as it has them; the rest goes into it."""
        device, texts = self.policy.device, [f"{kind}\n{prompt}" for prompt in prompts]
        found, kept = self.cache.read(texts) if self.cache is not None else ([], {})
        missing = sorted(set(range(len(prompts))) - set(found))
        fresh = self._encoded([prompts[position] for position in missing], encode) if missing else {}
        if self.cache is not None and missing:
            self.cache.write([texts[position] for position in missing], fresh)
        if not found:
            return fresh
        order = torch.tensor([*found, *missing], device=device).argsort()
        there = {name: value.to(device) for name, value in kept.items()}
        if missing:
            there = {name: torch.cat([value.float(), fresh[name]]) for name, value in there.items()}
        # put in order before they become twice as large
        return {name: value.index_select(0, order).float() for name, value in there.items()}

    @torch.no_grad()
    def _encoded(self, prompts: list[str], encode: Encode) -> dict[str, Tensor]:
        with self._at_work(), quiet_libraries():
            rows = [encode([prompt]) for prompt in prompts]
        return {name: self._stacked(name, [row[name] for row in rows]) for name in rows[0]}

    def _stacked(self, name: str, rows: list[Tensor]) -> Tensor:
        shapes = {tuple(row.shape[1:]): None for row in rows}
        if len(shapes) > 1:
            raise RuntimeError(
                f"{type(self.policy).__name__}.encode_prompts gives {name!r} the shape "
                f"{' or '.join(map(str, shapes))}, depending on the prompt. Pad every prompt to one length."
            )
        return torch.cat([row.detach().float() for row in rows])

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        policy = self.policy
        if policy.offload_encoders:
            with placed(policy.encoders(), policy.device):
                yield
        else:
            place(policy.encoders(), policy.device)
            yield

    def _warn_of_long_prompts(self, prompts: Sequence[str]) -> None:
        """Say once that the text encoder sees only the start of some prompts."""
        if self._warned_of_long_prompts:
            return
        tokenizer, limit, encoder = self.policy.prompt_limit()
        ids = tokenizer(list(prompts), truncation=True, max_length=limit + 1)["input_ids"]
        long = [prompt for prompt, tokens in zip(prompts, ids, strict=True) if len(tokens) > limit]
        if long:
            self._warned_of_long_prompts = True
            warnings.warn(
                f"{len(long)} of {len(prompts)} prompts are longer than the {limit} tokens of {encoder}, which sees "
                f"only their start. First: {long[0][:80]!r}",
                stacklevel=4,
            )
