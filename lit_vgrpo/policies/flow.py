"""Shared code of transformers on a rectified flow (arXiv 2209.03003)."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from lit_vgrpo.core.probability_paths import RectifiedFlow
from lit_vgrpo.core.ranges import Range, checked
from lit_vgrpo.core.solvers import FLOW_SDES
from lit_vgrpo.core.types import Conditioning, RolloutSpec
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.loading import config_value

FLOW_SOLVERS = ("euler", "dpm++", "unipc")
LONGEST_PROMPT = 1024  # tokens
SIGMA_KINDS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
"""Options of a scheduler that change its grid of times."""
TIMESTEPS = 1000  # which most pipelines divide by, whatever their scheduler has
PATCH = 2  # latents per side of a token
ATTENTION = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")  # LoRA targets
REFERENCE_LATENTS = "reference_latents"  # of the pictures to edit, in a conditioning
OWN_TIMESTEPS = (
    "set_timesteps = pipe.scheduler.set_timesteps  # the pipeline's sigmas are for its own scheduler",
    "pipe.scheduler.set_timesteps = lambda num_inference_steps=None, device=None, sigmas=None, mu=None: (",
    "    set_timesteps(num_inference_steps or len(sigmas), device)",
    ")",
)
"""Lines of Python that let a pipeline use another scheduler than its own."""
DEFAULT_SIDE = 1024  # pixels of an image, in most pipelines


@checked
class FlowPolicy(Policy, ABC):
    """A ``transformer`` whose pipeline passes its scheduler equally spaced sigmas.

    Args:
        checkpoint: A hub name, a local pipeline folder, or ``shipped:...``.
        max_sequence_length: Tokens of a prompt that the network sees, the chat template included. Longer prompts are
            cut, shorter ones padded, and masked if the pipeline has masks.
        **options: See :class:`~lit_vgrpo.policies.base.Policy`.
    """

    network_name: ClassVar[str] = "transformer"
    solvers: ClassVar[tuple[str, ...]] = FLOW_SOLVERS
    sde_solvers: ClassVar[tuple[str, ...]] = FLOW_SDES
    path_kind: ClassVar[Literal["flow", "vp"]] = "flow"
    default_lora_targets: ClassVar[tuple[str, ...]] = (
        *ATTENTION,
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    )
    """The joint attention of images and text, as in most families."""
    pipeline_solver: ClassVar[str] = "euler"
    """The pipeline's default solver."""
    patch: ClassVar[int] = PATCH
    """Latents per side of a token."""
    time_scale: ClassVar[int | None] = None
    """Factor of times in a network that first rounds them to its dtype, as 0.9 to 0.8984; ``None`` if it does not."""
    takes_guidance: ClassVar[bool] = False
    """True if the networks take the guidance scale as an input, unless their configuration says otherwise."""

    def __init__(
        self, checkpoint: str, max_sequence_length: Annotated[int, Range(1, LONGEST_PROMPT)] = 512, **options: Any
    ) -> None:
        super().__init__(checkpoint, **options)
        self.max_sequence_length = max_sequence_length

    @property
    def embeds_guidance(self) -> bool:
        name = "guidance_embeds"
        if self.loaded:
            return self.takes_guidance and bool(self.network.config.get(name, True))
        return self.takes_guidance and config_value(self, f"{self.network_name}/config.json", name) is not False

    def misfit(self, pipeline: Any) -> str | None:
        if self.negative_prompt and self.takes_guidance and pipeline.transformer.config.get("guidance_embeds", True):
            return "takes guidance as an input, so model.policy.negative_prompt has no effect. Leave it out."
        return self.scheduler_misfit(pipeline.scheduler) or super().misfit(pipeline)

    def scheduler_misfit(self, scheduler: Any) -> str | None:
        """Return why the pipeline's scheduler is none of the family's, as a phrase that follows its name."""
        return flow_scheduler_misfit(scheduler)

    def find_latent_shape(self) -> tuple[int, ...]:
        default = DEFAULT_SIDE // self.pipeline.vae_scale_factor
        sides = self.latent_sides(getattr(self.pipeline, "default_sample_size", default), PATCH)
        return self.network.config.in_channels // self.packed**2, *sides

    def build_path(self) -> RectifiedFlow:
        return RectifiedFlow() if self.time_scale is None else RectifiedFlow(self.dtype, self.time_scale)

    def prompt_limit(self) -> tuple[Any, int, str]:
        return self.pipeline.tokenizer, self.max_sequence_length, type(self.pipeline.text_encoder).__name__

    def image_tokens(self) -> int:
        """Return the number of tokens per image or video."""
        return math.prod(self.latent_shape[1:]) // self.patch**2

    def images(self, z: Tensor, cond: Conditioning) -> list[Tensor]:
        """Return the latents in the network's sequence: ``z``, then those of the pictures to edit."""
        references = cond.tensors.get(REFERENCE_LATENTS)
        return [z, *(() if references is None else references.reshape(len(z), -1, *references.shape[-3:]).unbind(1))]

    def shift_mu(self, steps: int) -> float | None:
        """Return the logarithm of a dynamic shift; ``None`` for the usual one, linear in the number of tokens."""
        return None

    def sigmas(self, steps: int) -> Sequence[float] | None:
        """Return the unshifted sigmas that the pipeline passes to its scheduler, or ``None`` if it passes none."""
        return np.linspace(1.0, 1 / steps, steps).tolist() if self.pipeline_solver == "euler" else None

    def scheduler(self, solver: str, steps: int) -> Any:
        base, tokens = self.pipeline.scheduler, self.image_tokens()
        if self.pipeline_solver != "euler":
            if solver == self.pipeline_solver:
                scheduler = like(base, steps)
                scheduler.set_timesteps(steps)
                return scheduler
            return flow_scheduler(solver, euler_like(base), steps, tokens)
        return flow_scheduler(solver, base, steps, tokens, self.sigmas(steps), self.shift_mu(steps))

    def scheduler_lines(self, spec: RolloutSpec) -> list[str]:
        lines = super().scheduler_lines(spec)
        if lines and self.sigmas(spec.steps) is not None and spec.ode_solver(self.solvers) != "euler":
            lines += OWN_TIMESTEPS
        return lines

    def scheduler_times(self, scheduler: Any) -> Tensor:
        return (scheduler.timesteps.double() / scheduler.config.num_train_timesteps).float()


def euler_like(base: Any) -> Any:
    """Return an Euler scheduler with the shift of a multistep scheduler."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    config = base.config
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=config.num_train_timesteps, shift=config.flow_shift)


def flow_scheduler_misfit(scheduler: Any, only_euler: bool = True) -> str | None:
    """Return why a rectified flow cannot be sampled like a pipeline with this scheduler, as a phrase, or ``None``.

    Args:
        only_euler: Refuse the multistep schedulers with a fixed shift.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler

    config = scheduler.config
    odd = [name for name in ("stochastic_sampling", "invert_sigmas") if config.get(name)]
    odd += ["num_train_timesteps"] if config.num_train_timesteps != TIMESTEPS else []
    is_usual = isinstance(scheduler, FlowMatchEulerDiscreteScheduler)
    is_other = not only_euler and config.get("use_flow_sigmas") and config.get("flow_shift")
    if (is_usual or is_other) and not odd:
        return None
    return (
        f"comes with {' and '.join([type(scheduler).__name__, *odd])}: a rectified flow needs "
        f"FlowMatchEulerDiscreteScheduler with {TIMESTEPS} steps, without stochastic_sampling and invert_sigmas."
    )


def flow_scheduler(
    solver: str,
    base: Any,
    steps: int,
    image_tokens: int,
    euler_sigmas: Sequence[float] | None = None,
    mu: float | None = None,
) -> Any:
    """Return a scheduler for a rectified flow: ``euler`` (the pipeline's), ``dpm++`` (2M) or ``unipc``.

    Args:
        base: The pipeline's scheduler, whose sigma shift all solvers use.
        steps: Number of network calls.
        image_tokens: Tokens per image in the network, for a dynamic shift.
        euler_sigmas: Unshifted sigmas that the pipeline passes to its scheduler, ``(steps,)``; ``None`` for the
            scheduler's default.
        mu: Logarithm of the dynamic shift, if it depends on more than the tokens; ``None`` computes it from them.

    Raises:
        ValueError: The path has no such solver, or the solver cannot follow the pipeline's grid of times.
    """
    from diffusers import DPMSolverMultistepScheduler, UniPCMultistepScheduler

    by_tokens = dynamic_mu(base, image_tokens)
    mu = by_tokens if by_tokens is None or mu is None else mu
    if solver == "euler":
        scheduler = like(base, steps)
        given: dict[str, Any] = {} if mu is None else {"mu": mu}
        if euler_sigmas is not None:
            given["sigmas"] = list(euler_sigmas)
        scheduler.set_timesteps(steps, **given)
        return scheduler
    for name in SIGMA_KINDS:
        if base.config.get(name):
            raise ValueError(f"solver={solver!r} cannot follow {name} of the pipeline's scheduler. Use euler.")
    # Every setting that matters is given: from_config of another class silently falls back to epsilon prediction and
    # unshifted sigmas. Timesteps stay on the CPU, since some schedulers branch on them at every step.
    shared = {
        "num_train_timesteps": base.config.num_train_timesteps,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": static_shift(base, mu),
        "final_sigmas_type": "zero",
    }
    if solver == "dpm++":
        scheduler = DPMSolverMultistepScheduler(**shared, algorithm_type="dpmsolver++", solver_order=2)
    elif solver == "unipc":
        scheduler = UniPCMultistepScheduler(**shared)
    else:
        raise ValueError(f"solver={solver!r} does not exist on a rectified flow. Use {' or '.join(FLOW_SOLVERS)}.")
    scheduler.set_timesteps(steps)
    return scheduler


def like(base: Any, steps: int) -> Any:
    """Return a scheduler like the pipeline's. With one step, the stretch to its last sigma would divide 0 by 0."""
    unstretched = {"shift_terminal": None} if steps == 1 and base.config.get("shift_terminal") else {}
    return type(base).from_config(base.config, **unstretched)


def dynamic_mu(base: Any, image_tokens: int) -> float | None:
    """Return the logarithm ``mu`` of a resolution-dependent shift; ``None`` for a fixed shift.

    Linear in the number of tokens, through the two points in the scheduler's config.
    """
    config = base.config
    if not config.get("use_dynamic_shifting"):
        return None
    tokens = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    shifts = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (shifts[1] - shifts[0]) / (tokens[1] - tokens[0])
    return shifts[0] + slope * (image_tokens - tokens[0])


def static_shift(base: Any, mu: float | None) -> float:
    """Return the factor ``s`` of ``s t / (1 + (s - 1) t)`` that reproduces the scheduler's shift of the sigmas."""
    if mu is None:
        return base.config.shift
    return mu if base.config.get("time_shift_type") == "linear" else math.exp(mu)
