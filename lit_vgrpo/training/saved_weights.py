"""The trained weights in a checkpoint of a run, and policies that start from them or from a LoRA file."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer

from lit_vgrpo.config.recipe import find_run
from lit_vgrpo.core.sharding import shape_of, write
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.errors import UserError, counted
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.export import LORA_FILE
from lit_vgrpo.policies.lora_file import KEY, PEFT_CONFIG, PEFT_STEM, SUFFIXES, lora_file_error, put_lora
from lit_vgrpo.policies.meta import drawing_errors
from lit_vgrpo.rollout.iteration import has_no_updates
from lit_vgrpo.system.hub import LoadError, cached_file, explain_unloadable, leave_silent_hub, loading
from lit_vgrpo.system.paths import CONFIG_NAME, file_sha256, resolve_path, typed_path
from lit_vgrpo.system.process import report_on_first
from lit_vgrpo.training.checkpoint_file import PortableCheckpoints, averages, read_sound
from lit_vgrpo.training.resume import Progress, last_good
from lit_vgrpo.training.trainer_internals import declared

TRAINED, AVERAGE, REFERENCE = "trained", "EMA", "reference"
SUFFIX = SUFFIXES[0]
_HUB_FILE = re.compile(
    rf"([\w-][\w.-]*/[\w-][\w.-]*)(?:/([\w./-]+(?:{'|'.join(map(re.escape, SUFFIXES))})))?", re.ASCII
)
_RUNS = "runs"
POLICY_PREFIX = "policy."  # of the names in a checkpoint, which are those of the Lightning module


@dataclass
class SavedWeights:
    """The trained weights of a policy in a checkpoint.

    Args:
        tensors: Trained weights and, if the run had an EMA callback, their average, by variant and by their names in
            the policy.
        lora_alpha: The policy's.
    """

    path: Path
    progress: Progress
    tensors: dict[str, dict[str, Tensor]]
    lora_alpha: int | None
    is_whole: bool = True  # not saved in the middle of an iteration

    @classmethod
    def read(cls, path: Path) -> SavedWeights:
        """Read and verify a checkpoint as :func:`~lit_vgrpo.training.checkpoint_file.read_sound` does."""
        saved = read_sound(path)
        tensors = {TRAINED: _of_policy(saved["state_dict"])}
        for average in averages(saved):
            tensors[AVERAGE] = _of_policy(average)
        state = saved["lit_vgrpo"]
        progress, iteration = Progress.of(saved), state["iteration"]
        if iteration is not None and has_no_updates(iteration):
            progress, iteration = replace(progress, iterations=progress.iterations + 1), None
        return cls(path, progress, tensors, state["lora_alpha"], iteration is None)

    def origin(self, variant: str) -> str:
        """Return a description of a variant."""
        return f"{variant} weights of {self.path} after {counted(self.progress.iterations, 'iteration')}"

    def refuse_misfit(self, variant: str, policy: Policy) -> None:
        """Raise UserError if the tensors of a variant are not those that a policy trains, or would be scaled."""
        difference = self.difference(variant, policy)
        if difference is not None:
            raise UserError(
                f"{self.path} is a checkpoint of a different policy: {difference} Use the recipe that wrote it."
            )
        if error := other_alpha(self.lora_alpha, policy):
            raise UserError(f"{self.path} was {error}")

    def difference(self, variant: str, policy: Policy) -> str | None:
        """Return how the tensors of a variant differ from those that a policy trains, or ``None``."""
        saved, current = self.tensors[variant], trainable_parameters(policy)
        odd = sorted(current.keys() ^ saved.keys())
        odd = odd or sorted(name for name in current if saved[name].shape != shape_of(current[name]))
        return f"{counted(len(odd), 'trained tensor')} would not fit, such as {odd[0]}." if odd else None

    def put_into(self, policy: Policy, variant: str) -> None:
        """Replace the policy's trained tensors, which must be whole; raise UserError if it trains other tensors."""
        self.refuse_misfit(variant, policy)
        write(trainable_parameters(policy), self.tensors[variant])


def evaluated_weights(trainer: Trainer) -> str:
    """Return the variant that evaluations and exports use: the average if a callback of the trainer keeps one."""
    return AVERAGE if any(hasattr(callback, "average") for callback in declared(trainer).callbacks) else TRAINED


@contextmanager
def averaged_weights(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Use the weights of the trainer's EMA callback, if it has one, within the context."""
    with ExitStack() as stack:
        for callback in declared(trainer).callbacks:
            if hasattr(callback, "average"):
                stack.enter_context(callback.applied(module))  # type: ignore[attr-defined]
        yield


def _of_policy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(POLICY_PREFIX)}
    return {name.removeprefix(POLICY_PREFIX): tensor for name, tensor in own.items()}


def other_weights(module: LightningModule, optimizer: Optimizer, strategy: Strategy) -> set[str]:
    """Return the names of the module's weights outside the policy that the optimizer trains.

    Raises:
        ValueError: A checkpoint would not have a weight that the optimizer trains.
    """
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    names = {name for name, weight in module.named_parameters() if id(weight) in held}
    if lost := len(held) - len(names):
        what = f"The optimizer trains {counted(lost, 'tensor')} that no checkpoint would have"
        raise ValueError(f"{what}. Make each an attribute of the module: a torch.nn.Parameter or a module.")
    others = {name for name in names if not name.startswith(POLICY_PREFIX)}
    if others and isinstance(strategy, PortableCheckpoints):
        what = f"The optimizer trains {min(others)}, outside the policy. This is untested"
        raise ValueError(f"{what} under {type(strategy).__name__}. Use trainer.strategy=ddp.")
    return others


# --- starting from them ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoraPlace:
    """A LoRA file: a local one, or one in a repository of the hub."""

    path: Path | None = None
    repository: str = ""
    filename: str = LORA_FILE

    def at_hand(self) -> Path | None:
        """Return the file if it is on this machine."""
        return self.path or cached_file(self.repository, self.filename)

    def fetch(self) -> Path:
        """Return the file, downloaded if necessary; raise LoadError if that fails."""
        if (path := self.at_hand()) is not None:
            return path
        from huggingface_hub import hf_hub_download

        remedy = f"Set {KEY}={self.repository}/FILE{SUFFIX}, or {KEY}=/a/local/file{SUFFIX}."
        with loading(self.repository, remedy):
            leave_silent_hub()
            if Path(self.filename).stem == PEFT_STEM:
                hf_hub_download(self.repository, str(Path(self.filename).with_name(PEFT_CONFIG)))
            return Path(hf_hub_download(self.repository, self.filename))

    def error(self, policy: Policy) -> str | None:
        """Return why a policy cannot start from it, in one line, or ``None``; nothing is downloaded."""
        path = self.at_hand()
        return lora_file_error(policy, path) if path else explain_unloadable(self.repository, self.filename, KEY)


def find_lora(policy: Policy) -> LoraPlace | None:
    """Return the LoRA file that ``start_from`` names, or ``None`` if it can only be a run.

    It may be a file, a folder with one, ``owner/name`` or ``owner/name/file.safetensors`` of the hub.

    Raises:
        LoadError: The path is invalid, or ``start_weights`` is given for a LoRA file.
    """
    assert policy.start_from is not None
    try:
        path = resolve_path(policy.start_from)
    except ValueError as error:
        raise LoadError(str(error)) from error
    place = _lora_at(policy.start_from, path)
    if place is not None and policy.start_weights != "trained":
        raise LoadError("model.policy.start_weights=ema has no effect on a LoRA file. Leave it out.")
    return place


def _lora_at(start_from: str, path: Path) -> LoraPlace | None:
    if path.is_dir():
        known = [] if (path / CONFIG_NAME).is_file() else sorted(path.iterdir())
        files = [file for file in known if file.suffix == SUFFIX] or [file for file in known if file.suffix in SUFFIXES]
        if len(files) > 1 and path / LORA_FILE not in files:
            raise LoadError(f"{KEY}={start_from} has {len(files)} files. Name one of them, such as {files[0]}.")
        return LoraPlace(path / LORA_FILE if len(files) > 1 else files[0]) if files else None
    if path.is_file():
        if path.suffix not in (*SUFFIXES, ".ckpt") and path.name != CONFIG_NAME:
            raise LoadError(f"{KEY}={start_from} is neither a run nor a LoRA file, {', '.join(SUFFIXES)}.")
        return LoraPlace(path) if path.suffix in SUFFIXES else None
    named = _HUB_FILE.fullmatch(start_from)
    first = start_from.partition("/")[0]
    if named is not None and first != _RUNS and not typed_path(first).is_dir():
        return LoraPlace(None, named[1], named[2] or LORA_FILE)
    if path.suffix in SUFFIXES:
        raise LoadError(f"{KEY}={start_from} does not exist.")
    return None


def policy_errors(policy: Policy, specs: Sequence[RolloutSpec] = ()) -> list[str]:
    """Return one line for each error in a policy or in what it starts from, without loading the pipeline's weights.

    Args:
        specs: Settings that it will sample images with.
    """
    errors = policy.check() or drawing_errors(policy, specs)
    if policy.start_from is not None and not policy.loaded:
        try:
            lora = find_lora(policy)
            if lora is None:
                _saved(policy)
            elif (error := lora.error(policy)) is not None:
                errors.append(error)
        except LoadError as error:
            errors.append(str(error))
    return errors


def load_policy(policy: Policy) -> Policy:
    """Load a policy, with the weights of the run or the LoRA file in ``start_from`` if it names one.

    Raises:
        LoadError: The checkpoint, that run or that file cannot be used.
    """
    if policy.loaded or policy.start_from is None:
        return policy.load()
    if (lora := find_lora(policy)) is not None:
        return policy.load(partial(put_lora, file=lora.fetch()))
    return policy.load(partial(_put_start, *_saved(policy, report_on_first)))


def _put_start(saved: SavedWeights, variant: str, policy: Policy) -> None:
    difference = saved.difference(variant, policy)
    if difference is not None:
        raise LoadError(
            f"{KEY}={policy.start_from} trained different weights: {difference} Use its lora_rank, lora_targets "
            "and train_only, or start from its weights as a pipeline: "
            "lightning export RUN --to DIR [--merge], then model.policy.checkpoint=DIR."
        )
    if error := other_alpha(saved.lora_alpha, policy):
        raise LoadError(f"{KEY}={policy.start_from} {error}")
    saved.put_into(policy, variant)


def other_alpha(alpha: int | None, policy: Policy) -> str | None:
    """Return how a policy would scale an adapter that was trained with another ``lora_alpha``, or ``None``."""
    if alpha is None or policy.lora_alpha in (None, alpha):
        return None
    return (
        f"trained with lora_alpha={alpha}, but the policy has {policy.lora_alpha}, which would scale the adapter by "
        f"{policy.lora_alpha / alpha:g}. Set model.policy.lora_alpha={alpha}."
    )


def start_hashes(policy: Policy) -> dict[str, str]:
    """Return hashes of the files that a policy starts from, whose weights are the reference in a resumed run too."""
    if policy.start_from is None:
        return {}
    lora = find_lora(policy)
    path = _saved(policy)[0].path if lora is None else lora.at_hand()
    if path is None:
        return {}
    if path.suffix in SUFFIXES:
        config = {PEFT_CONFIG: file_sha256(path.parent / PEFT_CONFIG)} if path.stem == PEFT_STEM else {}
        return {"weights": file_sha256(path), **config}
    return {"weights": checkpoint_hash(path)}


def checkpoint_hash(path: Path) -> str:
    """Return a hash of a checkpoint's content, from its checksums, which are together at the end of the file."""
    with zipfile.ZipFile(path) as archive:
        parts = [(part.filename.partition("/")[2], part.CRC) for part in archive.infolist()]
    return sha256(repr(parts).encode()).hexdigest()


def _saved(policy: Policy, say: Callable[[str], None] = lambda line: None) -> tuple[SavedWeights, str]:
    """Return the checkpoint that a policy starts from, and the variant of its weights; raise LoadError."""
    assert policy.start_from is not None
    variant = {"trained": TRAINED, "ema": AVERAGE}[policy.start_weights]
    try:
        path = resolve_path(policy.start_from)
        if not (path.is_file() and path.suffix == ".ckpt"):
            path = last_good(typed_path(find_run(f"{path}")[0]), say)
        saved = SavedWeights.read(path)
    except UserError as error:
        raise LoadError(f"{KEY}: {error}") from error
    if variant not in saved.tensors:
        raise LoadError(
            f"model.policy.start_weights=ema, but {path} has no averaged weights: the run had no EMA callback. "
            "Set start_weights=trained."
        )
    return saved, variant
