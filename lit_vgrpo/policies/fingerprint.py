"""What a prompt's embedding depends on besides the prompt, as one short text."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from lit_vgrpo.policies.base import Policy

SAMPLED_VALUES = 4096
"""Values of each parameter that are looked at: all of a small one, evenly spaced ones of a large one."""
NOT_OF_THE_MODEL = (
    "_name_or_path",
    "_commit_hash",
    "transformers_version",
    "_diffusers_version",
    "dtype",
    "torch_dtype",
)
"""Entries of a config that say where a model came from; the type is that of its parameters."""


@torch.no_grad()
def encoder_fingerprint(policy: Policy) -> str:
    """The same for the same embeddings, wherever the files lie: 64 hexadecimal digits.

    Covers the text encoders (class, config, type, weights, of which every large one is sampled), the tokenizers, the
    pipeline's own settings, and the options that the family adds to those of every policy.
    """
    digest = hashlib.sha256()

    def add(*what: object) -> None:
        digest.update(json.dumps(what, sort_keys=True, default=str).encode())

    pipeline = policy.pipeline
    add(type(policy).__name__, dict(_family_options(policy)))
    add(type(pipeline).__name__, {k: v for k, v in _own(pipeline.config).items() if not isinstance(v, list | tuple)})
    encoders = policy.encoders()
    for name, component in sorted(pipeline.components.items()):
        if any(component is encoder for encoder in encoders):
            add(name, type(component).__name__, _own(component.config.to_dict()))
            for key, parameter in component.named_parameters():
                add(key, parameter.shape, parameter.dtype)
            digest.update(_sampled(component))
        elif hasattr(component, "model_max_length"):
            add(name, type(component).__name__, _vocabulary(component))
    return digest.hexdigest()


def _family_options(policy: Policy) -> Iterator[tuple[str, Any]]:
    """Options that the policy's class and those between it and ``Policy`` name in their constructors."""
    from lit_vgrpo.policies.base import Policy

    known = inspect.signature(Policy).parameters
    for cls in type(policy).__mro__:
        if cls is Policy:
            return
        for name, option in inspect.signature(cls).parameters.items():
            if name not in known and option.kind is not option.VAR_KEYWORD:
                yield name, getattr(policy, name, None)


def _own(config: Any) -> dict[str, Any]:
    return {
        key: _own(value) if isinstance(value, dict) else value
        for key, value in dict(config).items()
        if key not in NOT_OF_THE_MODEL
    }


def _sampled(module: nn.Module) -> bytes:
    """Some bytes of every parameter, fetched from the device at once."""
    parts = []
    for parameter in module.parameters():
        flat = parameter.detach().flatten()
        step = max(1, flat.numel() // SAMPLED_VALUES)
        parts.append(flat[::step].contiguous().view(torch.uint8))
    return torch.cat(parts).cpu().numpy().tobytes()


def _vocabulary(tokenizer: Any) -> list[object]:
    """What makes a tokenizer's ids; not how it was last asked to cut and fill up."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        words: Any = sorted(tokenizer.get_vocab().items())
    else:
        words = {
            key: value for key, value in json.loads(backend.to_str()).items() if key not in ("truncation", "padding")
        }
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    return [words, special, tokenizer.model_max_length, tokenizer.padding_side]
