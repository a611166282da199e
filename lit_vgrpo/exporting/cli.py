"""``lightning export``: the weights of a run, written so that diffusers loads them without this package."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from lit_vgrpo.cli import guarded
from lit_vgrpo.errors import UserError
from lit_vgrpo.exporting.options import Options, parse_options
from lit_vgrpo.hub import source_of
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.export import save_merged
from lit_vgrpo.saved_policy import build_policy, load_policy, recipe_of, saved_weights
from lit_vgrpo.saved_weights import SavedWeights
from lit_vgrpo.vacant import written_whole


def export(args: Sequence[str]) -> int:
    """Write a run's weights: ``RUN --to DIR [--ema] [--merge] [--checkpoint FILE] [key=value ...]``.

    Returns:
        0; 2 for a mistake in what was typed, or a folder that cannot be written; 130 after Ctrl-C.
    """
    try:
        return guarded(_export, args)
    except KeyboardInterrupt:
        print("Stopped: nothing was written.", file=sys.stderr)
        return 130


def _export(args: Sequence[str]) -> int:
    options = parse_options(args)
    recipe = recipe_of(options.run, options.settings, ["model.policy"], "an export")
    policy = build_policy(recipe)
    if options.merge and policy.lora_rank is None:
        raise UserError(
            f"--merge has nothing to merge: {options.run} trains weights of its own, no LoRA. Leave it out."
        )
    saved = saved_weights(options.run, options.checkpoint, options.variant)
    load_policy(policy, saved, options.variant)
    with written_whole(options.to, "--to") as draft:
        if options.merge:
            save_merged(policy, draft)
        else:
            policy.save(draft)
    print(said(policy, saved, options))
    return 0


def said(policy: Policy, saved: SavedWeights, options: Options) -> str:
    """What was written, and the lines of Python that load it."""
    is_adapter = policy.lora_rank is not None and not options.merge
    if is_adapter:
        what = f"LoRA of rank {policy.lora_rank}, float32"
        lines = [from_pretrained(policy, source_of(policy.checkpoint)), f"pipe.load_lora_weights({_text(options.to)})"]
    else:
        what = f"pipeline, its {policy.network_name} in float32{' with the LoRA merged in' if options.merge else ''}"
        lines = [from_pretrained(policy, str(options.to), is_merged=options.merge)]
    origin = f"{options.variant} weights of {saved.path} after {saved.progress.iterations} iterations"
    return "\n".join([f"Written: {options.to} ({what}): {origin}", "import diffusers, torch", *lines])


def from_pretrained(policy: Policy, source: str, is_merged: bool = False) -> str:
    """The line of Python that loads a pipeline as the run had it.

    Args:
        source: a pipeline folder or a hub name.
        is_merged: an adapter is in the weights, of which a 16-bit type would round the smaller part away.
    """
    optional = type(policy.pipeline)._optional_components
    nulls = [f"{name}=None" for name in policy.null_components(Path(source)) if name not in optional]
    dtype = torch.float32 if is_merged else policy.dtype
    arguments = ", ".join([_text(source), *nulls, f"torch_dtype={dtype}"])
    return f"pipe = diffusers.DiffusionPipeline.from_pretrained({arguments})"


def _text(path: object) -> str:
    return json.dumps(str(path), ensure_ascii=False)
