"""Learning of a pipeline from watched calls with coded values.

The latents after each step and the outputs of the network are replaced by zeros, ones and the digits of an index. What
arrives at the network, the scheduler and the VAE then tells which value comes from where.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lit_vgrpo.policies.learned import (
    RULES,
    Guidance,
    Leaf,
    Learned,
    arguments_of,
    as_tensor,
    before_shift,
    guided,
    leaves,
    named_values,
    values_at,
)
from lit_vgrpo.policies.watching import GUIDER, UNGUIDED, Call, NotLearned, Pass, Stop, Watcher, rows_of

BASE = 128
"""Of the digits: numbers below it are exact in 16 bits."""
SCALES = (3.0, 5.0)
"""At which the rule of guidance is learned."""
WORDS = (
    "red",
    "blue",
    'a red circle on the left of two small green squares, above a long yellow line and a sign with the words "a cat"',
)
"""Two prompts of about one length, and a longer one with words to write."""
EDGES = ("", "a red circle and a blue square, " * 100)
"""An empty prompt, and one longer than most limits."""
GUIDER_STEPS = 50
"""Of the calls in which the rule is learned if a component has it, which may change it after a number of steps."""
SAME = 1e-4
UNUSED = ("return_dict", "generator")
"""Arguments of a VAE's ``decode`` that do not matter."""
SEED = 0
"""Seed of the noise of watched calls."""
Step = Callable[[int, Tensor], Tensor]
Predict = Callable[[Call, Pass], Any]


@dataclass
class Source:
    """Where values ``(N,)`` come from: ``scale * source[index] + offset``, only ``offset`` where ``index`` is -1."""

    index: Tensor
    scale: Tensor
    offset: Tensor

    def refuse_unless(self, scale: float, what: str) -> None:
        """Raise NotLearned unless the values are the source's times a factor."""
        comes = self.index >= 0
        if (
            not torch.allclose(self.scale[comes], torch.tensor(scale), rtol=SAME)
            or self.offset[comes].abs().max() > SAME
        ):
            raise NotLearned(f"does not pass on {what} as they are")


def codes(size: int) -> list[Tensor]:
    """Return the coded values ``(size,)``: zeros, ones, and the digits of an index."""
    digits = max(1, math.ceil(math.log(size, BASE) - 1e-9))
    index = torch.arange(size)
    return [torch.zeros(size), torch.ones(size), *((index // BASE**k % BASE).float() for k in range(digits))]


def decoded(seen: Sequence[Tensor], size: int) -> Source:
    """Return where values come from, by what arrived for each of :func:`codes`.

    Here the network gets three times four latents, in reverse order, followed by a 7 of the pipeline's own:

    >>> found = decoded([torch.cat([3 * code.flip(0), torch.tensor([7.0])]) for code in codes(4)], 4)
    >>> found.index.tolist(), found.scale.tolist(), found.offset.tolist()
    ([3, 2, 1, 0, -1], [3.0, 3.0, 3.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0, 7.0])
    """
    zeros, ones, *digits = (value.detach().flatten().double().cpu() for value in seen)
    scale = ones - zeros
    comes = scale.abs() > 1e-7 * ones.abs().max().clamp(min=1e-3)
    index = torch.zeros_like(scale)
    for k, value in enumerate(digits):
        index += ((value - zeros) / torch.where(comes, scale, torch.ones(()))).round() * BASE**k
    if not ((index >= 0) & (index < size))[comes].all():
        raise NotLearned("mixes values of the latents")
    return Source(torch.where(comes, index.long(), -1), torch.where(comes, scale, 0).float(), zeros.float())


def as_map(index: Tensor, size: int) -> Tensor | None:
    """Return an index; ``None`` if it takes everything in order."""
    return None if len(index) == size and torch.equal(index, torch.arange(size)) else index


class Learner:
    """Learns a pipeline from its calls.

    Args:
        watcher: Of the pipeline.
        arguments: Of all calls, such as its size.
        times: Returns a scheduler's times of the path, ``(S,)``.
        pictures: Returns the arguments for the pictures to edit of a number of prompts, of one shade of grey.
    """

    def __init__(
        self,
        watcher: Watcher,
        arguments: Mapping[str, Any],
        times: Callable[[Any], Tensor],
        pictures: Callable[[int, float], Mapping[str, Any]],
    ) -> None:
        self.watcher, self.arguments, self.times, self.pictures = watcher, dict(arguments), times, pictures
        self.off: dict[str, Any] = {}
        self.first: Call  # of two steps, without guidance

    def call(
        self,
        prompt: str | list[str],
        steps: int,
        predict: Predict | None = None,
        step: Step | None = None,
        decode: Callable[[Tensor], Tensor] | None = None,
        last: int | None = None,
        keeps: bool = True,
        encode: Callable[[torch.Size], Tensor] | None = None,
        **more: Any,
    ) -> Call:
        """Watch a call, see :meth:`Watcher.watch`; ``last`` is the number of passes after which it ends."""

        def ended(seen: Call, now: Pass) -> Any:
            if last is not None and len(seen.passes) >= last:
                raise Stop
            return self.output(now, None, len(seen.passes))

        given: dict[str, Any] = {"prompt": prompt, "num_inference_steps": steps, "output_type": "pt"}
        given |= {"generator": torch.Generator().manual_seed(SEED), **self.pictures(1, 0.0), **self.arguments}
        known = self.watcher.parameters
        given = {name: value for name, value in {**given, **self.off, **more}.items() if name in known}
        return self.watcher.watch(given, predict or ended, step, decode, keeps, encode)

    def output(self, now: Pass, code: Tensor | None, seed: int = 0) -> Any:
        """Return an output of a network with coded values, or random ones."""
        generator = torch.Generator().manual_seed(seed)

        def values(shape: torch.Size) -> Tensor:
            drawn = torch.randn(shape, generator=generator) if code is None else code[: shape.numel()].reshape(shape)
            return drawn.to(self.watcher.device)

        return self.watcher.output(now, values)

    def learn(self) -> Learned:
        """Return what was learned.

        Raises:
            NotLearned: Something does not fit.
        """
        self._turn_guidance_off()
        tree, takes_one = self._find_rows()
        learned = self._find_sources(tree, takes_one)
        learned.guidance = self._find_guidance(learned)
        return learned

    def _turn_guidance_off(self) -> None:
        """Find the arguments without guidance: one pass of one row per step."""
        known = self.watcher.parameters
        names = [name for name in ("true_cfg_scale", "guidance_scale") if name in known]
        guiders = UNGUIDED if GUIDER in known else ()
        for value, guider in product((1.0, 0.0), guiders or (None,)):
            self.off = {name: value if name == "guidance_scale" else 1.0 for name in names}
            self.off |= {GUIDER: guider} if guiders else {}
            try:
                self.first = seen = self.call(WORDS[0], 2)
            except Exception:  # the pipeline's code may raise anything
                if guider in guiders[:-1]:
                    continue
                raise
            if not (seen.steps and seen.passes):
                raise NotLearned("takes no step of its scheduler, or no pass of its network")
            if len(seen.passes) == len(seen.steps) and len(rows_of(self.output(seen.passes[0], None))) == 1:
                return
        raise NotLearned("cannot be called without guidance: each step has several passes or rows")

    # --- rows of prompts and pictures -------------------------------------------------------------------------------

    def _find_rows(self) -> tuple[Any, bool]:
        """Return the network's arguments as leaves, and whether images need separate passes."""
        first = self.first.passes[0].inputs
        others = [self.call(words, 2, last=1).passes[0].inputs for words in WORDS[1:]]
        for words in EDGES:
            with suppress(Exception):  # some pipelines refuse such prompts
                others.append(self.call(words, 2, last=1).passes[0].inputs)
        tree, takes_one = arguments_of(first, twice(first)), True
        for given in self._two_images():
            with suppress(NotLearned, ValueError, TypeError, RuntimeError, IndexError):
                two = self.call(given.pop("prompt"), 2, last=1, **given).passes[0]
                if len(rows_of(self.output(two, None))) == 2:
                    tree, takes_one = arguments_of(first, two.inputs), False
                    break
        known = named_values(tree, first)
        if self.pictures(1, 0.0):
            others.append(self.call(WORDS[0], 2, last=1, **self.pictures(1, 1.0)).passes[0].inputs)
        for seen in others:
            for leaf, value in values_at(tree, seen):
                mark_if_different(leaf, known[leaf.name], value)
        # all images share it, but prompts of one length differ
        takes_one |= any(
            leaf.kind == "row" and leaf.dim is None and not leaf.is_listed and not leaf.changes_size
            for leaf in leaves(tree)
        )
        return tree, takes_one

    def _two_images(self) -> list[dict[str, Any]]:
        """Return the arguments of calls that may pass the network two images at once."""
        both, option = {"prompt": [WORDS[0]] * 2, **self.pictures(2, 0.0)}, "num_images_per_prompt"
        several = len(both) == 1 and option in self.watcher.parameters
        return [both, {"prompt": WORDS[0], option: 2}] if several else [both]

    # --- latents, times and predictions -----------------------------------------------------------------------------

    def _find_sources(self, tree: Any, takes_one: bool) -> Learned:
        state, output = self.first.steps[0]["sample"], rows_of(self.output(self.first.passes[0], None))[0]
        size = state.numel()
        of_state, of_output = codes(size), codes(output.numel())
        again = max(len(of_state), len(of_output))  # the step after which ones come once more

        def predict(seen: Call, now: Pass) -> Any:  # without zeros, by whose length some pipelines divide
            return self.output(now, 1 + of_output[min(now.step, len(of_output) - 1)])

        def step(index: int, before: Tensor) -> Tensor:
            return shaped_like(before, of_state[1 if index == again else min(index, len(of_state) - 1)])

        seen = self.call(WORDS[0], again + 2, predict, step)
        if not len(seen.passes) == len(seen.steps) == again + 2:
            counts = f"{len(seen.steps)} scheduler steps and {len(seen.passes)} passes"
            raise NotLearned(f"takes {counts} in {again + 2} sampling steps")
        at = [named_values(tree, now.inputs) for now in seen.passes]
        self._find_times(tree, at, self.times(seen.scheduler).tolist(), shifts_of(seen))
        leaf, latents = self._find_latents(tree, at[1:], len(of_state), again, size)
        self.predictions = predictions = decoded(
            [taken["model_output"] for taken in seen.steps[: len(of_output)]], output.numel()
        )
        predictions.offset -= predictions.scale
        sign = predictions.scale[0].item()
        predictions.refuse_unless(sign, "the network's predictions")
        vae, vae_shape, vae_options = self._find_vae(state)
        is_pictured = bool(self.pictures(1, 0.0)) and bool((vae.index < 0).any())
        if is_pictured:
            self._find_picture(tree, leaf, vae)
        used = [source.index[source.index >= 0].unique() for source in (latents, vae)]
        for index, what in zip(used, ("its network", "its VAE"), strict=True):
            if not (torch.equal(index, used[0]) if is_pictured else len(index) == size):
                raise NotLearned(f"does not pass {what} all latents")
        is_other = len(vae.index) != size and not is_pictured
        if len(predictions.index) != size or (predictions.index < 0).any() or is_other:
            raise NotLearned("has predictions, or latents to decode, of another size than its latents")
        leaf.kind = "latents"
        shape = vae_shape
        if len(shape) == 4 and shape[1] == 1 and "num_frames" not in self.watcher.parameters:
            shape = (shape[0], *shape[2:])  # an image as a video of one frame
        # the policy's latents are in the VAE's order
        index, scale, shift = (value.reshape(shape) for value in (vae.index, vae.scale, vae.offset))
        if shape in (per_channel(scale).shape, per_channel(shift).shape):
            in_blocks = [blocks_of(value) for value in (index, scale, shift)]
            if all(per_channel(value)[0].numel() == 1 for value in in_blocks[1:]):
                index, scale, shift = in_blocks
        shape, indices = tuple(index.shape), index.flatten()
        moves = (indices >= 0).nonzero()[:, 0]
        from_latents = torch.zeros(size, dtype=torch.long)
        from_latents[indices[moves]] = moves
        own = torch.arange(len(indices), len(indices) + len(latents.index))
        to_network = torch.where(latents.index >= 0, from_latents[latents.index.clamp(min=0)], own)
        return Learned(
            tree=tree,
            latent_shape=shape,
            state_shape=tuple(state.shape[1:]),
            to_latents=as_map(indices.clamp(min=0), size),
            to_network=as_map(to_network, len(indices)),
            to_prediction=as_map(predictions.index[indices.clamp(min=0)], output.numel()),
            from_picture=torch.where(indices < 0, -1 - indices, -1) if is_pictured else None,
            sign=sign,
            output_shape=tuple(output.shape),
            vae_scale=per_channel(scale),
            vae_shift=per_channel(shift),
            vae_shape=vae_shape,
            vae_options=vae_options,
            takes_one=takes_one,
            example=self.first.passes[0],
            draws_state=not is_pictured and not torch.equal(indices, torch.arange(size)) and is_drawn_in_order(state),
        )

    def _find_times(
        self, tree: Any, at: Sequence[Mapping[str, Any]], path_times: Sequence[float], shifts: Sequence[float]
    ) -> None:
        """Mark the leaves that are a linear function of the time, or of the time before a shift."""
        for leaf, shift in product(leaves(tree), shifts):
            times = [before_shift(t, shift) for t in path_times]
            where = places_that_differ(at[0][leaf.name], at[-1][leaf.name])
            numbers = [number_of(now[leaf.name] if where is None else now[leaf.name][where]) for now in at]
            first, last = numbers[0], numbers[-1]
            if leaf.kind in ("row", "time") or first is None or last is None or first == last:
                continue
            factor = (last - first) / (times[-1] - times[0])
            rounded = float(f"{factor:.3g}")  # as the pipeline has it, up to the rounding of its times
            factor = rounded if abs(rounded - factor) < 2e-3 * abs(factor) else factor
            offset = first - factor * times[0]
            offset = float(round(offset)) if abs(offset - round(offset)) < 2e-3 * abs(factor) else offset
            error = max(abs(offset + factor * t - (n or 0.0)) for n, t in zip(numbers, times, strict=True))
            if error <= max(0.01 * abs(factor), 0.0 if as_tensor(leaf.value).is_floating_point() else 1.0):
                leaf.kind, leaf.factor, leaf.offset, leaf.shift, leaf.where = "time", factor, offset, shift, where
        if not any(leaf.kind == "time" for leaf in leaves(tree)):
            raise NotLearned("passes its network no time that is a linear function of the scheduler's")

    def _find_latents(
        self, tree: Any, at: Sequence[Mapping[str, Any]], number: int, again: int, size: int
    ) -> tuple[Leaf, Source]:
        """Return the leaf with the latents, and where its values come from, by the passes after each step."""
        found = []
        for leaf in leaves(tree):
            values = [now[leaf.name] for now in at]
            if leaf.kind == "time" or not isinstance(values[0], Tensor):
                continue
            if not all(torch.equal(value, values[0]) for value in values):
                found.append((leaf, [value.float() for value in values]))
        if len(found) != 1:
            names = " and ".join(leaf.name for leaf, _ in found) or "nothing"
            raise NotLearned(f"passes its network {names} that changes from step to step, where latents are expected")
        leaf, values = found[0]
        if not torch.allclose(values[again], values[1]):
            raise NotLearned(f"scales {leaf.name} differently at different times")
        source = decoded(values[:number], size)
        source.refuse_unless(1.0, "latents")
        return leaf, source

    def _find_vae(self, state: Tensor) -> tuple[Source, tuple[int, ...], dict[str, Any]]:
        """Return where the VAE's input comes from, its shape for one image, and the other arguments of its decode."""
        inputs, options = list[Tensor](), dict[str, Any]()
        for code in codes(state.numel()):
            step: Step = lambda _, before, code=code: shaped_like(before.float(), code)  # type: ignore[misc]  # noqa: E731
            seen = self.call(WORDS[0], 2, step=step).decoded
            if seen is None:
                raise NotLearned("does not decode its last latents with its VAE")
            inputs.append(seen[0])
            options = {name: value for name, value in seen[1].items() if name not in UNUSED}
        shape = tuple(inputs[0].shape)
        if shape[0] != 1:
            raise NotLearned(f"decodes {shape[0]} images for one")
        return decoded(inputs, state.numel()), shape[1:], options

    def _find_picture(self, tree: Any, leaf: Leaf, vae: Source) -> None:
        """Complete the source of the VAE's input where it is a picture's latents, which the network gets as well.

        There, an index of ``-1 - i`` is the network's value ``i``, and scale and offset are those of that value.
        """
        sizes, at_network, at_vae = list[int](), list[Tensor](), list[Tensor]()

        def encode(shape: torch.Size) -> Tensor:
            sizes.append(shape.numel())
            return codes(sizes[0])[len(at_vae)].reshape(shape).to(self.watcher.device)

        while not sizes or len(at_vae) < len(codes(sizes[0])):
            seen = self.call(WORDS[0], 2, encode=encode)
            if len(set(sizes)) != 1 or seen.decoded is None:
                raise NotLearned("encodes no picture of one size, but decodes more than its latents")
            at_network.append(named_values(tree, seen.passes[0].inputs)[leaf.name])
            at_vae.append(seen.decoded[0])
        network, decodes = decoded(at_network, sizes[0]), decoded(at_vae, sizes[0])
        places = torch.full((sizes[0],), -1)
        comes = network.index >= 0
        places[network.index[comes]] = comes.nonzero()[:, 0]
        still = (vae.index < 0).nonzero()[:, 0]
        place = places[decodes.index[still].clamp(min=0)]
        if (decodes.index[still] < 0).any() or (place < 0).any():
            raise NotLearned("decodes values that are neither its latents nor a picture's that its network gets")
        vae.index[still] = -1 - place
        vae.scale[still] = decodes.scale[still] / network.scale[place]
        vae.offset[still] = decodes.offset[still] - vae.scale[still] * network.offset[place]

    def packs(self, learned: Learned) -> bool:
        """Return whether the pipeline's call takes noise as the policy's latents, and packs it for its scheduler."""
        noise = torch.randn(1, *learned.latent_shape, generator=torch.Generator().manual_seed(0))
        order = learned.from_latents
        flat = noise.flatten(1)
        state = (flat if order is None else flat[:, order]).reshape(1, *learned.state_shape)
        for given in (state, noise):
            with suppress(Exception):  # the pipeline refuses another shape
                seen = self.call(WORDS[0], 2, latents=given.to(self.watcher.device))
                if torch.allclose(seen.steps[0]["sample"].float().cpu(), state, atol=1e-2):
                    return given is noise
        return False

    # --- guidance ---------------------------------------------------------------------------------------------------

    def _find_guidance(self, learned: Learned) -> Guidance:
        """Return the rule of guidance."""
        known, off = self.watcher.parameters, dict(self.off)
        more: dict[str, Any] = {"negative_prompt": WORDS[1]} if "negative_prompt" in known else {}
        for option in ("guidance_scale", "true_cfg_scale", GUIDER):
            if option not in known:
                continue
            steps = GUIDER_STEPS if option == GUIDER else 2
            calls = [self.call(WORDS[0], steps, self.guided_output, **{option: scale, **more}) for scale in SCALES]
            rows = self._rows_of_step(learned, calls[0], 0)
            if len(rows) == 2 and len(self._rows_of_step(learned, calls[0], 1)) == 2:
                rule = self._rule(learned, option, calls)
                given: dict[str, Any] = {option: SCALES[0]}
                with suppress(Exception):  # some pipelines fail without a negative prompt
                    plain = self.call(WORDS[0], 2, self.guided_output, **given)
                    alone = [values for values, _ in self._rows_of_step(learned, plain, 0)]
                    rule.needs_negative = len(alone) != 2 or starts_like(*alone)  # it may have the prompt twice
                return rule
            if len(rows) != 1:
                return Guidance(off=off, reason=f"has {len(rows)} rows in its first guided step")
            if self._has_guidance_input(learned, calls):
                return Guidance(option, off, "input", reason="")
        return Guidance(off=off)

    def guided_output(self, seen: Call, now: Pass) -> Any:
        """Return a network's output whose rows are alike, and longer for one of a step's rows in turn.

        A guided prediction is then longer than its parts in one step, and shorter in the next.
        """
        output, place = self.output(now, None), sum(images_before(seen, now))
        for row, values in enumerate(rows_of(output), start=place):
            generator = torch.Generator().manual_seed(now.step)
            base = torch.randn(values.shape, generator=generator)
            noise = torch.randn(values.shape, generator=generator.manual_seed(100 + row))
            values.copy_((1.4 if (row + now.step) % 2 else 1.0) * base + 0.1 * noise)
        now.outputs = rows_of(output)
        return output

    def _rows_of_step(self, learned: Learned, seen: Call, step: int) -> list[tuple[dict[str, Any], Tensor]]:
        """Return the prompt's values and the output of each row of a step."""
        found = []
        for now in seen.passes:
            for row, output in enumerate(now.outputs if now.step == step else []):
                values = values_at(learned.tree, now.inputs, row)
                found.append(({leaf.name: value for leaf, value in values if leaf.kind == "row"}, output))
        return found

    def _has_guidance_input(self, learned: Learned, calls: Sequence[Call]) -> bool:
        """Return whether an argument of the network is the guidance scale, and mark it."""
        values = [named_values(learned.tree, seen.passes[0].inputs) for seen in calls]
        for leaf in leaves(learned.tree):
            first, second = (number_of(at[leaf.name]) for at in values)
            if leaf.kind == "fixed" and first is not None and second is not None and first != second:
                leaf.factor = (second - first) / (SCALES[1] - SCALES[0])
                leaf.kind, leaf.offset = "guidance", first - leaf.factor * SCALES[0]
                return True
        return False

    def _rule(self, learned: Learned, option: str, calls: Sequence[Call]) -> Guidance:
        """Return the rule that gives what the scheduler got."""
        plain = named_values(learned.tree, self.first.passes[0].inputs)
        is_plain = [starts_like(values, plain) for values, _ in self._rows_of_step(learned, calls[0], 0)]
        if sum(is_plain) != 1:
            return Guidance(off=dict(self.off), reason="does not show which of its guided rows has the prompt")
        positive = is_plain.index(True)
        for rule, dims in RULES:
            found = list[float]()
            for seen, scale in zip(calls, SCALES, strict=True):
                pairs = []
                for number, taken in enumerate(seen.steps):
                    rows = self._rows_of_step(learned, seen, number)
                    c, u = (rows[row][1].double()[None] for row in (positive, 1 - positive))
                    pairs.append((c, u, taken["model_output"].double().flatten()))
                c, u, got = pairs[0]
                a, b = (self._scheduled(learned, value) for value in (c - u, u))
                fitted = ((a * (got - b)).sum() / (a * a).sum()).item()
                for k in (fitted,) if rule == "linear" else (scale, scale + 1, scale - 1):
                    guesses = [self._scheduled(learned, guided(rule, dims, c, u, k)) for c, u, _ in pairs]
                    errors = [
                        (guess - got).abs().max() / got.abs().max()
                        for guess, (*_, got) in zip(guesses, pairs, strict=True)
                    ]
                    if max(errors) < 1e-2:  # the pipeline may compute in 16 bits
                        found.append(k)
                        break
            if len(found) == len(SCALES):
                factor = round((found[1] - found[0]) / (SCALES[1] - SCALES[0]), 3)
                offset = round(found[0] - factor * SCALES[0], 2)
                passes = sum(now.step == 0 for now in calls[0].passes)
                return Guidance(option, dict(self.off), rule, factor, offset, dims, 1 - positive, passes, reason="")
        return Guidance(off=dict(self.off), reason="combines its guided passes by a rule that is not known")

    def _scheduled(self, learned: Learned, output: Tensor) -> Tensor:
        """Return what the scheduler gets of a network's output, flat."""
        return learned.sign * output.flatten()[self.predictions.index]


def shifts_of(seen: Call) -> list[float]:
    """Return the shifts between the times that a network may get and those of the path; the first is none."""
    mu = seen.schedule.get("mu")
    return [1.0] if mu is None else [1.0, math.exp(mu), mu]


def images_before(seen: Call, now: Pass) -> list[int]:
    """Return the number of rows of each earlier pass of the same step."""
    return [len(other.outputs) for other in seen.passes if other.step == now.step and other is not now]


def mark_if_different(leaf: Leaf, known: Any, value: Any) -> None:
    """Mark a leaf as a row of a prompt if its values for two prompts differ."""
    if isinstance(known, Tensor) and isinstance(value, Tensor):
        if known.shape != value.shape or not torch.equal(known, value):
            if known.is_complex():
                raise NotLearned(f"passes its network complex numbers that depend on the prompt, {leaf.name}")
            leaf.kind = "row"
            leaf.changes_size |= known.shape != value.shape
    elif isinstance(known, Tensor) and value is None:
        leaf.kind, leaf.changes_size = "row", True
    elif known is None and isinstance(value, Tensor) and value.ndim and len(value) == 1:
        leaf.value, leaf.dim, leaf.kind, leaf.changes_size = value, 0, "row", True
    elif type(known) is not type(value):
        raise NotLearned(f"passes its network {leaf.name} of {type(value).__name__} for only one of two prompts")
    elif known != value:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise NotLearned(f"passes its network {leaf.name}={value!r} for one prompt and {known!r} for another")
        leaf.kind, leaf.changes_size = "row", True


def places_that_differ(first: Any, last: Any) -> Tensor | None:
    """Return where two tensors differ; ``None`` if they do so nowhere or everywhere, or are none of one shape."""
    if not (isinstance(first, Tensor) and isinstance(last, Tensor) and first.shape == last.shape):
        return None
    where = first != last
    return where if where.any() and not where.all() else None


def number_of(value: Any) -> float | None:
    """Return the only number in a value; ``None`` if it has others, or is none."""
    if isinstance(value, bool) or not isinstance(value, Tensor | int | float):
        return None
    flat = as_tensor(value).flatten()
    return (
        float(flat[0]) if len(flat) and not flat.is_complex() and torch.equal(flat, flat[:1].expand_as(flat)) else None
    )


def is_drawn_in_order(state: Tensor) -> bool:
    """Return whether a call with seed 0 drew its first latents in their layout, up to a factor."""
    if state.is_meta:
        return False
    drawn = torch.randn(state.shape, generator=torch.Generator().manual_seed(SEED), dtype=state.dtype)
    return bool(torch.cosine_similarity(state.cpu().double().flatten(), drawn.double().flatten(), dim=0) > 0.99)


def shaped_like(latents: Tensor, values: Tensor) -> Tensor:
    """Return values in the shape and type of latents."""
    return values.reshape(latents.shape).to(latents)


def twice(value: Any) -> Any:
    """Return arguments as they would be for two images: each tensor with a first dimension of 1 twice."""
    if isinstance(value, Tensor):
        return torch.cat([value, value]) if value.ndim and len(value) == 1 else value
    return {key: twice(part) for key, part in value.items()} if isinstance(value, dict) else value


def starts_like(values: Mapping[str, Any], plain: Mapping[str, Any]) -> bool:
    """Return whether a row's values are a prompt's, perhaps padded."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            if value.ndim != plain[name].ndim:
                return False
            window = tuple(slice(0, min(sides)) for sides in zip(value.shape, plain[name].shape, strict=True))
            if not torch.equal(value[window], plain[name][window]):
                return False
    return True


def blocks_of(values: Tensor) -> Tensor:
    """Return values ``(C, h, w)`` as ``(4 C, h / 2, w / 2)``, or as they are where that is not possible."""
    if values.ndim != 3 or any(side % 2 for side in values.shape[1:]):
        return values
    split = values.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
    return split.permute(0, 2, 4, 1, 3).flatten(0, 2)


def per_channel(values: Tensor) -> Tensor:
    """Return values ``(C, ...)`` as ``(C, 1, ...)`` where those of a channel are equal."""
    first = values.flatten(1)[:, :1].reshape(len(values), *[1] * (values.ndim - 1))
    return first if torch.allclose(values, first.expand_as(values), rtol=1e-6, atol=1e-8) else values
