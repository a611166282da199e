"""Checks that a loaded policy does what its diffusers pipeline does.

Each check takes the policy, returns in a few words what it measured, raises :class:`Broken` with what is wrong, and
leaves the policy as it was. All assume float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from lit_vgrpo.core.rollout import Conditioning, RolloutSpec
from lit_vgrpo.core.sampling import image_generators, sample
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.errors import one_line
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.pipeline_call import call_of, pipeline_with, scheduler_of_the_pipeline
from lit_vgrpo.system.hub import quiet_libraries, source_of

PROMPTS = ("a red circle on the left", "a blue square", "a green triangle at the top", "dogs")
STEPS = 3
GUIDANCE = 3.0
SAME = 1e-3  # largest relative difference that float error makes over a few passes
OTHER = 1e-5  # least relative difference that another input makes
VISIBLE = 10 * SAME  # least that another prompt makes: a part of that must not hide in what counts as the same
LONG_WALK, SAME_SHIFT = 100, 0.02  # steps, and how far the solvers' middle times may lie apart over so many

Check = Callable[[Policy], str]


class Broken(Exception):
    """A policy failed a check; the message says how, and where to look."""


def checks_of(policy: Policy) -> Iterator[tuple[str, Check]]:
    """Yield every check after the line that it is shown by, the cheap and basic ones first."""
    yield "a prompt's embedding depends on no other prompt", prompts_are_rows
    yield "times lie in (0, 1] and fall", times_are_in_range
    yield "noise, time and prompt reach the prediction", inputs_count
    yield "prompts show in the pictures", prompts_show
    yield "a row does not depend on its batch", rows_do_not_depend_on_the_batch
    for solver in policy.solvers:
        for guidance in (1.0, GUIDANCE):
            shown = f"the pipeline draws the same picture: {solver}, guidance {guidance:g}"
            yield shown, partial(pictures_are_the_pipelines, solver=solver, guidance=guidance)
    yield "the path agrees with the solver's last step", path_agrees_with_the_solver
    yield "latents and pictures have their sizes", sizes_agree
    yield "the gradient reaches what is trained, and nothing else", gradient_reaches_what_is_trained
    yield "what was trained is saved so that diffusers reads it", saved_weights_are_read_back


def inputs(policy: Policy, size: int = 2) -> tuple[Tensor, Tensor, Conditioning]:
    """Return noise, times and prompts of a small batch."""
    noise = policy.prior(image_generators(1, 0, 0, list(range(size))))
    times = policy.path.snap(torch.linspace(0.2, 0.9, size, device=policy.device))
    return noise, times, policy.encode(PROMPTS[:size])


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected value; infinity where a value is not finite.

    Raises:
        Broken: the shapes differ.
    """
    if found.shape != expected.shape:
        raise Broken(f"the shape is {tuple(found.shape)} and should be {tuple(expected.shape)}")
    if not (found.isfinite().all() and expected.isfinite().all()):
        return float("inf")
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12)).item()


def _require_same(found: Tensor, expected: Tensor, advice: str) -> str:
    error = difference(found, expected)
    if not error <= SAME:
        raise Broken(f"differs by {error:.1e} of the largest value. {advice}")
    return f"differs by {error:.0e}"


@torch.no_grad()
def prompts_are_rows(policy: Policy) -> str:
    """Check that each prompt's embedding is a row of its own, the same alone and beside others."""
    with quiet_libraries():
        together = policy.encode_prompts(list(PROMPTS))
        alone = [policy.encode_prompts([prompt]) for prompt in PROMPTS]
    worst = 0.0
    for name, value in together.items():
        if len(value) != len(PROMPTS):
            raise Broken(f"encode_prompts gives {name!r} {len(value)} rows for {len(PROMPTS)} prompts")
        for row, one in zip(value, alone, strict=True):
            if one[name].shape[1:] != row.shape:
                raise Broken(f"{name!r} has another shape for another prompt: pad every prompt to one length")
            worst = max(worst, difference(one[name].float(), row[None].float()))
    if worst > SAME:
        raise Broken(f"an embedding changes by {worst:.1e} with the prompts beside it")
    return ", ".join(f"{name} {tuple(value.shape[1:])}" for name, value in together.items())


def times_are_in_range(policy: Policy) -> str:
    """Check that every solver's times lie in (0, 1], fall, and are shifted alike."""
    for solver in policy.solvers:
        times = policy.scheduler_times(policy.scheduler(solver, STEPS))
        if len(times) != STEPS:
            raise Broken(f"{solver} calls the network {len(times)} times for {STEPS} steps")
        if not (times.max() <= 1 and times.min() > 0 and (times.diff() < 0).all()):
            raise Broken(f"{solver} has the times {times.tolist()}: scheduler_times is in other units")
    middles = {
        solver: policy.scheduler_times(policy.scheduler(solver, LONG_WALK)).median().item() for solver in policy.solvers
    }
    if max(middles.values()) - min(middles.values()) > SAME_SHIFT:
        said = ", ".join(f"{solver} {middle:.3f}" for solver, middle in middles.items())
        raise Broken(f"half of the steps lie above {said}: the solvers shift their times differently")
    return f"{times[0]:.3f} to {times[-1]:.3f}, half above {middles[policy.solvers[0]]:.3f}"


@torch.no_grad()
def inputs_count(policy: Policy) -> str:
    """Check that another noise, time, prompt or guidance scale gives another prediction."""
    noise, t, cond = inputs(policy)
    plain = policy(noise, t, cond)
    if plain.shape != noise.shape or plain.dtype != torch.float32:
        raise Broken(f"predict gives {tuple(plain.shape)} for latents {tuple(noise.shape)}")
    others = {
        "noise": policy(noise.flip(0), t, cond),
        "time": policy(noise, policy.path.snap(t / 2), cond),
        "prompt": policy(noise, t, policy.encode(PROMPTS[2:4])),
        "guidance": policy(noise, t, cond, GUIDANCE),
    }
    for name, other in others.items():
        if difference(other, plain) < OTHER:
            raise Broken(f"another {name} gives the same prediction: predict drops it")
    return ", ".join(f"{name} {difference(other, plain):.0e}" for name, other in others.items())


@torch.no_grad()
def prompts_show(policy: Policy) -> str:
    """Check that prompts change the images: else no other check finds a wrong prompt, mask or negative prompt."""
    noise, _, _ = inputs(policy)
    drawn = [policy.decode(_sampled(policy, prompts, noise)) for prompts in (PROMPTS[:2], PROMPTS[2:4])]
    effect = difference(*drawn)
    if effect < VISIBLE:
        raise Broken(
            f"other prompts change the pictures by {effect:.0e}, below {VISIBLE:.0e}: a wrong negative prompt, mask "
            "or cut prompt would pass for float error. Try trained weights, or larger random ones where prompts enter"
        )
    return f"other prompts change them by {effect:.0e}"


def _sampled(policy: Policy, prompts: Sequence[str], noise: Tensor, solver: str = "", guidance: float = 1.0) -> Tensor:
    """Return the latents ``(B, C, h, w)`` of a short rollout; the first solver by default."""
    spec = RolloutSpec(solver or policy.solvers[0], STEPS, guidance)
    rows = torch.arange(len(noise), device=noise.device)
    return sample(policy, policy.encode(prompts), rows, spec, noise)[0]


@torch.no_grad()
def rows_do_not_depend_on_the_batch(policy: Policy) -> str:
    """Check that the network predicts the same for an image alone and in a batch."""
    noise, t, cond = inputs(policy, 4)
    together = policy(noise, t, cond)
    alone = [policy(noise[i : i + 1], t[i : i + 1], cond.select(torch.tensor([i]).to(noise.device))) for i in range(4)]
    return _require_same(torch.cat(alone), together, "Does the network see an attention mask, where prompts have one?")


@torch.no_grad()
def pictures_are_the_pipelines(policy: Policy, solver: str, guidance: float) -> str:
    """Check that the policy draws what its pipeline's own call draws from the same noise."""
    noise, _, _ = inputs(policy)
    drawn = policy.decode(_sampled(policy, PROMPTS[:2], noise, solver, guidance))
    with quiet_libraries(), pipeline_with(policy, scheduler_of_the_pipeline(policy, solver, STEPS)) as pipeline:
        pictures = pipeline(**call_of(policy, PROMPTS[:2], noise, STEPS, guidance)).images
    plain = "The shift, or the units of times, latents or the prediction, are others."
    guided = "See encode_negative and pipeline_options."
    return _require_same(drawn, pictures.to(drawn), plain if guidance == 1.0 else guided)


@torch.no_grad()
def path_agrees_with_the_solver(policy: Policy) -> str:
    """Check that a first-order solver's last step reaches the clean latents that the path finds in its prediction."""
    z, _, cond = inputs(policy)
    scheduler = policy.scheduler(policy.solvers[0], STEPS)
    times = policy.scheduler_times(scheduler).to(z.device)
    for timestep, t in zip(scheduler.timesteps, times, strict=True):
        before, t = z, t.expand(len(z))
        prediction = policy(before, t, cond)
        z = scheduler.step(prediction, timestep, before, return_dict=False)[0].float()
    clean = policy.path.to_x(prediction, before, t)
    return _require_same(clean, z, "build_path is another path, or scheduler_times and predict run the other way.")


@torch.no_grad()
def sizes_agree(policy: Policy) -> str:
    """Check that a decoded image, encoded again, has the size of the policy's latents."""
    noise, _, _ = inputs(policy)
    pictures = policy.decode(noise)
    latents = policy.encode_images(pictures)
    if latents.shape != noise.shape:
        raise Broken(f"a picture of {tuple(pictures.shape[2:])} has latents {tuple(latents.shape)}")
    return f"{tuple(noise.shape[1:])}, {tuple(pictures.shape[1:])}"


def gradient_reaches_what_is_trained(policy: Policy) -> str:
    """Check that gradients reach trained weights alone, and that these are float32."""
    trained = trainable_parameters(policy)
    if any(parameter.dtype != torch.float32 for parameter in trained.values()):
        raise Broken("trained weights must stay float32")
    noise, t, cond = inputs(policy)
    try:
        policy(noise, t, cond).square().mean().backward()
        reached = {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
        outside = [p for helper in policy.helpers() for p in helper.parameters() if p.grad is not None]
    finally:
        policy.zero_grad(set_to_none=True)
    if reached - trained.keys() or outside:
        raise Broken(f"{len(reached - trained.keys()) + len(outside)} frozen weights get a gradient")
    if not reached:
        raise Broken("no weight gets a gradient: does predict detach something?")
    if any(module.training for module in policy.train().modules()):
        raise Broken("train() must leave the network in eval mode")
    return f"{len(reached)} of {len(trained)} trained tensors"


@torch.no_grad()
def saved_weights_are_read_back(policy: Policy) -> str:
    """Check that diffusers reads saved weights: ``load_lora_weights`` an adapter, ``from_pretrained`` whole weights."""
    given, trained = inputs(policy), trainable_parameters(policy)
    before, kept = policy(*given), {name: value.clone() for name, value in trained.items()}
    generator = torch.Generator().manual_seed(0)
    try:
        for strength in (0.1, 1.0, 10.0):  # a small random network hardly hears a small change
            for name, value in trained.items():
                noise = torch.randn(value.shape, generator=generator).to(value.device)
                value.copy_(kept[name] + strength * max(0.02, kept[name].abs().mean().item()) * noise)
            expected = policy(*given)
            if difference(expected, before) >= OTHER:
                break
        else:
            raise Broken("other weights give the same prediction")
        with TemporaryDirectory() as folder:
            with quiet_libraries():
                policy.save(folder)
            read = _with_adapter if policy.lora_rank is not None else _with_weights
            found = read(policy, Path(folder), given)
    finally:
        for name, value in trained.items():
            value.copy_(kept[name])
    return _require_same(found, expected, "See lora_names.")


def _with_adapter(policy: Policy, folder: Path, given: tuple[Tensor, Tensor, Conditioning]) -> Tensor:
    """Return the prediction with the adapter as the pipeline reads it, in place of the policy's own."""
    network = policy.network
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # peft's, of a second adapter
        try:
            with quiet_libraries():
                policy.pipeline.load_lora_weights(str(folder), adapter_name="read_back")
            network.set_adapter("read_back")
            return policy(*given)
        except (AttributeError, ValueError, KeyError, RuntimeError) as error:
            raise Broken(f"load_lora_weights cannot read it: {one_line(error)[:200]}") from error
        finally:
            if "read_back" in network.peft_config:
                network.delete_adapters("read_back")
            network.set_adapter("default")


def _with_weights(policy: Policy, folder: Path, given: tuple[Tensor, Tensor, Conditioning]) -> Tensor:
    """Return the prediction of the network that diffusers reads from the saved folder."""
    kind = type(policy.network)
    with quiet_libraries():
        saved = kind.from_pretrained(source_of(str(folder)), subfolder=policy.network_name).to(policy.device)
    with policy.using(saved):
        return policy(*given)
