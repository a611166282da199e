"""On-policy distillation of several teachers: DiffusionOPD (arXiv 2605.15055) and Flow-OPD (arXiv 2605.08063)."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_vgrpo.core.noise import STREAM_ACTIVE, seeded_generator
from lit_vgrpo.core.probability_paths import ProbabilityPath, VariancePreserving
from lit_vgrpo.core.ranges import NonNegativeFloat, OnlyWith, Range, checked
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.solvers import transition
from lit_vgrpo.core.surrogate import mean_over_pixels
from lit_vgrpo.core.types import Experience, RolloutSpec, Steps
from lit_vgrpo.errors import shortened, suggestion
from lit_vgrpo.objectives.base import Copy, Metrics, Objective, PrepareContext
from lit_vgrpo.objectives.reward_gradient import active_steps
from lit_vgrpo.policies.base import Policy

TEACHER = "teacher"
"""The field of a row that names its teacher."""


def kl_factor(spec: RolloutSpec, path: ProbabilityPath, t: Tensor, t_next: Tensor, second_time: float) -> Tensor:
    """Return the weights ``(K,)`` of ``m((v - v_teacher)^2)`` in the KL between two sampling steps, per dimension.

    A step's mean is linear in the network's prediction, with a factor ``c``: the KL is ``c^2 / (2 std^2)`` times the
    squared distance of the predictions. An ODE step is treated as if ``std = 1``.

    Args:
        spec: Sampling settings; any ODE solver is treated as the path's first-order one.
        t: The steps' times ``(K,)``, and ``t_next`` those of the steps after them.
        second_time: The schedule's second time.
    """
    one, of_path = torch.ones_like(t)[:, None], "ddim_sde" if isinstance(path, VariancePreserving) else "flow_sde"
    solver, level = (str(spec.solver), spec.noise_level) if spec.is_sde else (of_path, 0.0)
    step = transition(solver, path, one, torch.zeros_like(one), t, t_next, level, second_time)
    return (step.mean.square() / (2 * torch.where(step.std > 0, step.std, 1.0).square()))[:, 0]


@checked
@dataclass(eq=False)
class OPD(Objective):
    """Trains the student towards a teacher's predictions at the latents of the student's own rollout.

    The row of a prompt names the teacher of its images in the field ``teacher``. Teachers are LoRAs of the student's
    base model, of at most its rank and on layers that it adapts. Each is held as a copy of the adapter's weights and
    swapped in, so the base is in memory once. Rewards and advantages are only logged, and all images are trained on.
    Student and teachers use the rollout's guidance.

    Args:
        teachers: LoRA folders or files by teacher, such as the ``export`` folder of a run.
        rollout: Sampling of images. An ODE, as in DiffusionOPD, or an SDE, as in Flow-OPD.
        num_steps: Steps per image to compare, drawn once per iteration for all images; null for all, as in both papers.
        late_bias: Step ``i`` is drawn with a probability proportional to ``(i + 1)^late_bias``. DanceOPD draws a single
            late step, from another distribution.
        weighting: ``kl`` weights the squared distance as in the KL between the sampling steps, see :func:`kl_factor`;
            ``none`` does not, as in DanceOPD.

    Source:
        DiffusionOPD: the abstract and project page, and third-party code: X-GenGroup/Flow-Factory
        trainers/diffusion_opd/trainer.py, Tencent-Hunyuan/UniRL algorithms/diffusionopd.py. The authors' code was not
        available. Flow-OPD: github.com/CostaliyA/Flow-OPD (MIT), scripts/train_sd3_opd_mix.py; this is its mode
        ``gkd``, the KL's direct gradient. DanceOPD: arXiv 2606.27377 and github.com/worldbench/DanceOPD, danceopd/core.
    """

    uses_advantages: ClassVar[bool] = False
    trains_on_sampling_steps: ClassVar[bool] = True
    default_rollout: ClassVar[RolloutSpec] = RolloutSpec("euler", steps=10)

    teachers: dict[str, str]
    rollout: RolloutSpec | None = None
    _: KW_ONLY
    num_steps: Annotated[int, Range(1, 1000)] | None = None
    late_bias: Annotated[NonNegativeFloat, OnlyWith("num_steps")] = 0.0
    weighting: Literal["kl", "none"] = "kl"

    # --- checks and cost -------------------------------------------------------------------------------------------

    @property
    def steps(self) -> range:
        """The rollout's steps that may be trained on: of an SDE, those with noise."""
        return self.spec.sde_steps if self.spec.is_sde else range(self.spec.steps)

    def check(self, sizes: Sizes) -> list[str]:
        errors, most = super().check(sizes), len(self.steps)
        if not self.teachers:
            errors += ["model.objective.teachers is empty. Name their LoRA folders, such as {ocr: runs/ocr/export}."]
        if (self.num_steps or 0) > most:
            errors += [f"model.objective.num_steps={self.num_steps} exceeds the rollout's {most}. Use at most {most}."]
        return errors

    def row_error(self, row: Mapping[str, Any]) -> str | None:
        name = row.get(TEACHER)
        if name in [*self.teachers]:  # a list in a row cannot be looked up in the mapping
            return None
        named = "names no teacher" if name is None else f"names the unknown teacher {name}"
        advice = suggestion(str(name or ""), self.teachers)
        return f'The row of prompt "{shortened(row.get("prompt"))}" {named} in its field {TEACHER}. {advice}'

    def predictions_per_image(self, sizes: Sizes) -> float:
        return self.num_steps or len(self.steps)

    def prediction_passes(self, sizes: Sizes) -> dict[str, float]:
        return super().prediction_passes(sizes) | {TEACHER: self.predictions_per_image(sizes)}

    # --- one iteration ---------------------------------------------------------------------------------------------

    def trained_steps(self, iteration: int) -> list[int]:
        """Return the steps to train on, ascending: a function of the iteration and the run's seed."""
        generator = seeded_generator(self.seed, STREAM_ACTIVE, iteration)
        chosen = active_steps(len(self.steps), self.num_steps or len(self.steps), self.late_bias, generator)
        return [self.steps[i] for i in chosen]

    def recorded_steps(self, iteration: int) -> Sequence[int]:
        return () if self.spec.is_sde else self.trained_steps(iteration)

    @staticmethod
    def copy_of(teacher: str) -> str:
        """Return the name of a teacher's copy of the adapter."""
        return f"{TEACHER} {teacher}"

    def copies_needed(self) -> dict[str, Copy]:
        """Return one per teacher; :func:`~lit_vgrpo.training.teachers.load_teachers` loads them."""
        return {self.copy_of(name): Copy() for name in self.teachers}

    def make_experience(self, context: PrepareContext) -> Experience:
        rollout, chain, device = context.rollout, context.rollout.trajectory, context.rollout.latents.device
        assert chain is not None
        steps, shape = torch.tensor(self.trained_steps(rollout.iteration)), (len(rollout), -1)
        times = torch.cat([rollout.schedule.cpu(), torch.zeros(1)])
        t, t_next = times[steps], times[steps + 1]
        weight = torch.ones_like(t)
        if self.weighting == "kl":
            weight = kl_factor(self.spec, context.policy.path, t, t_next, float(times[1]))
        before = chain.states[:, (steps - self.steps.start).to(device)] if self.spec.is_sde else chain.states
        t, weight = (value.to(device).expand(shape) for value in (t, weight))
        experience = context.experience(steps=Steps(before, t, weight))
        experience.kept["target"] = self._targets(context, experience)
        return experience

    def _targets(self, context: PrepareContext, experience: Experience) -> Tensor:
        """Return the predictions of each image's teacher, ``(B, K, C, h, w)``."""
        teacher, policy = self._teacher_numbers(context), context.policy
        assert experience.steps is not None
        target, guidance = torch.empty_like(experience.steps.before), self.guidance_in("training", policy)
        counts = self.all_ranks(teacher.bincount(minlength=len(self.teachers))[None])
        for number, name in enumerate(self.teachers):
            copy = self.copies[self.copy_of(name)]
            own = (teacher == number).nonzero().flatten().to(target.device)
            # Sharded weights are gathered in each pass, so all ranks need equally many; the first image is the padding.
            padded = F.pad(own, (0, int(counts[:, number].max()) - len(own)))
            if len(padded):
                copy.to(policy.device)
                with context.ledger.phase(TEACHER), copy.swapped_into(policy):
                    parts = padded.split(context.micro_batch_size)
                    micros = (experience.select(part).to(policy.device) for part in parts)
                    outputs = [self.forward(policy, micro, guidance).to(target.device) for micro in micros]
                target[own] = torch.cat(outputs)[: len(own)]
        return target

    def _teacher_numbers(self, context: PrepareContext) -> Tensor:
        """Return the index of each image's teacher, ``(B,)``, int64."""
        images, names = len(context.rollout), list(self.teachers)
        if context.is_trial:
            return torch.arange(images) % len(names)
        if len(context.data_rows) != images:
            raise RuntimeError("OPD takes each image's teacher from its row. Give PrepareContext data_rows.")
        for row in context.data_rows:
            if (error := self.row_error(row)) is not None:
                raise ValueError(error)
        return torch.tensor([names.index(row[TEACHER]) for row in context.data_rows])

    def forward(self, policy: Policy, micro: Experience, guidance: float) -> Tensor:
        """Return the network's predictions at a micro-batch's latents, from a single pass, ``(M, K, C, h, w)``."""
        assert micro.steps is not None
        z, t = micro.steps.before, micro.steps.t
        cond = micro.conditioning.select(micro.rows.repeat_interleave(t.shape[1]))
        return policy(z.flatten(0, 1), t.flatten(), cond, guidance).unflatten(0, t.shape)

    def losses(self, now: Tensor, kept: Mapping[str, Tensor], micro: Experience) -> tuple[Tensor, Metrics]:
        assert micro.steps is not None
        distance = mean_over_pixels((now - micro.kept["target"]).square(), 2)
        return (micro.steps.weight * distance).mean(dim=1), {"teacher_distance": distance.detach().mean(1)}
