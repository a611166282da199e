"""Checks that a loaded policy matches its diffusers pipeline.

Each check takes the policy, returns a short measurement, raises :class:`Broken` with what is wrong, and leaves the
policy unchanged. All assume float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from lit_vgrpo.core.noise import image_generators
from lit_vgrpo.core.sampling import sample
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.core.types import Conditioning, RolloutSpec
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.export import lora_calls
from lit_vgrpo.policies.loading import call_parameters
from lit_vgrpo.system.hub import quiet_libraries

PROMPTS = ("a red circle on the left", "a blue square", "a green triangle at the top", "dogs")
STEPS = {"flow": 3, "vp": 4}  # by the path's kind; DDIM needs a divisor of 1000
GUIDANCE = 3.0
SAME = 1e-3  # largest relative difference due to float error over a few passes
OTHER = 1e-5  # smallest relative difference due to a different input
VISIBLE = 10 * SAME  # the same for a different prompt, well above SAME so that part of an effect cannot hide in it
LONG_WALK, SAME_SHIFT = 100, 0.02  # steps, and the largest difference of the solvers' middle times

Check = Callable[[Policy], str]


class Broken(Exception):
    """A policy failed a check; the message names the difference and where to look."""


def checks_of(policy: Policy) -> Iterator[tuple[str, Check]]:
    """Yield every check with its title, the cheap and basic ones first."""
    yield "times are in (0, 1] and decrease", times_are_in_range
    yield "noise, time and prompt reach the prediction", inputs_count
    yield "prompts change the images", prompts_show
    yield "a row does not depend on its batch", rows_do_not_depend_on_the_batch
    for solver in solvers_of(policy):
        for guidance in (1.0, GUIDANCE) if policy.guidance_error() is None else (1.0,):
            shown = f"the pipeline samples the same image: {solver}, guidance {guidance:g}"
            yield shown, partial(pictures_are_the_pipelines, solver=solver, guidance=guidance)
    yield "the path agrees with the solver's last step", path_agrees_with_the_solver
    yield "gradients reach the trained weights only", gradient_reaches_what_is_trained
    yield "diffusers reads the saved weights", saved_weights_are_read_back


def solvers_of(policy: Policy) -> list[str]:
    """Return the solvers of a loaded policy, without those that its pipeline's times rule out."""
    first, *others = policy.solvers
    found = [first]
    for solver in others:
        with suppress(ValueError):
            policy.scheduler(solver, STEPS[policy.path_kind])
            found.append(solver)
    return found


def inputs(policy: Policy, size: int = 2) -> tuple[Tensor, Tensor, Conditioning]:
    """Return noise, times and prompts of a small batch."""
    noise = policy.prior(image_generators(1, 0, 0, list(range(size))))
    times = policy.path.snap(torch.linspace(0.2, 0.9, size, device=policy.device))
    return noise, times, encoded(policy, PROMPTS[:size])


def pictures_for(policy: Policy, prompts: Sequence[str], seed: int = 0) -> list[Tensor] | None:
    """Return noisy pictures for each prompt to edit, as :meth:`Policy.encode` takes them, if the family edits any."""
    blank = policy.blank_references(len(prompts))
    if blank is None:
        return None
    shape = blank[0].shape
    draws = [torch.Generator().manual_seed(seed + sum(prompt.encode())) for prompt in prompts]
    return [torch.randint(256, shape, generator=draw, dtype=torch.uint8) for draw in draws]


def encoded(policy: Policy, prompts: Sequence[str], seed: int = 0) -> Conditioning:
    """Return the embeddings of prompts, with pictures to edit if the family edits any."""
    return policy.encode(prompts, pictures_for(policy, prompts, seed))


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected value; infinity if a value is not finite.

    Raises:
        Broken: The shapes differ.
    """
    if actual.shape != expected.shape:
        raise Broken(f"the shape is {tuple(actual.shape)} and should be {tuple(expected.shape)}")
    if not (actual.isfinite().all() and expected.isfinite().all()):
        return float("inf")
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-12)).item()


def _require_same(actual: Tensor, expected: Tensor, advice: str) -> str:
    error = difference(actual, expected)
    if error > SAME:
        raise Broken(f"differs by {error:.1e} of the largest value. {advice}")
    return f"differs by {error:.0e}"


def times_are_in_range(policy: Policy) -> str:
    """Check that every solver's times are in (0, 1], decrease, and have the same shift."""
    solvers = solvers_of(policy)
    for solver in solvers:
        times = policy.scheduler_times(policy.scheduler(solver, STEPS[policy.path_kind]))
        if len(times) != STEPS[policy.path_kind]:
            raise Broken(f"{solver} calls the network {len(times)} times for {STEPS[policy.path_kind]} steps")
        if not (times.max() <= 1 and times.min() > 0 and (times.diff() < 0).all()):
            raise Broken(f"{solver} has the times {times.tolist()}: scheduler_times uses other units")
    middles = {
        solver: policy.scheduler_times(policy.scheduler(solver, LONG_WALK)).median().item() for solver in solvers
    }
    if max(middles.values()) - min(middles.values()) > SAME_SHIFT:
        said = ", ".join(f"{solver} {middle:.3f}" for solver, middle in middles.items())
        raise Broken(f"half of the steps are above {said}: the solvers shift their times differently")
    return f"{times[0]:.3f} to {times[-1]:.3f}, half above {middles[solvers[0]]:.3f}"


@torch.no_grad()
def inputs_count(policy: Policy) -> str:
    """Check that the prediction depends on noise, time, prompt, guidance scale and the picture to edit."""
    noise, t, cond = inputs(policy)
    plain = policy(noise, t, cond)
    pictures = pictures_for(policy, PROMPTS[:2])
    others = {
        "noise": policy(noise.flip(0), t, cond),
        "time": policy(noise, policy.path.snap(t / 2), cond),
        "prompt": policy(noise, t, policy.encode(PROMPTS[2:4], pictures)),
    }
    if pictures is not None:
        others["picture to edit"] = policy(noise, t, encoded(policy, PROMPTS[:2], seed=1))
    if policy.guidance_error() is None:
        others["guidance"] = policy(noise, t, cond, GUIDANCE)
    for name, other in others.items():
        if difference(other, plain) < OTHER:
            raise Broken(f"another {name} gives the same prediction: predict ignores it")
    return ", ".join(f"{name} {difference(other, plain):.0e}" for name, other in others.items())


@torch.no_grad()
def prompts_show(policy: Policy) -> str:
    """Check that prompts change the images; otherwise no check detects a wrong prompt, mask or negative prompt."""
    noise, _, _ = inputs(policy)
    drawn = [
        policy.decode(_sampled(policy, prompts, noise, edited=PROMPTS[:2])) for prompts in (PROMPTS[:2], PROMPTS[2:4])
    ]
    effect = difference(*drawn)
    if effect < VISIBLE:
        raise Broken(
            f"other prompts change the images by {effect:.0e}, below {VISIBLE:.0e}: a wrong negative prompt, mask or "
            "truncated prompt would look like float error. Try trained weights, or larger random ones where prompts "
            "enter"
        )
    return f"other prompts change them by {effect:.0e}"


def _sampled(
    policy: Policy,
    prompts: Sequence[str],
    noise: Tensor,
    solver: str = "",
    guidance: float = 1.0,
    edited: Sequence[str] | None = None,
) -> Tensor:
    """Return the latents ``(B, C, h, w)`` of a short rollout; ``edited`` are prompts whose pictures are edited."""
    spec = RolloutSpec(solver or policy.solvers[0], STEPS[policy.path_kind], guidance)
    rows = torch.arange(len(noise), device=noise.device)
    return sample(policy, policy.encode(prompts, pictures_for(policy, edited or prompts)), rows, spec, noise)[0]


@torch.no_grad()
def rows_do_not_depend_on_the_batch(policy: Policy) -> str:
    """Check that the prediction for an image is the same alone and in a batch."""
    noise, t, cond = inputs(policy, 4)
    together = policy(noise, t, cond)
    alone = [policy(noise[i : i + 1], t[i : i + 1], cond.select(torch.tensor([i]).to(noise.device))) for i in range(4)]
    return _require_same(torch.cat(alone), together, "Does the network see an attention mask, where prompts have one?")


@torch.no_grad()
def pictures_are_the_pipelines(policy: Policy, solver: str, guidance: float) -> str:
    """Check that policy and pipeline sample the same image from the same noise."""
    noise, _, _ = inputs(policy)
    drawn = policy.decode(_sampled(policy, PROMPTS[:2], noise, solver, guidance))
    pictured, parts = pictures_for(policy, PROMPTS[:2]), []
    for rows in (slice(0, 1), slice(1, 2)) if policy.pipeline_takes_one else (slice(0, 2),):
        edited = None if pictured is None else torch.stack(pictured[rows]).to(policy.device).float() / 255
        with quiet_libraries(), _pipeline_with(policy, solver, guidance) as pipeline:
            given = PROMPTS[rows], noise[rows], STEPS[policy.path_kind], guidance, edited
            parts.append(pipeline(**call_of(policy, *given))[0])
    pictures = torch.cat(parts)[..., :3, :, :]  # some pipelines add transparency
    plain = "The shift, or the units of times, latents or the prediction, differ."
    guided = "See encode_negative and pipeline_options."
    return _require_same(drawn, pictures.to(drawn), plain if guidance == 1.0 else guided)


@torch.no_grad()
def path_agrees_with_the_solver(policy: Policy) -> str:
    """Check that a first-order solver's last step gives the clean latents that the path derives from its prediction."""
    z, _, cond = inputs(policy)
    scheduler = policy.scheduler(policy.solvers[0], STEPS[policy.path_kind])
    times = policy.scheduler_times(scheduler).to(z.device)
    for timestep, t in zip(scheduler.timesteps, times, strict=True):
        before, t = z, t.expand(len(z))
        prediction = policy(before, t, cond)
        z = scheduler.step(prediction, timestep, before, return_dict=False)[0].float()
    clean = policy.path.to_x(prediction, before, t)
    return _require_same(clean, z, "build_path is the wrong path, or scheduler_times and predict are reversed.")


def gradient_reaches_what_is_trained(policy: Policy) -> str:
    """Check that gradients reach trained weights only."""
    trained = trainable_parameters(policy)
    try:
        policy(*inputs(policy)).square().mean().backward()
        reached = {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
    finally:
        policy.zero_grad(set_to_none=True)
    if reached - trained.keys():
        raise Broken(f"{len(reached - trained.keys())} frozen weights get a gradient")
    if not reached:
        raise Broken("no weight gets a gradient: does predict detach something?")
    return f"{len(reached)} of {len(trained)} trained tensors"


@torch.no_grad()
def saved_weights_are_read_back(policy: Policy) -> str:
    """Check that diffusers loads saved weights: ``load_lora_weights`` an adapter, ``from_pretrained`` a network."""
    given, trained = inputs(policy), trainable_parameters(policy)
    before, kept = policy(*given), {name: value.clone() for name, value in trained.items()}
    generator = torch.Generator().manual_seed(0)
    try:
        for strength in (0.1, 1.0, 10.0):  # a small random network barely reacts to a small change
            for name, value in trained.items():
                noise = torch.randn(value.shape, generator=generator).to(value.device)
                value.copy_(kept[name] + strength * max(0.02, kept[name].abs().mean().item()) * noise)
            expected = policy(*given)
            if difference(expected, before) >= OTHER:
                break
        else:
            raise Broken("changed weights give the same prediction")
        with TemporaryDirectory() as folder:
            with quiet_libraries():
                policy.save(folder)
            read = _with_adapter if policy.lora_rank is not None else _with_weights
            actual = read(policy, Path(folder), given)
    finally:
        for name, value in trained.items():
            value.copy_(kept[name])
    return _require_same(actual, expected, "See network_name.")


def _with_adapter(policy: Policy, folder: Path, given: tuple[Tensor, Tensor, Conditioning]) -> Tensor:
    """Return the prediction with the adapter that the pipeline loaded instead of the policy's."""
    networks = policy.networks()
    try:
        with quiet_libraries(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # peft warns of another adapter
            for method, options in lora_calls(policy.pipeline, policy.network_names):
                attrgetter(method)(policy.pipeline)(str(folder), adapter_name="read_back", **options)
        for network in networks.values():
            network.set_adapter("read_back")
        return policy(*given)
    finally:
        for network in networks.values():
            network.set_adapter("default")
            if "read_back" in network.peft_config:
                network.delete_adapters("read_back")


def _with_weights(policy: Policy, folder: Path, given: tuple[Tensor, Tensor, Conditioning]) -> Tensor:
    """Return the prediction of the network that diffusers loads from the saved folder."""
    with quiet_libraries():
        parts = [type(part).from_pretrained(folder, subfolder=name) for name, part in policy.networks().items()]
    with policy.using(policy.joined(parts).to(policy.device)):
        return policy(*given)


# --- the pipeline's call ----------------------------------------------------------------------------------------------


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
        pictures: The pictures that the prompts edit, as in ``encode_edits``.
    """
    pipeline = policy.pipeline
    known = call_parameters(pipeline)
    shared = [name for name in vars(policy) if name in known]  # max_sequence_length, which a subclass may pass on
    height, width = (side * policy.pixels_per_latent for side in noise.shape[-2:])
    options: dict[str, Any] = {
        **{name: getattr(policy, name) for name in shared},
        "prompt": prompts[0] if policy.pipeline_takes_one else list(prompts),
        **({"height": height, "width": width} if "height" in known else {}),
        "num_inference_steps": steps,
        "latents": policy.pipeline_latents(noise.clone()),
        "output_type": "pt",
    }
    options.pop("negative_prompt", None)
    if pictures is not None:
        options |= policy.pipeline_references(pictures)
    return {**options, **policy.pipeline_guidance(guidance, len(prompts)), **policy.pipeline_options}


def _scheduler_of_the_pipeline(policy: Policy, solver: str, steps: int) -> Any:
    """Return the pipeline's scheduler if it is the solver's, ``ddim`` by its configuration, else the policy's."""
    from diffusers import DDIMScheduler

    base, chosen = policy.pipeline.scheduler, policy.scheduler(solver, steps)
    if policy.path_kind == "flow" and type(chosen) is type(base):
        return deepcopy(base)
    if policy.path_kind == "vp" and isinstance(chosen, DDIMScheduler):
        trailing = {"timestep_spacing": "trailing", "clip_sample": False, "set_alpha_to_one": True}
        return DDIMScheduler.from_config(base.config, **trailing)
    # Not all other schedulers accept the pipeline's arguments.
    chosen.set_timesteps = lambda num_inference_steps=None, device=None, timesteps=None, sigmas=None, mu=None: None
    chosen.register_to_config(**{name: value for name, value in base.config.items() if name not in chosen.config})
    return chosen


@contextmanager
def _pipeline_with(policy: Policy, solver: str, guidance: float) -> Iterator[Any]:
    """Yield a policy's pipeline with a solver, its parts for a guidance scale, and all on the network's device."""
    pipeline = policy.pipeline.to(policy.device)
    scheduler = _scheduler_of_the_pipeline(policy, solver, STEPS[policy.path_kind])
    parts = {"scheduler": scheduler, **policy.pipeline_parts(guidance)}
    originals = {name: getattr(pipeline, name) for name in parts}
    for name, part in parts.items():
        setattr(pipeline, name, part)
    try:
        yield pipeline
    finally:
        for name, part in originals.items():
            setattr(pipeline, name, part)
