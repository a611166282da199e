"""Feature statistics of the reference images, from a folder or an ``.npz`` file."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lit_vgrpo.core.gather import objects_of_all_ranks, raise_together, rank_and_world_size
from lit_vgrpo.core.pictures import PROGRAM_FORMAT
from lit_vgrpo.metrics.features import FeatureNetwork, InceptionFeatures, Pixels
from lit_vgrpo.metrics.fid import FrechetDistance
from lit_vgrpo.metrics.kid import KeptFeatures
from lit_vgrpo.system.paths import resolve_path

IMAGE_SUFFIXES = frozenset({".bmp", ".jpg", ".jpeg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
MOST_EXPANSION = 20
"""Largest ratio of unpacked to packed size of an ``.npz`` file; statistics are noise, which hardly compresses."""
STATISTICS_SUFFIX = ".npz"
_OURS = ("mean", "cov", "count", "network", "images_sha256", "sha256")
_CLEAN_FID = ("mu", "sigma")


@dataclass(frozen=True)
class Reference:
    """Statistics of the reference images.

    Attributes:
        mean: shape ``(D,)``, float64.
        cov: shape ``(D, D)``, float64.
        count: number of images; ``None`` for clean-fid's files, which do not record it.
        network: name of the feature network.
        images_sha256: hash of the images' names and contents; empty if unknown.
        features: shape ``(count, D)``, float32, sorted by image name; for KID, otherwise ``None``.
    """

    mean: Tensor
    cov: Tensor
    count: int | None
    network: str
    images_sha256: str = ""
    features: Tensor | None = None

    def save(self, path: str | Path) -> None:
        """Write an ``.npz`` file atomically."""
        arrays = {
            "mean": self.mean.numpy(),
            "cov": self.cov.numpy(),
            "count": np.array(-1 if self.count is None else self.count),
            "network": np.array(self.network),
            "images_sha256": np.array(self.images_sha256),
        }
        if self.features is not None:
            arrays["features"] = self.features.numpy()
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with draft.open("wb") as stream:
                np.savez(stream, allow_pickle=False, sha256=np.array(_digest(arrays)), **arrays)
            os.replace(draft, target)
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path, network: FeatureNetwork) -> Reference:
        """Read a file written by :meth:`save`, or one of clean-fid's for its Inception network.

        Raises:
            ValueError: the file has no statistics, was changed, or was made with another feature network.
        """
        arrays = _arrays(Path(path))
        if not set(_OURS) <= set(arrays):
            if not isinstance(network, InceptionFeatures):
                raise ValueError(
                    f"{path} has clean-fid's statistics, which belong to its Inception network. "
                    "Use features=inception, or a folder of images instead."
                )
            return cls(torch.from_numpy(arrays["mu"]).double(), torch.from_numpy(arrays["sigma"]).double(), None, "")
        recorded = str(arrays.pop("sha256"))
        if _digest(arrays) != recorded:
            raise ValueError(f"{path} does not match its own hash {recorded[:16]}: it was changed. Create it again.")
        made_with = str(arrays["network"])
        if not network.has_made(made_with):
            raise ValueError(
                f"{path} was made with the feature network {made_with}, not with {network.name}. "
                "Set features to that network, or create the file again."
            )
        count = int(arrays["count"])
        return cls(
            mean=torch.from_numpy(arrays["mean"]),
            cov=torch.from_numpy(arrays["cov"]),
            count=None if count < 0 else count,
            network=made_with,
            images_sha256=str(arrays["images_sha256"]),
            features=torch.from_numpy(arrays["features"]) if "features" in arrays else None,
        )


def reference_errors(source: str | Path) -> list[str]:
    """Return errors in a reference that can be found without a feature network, one line each."""
    try:
        path = resolve_path(source)
        if path.suffix.lower() == STATISTICS_SUFFIX:
            _arrays(path)
        else:
            image_files(path)
    except ValueError as error:
        return [str(error)]
    return []


def reference_statistics(source: str | Path, network: FeatureNetwork, keep_features: bool = False) -> Reference:
    """Return the statistics of a folder of images, computed by all ranks together, or of an ``.npz`` file.

    Every rank must call it; an error on one rank is raised on all of them.

    Args:
        source: the folder, searched recursively, or the file.
        network: the feature network.
        keep_features: also keep every image's features, for KID.

    Raises:
        ValueError: an error of :func:`reference_errors`, an unreadable image, or a file that does not fit the network.
        LoadError: the network cannot be loaded.
    """
    path = resolve_path(source)
    local: Reference | _Share | None = None
    error: Exception | None = None
    try:
        if path.suffix.lower() == STATISTICS_SUFFIX:
            local = _from_file(path, network, keep_features)
        else:
            local = _Share(path, network, keep_features)
    except (ValueError, RuntimeError, OSError) as failure:
        error = failure
    raise_together(error)
    assert local is not None
    return local if isinstance(local, Reference) else local.reference()


class _Share:
    """One rank's images of a folder: every ``world_size``-th, by name."""

    def __init__(self, folder: Path, network: FeatureNetwork, keep_features: bool) -> None:
        rank, world_size = rank_and_world_size()
        files = image_files(folder)
        self.names = [file.relative_to(folder).as_posix() for file in files]
        self.network = network
        self.sums = FrechetDistance(network.dimension)
        self.kept = KeptFeatures(network.dimension) if keep_features else None
        self.hashes: dict[int, str] = {}
        numbers = list(range(rank, len(files), world_size))
        for start in range(0, len(numbers), network.batch_size):
            batch = numbers[start : start + network.batch_size]
            pictures, hashes = zip(*(_read(files[number]) for number in batch), strict=True)
            self.hashes |= dict(zip(batch, hashes, strict=True))
            features = network.of_pixels(pictures)
            self.sums.update(features, real=True)
            if self.kept is not None:
                self.kept.add(features, batch)

    def reference(self) -> Reference:
        """Return the statistics of all ranks' images."""
        self.sums.add_up_ranks()
        hashes = {number: sha for share in objects_of_all_ranks(self.hashes) for number, sha in share.items()}
        listing = "".join(f"{name}\0{hashes[number]}\n" for number, name in enumerate(self.names))
        images_sha256 = hashlib.sha256(listing.encode()).hexdigest()
        features = self.kept.gathered() if self.kept is not None else None
        return Reference(*self.sums.reference_moments(), self.network.name, images_sha256, features)


def _from_file(path: Path, network: FeatureNetwork, keep_features: bool) -> Reference:
    reference = Reference.load(path, network)
    if keep_features and reference.features is None:
        raise ValueError(f"{path} has no features, which KID needs. Use the folder of images instead.")
    if len(reference.mean) != network.dimension:
        raise ValueError(
            f"{path} has statistics of {len(reference.mean)} features, but {network.name} has {network.dimension}. "
            "Use another file."
        )
    return reference


def image_files(folder: Path) -> list[Path]:
    """Return the images of a folder and its subfolders, sorted by name.

    Raises:
        ValueError: the folder does not exist, or has fewer than two images.
    """
    if not folder.is_dir():
        raise ValueError(f"reference={folder} is neither a folder nor a {STATISTICS_SUFFIX} file. Use one of them.")
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file())
    if len(files) < 2:
        raise ValueError(f"reference={folder} has {len(files)} images. Use a folder with thousands, at least two.")
    return files


def _read(file: Path) -> tuple[Pixels, str]:
    try:
        data = file.read_bytes()
        with Image.open(io.BytesIO(data)) as picture:
            if picture.format == PROGRAM_FORMAT:
                raise ValueError(PROGRAM_FORMAT)
            return np.array(picture.convert("RGB")), hashlib.sha256(data).hexdigest()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{file} is not a readable image. Remove it from the reference folder.") from error


def _arrays(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise ValueError(f"reference={path} does not exist. Use a folder of images or an {STATISTICS_SUFFIX} file.")
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > MOST_EXPANSION * path.stat().st_size:
            raise ValueError(f"it would unpack to {unpacked} bytes")
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except (OSError, ValueError, EOFError, AttributeError, MemoryError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a readable {STATISTICS_SUFFIX} file. Create it again.") from error
    if not (set(_OURS) <= set(arrays) or set(_CLEAN_FID) <= set(arrays)):
        raise ValueError(f"{path} has no statistics but {', '.join(arrays) or 'nothing'}. Use another file.")
    return arrays


def _digest(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        value = np.ascontiguousarray(arrays[name])
        digest.update(f"{name}\0{value.dtype.str}\0{value.shape}\0".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()
