"""The recipe in a checkpoint, and which settings a resumed run may change."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lit_vgrpo.config.environment import is_same_value, with_fingerprints
from lit_vgrpo.config.tree import Place, class_name, dotted, leaves
from lit_vgrpo.errors import UserError
from lit_vgrpo.training.checkpoint_file import INPUTS_KEY, RECIPE_KEY
from lit_vgrpo.training.inputs import changed_inputs, moved_settings, same_inputs

FREE_KEYS = ("name", "run_dir", "ckpt_path", "allow_changes", "model.non_finite", "model.failed_images")
FREE_PARTS = ("trainer.", "data.heldout", "model.evaluator.latest", "model.evaluat")
"""Prefixes of settings that no weight depends on: where a run is computed, and its evaluation."""
MEMORY_ONLY = (
    "micro_batch_size",
    "eval_batch_size",
    "rollout_batch_size",
    "decode_batch_size",
    "batch_size",
    "gradient_checkpointing",
    "rollout_device",
    "vae_slicing",
    "embedding_cache",
    "embedding_cache_gb",
    "offload_encoders",
    "compile",
    "attention_backend",
    "channels_last",
    "fold_lora",
    "device",
    "overlap",
    "url",
)
"""Names of settings that only change how much is computed at once, and where."""
MEMORY_ONLY_PARTS = (".connection.",)
"""Parts whose settings are all of that kind."""
BOUND_KEYS = (
    *(f"trainer.{key}" for key in ("gradient_clip_val", "gradient_clip_algorithm", "precision", "EMA")),
    "data.heldout_fraction",  # held-out prompts are not trained on
)
ABSENT = "not set"
UNUSED = (None, False)
"""Values that an option missing in an older checkpoint may have."""
UNUSED_WORDS = {"start_weights": "trained", "kind": "adamw", "decode_dtype": "float32"}
"""The same, for options that name the earlier behaviour."""


class RecipeInCheckpoint(Callback):
    """Puts the recipe into every checkpoint, whichever callback saves it.

    Attributes:
        recipe: plain values, defaults filled in; a hash in place of what comes from the environment.
    """

    def __init__(self) -> None:
        self.recipe: dict[str, Any] = {}

    def carry(self, recipe: dict[str, Any], texts: Mapping[Place, str]) -> None:
        """Set the recipe for all later checkpoints.

        Args:
            texts: see :func:`~lit_vgrpo.config.environment.environment_texts`.
        """
        self.recipe = with_fingerprints(recipe, texts)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[RECIPE_KEY] = self.recipe


def changes(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    moved: Sequence[str] = (),
    texts: Mapping[Place, str] | None = None,
) -> list[str]:
    """Return one line for each setting that must be the same and is not.

    Args:
        saved: the checkpoint's recipe, plain values with the defaults filled in.
        now: the current one.
        moved: patterns of path settings whose files are unchanged.
        texts: values from the environment as written, which are not shown.

    >>> changes({"model": {"lr": 0.001}, "name": "a"}, {"model": {"lr": 0.0003}, "name": "b"})
    ['model.lr: 0.001 in the checkpoint, 0.0003 now']
    """
    before, after, shown_now = (dict(_settings(tree)) for tree in (saved, now, with_fingerprints(now, texts or {})))
    # The options of a replaced class are not compared.
    swapped = [
        key.removesuffix("class_path")
        for key in before
        if key.endswith("class_path") and before[key] != after.get(key, ABSENT)
    ]
    # With deduplicate, held-out prompts are left out of training.
    bound = (*BOUND_KEYS, "data.heldout") if before.get("data.deduplicate") else BOUND_KEYS
    lines = []
    for key in [*before, *(key for key in after if key not in before)]:
        old, new = before.get(key, ABSENT), after.get(key, ABSENT)
        if key not in before and (new in UNUSED or new == UNUSED_WORDS.get(key.rpartition(".")[2])):
            continue
        inner = any(key.startswith(owner) and key != f"{owner}class_path" for owner in swapped)
        if any(re.fullmatch(pattern, key) for pattern in moved):
            continue
        if not is_same_value(old, new) and not inner and not _is_free(key, bound):
            shown = key.replace(".init_args", "").removesuffix(".class_path")
            lines.append(f"{shown}: {_shown(old)} in the checkpoint, {_shown(shown_now.get(key, new))} now")
    return lines


def refuse_changes(
    checkpoint: Mapping[str, Any],
    now: Mapping[str, Any],
    inputs: Mapping[str, Mapping[str, str]],
    allowed: bool,
    what: str,
    texts: Mapping[Place, str],
) -> list[str]:
    """Compare a checkpoint's recipe and input files with the current ones; what it does not hold may be anything.

    Args:
        checkpoint: its content.
        now: the current recipe, as in :func:`changes`.
        inputs: the current fingerprints, see :func:`~lit_vgrpo.training.inputs.inputs_of`.
        allowed: value of ``allow_changes``.
        what: the checkpoint's name in messages.
        texts: as in :func:`changes`.

    Returns:
        The allowed changes.

    Raises:
        UserError: with every difference, unless they are allowed.
    """
    saved = checkpoint.get(INPUTS_KEY) or {}
    moved = moved_settings(same_inputs(saved, inputs), saved)
    of_recipe = changes(checkpoint[RECIPE_KEY], now, moved, texts) if RECIPE_KEY in checkpoint else []
    found = [*of_recipe, *changed_inputs(saved, inputs)]
    if found and not allowed:
        why = "it is a checkpoint of another recipe" if of_recipe else "it was trained with other files"
        raise UserError(
            f"Cannot continue from {what}: {why}.",
            *found,
            "Leave these as they were, or add allow_changes=true to go on with the new ones.",
        )
    return found


def _is_free(key: str, bound: Sequence[str]) -> bool:
    if any(key == name or key.startswith(f"{name}.") for name in bound):
        return False
    if any(part in key for part in MEMORY_ONLY_PARTS):
        return True
    return key in FREE_KEYS or key.startswith(FREE_PARTS) or key.rpartition(".")[2] in MEMORY_ONLY


def _settings(recipe: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every setting with its dotted key; of the callbacks only EMA, which is part of training."""
    for place, value in leaves(recipe, _has_parts):
        if place == ("trainer", "callbacks"):
            yield from _averages(value)
        else:
            yield dotted(place), list(value) if isinstance(value, tuple) else value


def _has_parts(place: Place, entries: list[Any]) -> bool:
    return place[-1] != "callbacks" and any(isinstance(entry, Mapping) for entry in entries)


def _averages(callbacks: Any) -> Iterator[tuple[str, Any]]:
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        if isinstance(callback, Mapping) and class_name(callback) == "EMA":
            yield "trainer.EMA.class_path", "EMA"
            yield from (
                (f"trainer.EMA.{dotted(place)}", value) for place, value in leaves(callback.get("init_args") or {})
            )


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text.rpartition(".")[2] if text.startswith("lit_vgrpo.") else text
