"""Shared code of the rewards that run a model.

Their files omit ``from __future__ import annotations``: type hints of inherited fields are evaluated in the subclasses'
files, where a name in a string may not exist.
"""

import warnings
from abc import abstractmethod
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lit_vgrpo.core.batches import BATCH_SIZE, in_batches
from lit_vgrpo.core.pixels import to_uint8
from lit_vgrpo.core.ranges import BatchSize, checked
from lit_vgrpo.rewards.base import Reward
from lit_vgrpo.system.hub import (
    LoadError,
    explain_unloadable,
    file_at_hand,
    headers_only,
    local_folder,
    quiet_libraries,
    source_of,
)
from lit_vgrpo.system.process import bar, is_first_process

Dtype = Literal["float32", "bfloat16", "float16"]


@checked
@dataclass(eq=False)
class ModelReward(Reward):
    """A reward from a frozen model, loaded once; each distinct prompt of a call is encoded once, separately.

    A subclass defines :meth:`_build`, :meth:`_score` and, if it uses the prompt, :meth:`_read`.

    Args:
        batch_size: Images per forward pass; smaller batches are padded, so that a score does not depend on its batch.
        dtype: Dtype of the model's weights; scores are float32.
        device: Device of the model; ``"auto"`` follows the images. With ``"cpu"`` it does not compete with the policy,
            so it may run in a thread.
    """

    weight_files: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Arguments that name weights, each with a file found there: the weights, or one file of the folder."""
    package: ClassVar[str | None] = None
    """An additional package that the model needs; ``extra`` installs it."""
    extra: ClassVar[str] = ""

    _: KW_ONLY
    batch_size: BatchSize = BATCH_SIZE
    dtype: Dtype = "float32"
    device: str = "auto"

    def __post_init__(self) -> None:
        self.concurrent = self.device == "cpu"
        self._model: Any = None
        self._has_told = self._is_checked = False

    def check(self) -> list[str]:
        """Report a missing package or file, weights neither cached nor reachable, or an unknown device.

        A first check also builds the model on the meta device, and compares it with the headers of its files.
        """
        if self.package is not None and find_spec(self.package) is None:
            return [f'{type(self).__name__} needs {self.package}. Run: pip install "lit-vgrpo[{self.extra}]"']
        try:
            torch.device("cpu" if self.device == "auto" else self.device)
        except RuntimeError as error:
            return [f"{self.option('device')}={self.device}: {error}"]
        places = [(getattr(self, name), file, self.option(name)) for name, file in self.weight_files]
        errors = [explain_unloadable(*place) for place in places if not _is_file(place[0])]
        is_ours = type(self)._build.__module__.startswith("lit_vgrpo.")  # which reads weights with our functions alone
        if not any(errors) and not self._is_checked and is_ours and self._is_at_hand():
            try:
                with headers_only(), torch.device("meta"):
                    self._build()
                self._is_checked = True
            except LoadError as error:
                return [str(error)]
        return [error for error in errors if error]

    def _is_at_hand(self) -> bool:
        """Return whether the model's files are on this machine."""
        places = ((getattr(self, name), file) for name, file in self.weight_files)
        return all(_is_file(checkpoint) or file_at_hand(checkpoint, file) for checkpoint, file in places)

    def load(self) -> None:
        """Load the model, once; raise LoadError for an error of :meth:`check`, or files with the wrong content."""
        if self._model is not None:
            return
        self._is_checked = True  # loading finds what a check finds in headers
        try:
            for error in self.check():
                raise LoadError(error)
            with quiet_libraries(), bar(f"Loading {self.name}", total=1):
                self._model = self._build().eval().requires_grad_(False)
        except BaseException:
            self._is_checked = False
            raise

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        self.load_for(images)
        if not prompts:
            return torch.zeros(0)
        texts = self._texts(prompts)
        return in_batches(self._score, self.batch_size, self.rounded(images), texts).float().to(images.device)

    def with_gradient(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        self.load_for(images)
        return self._score(images, self._texts(prompts)).float().to(images.device)

    @torch.no_grad()
    def _texts(self, prompts: list[str]) -> Tensor:
        """Return each prompt as encoded by :meth:`_read`."""
        distinct = list(dict.fromkeys(prompts))  # a group shares its prompt
        if is_first_process() and (line := self.truncation(distinct)) is not None:
            warnings.warn(line, stacklevel=3)
        place = {prompt: number for number, prompt in enumerate(distinct)}
        # one at a time, as in a policy: other prompts must not change its last bits
        return torch.cat([self._read([prompt]) for prompt in distinct])[[place[prompt] for prompt in prompts]]

    def truncated(self, prompts: list[str]) -> tuple[list[bool], int]:
        """Return which prompts are longer than the model reads, and the tokens that it reads, without its weights."""
        return [False] * len(prompts), 0

    def truncation(self, prompts: list[str]) -> str | None:
        """Return a line on the prompts that are truncated, once; None if the files are not on this machine."""
        if self._has_told or not prompts or (self._model is None and not self._is_at_hand()):
            return None
        is_long, most = [False], 0
        with quiet_libraries(), suppress(Exception):  # loading reports what is wrong with the files
            is_long, most = self.truncated(prompts)
        if not any(is_long):
            return None
        self._has_told = True
        share = f"{sum(is_long)} of {len(prompts)} prompts are longer than the {most} tokens that it reads"
        return f'Reward "{self.name}": {share}, and are truncated. First: {prompts[is_long.index(True)][:80]!r}'

    def load_for(self, images: Tensor) -> None:
        """Load the model and move it to its device, which may follow the images."""
        self.load()
        self._model.to(self._device_for(images))

    def rounded(self, images: Tensor) -> Tensor:
        """Return images as uint8 on the model's device."""
        return to_uint8(images).to(self._device_for(images))

    def _device_for(self, images: Tensor) -> torch.device | str:
        return images.device if self.device == "auto" else self.device

    @abstractmethod
    def _build(self) -> nn.Module:
        """Return the model with its weights, on the CPU; may store tokenizers and the like on the reward."""

    def _score(self, images: Tensor, texts: Tensor) -> Tensor:
        """Return scores ``(b,)`` from one forward pass; not called if a subclass overrides ``__call__``.

        Args:
            images: Shape ``(b, 3, H, W)``: uint8 on the model's device; or, if the reward is differentiable, floats in
                [0, 1] that may carry grad.
            texts: The prompts as returned by :meth:`_read`, first dimension b.
        """
        raise NotImplementedError

    def _read(self, prompts: list[str]) -> Tensor:
        """Return the encoded prompts for a forward pass, on the model's device; empty by default."""
        return torch.zeros(len(prompts), 0)


def longer_than(most: int, tokenizer: Any, prompts: list[str]) -> list[bool]:
    """Return which prompts have more tokens, by a tokenizer of transformers."""
    return [len(ids) > most for ids in tokenizer(prompts, truncation=True, max_length=most + 1)["input_ids"]]


def unit(features: Tensor) -> Tensor:
    """Normalise embeddings to length 1, in float32."""
    return nn.functional.normalize(features.float(), dim=-1)


def weights_file(checkpoint: str, filename: str) -> Path:
    """Return the file that a checkpoint names, or ``filename`` of its folder or hub repository, downloaded once."""
    folder = local_folder(checkpoint)
    if folder is not None:
        return folder if folder.is_file() else folder / filename
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(source_of(checkpoint), filename))


def _is_file(checkpoint: str) -> bool:
    path = local_folder(checkpoint)
    return path is not None and path.is_file()


class ScoreHead(nn.Module):
    """A stack of linear layers on an embedding; both originals have their activations commented out.

    Identities replace the originals' dropout so that the weights keep their numbers: ``layers.0, 2, 4, 6, 7``.

    Source:
        github.com/christophschuhmann/improved-aesthetic-predictor, simple_inference.py; also used by
        github.com/THUDM/ImageReward, ImageReward.py.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        first, second, third, *last = (nn.Linear(*widths) for widths in pairwise((width, 1024, 128, 64, 16, 1)))
        self.layers = nn.Sequential(first, nn.Identity(), second, nn.Identity(), third, nn.Identity(), *last)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return scores ``(b,)`` of embeddings ``(b, width)``, float32."""
        scores: Tensor = self.layers(embeddings.float())
        return scores.squeeze(-1)
