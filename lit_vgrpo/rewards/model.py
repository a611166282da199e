"""Shared code of the rewards that run a model.

Their files omit ``from __future__ import annotations``: type hints of inherited fields are evaluated in the subclasses'
files, where a name in a string may not exist.
"""

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lit_vgrpo.core.batches import BATCH_SIZE, in_batches
from lit_vgrpo.core.pixels import to_uint8
from lit_vgrpo.core.ranges import BatchSize, checked
from lit_vgrpo.rewards.base import Reward
from lit_vgrpo.rewards.weights import file_error
from lit_vgrpo.system.hub import LoadError, quiet_libraries

Dtype = Literal["float32", "bfloat16", "float16"]


@checked
@dataclass(eq=False)
class ModelReward(Reward):
    """A reward from a frozen model, loaded once; each distinct prompt of a call is encoded once, by itself.

    A subclass defines :meth:`_build`, :meth:`_score` and, if it uses the prompt, :meth:`_read`.

    Args:
        checkpoint: hub name or local path.
        batch_size: images per forward pass; smaller batches are padded, so that a score does not depend on its batch.
        dtype: of the model's weights; scores are float32.
        device: where the model runs; ``"auto"`` follows the images. With ``"cpu"`` it does not compete with the policy,
            so it may run in a thread.

    Raises:
        ValueError: an argument out of range.
    """

    package: ClassVar[str | None] = None
    """An additional package that the model needs; ``extra`` installs it."""
    extra: ClassVar[str] = ""

    checkpoint: str
    _: KW_ONLY
    batch_size: BatchSize = BATCH_SIZE
    dtype: Dtype = "float32"
    device: str = "auto"

    def __post_init__(self) -> None:
        try:
            torch.device("cpu" if self.device == "auto" else self.device)
        except RuntimeError as error:
            raise ValueError(f"device={self.device!r} is unknown. Use auto, cpu, cuda or cuda:1.") from error
        self.concurrent = self.device == "cpu"
        self._model: nn.Module | None = None

    def check(self) -> list[str]:
        """Report a missing package or file, or weights neither cached nor reachable."""
        if self.package is not None and find_spec(self.package) is None:
            return [f'{type(self).__name__} needs {self.package}. Run: pip install "lit-vgrpo[{self.extra}]"']
        errors = [file_error(getattr(self, name), file, self.option(name)) for name, file in self.weight_files]
        return [error for error in errors if error]

    def load(self) -> None:
        """Load the model; a second call does nothing.

        Raises:
            LoadError: an error of :meth:`check`, or files with the wrong content.
        """
        if self._model is not None:
            return
        for error in self.check():
            raise LoadError(error)
        with quiet_libraries():
            self._model = self._build().eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        self.load()
        assert self._model is not None
        device = device_for(images, self.device)
        self._model.to(device)
        if not prompts:
            return torch.zeros(0)
        pixels, texts = to_uint8(images).cpu(), self._texts(prompts)
        return in_batches(self._score, self.batch_size, pixels, texts).float().to(images.device)

    @abstractmethod
    def _build(self) -> nn.Module:
        """Return the model with its weights, on the CPU; may store tokenizers and the like on the reward."""

    def _score(self, images: Tensor, texts: Tensor) -> Tensor:
        """Run one forward pass; not called if a subclass overrides ``__call__``.

        Args:
            images: shape ``(b, 3, H, W)``, uint8, on the CPU, where resizing rounds as in PIL.
            texts: the prompts as returned by :meth:`_read`, first dimension b.

        Returns:
            Shape ``(b,)``.
        """
        raise NotImplementedError

    def _read(self, prompts: list[str]) -> Tensor:
        """Return the encoded prompts for a forward pass, on the model's device; empty by default."""
        return torch.zeros(len(prompts), 0)

    def _texts(self, prompts: list[str]) -> Tensor:
        distinct = list(dict.fromkeys(prompts))  # a group shares its prompt
        place = {prompt: number for number, prompt in enumerate(distinct)}
        # one at a time, as in a policy: other prompts must not change its last bits
        return torch.cat([self._read([prompt]) for prompt in distinct])[[place[prompt] for prompt in prompts]]


def unit(features: Tensor) -> Tensor:
    """Normalise embeddings to length 1, in float32."""
    return nn.functional.normalize(features.float(), dim=-1)


def device_for(images: Tensor, device: str) -> torch.device:
    """Return the device of a model; ``"auto"`` follows the images."""
    return images.device if device == "auto" else torch.device(device)


WIDTHS = (1024, 128, 64, 16, 1)


class ScoreHead(nn.Module):
    """A stack of linear layers; both originals have their activations commented out.

    Identities replace the originals' dropout so that the weights keep their numbers: ``layers.0, 2, 4, 6, 7``.

    Args:
        width: of the embedding.

    Source:
        github.com/christophschuhmann/improved-aesthetic-predictor, simple_inference.py; also used by
        github.com/THUDM/ImageReward, ImageReward.py.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        first, second, third, fourth, last = (
            nn.Linear(*widths) for widths in zip((width, *WIDTHS), WIDTHS, strict=False)
        )
        self.layers = nn.Sequential(first, nn.Identity(), second, nn.Identity(), third, nn.Identity(), fourth, last)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return scores ``(b,)`` of embeddings ``(b, width)``, float32."""
        scores: Tensor = self.layers(embeddings.float())
        return scores.squeeze(-1)
