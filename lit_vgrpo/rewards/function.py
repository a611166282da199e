"""A user's function as a reward."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cached_property
from pkgutil import resolve_name
from typing import Any, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.pixels import to_pil, to_uint8
from lit_vgrpo.core.ranges import checked
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
        images: The format passed to the function: a float32 tensor ``(B, 3, H, W)`` in [0, 1], a list of RGB PIL
            images, or a uint8 array ``(B, H, W, 3)``.
        name: Key of its score; null for the function's name.
        concurrent: Call it in a thread while the next images are sampled.
        options: Additional keyword arguments.

    Raises:
        ValueError: ``images`` is unknown.
    """

    def __init__(
        self,
        function: str,
        images: Images = "tensor",
        name: str | None = None,
        concurrent: bool = False,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.function = function
        self.images: Images = images
        self.name = name or function.rpartition(":")[2].rpartition(".")[2]
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
            RewardError: The function cannot be imported, or does not accept the arguments.
        """
        self._call  # noqa: B018  the property imports

    @property
    def takes_references(self) -> bool:
        return self._call[1]

    def __call__(
        self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]], references: Tensor | None = None
    ) -> Tensor:
        function, takes_references, count = self._call
        more = {"references": self._converted(references)} if takes_references else {}
        returned = function(*(self._converted(images), prompts, rows)[:count], **self.options, **more)
        if isinstance(returned, Tensor):
            return returned.detach().float()
        return torch.tensor([math.nan if score is None else float(score) for score in returned])

    def _converted(self, images: Tensor | None) -> Any:
        if images is None or self.images == "tensor":
            return images
        if self.images == "pil":
            return to_pil(images)
        return to_uint8(images).permute(0, 2, 3, 1).contiguous().cpu().numpy()

    @cached_property
    def _call(self) -> tuple[Callable[..., Any], bool, int]:
        """The function, if it takes the pictures to edit, and its number of positional arguments."""
        import_from_here()
        try:
            function = resolve_name(self.function)
            signature = inspect.signature(function)
        except (Exception, SystemExit) as error:  # importing the user's module may raise anything
            key = f"{self.option('function')}={self.function}"
            raise RewardError(f"{key} cannot be imported ({type(error).__name__}: {error}).") from error
        takes_references = "references" in signature.parameters and "references" not in self.options
        given = {**self.options, **({"references": None} if takes_references else {})}
        for count in (3, 2):
            try:
                signature.bind(*["images", "prompts", "rows"][:count], **given)
                return function, takes_references, count
            except TypeError as error:
                reason = error
        raise RewardError(f"{self.function} cannot be called with (images, prompts, rows): {reason}")
