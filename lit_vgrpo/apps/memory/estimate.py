"""Memory that a recipe needs on a rank, from configuration files only, compared with what the device has."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from lit_vgrpo.apps.memory.shares import bytes_of, restored_at_once, shares, tensors_of
from lit_vgrpo.config.recipe import read_recipe
from lit_vgrpo.config.tree import leaves, typed_key
from lit_vgrpo.core.batches import at_most
from lit_vgrpo.core.gather import image_ranks
from lit_vgrpo.errors import UserError, is_deliberate, one_line
from lit_vgrpo.launch.build import build_recipe
from lit_vgrpo.launch.recipe_cli import RecipeCLI
from lit_vgrpo.objectives.reward_gradient import RewardGradient, window
from lit_vgrpo.options import SMALLEST_RESERVE
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.meta import AutocastOnMeta, NotEstimated, policy_on_meta
from lit_vgrpo.rewards import Reward
from lit_vgrpo.rewards.clip import AestheticScore
from lit_vgrpo.rewards.function import is_custom
from lit_vgrpo.rewards.geneval import GenEval
from lit_vgrpo.rewards.hps import HPSv2
from lit_vgrpo.rewards.model import ModelReward
from lit_vgrpo.system.hub import LoadError, file_at_hand
from lit_vgrpo.system.memory import available_bytes
from lit_vgrpo.system.process import bar
from lit_vgrpo.training.context_parallel import context_errors
from lit_vgrpo.training.memory_passes import LiveMemory, Pass, demand
from lit_vgrpo.training.micro_batch import shown
from lit_vgrpo.training.strategies import AbsentGPU

Peaks = dict[tuple[Any, ...], int]
"""Peaks of passes, by the policy's options and the pass."""
ADVICE = {
    "training on a micro-batch": ("data.micro_batch_size=1", "model.policy.gradient_checkpointing=true"),
    "passes of stored predictions": ("data.micro_batch_size=1",),
    "rollout": ("model.rollout_batch_size=1",),
    "evaluation": ("data.eval_batch_size=1", "model.rollout_batch_size=1", "model.policy.decode_batch_size=1"),
    "decoding images": ("model.policy.decode_batch_size=1", "model.rollout_batch_size=1"),
    "gradient of the reward": ("model.policy.decode_batch_size=1", "model.objective.decode_half=true"),
    "encoding prompts": ("model.policy.offload_encoders=true", "model.policy.offload_network=true"),
    "optimizer's step": (),
}
"""Settings that lower the peak of each phase, the one that costs least first."""
ANYWHERE = (
    "model.policy.offload_encoders=true",
    "model.optimizer.kind=adamw8bit",
    "model.policy.lora_rank=32",
    "model.policy.quantisation=nf4",
)
"""Settings that lower what is always allocated, in the same order."""
TRAINING, STORED, ROLLOUT, EVALUATION, DECODING, GRADIENT, ENCODING, STEP = ADVICE
PUBLISHED = {
    "yuvalkirstain/PickScore_v1": 986_109_441,
    "openai/clip-vit-large-patch14": 427_616_513,
    "facebook/mask2former-swin-small-coco-instance": 68_741_083,
    "THUDM/ImageReward": 413_121_249,
    "ViT-H-14": 986_109_441,
    "vision of openai/clip-vit-large-patch14": 303_966_208 + 927_969,
}
"""Parameter counts of the default checkpoints and open_clip models; the last is the part of the aesthetic score."""
RESERVED = 20
"""Memory reserved on a GPU for CUDA, its libraries and fragmentation: at least this many bytes, and one part in
this many. A choice, not a measurement."""


@dataclass(frozen=True)
class Estimate:
    """Bytes on a rank's device: ``parts`` that are always allocated, and the peak that each of the ``phases`` adds."""

    parts: dict[str, int]
    phases: dict[str, int]
    unknown: tuple[str, ...] = ()
    """Rewards whose models are not included."""

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def peak(self) -> int:
        """Largest number of bytes allocated at once."""
        return sum(self.parts.values()) + self.phases[self.peak_phase]

    def line(self) -> str:
        """Return the peak in a sentence."""
        return f"Estimated memory per rank, without Python and libraries: {shown(self.peak)}, in {self.peak_phase}."

    def table(self) -> str:
        """Return an aligned table of the permanent memory, what each phase adds, and the peak."""
        rows = [(name, shown(size)) for name, size in self.parts.items() if size]
        rows += [(f"+ {name}", shown(size)) for name, size in self.phases.items() if size]
        rows.append((f"peak, in {self.peak_phase}", shown(self.peak)))
        width = max(len(name) for name, _ in rows)
        return "\n".join(["Estimated memory per rank:", *(f"{name:<{width}}  {size:>10}" for name, size in rows)])


def memory_report(cli: RecipeCLI, gpu_bytes: int | None = None, is_complete: bool = True) -> tuple[str, list[str]]:
    """Return the estimate as text, and an error if the recipe needs more than its device, or a GPU of a size, has.

    The text has a line for each part if a GPU's size is given.

    A GPU counts as empty, even if other processes are using it. The batch sizes must fit the world size. The settings
    that are advised are checked if the recipe ``is_complete``: without its weights, each check would miss them again.

    Raises:
        NotEstimated: There is no estimate; the message is the reason.
    """
    is_absent = isinstance(cli.trainer.accelerator, AbsentGPU)
    device = torch.device("cuda", 0) if is_absent or gpu_bytes is not None else cli.trainer.strategy.root_device
    if gpu_bytes is not None:
        name, size = "the given GPU", gpu_bytes
    elif is_absent:
        name, size = "", 0
    elif device.type == "cuda":
        name, size = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    else:
        name, size = "this machine's free memory", available_bytes() // max(1, cli.trainer.num_devices)
    free = size if device.type == "cpu" else max(0, size - max(SMALLEST_RESERVE, size // RESERVED))
    peaks = Peaks()
    needed = _estimated(cli, device, peaks)
    hint = "" if gpu_bytes is not None else " Its parts, compared with a GPU: --memory 80GiB."
    fits = "It fits." if needed.peak <= free else "It does not fit."
    room = f"Available: {shown(free)}, {name}. {fits}" if size else "This machine has no GPU."
    text = f"{needed.line() if gpu_bytes is None else needed.table()}\n{room}{hint}"
    if needed.unknown:
        text += f"\nNot included, because their size is unknown: models of the reward {', '.join(needed.unknown)}."
    if not size or needed.peak <= free:
        return text, []
    too_large = (
        f"The recipe needs about {shown(needed.peak)} per rank, in {needed.peak_phase}; {shown(free)} is available "
        f"({name}). {advice(cli, needed, free, device, peaks, is_complete)}"
    )
    return text, [too_large]


def _estimated(cli: RecipeCLI, device: torch.device, peaks: Peaks) -> Estimate:
    try:
        return estimate(cli, device, peaks)
    except NotEstimated:
        raise
    except LoadError as error:
        raise UserError(str(error)) from error
    except Exception as error:  # such as shapes that depend on values: a missing estimate must not fail the check
        if is_deliberate(error):  # the run's first update would raise it too
            raise UserError(str(error)) from error
        raise NotEstimated(f"{type(error).__name__}: {one_line(error)}") from error


def advice(
    cli: RecipeCLI, needed: Estimate, free: int, device: torch.device, peaks: Peaks, is_complete: bool = True
) -> str:
    """Return the settings that a recipe lacks to fit, as few of them as possible, and the peak with them."""
    values, command = {typed_key(place): value for place, value in leaves(cli.plain_recipe())}, cli.recipe.command

    def peak_with(settings: Iterable[str]) -> float:
        given = [(key, value) for key, _, value in (one.partition("=") for one in settings)]
        overrides = [*command.overrides, *given, ("ckpt_path", "null")]  # which would be read each time
        changed = replace(command, overrides=overrides)
        with suppress(UserError, NotEstimated), warnings.catch_warnings(action="ignore"):  # the recipe itself warned
            other = build_recipe(read_recipe(changed), make_folder=False, elsewhere=True)
            return math.inf if is_complete and other.errors() else _estimated(other, device, peaks).peak
        return math.inf

    def is_left(setting: str) -> bool:
        key, _, value = setting.partition("=")
        return key in values and (values[key] != 1 if value == "1" else values[key] in (None, False, "adamw"))

    over = [phase for phase, size in needed.phases.items() if sum(needed.parts.values()) + size > free]
    left = filter(is_left, dict.fromkeys([*(one for phase in over for one in ADVICE[phase]), *ANYWHERE]))
    chosen, peak = list[str](), float(needed.peak)
    for setting in bar("Trying settings", left):
        if (found := peak_with([*chosen, setting])) < peak:
            chosen, peak = [*chosen, setting], found
        if peak <= free:
            break
    else:
        least = f"With {' '.join(chosen)}, it needs {shown(int(peak))}. " if chosen else ""
        return f"{least}Use a larger GPU, or several: strategy/fsdp2."
    for setting in reversed(chosen):
        key, _, value = setting.partition("=")
        others = [one for one in chosen if one != setting]
        fewer = [others] if setting != chosen[-1] else []  # without the last one it did not fit
        if value == "1" and isinstance(size := values[key], int) and size > 3:
            fewer.append([*others, f"{key}={size // 2}"])
        for settings in fewer:
            if (found := peak_with(settings)) <= free:
                chosen, peak = settings, found
                break
    return f"Set {' '.join(chosen)}, which needs {shown(int(peak))}."


def estimate(cli: RecipeCLI, device: torch.device | None = None, peaks: Peaks | None = None) -> Estimate:
    """Estimate the memory that a recipe needs on a rank, by default on its device here, excluding libraries.

    Args:
        peaks: The peaks of passes of the same recipe with other settings of :data:`ADVICE`, to which this adds.

    Raises:
        NotEstimated: The pipeline's configuration files are not on this machine.
        LoadError: An option of the policy does not fit them.
    """
    module, trainer = cli.model, cli.trainer
    device = device or trainer.strategy.root_device
    on_gpu = device.type != "cpu"
    plan = cli.datamodule.sizes.plan(image_ranks(trainer)[1])
    policy = policy_on_meta(module.policy, device.type)
    degree = getattr(trainer.strategy, "context_parallel", 1)
    guidance = module.objective.rollout_spec(0).guidance
    for error in context_errors(policy, degree, module.evaluator.sides):
        raise LoadError(error)
    asked = demand(module.objective, policy, plan)
    share = shares(policy, module.optimization.optimizer, trainer.strategy, trainer.world_size, on_gpu)
    averages = sum(type(callback).__name__ == "EMA" for callback in trainer.callbacks)  # type: ignore[attr-defined]
    in_cpu_memory = not on_gpu and "reference" not in asked.copies  # the module's reference
    copies = len(asked.copies) + averages + in_cpu_memory
    encoders = sum(bytes_of(tensors_of(encoder)) for encoder in policy.encoders())
    leave = on_gpu and module.policy.offload_encoders
    waiting = share.movable if device.type == "cuda" and module.policy.offload_network else 0
    latent = 4 * torch.Size(policy.latent_shape).numel()
    models, unknown = scorers(module.evaluator.observed.leaves(), device)
    moves_away = on_gpu and module.rollout_device is not None
    parts = {
        **share.parts,
        "copies of the trained weights": copies * share.trained,
        "text encoders": 0 if leave else encoders,
        "VAE": bytes_of(tensors_of(policy.pipeline.vae)),
        "reward models": models,
        "stored latents": 0 if moves_away else round(latent * asked.kept),
    }
    rollout = at_most(plan.images_per_iteration, module.rollout_batch_size) or plan.images_per_rank
    peaks = Peaks() if peaks is None else peaks

    def peak_of(asked: Pass) -> int:
        key = policy.gradient_checkpointing, policy.lora_rank, policy.quantisation, policy.latent_shape, asked
        if key not in peaks:
            peaks[key] = peak_of_pass(policy, asked)
        return peaks[key] // degree

    phases = {
        ENCODING: max(0, encoding_peak(policy, max(1, plan.groups_per_rank)) + (encoders if leave else 0) - waiting),
        ROLLOUT: peak_of(Pass(rollout, guidance, False)) + asked.samples_with_copy * share.trained,
        DECODING: _decoding(policy, rollout),
        TRAINING: peak_of(asked.trained) + round(latent * asked.loss),
        STEP: share.step,
    }
    if module.objective.trains_on_rollout_passes:  # the graph is alive while the images are decoded
        phases[DECODING] += phases[TRAINING]
    if isinstance(module.objective, RewardGradient):
        phases[GRADIENT] = gradient_peak(policy, module.objective.decode_crop, module.objective.decode_half)
    if asked.stored is not None:
        phases[STORED] = peak_of(asked.stored) + bool(asked.copies) * share.trained
    if (data := cli.datamodule).has_heldout:
        images = len(data.heldout_rows()) * data.heldout_images_per_prompt
        batch = min(data.eval_batch_size, -(-images // image_ranks(trainer)[1]))
        sampled = at_most(images, module.rollout_batch_size) or batch
        with policy.sized(*module.evaluator.sides):
            asked_now = Pass(sampled, module.evaluator.spec.guidance, False)
            peak = max(peak_of(asked_now), _decoding(policy, batch))
        phases[EVALUATION] = peak + bool(averages) * share.trained  # the averages are swapped in
    return Estimate(parts, phases, tuple(unknown))


def encoding_peak(policy: Policy, prompts: int) -> int:
    """Return the peak of encoding prompts one by one and stacking their rows at the end."""
    with torch.no_grad(), AutocastOnMeta(), LiveMemory() as live:
        row = bytes_of(policy.encode(["b"], policy.blank_references(1)).tensors.values())  # not "a", which is kept
    return max(live.peak + (prompts - 1) * row, 2 * prompts * row)


def peak_of_pass(policy: Policy, asked: Pass) -> int:
    """Return the peak of calls of the policy and their backward pass, without the gradients of weights."""
    cond = policy.encode(["a"], policy.blank_references(1))
    policy.negative()
    weights = [p for p in policy.parameters() if p.requires_grad]
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    with torch.set_grad_enabled(asked.with_grad), LiveMemory() as live:
        z = torch.empty(asked.rows, *policy.latent_shape, device="meta")
        t = torch.empty(asked.rows, device="meta")
        rows = torch.zeros(asked.rows, dtype=torch.int64, device="meta")
        predictions = [policy(z, t, cond.select(rows), asked.guidance) for _ in range(asked.times)]
        if asked.with_grad:
            torch.stack([one.sum() for one in predictions]).sum().backward()
    return live.peak + restored_at_once(policy)


def _decoding(policy: Policy, images: int) -> int:
    """Return the peak of decoding one of the VAE's batches, with all images before and after concatenation."""
    at_once = policy.decode_batch_size
    with torch.no_grad(), AutocastOnMeta(), LiveMemory() as live:
        decoded = policy.decode(torch.empty(at_once, *policy.latent_shape, device="meta"))
    return live.peak + 2 * max(0, images - at_once) * bytes_of([decoded[:1]])


def gradient_peak(policy: Policy, crop: float | None, halved: bool = False) -> int:
    """Return the peak of one of the VAE's batches and its backward pass, without the reward's model."""
    height, width = window(policy.latent_shape[-2:], crop)
    with torch.enable_grad(), AutocastOnMeta(), LiveMemory() as live:
        latents = torch.empty(policy.decode_batch_size, *policy.latent_shape, device="meta", requires_grad=True)
        policy.decode_with_gradient(latents[..., :height, :width], halved).sum().backward()
    return live.peak


def scorers(rewards: Iterable[Reward], device: torch.device) -> tuple[int, list[str]]:
    """Return the bytes of the reward models' weights on a device, and the names of the rewards of unknown size."""
    total, unknown = 0, []
    for reward in rewards:
        wanted: Any = getattr(reward, "device", "auto")
        place = device if wanted == "auto" else torch.device(wanted)
        if place.type != device.type or place.index not in (None, device.index):
            continue
        dtype = getattr(torch, str(getattr(reward, "dtype", "float32")))
        sizes = [_bytes(name, dtype) for name in _models(reward)]
        if None in sizes:
            unknown.append(reward.name)
        total += sum(size or 0 for size in sizes)
    return total, unknown


def _models(reward: Reward) -> list[str]:
    """Return the names of a reward's models; an empty name if they are not known."""
    if isinstance(reward, GenEval):
        return [reward.detector, reward.clip]
    if isinstance(reward, AestheticScore):
        return [f"vision of {reward.clip}"]
    if isinstance(reward, HPSv2):
        return [reward.model]
    if isinstance(reward, ModelReward):
        return [getattr(reward, "checkpoint", "")]
    return [""] if is_custom(reward) else []


def _bytes(name: str, dtype: torch.dtype) -> int | None:
    """Return a model's size: as published, or from its configuration if that is on this machine."""
    from transformers import AutoConfig, AutoModel

    if name in PUBLISHED:
        return PUBLISHED[name] * dtype.itemsize
    try:
        if (path := file_at_hand(name, "config.json")) is None:
            return None
        with torch.device("meta"):
            model = AutoModel.from_config(AutoConfig.from_pretrained(path.parent))
    except (OSError, ValueError):  # not a transformers model: the reward's check reports damaged files
        return None
    return bytes_of(tensors_of(model.to(dtype)))
