"""Memory that a recipe needs on a rank, from configuration files alone, without reading weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from lit_vgrpo.apps.memory.meta import AutocastOnMeta, policy_on_meta
from lit_vgrpo.apps.memory.scorers import scorers
from lit_vgrpo.apps.memory.shares import bytes_of, copy_in_8_bits, restored_at_once, shares, tensors_of
from lit_vgrpo.core.batches import at_most
from lit_vgrpo.core.types import Conditioning
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.training.memory_passes import LiveMemory, Pass, demand
from lit_vgrpo.training.micro_batch import shown

if TYPE_CHECKING:
    from lit_vgrpo.launch.recipe_cli import RecipeCLI

TRAINING, ROLLOUT, SCOUTS, STORED, DECODING, ENCODING, EVALUATION, STEP = (
    "forward and backward of a micro-batch",
    "rollout",
    "scouts",
    "passes of stored predictions",
    "decoding images",
    "encoding prompts",
    "evaluation",
    "optimizer's step",
)


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank's device.

    Attributes:
        parts: Always allocated, by name.
        phases: Additional peak memory of each phase.
        unknown: Rewards whose models are not included.
    """

    parts: dict[str, int]
    phases: dict[str, int]
    unknown: tuple[str, ...] = ()

    @property
    def peak_phase(self) -> str:
        """Phase with the largest peak."""
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def peak(self) -> int:
        """Largest number of bytes allocated at once."""
        return sum(self.parts.values()) + self.phases[self.peak_phase]

    def table(self) -> str:
        """Return an aligned table of what is always allocated, what each phase adds, and the peak."""
        rows = [(name, shown(size)) for name, size in self.parts.items() if size]
        rows += [(f"+ {name}", shown(size)) for name, size in self.phases.items() if size]
        rows.append((f"peak, in {self.peak_phase}", shown(self.peak)))
        width = max(len(name) for name, _ in rows)
        return "\n".join(["Estimated memory per rank:", *(f"{name:<{width}}  {size:>10}" for name, size in rows)])


def estimate(cli: RecipeCLI, device: torch.device | None = None) -> Estimate:
    """Estimate the memory that a recipe needs, without that of the libraries.

    Args:
        device: Device of a rank; ``None`` uses the recipe's on this machine.

    Raises:
        NotHere: The pipeline's configuration files are not on this machine.
        LoadError: An option of the policy does not fit them.
    """
    module, trainer = cli.model, cli.trainer
    device = device or trainer.strategy.root_device
    on_gpu = device.type != "cpu"
    plan = cli.datamodule.sizes.plan(trainer.world_size)
    policy = policy_on_meta(module.policy, device.type)
    asked = demand(module.objective, policy, plan)
    share = shares(policy, module.optimization.optimizer, trainer.strategy, trainer.world_size, on_gpu)
    averages = sum(type(callback).__name__ == "EMA" for callback in trainer.callbacks)  # type: ignore[attr-defined]
    copies = len(asked.copies) + averages
    if not on_gpu and "reference" not in asked.copies:
        copies += 1  # the module's reference, which is kept in CPU memory
    vae = policy.pipeline.vae
    encoders = sum(bytes_of(tensors_of(encoder)) for encoder in policy.encoders())
    leave = on_gpu and module.policy.offload_encoders
    latent = 4 * torch.Size(policy.latent_shape).numel()
    models, unknown = scorers(module.evaluator.observed.rewards, device)
    spec = module.objective.rollout_spec(0)
    narrow = {one.quantise for one in (spec, spec.scouts and spec.of_scouts, module.evaluation) if one} - {None}
    kept = 0 if on_gpu and module.rollout_device is not None else round(latent * asked.kept)
    parts = {
        **share.parts,
        "copies of the trained weights": copies * share.trained,
        "copies for 8-bit rollouts": len(narrow) * copy_in_8_bits(policy),
        "text encoders": 0 if leave else encoders,
        "VAE": bytes_of(tensors_of(vae)),
        "reward models": models,
        "stored latents": kept,
    }
    rollout = at_most(plan.images_per_iteration, module.rollout_batch_size) or plan.images_per_rank
    cond = policy.encode(["a"], policy.blank_references(1))
    peak_of = cache(lambda asked: peak_of_pass(policy, asked, cond))  # phases may ask for the same
    phases = {
        ENCODING: encoding_peak(policy, max(1, plan.groups_per_rank)) + (encoders if leave else 0),
        ROLLOUT: peak_of(Pass(rollout, spec.guidance, False)) + asked.samples_with_copy * share.trained,
        DECODING: _decoding(policy, rollout),
        TRAINING: peak_of(asked.trained) + round(latent * asked.loss),
        STEP: share.step,
    }
    if spec.scouts is not None:
        # Their noise and latents are kept until the last of them is scored.
        factor = spec.scouts.factor
        held = 0 if on_gpu and module.rollout_device is not None else 2 * latent * factor * plan.images_per_rank
        scouts = at_most(plan.images_per_iteration * factor, module.rollout_batch_size) or plan.images_per_rank * factor
        phases[SCOUTS] = peak_of(Pass(scouts, spec.guidance, False)) + asked.samples_with_copy * share.trained + held
        phases[DECODING] = max(phases[DECODING], _decoding(policy, scouts) + held)
    if asked.stored is not None:
        phases[STORED] = peak_of(asked.stored) + bool(asked.copies) * share.trained
    if (data := cli.datamodule).has_heldout:
        images = len(data.heldout_rows()) * data.heldout_images_per_prompt
        batch = min(data.eval_batch_size, -(-images // trainer.world_size))
        sampled = at_most(images, module.rollout_batch_size) or batch
        evaluation = module.evaluation or spec.as_ode()
        peak = max(peak_of(Pass(sampled, evaluation.guidance, False)), _decoding(policy, batch))
        phases[EVALUATION] = peak + bool(averages) * share.trained  # which are swapped in
    return Estimate(parts, phases, tuple(unknown))


def encoding_peak(policy: Policy, prompts: int) -> int:
    """Return the peak of encoding prompts one after the other, whose rows are stacked in the end."""
    with torch.no_grad(), AutocastOnMeta(), LiveMemory() as live:
        row = bytes_of(policy.encode(["b"], policy.blank_references(1)).tensors.values())  # not "a", which is kept
    return max(live.peak + (prompts - 1) * row, 2 * prompts * row)


def peak_of_pass(policy: Policy, asked: Pass, cond: Conditioning | None = None) -> int:
    """Return the peak of one call of the policy and its backward pass, without the gradients of weights.

    Args:
        cond: Conditioning of one prompt; ``None`` encodes one.
    """
    cond = cond or policy.encode(["a"], policy.blank_references(1))
    policy.negative()
    weights = [p for p in policy.parameters() if p.requires_grad]
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    with torch.set_grad_enabled(asked.with_grad), LiveMemory() as live:
        z = torch.empty(asked.rows, *policy.latent_shape, device="meta")
        t = torch.empty(asked.rows, device="meta")
        rows = torch.zeros(asked.rows, dtype=torch.int64, device="meta")
        prediction = policy(z, t, cond.select(rows), asked.guidance)
        if asked.with_grad:
            prediction.sum().backward()
    return live.peak + restored_at_once(policy)


def _decoding(policy: Policy, images: int) -> int:
    """Return the peak of decoding one of the VAE's batches, with all images before and after concatenation."""
    at_once = policy.decode_batch_size
    with torch.no_grad(), AutocastOnMeta(), LiveMemory() as live:
        decoded = policy.decode(torch.empty(at_once, *policy.latent_shape, device="meta"))
    return live.peak + 2 * max(0, images - at_once) * bytes_of([decoded[:1]])
