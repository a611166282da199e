"""Checks that a resumed run has the same recipe and input files, and that evaluations evaluate the same."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lit_vgrpo.config.environment import is_same_value, with_fingerprints
from lit_vgrpo.config.tree import Place, class_name, dotted, leaves
from lit_vgrpo.core.gather import raise_together
from lit_vgrpo.core.pictures import PICTURE, picture_files
from lit_vgrpo.data import PromptDataModule
from lit_vgrpo.errors import UserError
from lit_vgrpo.objectives.base import Objective
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.components import component_folder
from lit_vgrpo.policies.loading import INDEX, config_folder
from lit_vgrpo.policies.modular import MODULAR_INDEX
from lit_vgrpo.rewards import Reward, Weighted
from lit_vgrpo.rewards.combine import Part
from lit_vgrpo.rewards.function import PythonReward
from lit_vgrpo.system.paths import file_content, file_sha256, import_from_here, typed_path
from lit_vgrpo.training.checkpoint_file import INPUTS_KEY, RECIPE_KEY, FileCheckpointIO
from lit_vgrpo.training.loggers import log_settings
from lit_vgrpo.training.saved_weights import start_hashes
from lit_vgrpo.training.teachers import teacher_hashes
from lit_vgrpo.training.trainer_internals import declared

FREE = ("data.heldout", "model.heldout", "model.untrained", "model.evaluat", "model.non_finite", "model.failed_images")
"""Prefixes of settings that no weight depends on."""
MEMORY_ONLY = (
    *("micro_batch_size", "eval_batch_size", "rollout_batch_size", "decode_batch_size", "batch_size"),
    *("gradient_checkpointing", "rollout_device", "embedding_cache", "embedding_cache_gb"),
    *("offload_encoders", "offload_network", "compile", "attention_backend", "channels_last", "fold_lora", "device"),
    *("overlap", "url", "connection", "concurrent", "threads"),
)
"""Names of settings that only affect batch sizes, placement and speed."""
NO_OPTIONS = (*MEMORY_ONLY, "key", "failure")  # attributes of a reward that do not change its scores
OF_TRAINER = ("precision",)
CONFIGS = (INDEX, MODULAR_INDEX, "*/config.json", "*/scheduler_config.json")
ABSENT = "not set"

Inputs = dict[str, dict[str, str]]
"""SHA-256 of files by the recipe's key and the name of the file."""


class InputModule(Protocol):
    """The parts of :class:`~lit_vgrpo.module.VGRPOModule` whose files a run reads."""

    policy: Policy
    objective: Objective
    reward: Weighted


class ResumeGuard(Callback):
    """Puts the recipe and the hashes of input files into checkpoints, and refuses damaged checkpoints.

    The command compares them before it resumes; with any other Trainer, changed input files are a warning.
    """

    def __init__(self) -> None:
        self.recipe: dict[str, Any] = {}  # with hashes of what is from the environment; empty outside the command
        self.inputs: Inputs = {}

    def carry(self, recipe: dict[str, Any], texts: Mapping[Place, str]) -> None:
        """Set the recipe for all later checkpoints; ``texts`` as in :func:`changes`."""
        self.recipe = with_fingerprints(recipe, texts)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Some strategies write checkpoints differently and accept no other.
        with suppress(MisconfigurationException, NotImplementedError):
            if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
                trainer.strategy.checkpoint_io = FileCheckpointIO()
        module, data = cast(Any, pl_module), declared(trainer).datamodule
        seeds = {name: {"seed": getattr(part, "seed", None)} for name, part in (("model", module), ("data", data))}
        own = self.recipe or seeds
        raise_together(difference(trainer.strategy.broadcast(own), own, trainer.global_rank))
        if stage == "fit" and not self.recipe:  # the command logs the whole recipe
            parts = {"model": module, "rewards": module.reward.weight_of, "optimizer": module.optimization.optimizer}
            log_settings(trainer.loggers, {**parts, "data": data, "sizes": getattr(data, "sizes", None)})

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != TrainerFn.FITTING or self.recipe:  # the command has compared them
            return
        now = inputs_of(cast(InputModule, pl_module), declared(trainer).datamodule)
        for line in changed_inputs(checkpoint.get(INPUTS_KEY, {}), now):
            rank_zero_warn(f"{line}. Training continues with the current version.")

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.inputs = inputs_of(cast(InputModule, pl_module), declared(trainer).datamodule)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Before the callbacks that look at the newest evaluation.
        module: Any = pl_module
        if module.is_resumed and module.evaluate_at_start and module.evaluator.is_new(trainer):
            module.evaluator.evaluate(module, logs=True)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[INPUTS_KEY] = self.inputs
        if self.recipe:
            checkpoint[RECIPE_KEY] = self.recipe


def difference(first: Mapping[str, Any], own: Mapping[str, Any], rank: int) -> RuntimeError | None:
    """Return an error if a rank's settings differ from the first's; texts from the environment may differ."""
    lines = [line for line in changes(first, own, where=("on rank 0", f"on rank {rank}")) if "${" not in line]
    advice = "Start all ranks with the same command, and seed_everything with a number."
    return RuntimeError(f"The ranks have different settings. {'; '.join(lines)}. {advice}") if lines else None


def refuse_changes(
    checkpoint: Mapping[str, Any],
    now: Mapping[str, Any],
    inputs: Inputs,
    allowed: bool,
    what: str,
    texts: Mapping[Place, str],
    command: str,
) -> list[str]:
    """Compare a checkpoint's recipe and input files with the current ones, and return the allowed changes.

    Args:
        now: The current recipe, see :func:`changes`; ``texts`` likewise.
        inputs: The current hashes, see :func:`inputs_of`.
        allowed: Value of ``allow_changes``; without it, UserError lists the differences.
        what: The checkpoint's name in messages.
        command: The command that allows changes.
    """
    saved = checkpoint.get(INPUTS_KEY, {})
    changed_settings = changes(checkpoint[RECIPE_KEY], now, texts) if RECIPE_KEY in checkpoint else []
    changed = [*changed_settings, *changed_inputs(saved, inputs)]
    if changed and not allowed:
        why = "it is a checkpoint of another recipe" if changed_settings else "it was trained with other files"
        advice = f"Restore these, or continue with the new ones: {command}"
        raise UserError(f"Cannot continue from {what}: {why}.", *changed, advice)
    return changed


def changes(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    texts: Mapping[Place, str] | None = None,
    where: tuple[str, str] = ("in the checkpoint", "now"),
) -> list[str]:
    """Return one line for each changed setting that must stay the same.

    Args:
        saved: The checkpoint's recipe, plain values with the defaults filled in.
        now: The current one.
        texts: Values from the environment as written; they are not shown.
        where: Words after the old and the new value.

    >>> changes({"model": {"lr": 0.001}, "name": "a"}, {"model": {"lr": 0.0003}, "name": "b"})
    ['model.lr: 0.001 in the checkpoint, 0.0003 now']
    """
    before, after, shown_now = (_settings(tree) for tree in (saved, now, with_fingerprints(now, texts or {})))
    lines = []
    for key in dict.fromkeys((*before, *after)):
        old, new = before.get(key, ABSENT), after.get(key, ABSENT)
        if (old, new) == (ABSENT, None):
            continue  # an option that did not exist then
        if not is_same_value(old, new) and not _is_found_elsewhere(old, new):
            shown = key.replace(".init_args", "").removesuffix(".class_path")
            lines.append(f"{shown}: {_shown(old)} {where[0]}, {_shown(shown_now.get(key, new))} {where[1]}")
    return lines


def _settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the weights depend on, by dotted key; among callbacks only EMA's.

    An empty mapping or list sets nothing, so it equals an option that did not exist.
    """
    trainer = recipe.get("trainer") or {}
    callbacks = trainer.get("callbacks") or []
    trained = {name: recipe[name] for name in ("seed_everything", "model", "data") if name in recipe}
    trained["trainer"] = {name: trainer.get(name) for name in OF_TRAINER}
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        if class_name(callback) == "EMA":
            trained["trainer"]["EMA"] = dict(callback)
    settings = {dotted(place): value for place, value in leaves(trained) if value not in ({}, [])}
    return {key: value for key, value in settings.items() if not _is_free(key)}


def _is_free(key: str) -> bool:
    name = key.rpartition(".")[2].partition("[")[0]  # url[0] is an entry of a list
    return key.startswith(FREE) or ".connection." in key or name in MEMORY_ONLY


def _is_found_elsewhere(old: Any, new: Any) -> bool:
    """Return True for a different path to the same file, as after starting from another folder."""
    if not isinstance(old, str) or not isinstance(new, str) or Path(old).name != Path(new).name:
        return False
    before, now = typed_path(old), typed_path(new)
    return now.exists() and (not before.exists() or before.samefile(now))


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def inputs_of(module: InputModule, data: LightningDataModule | None) -> Inputs:
    """Return hashes of the files on this machine that the trained weights depend on.

    These are the training prompts, the file that defines each custom reward, the configuration files of the
    pipeline, the weights that the policy starts from, and its teachers' LoRAs. Files that cannot be read are left out:
    they are reported where they are used. The module's weights need not be loaded.
    """
    prompts = data if isinstance(data, PromptDataModule) else None
    readers: dict[str, Callable[[], dict[str, str]]] = {
        "data.train": lambda: {} if prompts is None else {"prompts": prompts.sets.fingerprint()},
        "model.policy.checkpoint": lambda: _configs_of(module.policy),
        "model.policy.start_from": lambda: start_hashes(module.policy),
        "model.objective.teachers": lambda: teacher_hashes(module.objective, module.policy),
        **{f"model.reward {part.name}": partial(_code_of, part) for part in module.reward.parts},
    }
    inputs: Inputs = {}
    for key, read in readers.items():
        with suppress(OSError, ValueError, RuntimeError, ImportError):
            inputs[key] = read()
    return {key: hashes for key, hashes in inputs.items() if hashes}


def _code_of(part: Part) -> dict[str, str]:
    sources = map(_source_of, part.reward.leaves() if part.weight else ())  # weight 0: not trained on
    return {source.name: file_sha256(source) for source in sources if source is not None}


def _configs_of(policy: Policy) -> dict[str, str]:
    folder = config_folder(policy.checkpoint, policy.revision)
    if folder is None:
        return {}
    found = {path.relative_to(folder).as_posix(): path for name in CONFIGS for path in sorted(folder.glob(name))}
    for name, source in policy.components.items():
        found[f"{name}/config.json"] = component_folder(name, source) / "config.json"
    return {name: sha256(path.read_bytes()).hexdigest() for name, path in sorted(found.items()) if path.is_file()}


def _source_of(reward: Reward) -> Path | None:
    """Return the file that defines a reward, or ``None`` for the rewards of this package."""
    name = type(reward).__module__
    if isinstance(reward, PythonReward):
        import_from_here()
        function = reward.function
        name = import_module(function.partition(":")[0]).__name__ if isinstance(function, str) else function.__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    # A script changes for many reasons besides the class that it defines.
    return None if file is None or name == "__main__" or name.startswith("lit_vgrpo.") else Path(file)


def changed_inputs(saved: Inputs, now: Inputs) -> list[str]:
    """Return one line for each input with a file that differs; files known to only one side are ignored.

    >>> changed_inputs({"data.train": {"prompts": "1"}, "a": {}}, {"data.train": {"prompts": "2"}, "b": {}})
    ['data.train: prompts changed since the checkpoint was written']
    """
    lines = []
    for key in (key for key in saved if key in now):
        names = [name for name, value in saved[key].items() if now[key].get(name, value) != value]
        if names:
            lines.append(f"{key}: {', '.join(names)} changed since the checkpoint was written")
    return lines


def hashed(content: Any) -> str:
    """Return a short hash of plain values, in which rewards count with their content."""
    try:
        text = json.dumps(content, skipkeys=True, default=_content_of)
    except (TypeError, ValueError, RecursionError):  # such as two rewards that refer to each other
        text = re.sub(r" at 0x\w+", "", repr(content))
    return sha256(text.encode()).hexdigest()[:16]


def row_hash(row: Mapping[str, Any]) -> str:
    """Return a hash of a prompt, the other fields of its row, and the content of its pictures."""
    pictures = [file_sha256(Path(x)) if os.path.isfile(x) else os.path.basename(x) for x in picture_files(row)]
    return hashed(sorted({**row, PICTURE: pictures}.items(), key=str))


def _content_of(value: Any) -> Any:
    """Return what determines the scores of a reward: its options, its code, and the content of its files.

    Its options are the attributes with the names of the constructor's arguments. Others may be state, or differ in
    every process. They count only if the constructor renames an argument.
    """
    if isinstance(value, Part):
        return [value.weight, value.clip, value.reward]
    if isinstance(value, set | frozenset):  # in any order
        return sorted(map(str, value))
    if not isinstance(value, Reward):  # such as a function or a pattern, without its address in memory
        return re.sub(r" at 0x\w+", "", str(value))
    code: Any = value.function if isinstance(value, PythonReward) else type(value)
    source: Any = None
    with suppress(Exception, SystemExit):  # reported where it is called
        file = _source_of(value)
        source = file_sha256(file) if file else code.__module__ == "__main__" and inspect.getsource(code)
    state, known = vars(value), inspect.signature(type(value)).parameters
    options = {name: state[key] for name in known for key in (f"_{name}", name) if key in state}
    if len(options) < len(known):
        options |= {name: x for name, x in state.items() if not name.startswith("_")}
    kept = {name: _content_at(x) for name, x in options.items() if name not in NO_OPTIONS}
    return [type(value).__qualname__, value.name, source, kept]


def _content_at(value: Any) -> Any:
    """Return the content of a file or model folder, by names and sizes if large, that a value names, or the value."""
    if not isinstance(value, str | Path) or not value:
        return value
    if os.path.isfile(value):
        return file_content(Path(value))
    if os.path.isfile(os.path.join(value, "config.json")):
        return sorted((entry.name, entry.stat().st_size) for entry in os.scandir(value) if entry.is_file())
    return value
