"""Feature networks for FID, KID and diversity, with clean-fid's preprocessing."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lit_vgrpo.core.batches import BATCH_SIZE, in_batches
from lit_vgrpo.core.pixels import strips, to_uint8
from lit_vgrpo.system.hub import (
    LoadError,
    explain_unloadable,
    file_at_hand,
    headers_only,
    load_network,
    loading,
    quiet_libraries,
    source_of,
    weight_files,
)
from lit_vgrpo.system.paths import file_sha256, resolve_path

INCEPTION = "inception"
INCEPTION_FILE = "inception-2015-12-05.pt"
INCEPTION_SIDE = 299
TORCHSCRIPT_SUFFIXES = (".pt", ".pts")
REMEDY = "Set features to a TorchScript file, or to a folder with a vision model and its processor."

Pixels = npt.NDArray[np.uint8]
"""One image, ``(H, W, 3)``."""


class FeatureNetwork(ABC):
    """A frozen network that extracts features of images; its weights are loaded on first use."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.side = INCEPTION_SIDE  # of the square that images are resized to
        self.device = torch.device("cpu")
        self._model: Any = None

    @abstractmethod
    def check(self) -> list[str]:
        """Return errors that can be found without loading weights, one line each."""

    @abstractmethod
    def _load(self) -> Any:
        """Return the model on the CPU; may set ``side``."""

    @abstractmethod
    def _forward(self, pixels: Tensor) -> Tensor:
        """Return features ``(B, D)`` of resized pixels ``(B, 3, side, side)``, float32 in [0, 255]."""

    @abstractmethod
    def _hashes(self) -> Iterable[str]:
        """Return hashes of the files that were loaded, and other texts on which the features depend."""

    @cached_property
    def name(self) -> str:
        """Label of its statistics: a hash of what is loaded."""
        self.load()
        return sha256("".join(self._hashes()).encode()).hexdigest()[:16]

    @cached_property
    def dimension(self) -> int:
        """Length ``D`` of a feature vector, measured on one black image."""
        return self.extract([np.zeros((8, 8, 3), dtype=np.uint8)]).shape[1]

    def load(self) -> None:
        """Load the weights, once; raise LoadError for an error of :meth:`check`, or files without such a network."""
        if self._model is not None:
            return
        for error in self.check():
            raise LoadError(error)
        with loading(self.source, REMEDY), quiet_libraries(), warnings.catch_warnings():
            # deprecated, but clean-fid's network is a TorchScript file
            warnings.filterwarnings("ignore", message=".*torch.jit.*", category=FutureWarning)
            model = self._load().eval().to(self.device)
        for parameter in model.parameters():  # TorchScript has no model.requires_grad_
            parameter.requires_grad_(False)
        self._model = model

    def to(self, device: torch.device | str) -> FeatureNetwork:
        self.device = torch.device(device)
        if self._model is not None:
            self._model.to(self.device)
        return self

    def __call__(self, images: Tensor) -> Tensor:
        """Return the features of images ``(B, 3, H, W)`` in [0, 1], rounded to 8 bits like a saved file.

        Of videos ``(B, F, 3, H, W)``, those of the frames side by side. They are ``(B, D)``, float32, on the network's
        device; NaN for an image that is not finite.
        """
        images = strips(images)
        features = self.extract(list(to_uint8(images).permute(0, 2, 3, 1).contiguous().cpu().numpy()))
        is_unfit = ~images.isfinite().flatten(1).all(1)
        return features.masked_fill(is_unfit[:, None].to(features.device), float("nan"))

    @torch.no_grad()
    def extract(self, pictures: Sequence[Pixels]) -> Tensor:
        """Return features ``(B, D)``, float32, of images ``(H, W, 3)`` in uint8, which may differ in size."""
        self.load()
        if not pictures:
            return torch.zeros(0, self.dimension, device=self.device)
        pixels = np.stack([clean_resize(picture, self.side) for picture in pictures])
        return in_batches(self._features, BATCH_SIZE, torch.from_numpy(pixels))  # padded, for the same bits

    def _features(self, pixels: Tensor) -> Tensor:
        # the trainer's autocast would change the statistics
        with torch.autocast(self.device.type, enabled=False):
            return self._forward(pixels.permute(0, 3, 1, 2).contiguous().to(self.device)).flatten(1).float()


class TorchScriptFeatures(FeatureNetwork):
    """A TorchScript network from ``(B, 3, 299, 299)`` in [0, 255] to ``(B, D)``."""

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.path = resolve_path(source)

    def check(self) -> list[str]:
        error = f"{self.path} does not exist. Set features to a TorchScript file, or to {INCEPTION}."
        return [] if self.path.is_file() else [error]

    def _load(self) -> Any:
        return torch.jit.load(str(self.path), map_location="cpu")

    def _forward(self, pixels: Tensor) -> Tensor:
        return self._model(pixels)

    def _hashes(self) -> list[str]:
        return [file_sha256(self.path)]


class InceptionFeatures(TorchScriptFeatures):
    """clean-fid's Inception network, on whose 2048 features FID is defined; torch.hub's cache holds its file."""

    def __init__(self) -> None:
        super().__init__(INCEPTION)
        self.path = Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION_FILE

    def check(self) -> list[str]:
        get = f"from cleanfid.downloads_helper import check_download_inception as get; get('{self.path.parent}')"
        return [] if self.path.is_file() else [f'{self.path} does not exist. Download it: python -c "{get}"']

    def _load(self) -> Any:
        from cleanfid.inception_torchscript import InceptionV3W

        return InceptionV3W(str(self.path.parent), download=False)


class TransformersFeatures(FeatureNetwork):
    """A vision model of transformers (CLIP, SigLIP, DINOv2, ...): its image embedding, or else its pooled output.

    Images are resized to a square by clean-fid's filter, without the processor's crop, and then normalised with the
    processor's mean and standard deviation.
    """

    def check(self) -> list[str]:
        error = explain_unloadable(self.source, "config.json", "features")
        if error is None and file_at_hand(self.source, "config.json"):
            try:
                with headers_only(), loading(self.source, REMEDY):
                    self._load()
            except LoadError as reason:
                error = str(reason)
        return [error] if error else []

    @property
    def is_clip(self) -> bool:
        """True if it is a CLIP model, which also embeds text."""
        from transformers import AutoConfig

        return bool(AutoConfig.from_pretrained(source_of(self.source)).model_type == "clip")

    def _load(self) -> Any:
        from transformers import AutoImageProcessor, AutoModel

        processor: Any = AutoImageProcessor.from_pretrained(source_of(self.source))
        size = processor.crop_size if getattr(processor, "do_center_crop", False) else processor.size
        self.side = int(next(size[key] for key in ("height", "shortest_edge") if size.get(key)))
        moments = (processor.image_mean, processor.image_std)
        self._mean, self._std = (torch.tensor(values, dtype=torch.float32).view(1, 3, 1, 1) for values in moments)
        return load_network(AutoModel, self.source, REMEDY, dtype=torch.float32)

    def _forward(self, pixels: Tensor) -> Tensor:
        inputs = (pixels / 255 - self._mean.to(pixels)) / self._std.to(pixels)
        output = getattr(self._model, "get_image_features", self._model)(pixel_values=inputs)
        return output if isinstance(output, Tensor) else output.pooler_output

    def _hashes(self) -> list[str]:
        config = file_at_hand(self.source, "config.json")
        assert config is not None
        files = [config, *weight_files(config.parent).get(None, ())]  # others may come later, such as a tokenizer's
        return [*map(file_sha256, files), f"{self.side} {self._mean.tolist()} {self._std.tolist()}"]


def feature_network(source: str = INCEPTION) -> FeatureNetwork:
    """Return the feature network that a recipe names, without loading it.

    It is ``inception`` (clean-fid's), a TorchScript file (``.pt``, ``.pts``), or a vision model of transformers.
    """
    if source == INCEPTION:
        return InceptionFeatures()
    is_script = Path(source).suffix.lower() in TORCHSCRIPT_SUFFIXES
    return TorchScriptFeatures(source) if is_script else TransformersFeatures(source)


def clean_resize(picture: Pixels, side: int) -> npt.NDArray[np.float32]:
    """Resize an image ``(H, W, 3)`` to ``(side, side, 3)``, float32 in [0, 255], by clean-fid's bicubic filter."""
    from cleanfid.resize import make_resizer

    resized: npt.NDArray[np.float32] = make_resizer("PIL", False, "bicubic", (side, side))(picture)
    return resized
