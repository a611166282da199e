"""One call of a diffusers pipeline, watched where it uses its network, its scheduler and its VAE.

The network and the VAE are replaced, so that a call costs no more than its text encoders. The pipeline itself is not
changed: a shallow copy is called.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lit_vgrpo.policies.acceleration import repeated_blocks
from lit_vgrpo.policies.loading import call_parameters
from lit_vgrpo.policies.meta import AutocastOnMeta
from lit_vgrpo.policies.placement import placed
from lit_vgrpo.system.hub import LoadError, quiet_libraries

GUIDER = "guider"
"""Name of the guidance scale of a pipeline that keeps it in a component, among the arguments of a watched call; without
guidance it is one of :data:`UNGUIDED`."""
UNGUIDED: tuple[dict[str, Any], ...] = ({"enabled": False}, {"enabled": True, "stop": 0.0})
"""Options of a guider without guidance. Some modular pipelines fail without embeddings of a negative prompt, which they
compute only for an enabled guider."""

PROJECTED, NEVER = "adaptive_projected_guidance_start_step", 100_000
"""Option of HunyuanImage 2.1's guider, whose rule changes at that step to one with momentum."""


class NotLearned(LoadError):
    """A pipeline does something that a learned policy cannot do; the message is a phrase that names it."""


class Stop(BaseException):
    """Ends a watched call, also where the pipeline catches exceptions to log them."""


class Decoded(NamedTuple):
    """What a VAE's ``decode`` returns, as a tuple and as an object."""

    sample: Any


class Previous(NamedTuple):
    """What a scheduler's step returns, as a tuple and as an object."""

    prev_sample: Any


@dataclass
class Pass:
    """A pass of a network.

    Attributes:
        network: Name of the network in its pipeline.
        inputs: Its arguments by name.
        step: Number of the sampling step.
        outputs: The prediction for each row, if the caller keeps it.
    """

    network: str
    inputs: dict[str, Any]
    step: int
    outputs: list[Tensor] = field(default_factory=list)


@dataclass
class Call:
    """What was seen of a call.

    Attributes:
        passes: In order.
        steps: The arguments ``model_output``, ``timestep`` and ``sample`` of each scheduler step.
        states: The latents after each step.
        schedule: The arguments of ``set_timesteps``.
        scheduler: The scheduler that the call used.
        decoded: The VAE's input, and the other arguments of its ``decode``.
        result: What the call returned; ``None`` if it was stopped.
    """

    passes: list[Pass] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    schedule: dict[str, Any] = field(default_factory=dict)
    scheduler: Any = None
    decoded: tuple[Tensor, dict[str, Any]] | None = None
    result: Any = None


class StandIn:
    """A component of a pipeline with another call, or other attributes."""

    def __init__(self, part: Any, call: Callable[..., Any] | None = None, **replaced: Any) -> None:
        vars(self).update(stands_for=part, replacement=call or part, **replaced)

    @property  # type: ignore[misc]  # pipelines ask for the class of their VAE
    def __class__(self) -> Any:
        return type(self.stands_for)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stands_for, name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.replacement(*given, **named)


class Watcher:
    """Calls a pipeline and records what it does.

    Args:
        pipeline: A loaded diffusers pipeline.
        networks: The networks to replace, by their names in the pipeline.
        device: Device of its text encoders; without weights, on the meta device, they return random values.
        scheduler: Returns a new scheduler for each call.
    """

    def __init__(
        self, pipeline: Any, networks: Mapping[str, Any], device: torch.device, scheduler: Callable[[], Any]
    ) -> None:
        self.pipeline, self.networks, self.scheduler = pipeline, networks, scheduler
        self.placed_on = device
        self.has_weights = device.type != "meta"
        self.device = device if self.has_weights else torch.device("cpu")
        self._kept: dict[str, Any] = {}  # embeddings of prompts and pictures, by the arguments
        self._shapes: dict[str, Any] = {}

        self.parameters = dict(call_parameters(pipeline))
        if guiders_at(pipeline, UNGUIDED[0]):
            self.parameters[GUIDER] = inspect.Parameter(GUIDER, inspect.Parameter.KEYWORD_ONLY)

    @torch.no_grad()
    def watch(
        self,
        arguments: Mapping[str, Any],
        predict: Callable[[Call, Pass], Any],
        step: Callable[[int, Tensor], Tensor] | None = None,
        decode: Callable[[Tensor], Tensor] | None = None,
        keeps: bool = False,
        encode: Callable[[torch.Size], Tensor] | None = None,
    ) -> Call:
        """Call the pipeline.

        Args:
            arguments: Of the call.
            predict: Returns what a network returns for the last of the passes; may raise :class:`Stop`.
            step: Returns the latents after a step, by its number and the latents before it; ``None`` lets the scheduler
                take the step.
            decode: Returns the VAE's output; ``None`` stops before decoding.
            keeps: Keep the prompts' embeddings for later calls.
            encode: Returns the latents that the VAE encodes, by their shape; ``None`` lets it encode.
        """
        seen, scheduler = Call(), self.scheduler()
        seen.scheduler = scheduler
        take, prepare = scheduler.step, scheduler.set_timesteps
        forms = {name: inspect.signature(type(network).forward) for name, network in self.networks.items()}

        @wraps(take)
        def step_taken(*given: Any, **named: Any) -> Any:
            bound = inspect.signature(take).bind(*given, **named).arguments
            if seen.passes and seen.passes[-1].step < len(seen.steps):
                raise NotLearned("takes several steps of its scheduler after one pass of its network")
            seen.steps.append({name: copied(bound[name]) for name in ("model_output", "timestep", "sample")})
            if step is None:
                after = take(*given, **{**named, "return_dict": False})[0]
            else:
                after = step(len(seen.steps) - 1, bound["sample"])
            seen.states.append(copied(after))
            return Previous(after)

        @wraps(prepare)
        def prepared(*given: Any, **named: Any) -> Any:
            seen.schedule = dict(inspect.signature(prepare).bind(*given, **named).arguments)
            seen.schedule.pop("device", None)
            return prepare(*given, **named)

        def passed(name: str) -> Callable[..., Any]:
            def forward(*given: Any, **named: Any) -> Any:
                inputs = dict(forms[name].bind(None, *given, **named).arguments)
                inputs = {**inputs, **inputs.pop("kwargs", {})}
                inputs.pop("self")
                seen.passes.append(Pass(name, tree_map(copied, inputs), len(seen.steps)))
                return predict(seen, seen.passes[-1])

            return forward

        def decoded(*given: Any, **named: Any) -> Any:
            options = dict(inspect.signature(self.pipeline.vae.decode).bind(*given, **named).arguments)
            latents = options.pop(next(iter(options)))
            seen.decoded = latents, {**options, **options.pop("kwargs", {})}
            if decode is None:
                raise Stop
            return Decoded(decode(latents))

        scheduler.step, scheduler.set_timesteps = step_taken, prepared
        twin, parts = self._twin(), dict[str, Any](scheduler=scheduler)
        parts |= {name: StandIn(network, passed(name), dtype=torch.float32) for name, network in self.networks.items()}
        arguments = dict(arguments)
        parts |= guiders_at(self.pipeline, arguments.pop(GUIDER, UNGUIDED[0]))
        vae = self.pipeline.vae
        own = wraps(vae.encode)(partial(encoded_latents if self.has_weights else random_latents, vae))
        kept = self._once("encode", own) if keeps else own
        if encode is not None:
            kept = wraps(vae.encode)(lambda *given, **named: replaced_latents(own(*given, **named), encode))
        buffers = {} if self.has_weights else with_values(vae)
        parts["vae"] = StandIn(vae, **{**buffers, "decode": decoded, "encode": kept, "device": self.device})
        if keeps and hasattr(twin, "encode_prompt"):
            parts["encode_prompt"] = self._once("encode_prompt", twin.encode_prompt)
        elif keeps:
            parts |= {name: StandIn(part, self._once(name, part)) for name, part in self._encoders(twin)}
        vars(twin).update(parts)
        try:
            frozen = [part for name, part in self.pipeline.components.items() if name not in self.networks]
            modules = [part for part in frozen if isinstance(part, nn.Module)] if self.has_weights else []
            with quiet_libraries(), placed(modules, self.device):
                seen.result = twin(**arguments)
        except Stop:
            pass
        return seen

    def _twin(self) -> Any:
        """Return a shallow copy of the pipeline whose parts are on the device, whatever their order is.

        It computes in float32, also outside its text encoders in 16 bits, so that what is seen is not rounded.
        """
        twin, kind, device = copy.copy(self.pipeline), type(self.pipeline), self.device
        twin.__class__ = type(kind.__name__, (kind,), {"_execution_device": property(lambda self: device)})
        for name, part in self.pipeline.components.items():
            if isinstance(part, nn.Module) and name not in (*self.networks, "vae"):
                call, shown = (in_own_type, {}) if self.has_weights else (random_output, {"device": device})
                vars(twin)[name] = StandIn(part, partial(call, part), dtype=torch.float32, **shown)
        return twin

    def _encoders(self, twin: Any) -> list[tuple[str, Any]]:
        """Return the networks that encode prompts and pictures, by name."""
        named = [(name, getattr(twin, name)) for name in self.pipeline.components.keys() - {*self.networks, "vae"}]
        return [(name, part) for name, part in named if isinstance(part, nn.Module)]

    def _once(self, name: str, encode: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose results for equal arguments are kept."""

        @wraps(getattr(encode, "forward", encode))
        def call(*given: Any, **named: Any) -> Any:
            leaves, form = tree_flatten((given, named))
            key = f"{name} {form} {[summary(leaf) for leaf in leaves]}"
            if key not in self._kept:
                self._kept[key] = encode(*given, **named)
            return self._kept[key]

        return call

    def output(self, seen: Pass, values: Callable[[torch.Size], Tensor]) -> Any:
        """Return an output of a network's own kind with other values.

        Args:
            values: Returns a tensor of a shape.
        """
        leaves, form = self._output_form(seen)
        return tree_unflatten([values(leaf) if isinstance(leaf, torch.Size) else leaf for leaf in leaves], form)

    def _output_form(self, seen: Pass) -> tuple[list[Any], Any]:
        """Return a network's output with shapes in the place of tensors, and its structure."""
        network = self.networks[seen.network]
        shapes = tree_map(lambda leaf: tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf, seen.inputs)
        key = f"{seen.network} {shapes}"
        if key not in self._shapes:
            tried = on_meta(network, seen.inputs)
            output = network(**tree_map(partial(floats_as, network.dtype), seen.inputs)) if tried is None else tried[1]
            leaves, form = tree_flatten(output)
            self._shapes[key] = [leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in leaves], form
        return self._shapes[key]

    def idle_weights(self, seen: Pass, prediction: Callable[[Tensor], Tensor]) -> tuple[str, ...]:
        """Return patterns of a network's weights on which no prediction depends, tried on the meta device.

        Args:
            prediction: Returns the used values of an output ``(B, ...)``.
        """
        try:
            with torch.enable_grad():
                if (tried := on_meta(self.networks[seen.network], seen.inputs)) is None:
                    return ()
                twin, output = tried
                prediction(stacked(prediction_of(output))).sum().backward()
        except Exception:  # the network's code may raise anything
            return ()
        idle = {name for name, weight in twin.named_parameters() if weight.grad is None}
        found = set()
        for name in idle:
            module = name.rpartition(".")[0]
            own = {f"{module}.{key}" for key, _ in twin.get_submodule(module).named_parameters()}
            found.add(f"{module}.*" if own <= idle else name)
        return tuple(sorted(found))


def guider_options(guider: Any, scale: float | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of a guider at a guidance scale, or those that are given.

    A rule that reads the predictions of earlier steps never starts: a policy's prediction depends on the latents alone.
    """
    never = {PROJECTED: NEVER} if PROJECTED in guider.config else {}
    return scale if isinstance(scale, Mapping) else {"enabled": True, "guidance_scale": scale, **never}


def guiders_at(pipeline: Any, scale: float | Mapping[str, Any]) -> dict[str, Any]:
    """Return the guiders among a pipeline's components, by name, see :func:`guider_options`."""
    guiders = {name: part for name, part in pipeline.components.items() if name.endswith(GUIDER) and part is not None}
    with quiet_libraries():
        return {name: part.new(**guider_options(part, scale)) for name, part in guiders.items()}


def in_own_type(module: Any, *given: Any, **named: Any) -> Any:
    """Return a module's output for floating-point inputs of any type, in float32."""
    own = next((weight.dtype for weight in module.parameters() if weight.is_floating_point()), torch.float32)
    given, named = tree_map(partial(floats_as, getattr(module, "dtype", own)), (given, named))
    return tree_map(partial(floats_as, torch.float32), module(*given, **named))


def random_output(module: nn.Module, *given: Any, **named: Any) -> Any:
    """Return random values of the shapes that a module on the meta device returns, by its integer inputs."""
    leaves = [leaf for leaf in tree_flatten((given, named))[0] if isinstance(leaf, Tensor)]
    seed = sum(int(leaf.long().sum()) for leaf in leaves if not leaf.is_floating_point())
    generator = torch.Generator().manual_seed(seed)

    def drawn(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        is_real = leaf.is_floating_point()
        return torch.randn(leaf.shape, generator=generator) if is_real else torch.zeros(leaf.shape, dtype=leaf.dtype)

    with AutocastOnMeta(masks_are_full=True):
        return tree_map(drawn, module(*tree_map(floats_to_meta, given), **tree_map(floats_to_meta, named)))


def with_values(module: nn.Module) -> dict[str, Any]:
    """Return values from 1 to 2 for a module's buffers on the meta device, as of a VAE's statistics, by attribute."""
    named = dict(module.named_buffers(recurse=False))
    values = {key: torch.linspace(1, 2, one.numel()).reshape(one.shape) for key, one in named.items()}
    buffers = {key: values[key].to(one.dtype) for key, one in named.items()}
    children = {name: (child, with_values(child)) for name, child in module.named_children()}
    return buffers | {name: StandIn(child, **values) for name, (child, values) in children.items() if values}


def encoded_latents(vae: Any, images: Tensor, **named: Any) -> Any:
    """Return what a VAE encodes, in its own type."""
    return vae.encode(images.to(vae.dtype), **named)


def random_latents(vae: Any, images: Tensor, **named: Any) -> Any:
    """Return random latents of the shape that a VAE on the meta device encodes, the same for the same images."""
    encoded = vae.encode(without_values(images.shape, images.dtype))
    generator = torch.Generator().manual_seed(0 if images.is_meta else int(1000 * images.double().sum()))
    return replaced_latents(encoded, lambda shape: torch.randn(shape, generator=generator))


def replaced_latents(encoded: Any, values: Callable[[torch.Size], Tensor]) -> Any:
    """Return what a VAE encodes with other latents, without variance, by their shape."""
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    if hasattr(encoded, "latent_dist"):
        mean = values(encoded.latent_dist.mean.shape)
        encoded.latent_dist = DiagonalGaussianDistribution(torch.cat([mean, mean], dim=1), deterministic=True)
    else:
        encoded.latent = values(encoded.latent.shape)
    return encoded


@cache
def without_values(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor on the meta device, the same in each call, so that an estimate of memory counts none."""
    return torch.empty(shape, dtype=dtype, device="meta")


def summary(leaf: Any) -> Any:
    """Return what tells an argument from others: tokens, or the sum of other tensors."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.shape, leaf.double().sum().item() if leaf.is_floating_point() else leaf.tolist()


def copied(leaf: Any) -> Any:
    """Return a copy of a tensor, which a pipeline may change in place."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def on_meta(
    network: Any, inputs: Mapping[str, Any], prepare: Callable[[Any], None] = lambda twin: None
) -> tuple[Any, Any] | None:
    """Return a network like another on the meta device, and its output; ``None`` if it reads values of the inputs.

    Masks and other integers may stay on the CPU, where some networks read them.

    Args:
        prepare: Changes the network before its pass.
    """
    with suppress(Exception), torch.device("meta"), AutocastOnMeta():
        twin = type(network).from_config(network.config).eval()
        prepare(twin)
        return twin, twin(**tree_map(floats_to_meta, inputs))
    return None


@torch.enable_grad()
def omitted_by_checkpointing(network: Any, inputs: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a network's blocks that its gradient checkpointing omits, tried on the meta device."""
    plain, recomputed = list[tuple[str, set[str]]](), list[tuple[str, set[str]]]()

    def watched(twin: Any, calls: list[tuple[str, set[str]]]) -> None:
        def note(block: nn.Module, given: Any, named: Any) -> None:
            values = inspect.signature(block.forward).bind(*given, **named).arguments
            present = {name for name, value in values.items() if isinstance(value, Tensor)}
            calls.append((type(block).__name__, present))

        calls.clear()
        if calls is recomputed:
            twin.enable_gradient_checkpointing(lambda block, *given, **named: block(*given, **named))
        for block in repeated_blocks(twin):
            block.register_forward_pre_hook(note, with_kwargs=True)

    for calls in (plain, recomputed):
        if on_meta(network, inputs, lambda twin, calls=calls: watched(twin, calls)) is None:  # type: ignore[misc]
            return []
    both = zip(plain, recomputed, strict=False)
    return sorted({f"{kind}.{name}" for (kind, before), (_, after) in both for name in before - after})


def floats_as(dtype: torch.dtype, leaf: Any) -> Any:
    """Return a floating-point tensor in another type, or anything else unchanged."""
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def floats_to_meta(leaf: Any) -> Any:
    """Return a floating-point tensor without its values, or anything else unchanged, on the CPU."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to("meta", torch.float32) if leaf.is_floating_point() else leaf.cpu()


def to_meta(leaf: Any) -> Any:
    """Return a tensor without its values, or anything else unchanged."""
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def prediction_of(output: Any) -> Any:
    """Return the prediction in a network's output: ``(B, ...)``, or a list of one tensor per row."""
    return output[0] if isinstance(output, tuple | list) else next(iter(output.values()))


def stacked(prediction: Any) -> Tensor:
    """Return a prediction ``(B, ...)``."""
    return torch.stack(list(prediction)) if isinstance(prediction, list | tuple) else prediction


def rows_of(output: Any) -> list[Tensor]:
    """Return the prediction for each row of a network's output, not as copies."""
    return list(prediction_of(output))
