"""Calls of a policy's diffusers pipeline that sample what the policy samples."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import Tensor

from lit_vgrpo.policies.base import Policy


def call_of(
    policy: Policy,
    prompts: Sequence[str],
    noise: Tensor,
    steps: int,
    guidance: float,
    pictures: Tensor | None = None,
) -> dict[str, Any]:
    """Return the arguments for a loaded policy's pipeline.

    Args:
        noise: ``z_1`` of each prompt, ``(B, C, h, w)``.
        pictures: the pictures that the prompts edit, ``(B, 3, H, W)`` in [0, 1].
    """
    pipeline = policy.pipeline
    known = inspect.signature(type(pipeline).__call__).parameters
    own = [name for name in inspect.signature(type(policy)).parameters if name in known]  # max_sequence_length
    options: dict[str, Any] = {
        **{name: getattr(policy, name) for name in own},
        "prompt": list(prompts),
        "height": noise.shape[2] * policy.pixels_per_latent,
        "width": noise.shape[3] * policy.pixels_per_latent,
        "num_inference_steps": steps,
        "latents": policy.pipeline_latents(noise.clone()),
        "output_type": "pt",
    }
    options.pop("negative_prompt", None)
    if pictures is not None:
        options |= policy.pipeline_references(pictures)
    return {**options, **policy.pipeline_guidance(guidance, len(prompts)), **policy.pipeline_options}


def scheduler_of_the_pipeline(policy: Policy, solver: str, steps: int) -> Any:
    """Return the scheduler to compare with the policy's, from the pipeline's configuration if possible.

    A flow's first solver is the pipeline's scheduler itself. ``ddim`` uses the pipeline's noise schedule with the steps
    of a rollout: "trailing", from pure noise. For other solvers, unknown to the pipeline, it is the policy's.
    """
    from diffusers import DDIMScheduler

    own, chosen = policy.pipeline.scheduler, policy.scheduler(solver, steps)
    if policy.path_kind == "flow" and type(chosen) is type(own):
        return deepcopy(own)
    if policy.path_kind == "vp" and isinstance(chosen, DDIMScheduler):
        return DDIMScheduler.from_config(
            own.config, timestep_spacing="trailing", clip_sample=False, set_alpha_to_one=True
        )
    # Not all other schedulers accept the pipeline's arguments.
    chosen.set_timesteps = lambda num_inference_steps=None, device=None, sigmas=None, mu=None: None
    return chosen


@contextmanager
def pipeline_with(policy: Policy, scheduler: Any) -> Iterator[Any]:
    """Yield a policy's pipeline with another scheduler and all parts on the network's device."""
    pipeline, own = policy.pipeline, policy.pipeline.scheduler
    try:
        pipeline.to(policy.device)
        pipeline.scheduler = scheduler
        yield pipeline
    finally:
        pipeline.scheduler = own
