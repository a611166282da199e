"""Starting a policy from the weights of an earlier run, or from a LoRA file."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from hashlib import sha256

from lit_vgrpo.errors import UserError
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.embeddings import sampled
from lit_vgrpo.policies.lora_file import put_lora
from lit_vgrpo.system.file_fingerprint import file_fingerprint
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.system.paths import resolve_path
from lit_vgrpo.system.process import report_on_first
from lit_vgrpo.training.lora_place import find_lora
from lit_vgrpo.training.saved_run import find_run, last_good
from lit_vgrpo.training.saved_weights import AVERAGE, TRAINED, SavedWeights


def policy_errors(policy: Policy) -> list[str]:
    """Return one line for each error in a policy or in what it starts from, without loading the pipeline's weights."""
    errors = policy.check()
    if policy.start_from is not None and not policy.loaded:
        try:
            lora = find_lora(policy.start_from, policy.start_weights)
            if lora is None:
                _saved(policy.start_from, policy.start_weights)
            elif (error := lora.error(policy)) is not None:
                errors.append(error)
        except LoadError as refused:
            errors.append(str(refused))
    return errors


def load_policy(policy: Policy) -> Policy:
    """Load a policy, with the weights of the run or the LoRA file in ``start_from`` if it names one.

    Raises:
        LoadError: the checkpoint, that run or that file cannot be used.
    """
    if policy.loaded or policy.start_from is None:
        return policy.load()
    if (lora := find_lora(policy.start_from, policy.start_weights)) is not None:
        return policy.load(partial(put_lora, file=lora.fetch()))
    return policy.load(partial(_put_start, *_saved(policy.start_from, policy.start_weights, report_on_first)))


def _put_start(saved: SavedWeights, variant: str, policy: Policy) -> None:
    """Replace a loaded policy's weights by a variant of a run's; raise LoadError if the run trained other weights."""
    difference = saved.difference(variant, policy)
    if difference is not None:
        raise LoadError(
            f"model.policy.start_from={policy.start_from} trained other weights: {difference} Give lora_rank, "
            "lora_targets and train_only as there; or start from its weights as a pipeline: "
            "lightning export RUN --to DIR [--merge], then model.policy.checkpoint=DIR."
        )
    alpha = saved.policy_options.get("lora_alpha") or saved.policy_options.get("lora_rank")
    if policy.lora_rank is not None and alpha not in (None, policy.lora_alpha):
        raise LoadError(
            f"model.policy.start_from={policy.start_from} trained with lora_alpha={alpha}, this run has "
            f"{policy.lora_alpha}: the same adapter would count {policy.lora_alpha / alpha:g} times as much. "
            f"Set model.policy.lora_alpha={alpha}."
        )
    saved.put_into(policy, variant)


def start_fingerprint(policy: Policy) -> dict[str, str]:
    """Return a fingerprint of the weights that a policy starts from, which are its reference in a resumed run too.

    Raises:
        LoadError: they cannot be read.
    """
    assert policy.start_from is not None
    if (lora := find_lora(policy.start_from, policy.start_weights)) is not None:
        return {} if (file := lora.at_hand()) is None else {"weights": file_fingerprint(file)}
    saved, variant = _saved(policy.start_from, policy.start_weights)
    tensors = saved.tensors[variant]
    digest = sha256(json.dumps({name: list(tensor.shape) for name, tensor in tensors.items()}).encode())
    digest.update(sampled(tensors.values()))
    return {"weights": digest.hexdigest()}


def _saved(
    start_from: str, start_weights: str, say: Callable[[str], None] = lambda line: None
) -> tuple[SavedWeights, str]:
    """Return the checkpoint that a run starts from, and the variant of its weights.

    Args:
        say: called with a line for every checkpoint that is skipped.

    Raises:
        LoadError: it cannot be used.
    """
    variant = {"trained": TRAINED, "ema": AVERAGE}[start_weights]
    try:
        path = resolve_path(start_from)
        if not (path.is_file() and path.suffix == ".ckpt"):
            run, _ = find_run(str(path))
            path = last_good(run, say)
        saved = SavedWeights.read(path)
    except UserError as error:
        raise LoadError(f"model.policy.start_from: {error}") from error
    except ValueError as error:
        raise LoadError(str(error)) from error
    if variant not in saved.tensors:
        raise LoadError(
            f"model.policy.start_weights=ema, but {path} holds no average: that run had no EMA callback. "
            "Set start_weights=trained."
        )
    return saved, variant
