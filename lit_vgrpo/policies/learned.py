"""What a policy knows of a pipeline: its network's arguments, the layouts of its latents, and its rule of guidance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.linalg import vector_norm

from lit_vgrpo.core.types import SIZE_OF
from lit_vgrpo.policies.watching import NotLearned, Pass

BESIDE = "reference_latents"
"""The network's values next to the latents, in a conditioning: a picture's."""
Rule = Literal["none", "input", "linear", "norm", "clamped_norm"]
RULES: tuple[tuple[Rule, tuple[int, ...]], ...] = (
    *(("linear", ()), ("norm", (-1,)), ("norm", ())),
    *(("clamped_norm", (-1,)), ("clamped_norm", ())),
)
"""Ways to combine two passes, and the dimensions over which a length is taken; ``()`` is all."""


@dataclass
class Leaf:
    """A value in the network's arguments.

    Attributes:
        name: Where it is, such as ``added_cond_kwargs.text_embeds``.
        value: Its value in a call with one image.
        kind: ``latents``, ``time``, ``guidance``, ``row`` (of a prompt), or ``fixed``.
        dim: Its dimension of images; ``None`` if all images share it.
        is_listed: It is in a list with one entry per image.
        changes_size: Its shape, or the number that it is, differs between prompts; a tensor may be absent, which a
            conditioning has as an empty one.
        factor: A time is ``offset + factor * t``; a guidance scale likewise.
        offset: See ``factor``.
        shift: The network gets the time before the scheduler's shift by this factor.
        where: Places of a time for one image, if others have a number that is the same in each step, as the frames of a
            picture do.
    """

    name: str
    value: Any
    kind: Literal["latents", "time", "guidance", "row", "fixed"] = "fixed"
    dim: int | None = None
    is_listed: bool = False
    changes_size: bool = False
    factor: float = 1.0
    offset: float = 0.0
    shift: float = 1.0
    where: Tensor | None = None

    @property
    def is_padded(self) -> bool:
        """True if images of one pass may have tensors of different sizes, which the conditioning pads."""
        return self.is_listed and self.changes_size and isinstance(self.value, Tensor)

    @property
    def one(self) -> Tensor:
        """The value for one image, without the dimension of images."""
        return as_tensor(self.value) if self.dim is None else self.value.select(self.dim, 0)


@dataclass
class PerImage:
    """A list with one entry per image."""

    entry: Any


def before_shift(t: Any, shift: float) -> Any:
    """Return the time that a scheduler shifts to ``t``, ``shift s / (1 + (shift - 1) s)``."""
    return t if shift == 1 else t / (t + shift * (1 - t))


def as_tensor(value: Any) -> Tensor:
    """Return a tensor or a number as a tensor."""
    return value if isinstance(value, Tensor) else torch.tensor(value)


def arguments_of(one: Any, two: Any, name: str = "", is_listed: bool = False) -> Any:
    """Return a network's arguments as leaves, from a pass with one image and a pass with two.

    >>> one = {"states": torch.zeros(1, 16, 8), "mask": [torch.ones(16)], "return_dict": False}
    >>> two = {"states": torch.zeros(2, 16, 8), "mask": [torch.ones(16)] * 2, "return_dict": False}
    >>> tree = arguments_of(one, two)
    >>> tree["states"].dim, tree["mask"].entry.is_listed, tree["return_dict"].dim
    (0, True, None)

    Raises:
        NotLearned: It cannot be seen how two images are passed.
    """
    start = f"{name}." if name else ""
    if isinstance(one, dict):
        return {key: arguments_of(one[key], two[key], f"{start}{key}", is_listed) for key in one}
    if type(one) in (list, tuple):
        if len(one) == 1 and len(two) == 2:
            return PerImage(arguments_of(one[0], two[0], f"{start}0", is_listed=True))
        if len(one) != len(two):
            raise NotLearned(f"passes {name} as a list of {len(two)} for two images, and of {len(one)} for one")
        both = zip(one, two, strict=True)
        return type(one)(arguments_of(a, b, f"{start}{i}", is_listed) for i, (a, b) in enumerate(both))
    leaf = Leaf(name, one, is_listed=is_listed)
    if isinstance(one, Tensor) and one.shape != two.shape:
        doubled = [dim for dim in range(one.ndim) if one.shape[dim] != two.shape[dim]]
        leaf.dim = doubled[0]
        if len(doubled) > 1 or (one.shape[leaf.dim], two.shape[leaf.dim]) != (1, 2):
            raise NotLearned(f"passes {name} {list(two.shape)} for two images, and {list(one.shape)} for one")
    return leaf


def parts_of(tree: Any, given: Any = None) -> list[tuple[Any, Any]]:
    """Return the parts of a mapping or a sequence of leaves, each with its part of a pass's arguments."""
    if isinstance(tree, dict):
        return [(part, given.get(key) if isinstance(given, dict) else None) for key, part in tree.items()]
    return [(part, given[i] if isinstance(given, list | tuple) else None) for i, part in enumerate(tree)]


def images_in(tree: Any, given: Any) -> int:
    """Return the number of images among a pass's arguments."""
    if isinstance(tree, PerImage):
        return len(given)
    if isinstance(tree, Leaf):
        return given.shape[tree.dim] if tree.dim is not None and isinstance(given, Tensor) else 1
    return max((images_in(part, value) for part, value in parts_of(tree, given) if value is not None), default=1)


def values_at(tree: Any, given: Any = None, image: int = 0) -> Iterator[tuple[Leaf, Any]]:
    """Yield each leaf with its value for one image among a pass's arguments."""
    if isinstance(tree, Leaf):
        if tree.dim is not None and isinstance(given, Tensor):
            given = given.select(tree.dim, image if given.shape[tree.dim] > image else 0)
        yield tree, given
    elif isinstance(tree, PerImage):
        yield from values_at(tree.entry, given if given is None else given[image], image)
    else:
        for part, value in parts_of(tree, given):
            yield from values_at(part, value, image)


def named_values(tree: Any, given: Any) -> dict[str, Any]:
    """Return the values for the first image among a pass's arguments, by the leaf's name."""
    return {leaf.name: value for leaf, value in values_at(tree, given)}


def leaves(tree: Any) -> list[Leaf]:
    """Return all leaves."""
    return [leaf for leaf, _ in values_at(tree)]


def built(tree: Any, number: int, value_of: Callable[[Leaf], Any], image: int | None = None) -> Any:
    """Return the arguments of a pass.

    Args:
        number: Images of the pass.
        value_of: Returns a leaf's values for all images, ``(number, ...)``, a list of them for a leaf in a list, or a
            fixed value that is not a tensor.
        image: The image whose entry of a list this is.
    """
    if isinstance(tree, PerImage):
        return [built(tree.entry, number, value_of, i) for i in range(number)]
    if isinstance(tree, dict):
        return {key: built(part, number, value_of, image) for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(built(part, number, value_of, image) for part in tree)
    value = value_of(tree)
    if not isinstance(value, Tensor):
        return value if not isinstance(value, list) or image is None else value[image]
    if not isinstance(tree.value, Tensor):
        return type(tree.value)(value[image or 0].item())
    if image is not None:
        return value[image].contiguous()
    if tree.dim is None:  # a number for all images may differ between them where it is the time
        return value.reshape(number) if tree.kind in ("time", "guidance") and tree.value.numel() == 1 else value[0]
    return value.movedim(0, tree.dim).contiguous()  # as the pipeline's; some networks take views of it


@dataclass
class Guidance:
    """How a pipeline guides.

    Attributes:
        option: The argument of its call.
        off: The arguments without guidance.
        rule: ``none`` is known; ``input`` of the network; ``linear``; ``norm``: the guided prediction gets the length
            of the one with the prompt; ``clamped_norm``: only where it would be longer.
        factor: The pipeline's scale ``s`` gives ``u + (factor s + offset) (c - u)``.
        offset: See ``factor``.
        dims: Dimensions of the network's output over which a length is taken; ``()`` for all.
        negative_row: Number of the row without the prompt among a step's rows.
        passes: Of a step.
        needs_negative: The pipeline guides only with a negative prompt; otherwise an empty one is left out.
        reason: Why no rule is known, as a phrase.
    """

    option: str = ""
    off: dict[str, Any] = field(default_factory=dict)
    rule: Rule = "none"
    factor: float = 1.0
    offset: float = 0.0
    dims: tuple[int, ...] = ()
    negative_row: int = 0
    passes: int = 1
    needs_negative: bool = True
    reason: str = "has no guidance"

    def arguments(self, scale: float) -> dict[str, Any]:
        """Return the pipeline's arguments for a scale of the policy."""
        return {**self.off, self.option: scale if self.rule == "input" else (scale - self.offset) / self.factor}


def guided(rule: Rule, dims: tuple[int, ...], with_prompt: Tensor, without: Tensor, scale: Any) -> Tensor:
    """Return the guided prediction of two in the network's output layout ``(B, ...)``."""
    combined = without + scale * (with_prompt - without)
    if rule == "linear":
        return combined
    over = dims or tuple(range(1, combined.ndim))
    ratio = vector_norm(with_prompt, dim=over, keepdim=True) / vector_norm(combined, dim=over, keepdim=True)
    return combined * (ratio.clamp(max=1.0) if rule == "clamped_norm" else ratio)


@dataclass
class Learned:
    """What was learned of a pipeline at one size.

    Attributes:
        tree: The network's arguments.
        latent_shape: ``(C, h, w)`` of the policy's latents: as the VAE sees them, or in blocks of 2 x 2 if the VAE's
            scale differs within those; of a video ``(C, f, h, w)``.
        state_shape: Of the scheduler's latents, without the dimension of images.
        to_latents: ``(n,)``: the scheduler's latent of each of the policy's; ``None`` for one order.
        to_network: ``(N,)``: the policy's latent of each value of the network's argument, or, from ``n`` on, the value
            that the pipeline has there itself.
        to_prediction: ``(n,)``: the value of the network's output for each of the policy's latents.
        from_picture: ``(n,)``: the value of the network's argument for each policy latent that is a picture's,
            as of a video's first frame, and -1 for the others; ``None`` if none is. The prediction for it leads to the
            picture, and no other map has a value for it.
        sign: Factor of the prediction.
        output_shape: Of the network's output, without the dimension of images.
        vae_scale: The VAE's latents are ``vae_scale * latents + vae_shift``; broadcasts with ``latent_shape``.
        vae_shift: See ``vae_scale``.
        vae_shape: Of the VAE's input, without the dimension of images.
        vae_options: Other arguments of the VAE's ``decode``.
        takes_one: Images need separate passes.
        draws_state: The pipeline draws its noise in the scheduler's layout, which is another than the policy's.
        packs: The pipeline's call takes noise in the layout of the policy's latents; ``None`` while it is not known.
        example: A pass with one image.
        guidance: The rule of guidance.
        decoded_shape: Of one image that the VAE decodes; empty if unknown.
        copies: Copies of its tensors on devices.
    """

    tree: Any
    latent_shape: tuple[int, ...]
    state_shape: tuple[int, ...]
    to_latents: Tensor | None
    to_network: Tensor | None
    to_prediction: Tensor | None
    from_picture: Tensor | None
    sign: float
    output_shape: tuple[int, ...]
    vae_scale: Tensor
    vae_shift: Tensor
    vae_shape: tuple[int, ...]
    vae_options: dict[str, Any]
    takes_one: bool
    example: Pass
    draws_state: bool = False
    guidance: Guidance = field(default_factory=Guidance)
    decoded_shape: tuple[int, ...] = ()
    packs: bool | None = None
    copies: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size, taken = math.prod(self.latent_shape), self.to_network
        self.has_beside = taken is not None and bool((taken >= size).any())
        self.block = self.vae_shape[-1] // self.latent_shape[-1]
        self.is_one_frame = len(self.vae_shape) > len(self.latent_shape)
        self.from_latents = inverse(self.to_latents)
        if self.to_latents is not None and self.from_picture is not None:
            moves = (self.from_picture < 0).nonzero()[:, 0]
            self.from_latents = torch.zeros(math.prod(self.state_shape), dtype=torch.long)
            self.from_latents[self.to_latents[moves]] = moves
        self.kept_shape = self.output_shape  # of the part of the output that is the prediction
        if math.prod(self.output_shape) != size:
            self.kept_shape = (size // self.output_shape[-1], self.output_shape[-1])
        self.from_prediction = None if self.to_prediction is None else self.to_prediction.argsort()
        self.to_kept = inverse(self.from_prediction)

    def of_kind(self, kind: str) -> list[Leaf]:
        """Return the leaves of a kind."""
        return [leaf for leaf in leaves(self.tree) if leaf.kind == kind]

    def rows(self, passes: Sequence[Pass]) -> list[tuple[Pass, int]]:
        """Return the rows of passes in order: the pass, and the number of the image in it."""
        return [(seen, image) for seen in passes for image in range(images_in(self.tree, seen.inputs))]

    def conditioning(self, seen: Pass, image: int) -> dict[str, Tensor]:
        """Return an image's values in a pass that depend on its prompt and pictures, one row each.

        Raises:
            NotLearned: Something else differs from what was learned.
        """
        found = {}
        for leaf, value in values_at(self.tree, seen.inputs, image):
            known = leaf.one if isinstance(leaf.value, Tensor) else leaf.value
            if value is None and leaf.changes_size and isinstance(known, Tensor):
                value = known.new_zeros([0] * known.ndim)
            is_like = type(known) is type(value)
            if leaf.kind == "fixed" and is_like:
                is_like = torch.equal(known, value.to(known)) if isinstance(value, Tensor) else known == value
            elif leaf.kind == "row" and is_like and isinstance(value, Tensor):
                is_like = value.ndim == known.ndim and (leaf.changes_size or value.shape == known.shape)
            if not is_like:
                raise NotLearned(f"passes its network another kind of {leaf.name} for this prompt than for others")
            if leaf.kind == "row":
                found[leaf.name] = as_tensor(value).unsqueeze(0)
                if leaf.changes_size and isinstance(value, Tensor):
                    found[SIZE_OF + leaf.name] = torch.tensor([value.shape], device=value.device)
            elif leaf.kind == "latents" and self.has_beside:
                found[BESIDE] = value.unsqueeze(0)
        return found

    def alike(self, tensors: Mapping[str, Tensor], number: int) -> list[tuple[dict[str, Sequence[int]], list[int]]]:
        """Return groups of rows that one pass may have: the sizes of their values by name, and the rows."""
        changing = [leaf for leaf in self.of_kind("row") if leaf.changes_size and not leaf.is_padded]
        padded = [leaf.name for leaf in changing if isinstance(leaf.value, Tensor)]
        numbers = [leaf.name for leaf in changing if leaf.name not in padded]
        if not (changing or self.takes_one) or any(value.is_meta for value in tensors.values()):
            return [({}, list(range(number)))]
        keys = [tensors[name].reshape(number, -1) for name in (*(SIZE_OF + name for name in padded), *numbers)]
        table = torch.cat(keys, dim=1).int().tolist() if keys else [[]] * number
        groups: dict[tuple[int, ...], list[int]] = {}
        for row, key in enumerate(table):
            groups.setdefault((*key, row) if self.takes_one else tuple(key), []).append(row)
        return [
            ({name: tensors[SIZE_OF + name][rows[0]].int().tolist() for name in padded}, rows)
            for rows in groups.values()
        ]


def inverse(order: Tensor | None) -> Tensor | None:
    """Return the inverse of a permutation; ``None`` is the identity."""
    return None if order is None else order.argsort()
