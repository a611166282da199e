"""A user's function as a reward."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from functools import cached_property, partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from lit_vgrpo.core.pixels import to_pil, to_uint8
from lit_vgrpo.core.ranges import checked
from lit_vgrpo.errors import error_in_user_code, place_of, shortened, suggestion
from lit_vgrpo.rewards.base import Reward, RewardError, RewardOutage, described, guest
from lit_vgrpo.system.paths import import_from_here, missing_module, without_ending

FORM = "Name a function of (images, prompts) or (images, prompts, rows) that returns one number per image."
ROWS = ("rows", "metadata")
"""Names of a third argument that gets the rows also if it has a default other than None."""
Images = Literal["tensor", "pil", "numpy"]
if TYPE_CHECKING:
    RewardLike = Reward | Callable[..., Any]
    RewardsLike = RewardLike | Sequence[RewardLike]
else:
    RewardLike = RewardsLike = Reward  # the type that the parser sees: a recipe names a function under "python"


@checked
class PythonReward(Reward):
    """Score from ``function(images, prompts, rows)``: one number per image, None or NaN for a failed one.

    In a recipe: ``reward: {python: my_module:my_function}``. The module may be next to the recipe or in the current
    folder. In Python, a function is accepted wherever a reward is, and so is a network, which is put into evaluation
    mode. A function of two arguments gets images and prompts; one with an argument ``references`` also gets the
    pictures that the prompts edit, in the same format as the images, or None.

    Args:
        function: ``my_module:my_function``, or the function.
        images: The format passed to the function: a float32 tensor ``(B, 3, H, W)`` in [0, 1], a list of RGB PIL
            images, or a uint8 array ``(B, H, W, 3)``.
        name: Key of its score; null for the function's name.
        concurrent: Call it in a thread while the next images are sampled.
        videos: It scores videos: a tensor ``(B, F, 3, H, W)``, or a list or array of frames per video. Otherwise it
            scores each frame.
        differentiable: Its scores carry the gradient of the tensor ``images``, for methods that train on it.
        options: Additional keyword arguments.

    Raises:
        ValueError: ``images`` is unknown, or ``differentiable`` needs them as a tensor.
    """

    loads_nothing = True

    def __init__(
        self,
        function: str | Callable[..., Any],
        images: Images = "tensor",
        name: str | None = None,
        concurrent: bool = False,
        options: dict[str, Any] | None = None,
        differentiable: bool = False,
        videos: bool = False,
    ) -> None:
        if differentiable and images != "tensor":
            raise ValueError(f"differentiable=True needs images=tensor: images={images} carry no gradient.")
        self.function = function
        self.images: Images = images
        self.name = name or str(self).rpartition(":")[2].rpartition(".")[2]
        self.concurrent, self.differentiable, self.takes_videos = concurrent, differentiable, videos
        self.options = dict(options or {})

    def __str__(self) -> str:
        if isinstance(self.function, str):
            return self.function
        function = self.function.func if isinstance(self.function, partial) else self.function
        return str(getattr(function, "__name__", type(function).__name__)).strip("<>")  # a lambda's

    @property
    def _shown(self) -> str:
        """The function, for messages: in a recipe with its key, under ``python``."""
        if not isinstance(self.function, str):
            return str(self)
        return f"{self.option('function' if self.key is None else 'python')}={self}"

    def check(self) -> list[str]:
        """Report a module that cannot be imported, a missing name, or arguments the function does not accept."""
        try:
            self.load()
        except RewardError as error:
            return [str(error)]
        return []

    def load(self) -> None:
        """Import the function; raise RewardError if that fails, or it does not accept the arguments."""
        self._call  # noqa: B018  the property imports

    @property
    def func(self) -> Callable[..., Any]:
        """The function, imported; named as in a ``partial``."""
        return self._call[0]

    @property
    def takes_references(self) -> bool:
        return self._call[1]

    def __call__(
        self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]], references: Tensor | None = None
    ) -> Tensor:
        return self.with_gradient(images, prompts, rows, references).detach()

    def with_gradient(
        self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]], references: Tensor | None = None
    ) -> Tensor:
        function, takes_references, count = self._call
        more = {"references": self._converted(references)} if takes_references else {}
        # a copy of the prompts too: their number is that of the scores
        returned = function(*(self._converted(images), [*prompts], rows)[:count], **self.options, **more)
        self.failure = None
        if isinstance(returned, Tensor):
            return returned if returned.is_complex() else returned.float()
        return torch.tensor(self._numbers(returned, prompts), dtype=torch.float32)

    def _numbers(self, returned: Any, prompts: list[str]) -> list[float]:
        """Return one number per image; a value that is none fails its image, anything but a list ends the run."""
        is_list = isinstance(returned, Iterable) and not isinstance(returned, str | bytes | Mapping | Set)
        scores = [*returned] if is_list and getattr(returned, "ndim", True) else []
        numbers, count = [_number(score) for score in scores], len(prompts)
        if len(numbers) != count or (isinstance(returned, tuple) and None in numbers):  # such as (scores, info)
            what = "only the scores" if isinstance(returned, tuple) else "one number per image"
            wanted = f"Return {what}: a list or tensor of {count}."
            raise RewardOutage(f'{place_of(self)}Reward "{self.name}" returned {described(returned)}. {wanted}')
        if None in numbers:
            shown = described(scores[numbers.index(None)])
            raise RewardError(f"{place_of(self)}returned {shown} for an image. Return a number, or None if it failed.")
        if missing := [prompt for prompt, score in zip(prompts, scores, strict=True) if score is None]:
            self.failure = f'{place_of(self)}returned None for prompt "{shortened(missing[0])}"'
        return [number for number in numbers if number is not None]

    def _converted(self, images: Tensor | None) -> Any:
        if images is None or self.images == "tensor":
            return images
        if images.ndim == 5:  # several pictures to edit per image, or a video's frames
            return [self._converted(frames) for frames in images]
        if self.images == "pil":
            return to_pil(images)
        return to_uint8(images).permute(0, 2, 3, 1).contiguous().cpu().numpy()

    @cached_property
    def _call(self) -> tuple[Callable[..., Any], bool, int]:
        """The function, if it takes the pictures to edit, and its number of positional arguments."""
        import_from_here()
        try:
            with guest():
                function = resolve_name(self.function) if isinstance(self.function, str) else self.function
                if isinstance(function, nn.Module):  # a dropout would score at random
                    function.eval()
                signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
        except (Exception, SystemExit) as error:  # importing the user's module may raise anything
            if (missing := missing_module(error, str(self))) is not None:
                raise RewardError(f"{self._shown} cannot be imported: {missing}") from error
            reason = error_in_user_code(error) or f"{type(error).__name__}: {error}"
            raise RewardError(f"{self._shown} cannot be imported ({reason.rstrip('.')}). {self._advice()}") from error
        if inspect.iscoroutinefunction(function):
            advice = "Name one that calls it with asyncio.run, and in a notebook set concurrent=True."
            raise RewardError(f"{self._shown} is an async function. {advice}")
        if inspect.isclass(function):
            own = f"class_path: {function.__module__}.{function.__qualname__}"
            raise RewardError(f"{self._shown} is a class. {FORM} A subclass of Reward is named by {own}.")
        takes_references = "references" in signature.parameters and "references" not in self.options
        given = {**self.options, **({"references": None} if takes_references else {})}
        third = [*signature.parameters.values()][2:3]  # a default makes it an option, such as invert=False
        is_option = any(
            one.default is not one.empty and one.default is not None and one.name not in ROWS for one in third
        )
        for count in (2,) if is_option else (3, 2):
            try:
                signature.bind(*["images", "prompts", "rows"][:count], **given)
                return function, takes_references, count
            except TypeError as error:
                reason = str(error)
        taken = f"takes ({', '.join(signature.parameters)}) and cannot be called with (images, prompts)"
        raise RewardError(f"{self._shown} {taken}: {reason}. {FORM}")

    def _advice(self) -> str:
        """Return a suggestion from the functions that the module defines, or an empty text."""
        module, _, name = str(self).partition(":")
        if module.endswith(".py"):
            return f"Leave out .py: {without_ending(str(self))}"
        named = inspect.getmembers(sys.modules.get(module), inspect.isfunction)
        known = [key for key, value in named if value.__module__ == module and key[0] != "_"]
        return suggestion(name, known) if known else ""


def _number(score: Any) -> float | None:
    """Return a number, also from text or a tensor of one value; NaN for None, and ``None`` for anything else."""
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan if score is None else float(score)
    return None


def is_custom(reward: Reward) -> bool:
    """Return True for a function, or an instance of a class outside this package."""
    return isinstance(reward, PythonReward) or not type(reward).__module__.startswith("lit_vgrpo.")


def as_reward(reward: RewardLike) -> Reward:
    """Return a reward unchanged, and a function of images and prompts as a :class:`PythonReward`.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(reward, Reward):
        if not isinstance(getattr(reward, "name", None), str):
            raise TypeError(f"{type(reward).__name__} has no name. Set its attribute name, the key of its score.")
        return reward
    if isinstance(reward, type) or not callable(reward):
        given = f"the class {reward.__name__}" if isinstance(reward, type) else repr(reward)
        raise TypeError(f"{given} is not a reward. {Reward.TO_PASS}")
    made = PythonReward(reward)
    for error in made.check():
        raise TypeError(error)
    return made
