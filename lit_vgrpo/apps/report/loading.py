"""The lines of Python that load an export."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.loading import config_folder
from lit_vgrpo.system.hub import source_of


def load_lines(
    policy: Policy, written: Path, dtype: torch.dtype, merged: bool, draft: Path | None = None
) -> tuple[str, list[str]]:
    """Return what was written, in words, and the lines that load it.

    Args:
        written: Folder of a pipeline or an adapter, or file of an adapter.
        draft: Folder that will have that name; ``None`` where it has it already.
        dtype: Dtype of what was written.
        merged: An adapter was merged into the weights.
    """
    head = "import diffusers, torch"
    if policy.lora_rank is not None and not merged:
        base = from_pretrained(policy, source_of(policy.checkpoint), policy.dtype)
        return f"LoRA of rank {policy.lora_rank}, {_name(dtype)}", [
            head,
            base,
            f"pipe.load_lora_weights({_text(written)})",
        ]
    what = f"pipeline in {_name(dtype)}{', with the LoRA merged in' if merged else ''}"
    return what, [head, from_pretrained(policy, str(written), dtype, draft)]


def from_pretrained(policy: Policy, source: str, dtype: torch.dtype, index: Path | None = None) -> str:
    """Return the line of Python that loads the run's pipeline.

    Args:
        source: Pipeline folder or hub name.
        dtype: Dtype to load it in.
        index: Folder with the pipeline's index, if the source is not there yet.
    """
    optional = type(policy.pipeline)._optional_components
    is_start = source == source_of(policy.checkpoint)
    folder = config_folder(policy.checkpoint, policy.revision) if is_start else index
    nulls = [f"{name}=None" for name in policy.null_components(folder or Path(source)) if name not in optional]
    which = {"variant": policy.variant, "revision": policy.revision} if is_start else {}
    given = [f"{name}={_text(value)}" for name, value in which.items() if value is not None]
    arguments = ", ".join([_text(source), *given, *nulls, f"torch_dtype={dtype}"])
    return f"pipe = diffusers.DiffusionPipeline.from_pretrained({arguments})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text(path: object) -> str:
    return json.dumps(str(path), ensure_ascii=False)
