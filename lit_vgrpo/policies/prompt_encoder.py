"""Prompt embeddings, each computed once."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lit_vgrpo.core.pictures import picture_digest
from lit_vgrpo.core.types import MASK, Conditioning, is_of_prompt, lengthened, padded
from lit_vgrpo.errors import one_line
from lit_vgrpo.policies.embeddings import Embedder, EmbeddingCache, Row, encoder_fingerprint
from lit_vgrpo.policies.placement import place, placed, waiting
from lit_vgrpo.system.hub import LoadError, quiet_libraries
from lit_vgrpo.system.paths import resolve_path
from lit_vgrpo.system.process import bar

Encode = Callable[[], Mapping[str, Tensor]]
"""Returns the embeddings of one text, one row."""
MAX_BYTES_IN_MEMORY = 64 << 20
"""Holds a few hundred prompts of SDXL, or 15 of SD 3.5 with T5: a small prompt set is encoded once per run."""


def masked_rows(rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return prompts' tokens ``(L, D)`` of different lengths as one padded tensor and its mask."""
    masks = [torch.ones(len(row), device=row.device) for row in rows]
    return {"tokens": pad_sequence(list(rows), batch_first=True), MASK: pad_sequence(masks, batch_first=True)}


def _without_padding(row: Row) -> Row:
    """Return only the tokens in a prompt's mask; all of them on the meta device, where the mask has no values."""
    kept = row[MASK].bool()
    return row if kept.is_meta else {name: value[kept] if is_of_prompt(name) else value for name, value in row.items()}


def _are_equal(embeddings: Conditioning) -> bool:
    """Return whether the embeddings of all prompts are equal, regardless of their pictures and masks."""
    values = [value for name, value in embeddings.tensors.items() if is_of_prompt(name) and value.is_floating_point()]
    return all(value.eq(value[:1]).all() for value in values)


def size_error(policy: Embedder, size: tuple[int, ...]) -> str | None:
    """Return why a picture of a height and width cannot be edited, as a phrase that follows its name, or ``None``."""
    if policy.image_size in (None, size):
        return None
    wanted, given = (" x ".join(map(str, sides)) for sides in (policy.image_size or (), size))
    return f"has {given} pixels (height x width), but the images have {wanted}. Resize it, or set height and width."


class PromptEncoder:
    """A policy's text encoders behind its embedding cache.

    Prompts are encoded one at a time, because a matrix product of one row may use a different kernel than one of
    several rows and round differently. A prompt thus has the same embedding bit for bit alone and in a batch, on every
    rank, with a cold, warm or no cache. A text encoder's pass is short compared with those of the prompt's images.
    """

    def __init__(self, policy: Embedder) -> None:
        self.policy = policy
        self._negative: dict[str, Conditioning] = {}
        self._recent: OrderedDict[str, Row] = OrderedDict()  # used last, last
        self._warned_of: set[str] = set()
        self._tells_prompts_apart = False

    @cached_property
    def cache(self) -> EmbeddingCache | None:
        policy = self.policy
        if policy.embedding_cache is None:
            return None
        size = int(policy.embedding_cache_gb * 1e9)
        return EmbeddingCache(resolve_path(policy.embedding_cache), size, encoder_fingerprint(policy))

    def encode(self, prompts: Sequence[str], references: Sequence[Tensor] | None = None) -> tuple[Conditioning, Tensor]:
        """Return a row per distinct prompt and the row of each. See :meth:`lit_vgrpo.policies.Policy.encode_each`."""
        policy = self.policy
        if isinstance(prompts, str | Mapping) or not all(isinstance(prompt, str) for prompt in prompts):
            raise TypeError(f"Prompts must be a list of texts, such as ['a cat'], not {one_line(repr(prompts)):.80}.")
        if policy.edits != (references is not None):
            has = "needs an image" if policy.edits else "takes no image"
            raise ValueError(f"{type(policy).__name__} {has} in each row of the prompts.")
        self._warn_of_long_prompts(prompts)
        if policy.edits:
            self._warn_of_long_prompts([policy.negative_prompt], "negative prompts")
        texts, work, start = [], dict[str, Encode](), policy.embedding_key
        pictures: Sequence[Tensor | None] = references or [None] * len(prompts)
        for prompt, picture in zip(prompts, pictures, strict=True):
            if picture is None:
                texts.append(f"{start}prompt\n{prompt}")
                work[texts[-1]] = partial(policy.encode_prompts, [prompt])
            elif (error := size_error(policy, tuple(picture.shape[-2:]))) is not None:
                raise ValueError(f'The picture of "{prompt}" {error}')
            else:
                # the negative prompt too, since an encoder may read it with the picture
                texts.append(f"{start}edit\n{[prompt, policy.negative_prompt]}\n{picture_digest(picture)}")
                work[texts[-1]] = partial(self._encode_edit, prompt, picture)
        embeddings = Conditioning(self._looked_up(work))
        if not (self._tells_prompts_apart or len(set(prompts)) == 1 or policy.device.type == "meta"):
            self._tells_prompts_apart = True  # also in the call of encode below
            if _are_equal(embeddings):
                self._refuse_equal(None if references is None else [references[0]] * 2)
        row_of = {text: row for row, text in enumerate(work)}
        return embeddings, torch.tensor([row_of[text] for text in texts], device=policy.device)

    def _encode_edit(self, prompt: str, picture: Tensor) -> Mapping[str, Tensor]:
        policy = self.policy
        place([policy.pipeline.vae], policy.device)
        return policy.encode_edits([prompt], picture.unsqueeze(0).to(policy.device).float() / 255)

    def negative(self) -> Conditioning:
        """Return the embedding of the negative prompt, one row."""
        policy, key = self.policy, f"{self.policy.embedding_key}negative\n{self.policy.negative_prompt}"
        known = self._negative.get(key)
        if known is None or next(iter(known.tensors.values())).device != policy.device:
            self._warn_of_long_prompts([policy.negative_prompt], "negative prompts")
            # separate from prompts, because a family may treat an empty negative prompt differently
            known = self._negative[key] = Conditioning(self._looked_up({key: policy.encode_negative}))
        return known

    def _looked_up(self, work: Mapping[str, Encode]) -> dict[str, Tensor]:
        """Return the embeddings of distinct texts from memory or the cache, computing missing ones."""
        texts = list(work)
        rows = {text: self._recent[text] for text in texts if text in self._recent}
        missing = [text for text in texts if text not in rows]
        if missing and self.cache is not None:
            kept = zip(missing, self.cache.read(missing), strict=True)
            rows |= {text: row for text, row in kept if row is not None}
        new = [text for text in missing if text not in rows]
        if new:
            fresh = self._encoded([work[text] for text in new])
            rows |= zip(new, fresh, strict=True)
            if self.cache is not None:
                self.cache.write(new, fresh)
        for text in texts:
            self._recent[text] = rows[text]
            self._recent.move_to_end(text)
        while sum(value.nbytes for row in self._recent.values() for value in row.values()) > MAX_BYTES_IN_MEMORY:
            self._recent.popitem(last=False)
        return {name: self._stacked(name, [rows[text][name] for text in texts]) for name in rows[texts[0]]}

    @torch.no_grad()
    def _encoded(self, work: Sequence[Encode]) -> list[Row]:
        """Return each text's row, on the network's device."""
        policy = self.policy
        if not policy.offload_encoders:
            place(policy.encoders(), policy.device)
        network = waiting(policy.network) if policy.offload_network else nullcontext()
        with network, placed(policy.encoders(), policy.device), quiet_libraries():
            encoded = [encode() for encode in bar("Encoding prompts", work, is_brief=True)]
        rows: list[Row] = [{name: value[0].detach() for name, value in row.items()} for row in encoded]
        return rows if policy.prompt_length() is None else [_without_padding(row) for row in rows]

    def _stacked(self, name: str, values: list[Tensor]) -> Tensor:
        # of one length in every call, so that an image's last bits do not depend on the other prompts
        length = self.policy.prompt_length()
        if length is not None and is_of_prompt(name):
            values = [lengthened(value, length, dim=0) for value in values]
        elif length is None and any(value.shape != values[0].shape for value in values):
            values = padded(values)
        # converted to float32 last: rows of 16-bit encoders are half as large
        return torch.stack([value.to(self.policy.device) for value in values]).float()

    def _refuse_equal(self, references: Sequence[Tensor] | None) -> None:
        """Raise LoadError if two orders of the same words have the same embedding.

        Other prompts may differ only in what the pipeline changes or drops: case, spaces, or a long prompt's end.
        """
        pair, policy = ["a cat on a dog", "a dog on a cat"], self.policy
        if _are_equal(self.encode(pair, references)[0]):
            self._tells_prompts_apart = False
            damaged = f"{policy.prompt_limit()[2]} of {policy.checkpoint} is damaged. Download or save it again."
            raise LoadError(f"{pair[0]!r} and {pair[1]!r} have the same embedding: {damaged}")

    def _warn_of_long_prompts(self, prompts: Sequence[str], kind: str = "prompts") -> None:
        if kind in self._warned_of:
            return
        tokenizer, limit, encoder = self.policy.prompt_limit()
        ids = tokenizer(list(prompts), truncation=True, max_length=limit + 1)["input_ids"]
        long = [prompt for prompt, tokens in zip(prompts, ids, strict=True) if len(tokens) > limit]
        if long:
            self._warned_of.add(kind)
            warnings.warn(
                f"{len(long)} of {len(prompts)} {kind} are longer than the {limit} tokens of {encoder}, which "
                f"truncates them. First: {long[0][:80]!r}",
                stacklevel=4,
            )
