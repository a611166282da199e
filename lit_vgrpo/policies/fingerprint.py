"""Fingerprints of a policy's weights, and of everything a prompt's embedding depends on besides the prompt."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lit_vgrpo.policies.contract import PolicyContract
from lit_vgrpo.policies.pipeline_folder import INDEX, config_folder, weight_files
from lit_vgrpo.system.file_fingerprint import folder_fingerprint, of_the_model
from lit_vgrpo.system.hub import local_folder

SAMPLED_VALUES = 4096
"""Values sampled per parameter: all of a small one, evenly spaced ones of a large one."""


def pipeline_fingerprint(policy: PolicyContract) -> dict[str, str]:
    """Return a fingerprint of the files of each part of a policy's pipeline, which need not be loaded.

    Files of more than 64 MiB are sampled, see :func:`~lit_vgrpo.system.file_fingerprint.file_fingerprint`. Empty if
    some parts are not on this machine.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is damaged.
    """
    folder = local_folder(policy.checkpoint) or config_folder(policy.checkpoint, policy.revision)
    if folder is None:
        return {}
    index = of_the_model(json.loads((folder / INDEX).read_bytes()))
    left_out = policy.null_components(folder)
    found = {INDEX: hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()}
    for name in (name for name, entry in index.items() if isinstance(entry, list) and name not in left_out):
        part = folder / name
        weights = weight_files(part, policy.variant) or weight_files(part, None)
        if not part.is_dir() or ((part / "config.json").is_file() and not weights):
            return {}  # not downloaded completely yet
        found[name] = folder_fingerprint(part, weights)
    return found


@torch.no_grad()
def encoder_fingerprint(policy: PolicyContract) -> str:
    """Return a fingerprint of the encoders, independent of their files' location: 64 hex digits.

    Covers the text encoders (class, config, type, weights, large ones sampled), the VAE too in a family that edits, the
    tokenizers and processors of pictures, the pipeline's settings, and the family's own options.
    """
    digest = hashlib.sha256()

    def add(*what: object) -> None:
        digest.update(json.dumps(what, sort_keys=True, default=str).encode())

    pipeline = policy.pipeline
    add(type(policy).__name__, dict(_family_options(policy)))
    settings = of_the_model(dict(pipeline.config))
    add(type(pipeline).__name__, {k: v for k, v in settings.items() if not isinstance(v, list | tuple)})
    encoders = [*policy.encoders(), *([pipeline.vae] if policy.edits else [])]
    for name, component in sorted(pipeline.components.items()):
        if any(component is encoder for encoder in encoders):
            add(name, type(component).__name__, of_the_model(_as_dict(component.config)))
            for key, parameter in component.named_parameters():
                add(key, parameter.shape, parameter.dtype)
            digest.update(sampled(component.parameters()))
        elif hasattr(component, "model_max_length"):
            add(name, type(component).__name__, _vocabulary(component))
        elif hasattr(component, "image_processor"):
            add(name, type(component).__name__, component.image_processor.to_dict())
    return digest.hexdigest()


def _as_dict(config: Any) -> dict[str, Any]:
    return dict(config) if isinstance(config, Mapping) else config.to_dict()  # diffusers', or transformers'


def _family_options(policy: PolicyContract) -> Iterator[tuple[str, Any]]:
    """Yield options of the constructors of the policy's class and its bases below ``Policy``."""
    known = inspect.signature(PolicyContract).parameters
    for cls in type(policy).__mro__:
        if cls is PolicyContract:
            return
        for name, option in inspect.signature(cls).parameters.items():
            if name not in known and option.kind is not option.VAR_KEYWORD:
                yield name, getattr(policy, name, None)


def sampled(tensors: Iterable[Tensor]) -> bytes:
    """Return a sample of each tensor's bytes, in one transfer from the device."""
    parts = []
    for tensor in tensors:
        flat = tensor.detach().flatten()
        step = max(1, flat.numel() // SAMPLED_VALUES)
        parts.append(flat[::step].contiguous().view(torch.uint8))
    return torch.cat(parts).cpu().numpy().tobytes()


def _vocabulary(tokenizer: Any) -> list[object]:
    """Return everything that determines a tokenizer's ids, except its last truncation and padding."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        words: Any = sorted(tokenizer.get_vocab().items())
    else:
        words = {
            key: value for key, value in json.loads(backend.to_str()).items() if key not in ("truncation", "padding")
        }
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    return [words, special, tokenizer.model_max_length, tokenizer.padding_side]
