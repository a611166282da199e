"""A function of the user's own as a reward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.pixels import to_pil, to_uint8
from lit_vgrpo.core.ranges import checked
from lit_vgrpo.errors import nearest
from lit_vgrpo.rewards.base import Reward, RewardError
from lit_vgrpo.system.paths import import_from_here

Images = Literal["tensor", "pil", "numpy"]


@checked
class PythonReward(Reward):
    """Score from ``function(images, prompts, rows)``: one number per image, None or NaN for a failed one.

    In a recipe: ``reward: {python: my_module:my_function}``. The module may be in the current folder. A function of two
    arguments gets images and prompts; one with an argument ``references`` also gets the pictures that the prompts edit,
    in the same format as the images, or None.

    Args:
        function: ``my_module:my_function``.
        images: the format passed to the function: a float32 tensor ``(B, 3, H, W)`` in [0, 1], a list of RGB PIL
            images, or a uint8 array ``(B, H, W, 3)``.
        name: the key of its score; null for the function's own name.
        concurrent: call it in a thread while the next images are sampled.
        options: further keyword arguments.

    Raises:
        ValueError: ``function`` is not of this form, or ``images`` is unknown.
    """

    def __init__(
        self,
        function: str,
        images: Images = "tensor",
        name: str | None = None,
        concurrent: bool = False,
        options: dict[str, Any] | None = None,
    ) -> None:
        module, _, attribute = function.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
            raise ValueError(f"function={function!r} is not a function. Write my_module:my_function.")
        self.function = function
        self.images: Images = images
        self.name = name or attribute.rpartition(".")[2]
        self.concurrent = concurrent
        self.options = dict(options or {})

    def check(self) -> list[str]:
        """Report a module that cannot be imported, a missing name, or arguments the function does not accept."""
        try:
            self.load()
        except RewardError as error:
            return [str(error)]
        return []

    def load(self) -> None:
        """Import the function.

        Raises:
            RewardError: it cannot be imported, or does not accept the arguments.
        """
        self._call  # noqa: B018  the property imports

    @property
    def takes_references(self) -> bool:
        self._call  # noqa: B018  the property imports
        return self._takes_references

    def __call__(
        self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]], references: Tensor | None = None
    ) -> Tensor:
        more = {"references": self._converted(references)} if self.takes_references else {}
        returned = self._call(self._converted(images), prompts, rows, **more)
        if isinstance(returned, Tensor):
            return returned.detach().float()
        try:
            return torch.tensor([float("nan") if score is None else float(score) for score in returned])
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"{self.function} returned {type(returned).__name__}, not one number per image. "
                "Return a list, an array or a tensor of numbers."
            ) from error

    def _converted(self, images: Tensor | None) -> Any:
        if images is None or self.images == "tensor":
            return images
        if self.images == "pil":
            return to_pil(images)
        return to_uint8(images).permute(0, 2, 3, 1).contiguous().cpu().numpy()

    @cached_property
    def _call(self) -> Callable[..., Any]:
        module_name, _, attribute = self.function.partition(":")
        import_from_here()
        try:
            found: Any = import_module(module_name)
        except (Exception, SystemExit) as error:
            raise RewardError(
                f"Cannot import {module_name}: {type(error).__name__}: {error}. "
                f"Set {self.option('function')} to a function of a module in this folder or of an installed package."
            ) from error
        for part in attribute.split("."):
            if not hasattr(found, part):
                guess = nearest(part, [name for name in dir(found) if not name.startswith("_")])
                hint = f" Did you mean {guess}?" if guess else ""
                raise RewardError(
                    f"{self.option('function')}={self.function}: the module {module_name} defines no {attribute}.{hint}"
                )
            found = getattr(found, part)
        if inspect.isclass(found) and issubclass(found, Reward):
            raise RewardError(f"{self.function} is a reward itself. Write class_path: {module_name}.{attribute}.")
        if not callable(found):
            raise RewardError(f"{self.function} is a {type(found).__name__}, not a function.")
        return self._adapted(found)

    def _adapted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self._takes_references = False
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # some built-in functions have no signature
            return lambda images, prompts, rows: function(images, prompts, rows, **self.options)
        self._takes_references = "references" in signature.parameters and "references" not in self.options
        known = {**self.options, **({"references": None} if self._takes_references else {})}
        for arguments in (("images", "prompts", "rows"), ("images", "prompts")):
            try:
                signature.bind(*arguments, **known)
            except TypeError:
                continue
            count = len(arguments)
            return lambda images, prompts, rows, **more: function(
                *(images, prompts, rows)[:count], **self.options, **more
            )
        given = ", ".join(["images, prompts, rows", *self.options])
        raise RewardError(f"{self.function}{signature} cannot be called with ({given}). Change its arguments.")
