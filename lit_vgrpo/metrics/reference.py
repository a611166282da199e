"""Feature statistics of the reference images, from a folder or an ``.npz`` file."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lit_vgrpo.core.batches import BATCH_SIZE
from lit_vgrpo.core.gather import raise_together, rank_and_world_size
from lit_vgrpo.core.pictures import read_picture
from lit_vgrpo.errors import shell_line
from lit_vgrpo.metrics.features import FeatureNetwork, InceptionFeatures
from lit_vgrpo.metrics.statistics import FeatureMoments, KeptFeatures
from lit_vgrpo.system.paths import resolve_path

IMAGE_SUFFIXES = frozenset({".bmp", ".jpg", ".jpeg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
STATISTICS_SUFFIX = ".npz"
_OURS, _CLEAN_FID = ("mean", "cov", "network"), ("mu", "sigma")


@dataclass(frozen=True)
class Reference:
    """Statistics of the reference images."""

    mean: Tensor  # (D,), float64
    cov: Tensor  # (D, D), float64
    network: str = ""  # its name; empty for clean-fid's files, which do not record it
    features: Tensor | None = None  # (N, D), float32, sorted by image name; for KID

    def save(self, path: str | Path) -> None:
        """Write an ``.npz`` file."""
        arrays = {"mean": self.mean.numpy(), "cov": self.cov.numpy(), "network": np.array(self.network)}
        if self.features is not None:
            arrays["features"] = self.features.numpy()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, allow_pickle=False, **arrays)

    @classmethod
    def load(cls, path: str | Path, network: FeatureNetwork) -> Reference:
        """Read a file of :meth:`save` or clean-fid; raise ValueError without statistics, or for another network's."""
        arrays = _arrays(Path(path))
        if not set(_OURS) <= set(arrays):
            if not isinstance(network, InceptionFeatures):
                raise ValueError(f"{path} has clean-fid's statistics, which need features=inception.")
            return cls(torch.from_numpy(arrays["mu"]).double(), torch.from_numpy(arrays["sigma"]).double())
        if (made_with := str(arrays["network"])) != network.name:
            other = f"{path} was made with the feature network {made_with}, not with {network.name}"
            again = shell_line("python", "-m", "lit_vgrpo.metrics", "FOLDER", path, "--features", network.source)
            raise ValueError(f"{other}, or by an earlier version of this package. Make it again: {again}")
        features = torch.from_numpy(arrays["features"]) if "features" in arrays else None
        return cls(torch.from_numpy(arrays["mean"]), torch.from_numpy(arrays["cov"]), made_with, features)


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

    Every rank must call it; an error on one rank is raised on all of them. Images are upright, and on white where they
    are transparent. For KID, ``keep_features`` also keeps every image's.

    Raises:
        ValueError: An error of :func:`reference_errors`, an unreadable image, or a file that does not fit the network.
        LoadError: The network cannot be loaded.
    """
    path = resolve_path(source)
    saved: Reference | None = None
    error: Exception | None = None
    try:
        if path.suffix.lower() == STATISTICS_SUFFIX:
            saved = Reference.load(path, network)
            if keep_features and saved.features is None:
                raise ValueError(f"{path} has no features, which KID needs. Use the folder of images instead.")
        else:
            moments, kept = _share(path, network, keep_features)
    except (ValueError, RuntimeError, OSError) as failure:
        error = failure
    raise_together(error)
    if saved is not None:
        return saved
    moments.add_up_ranks()
    return Reference(*moments.mean_and_cov(), network.name, kept.gathered() if keep_features else None)


def _share(folder: Path, network: FeatureNetwork, keep_features: bool) -> tuple[FeatureMoments, KeptFeatures]:
    """Return the moments and features of this rank's images of a folder: every ``world_size``-th, by name."""
    rank, world_size = rank_and_world_size()
    files = image_files(folder)
    moments, kept = FeatureMoments(network.dimension), KeptFeatures(network.dimension)
    numbers = list(range(rank, len(files), world_size))
    for start in range(0, len(numbers), BATCH_SIZE):
        batch = numbers[start : start + BATCH_SIZE]
        features = network.extract([read_picture(files[number]).permute(1, 2, 0).numpy() for number in batch])
        moments.update(features)
        if keep_features:
            kept.add(features, batch)
    return moments, kept


def image_files(folder: Path) -> list[Path]:
    """Return the images of a folder and its subfolders, sorted by name; raise ValueError for fewer than two."""
    if not folder.is_dir():
        raise ValueError(f"reference={folder} is neither a folder nor a {STATISTICS_SUFFIX} file.")
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file())
    if len(files) < 2:
        raise ValueError(f"reference={folder} has {len(files)} images. Use a folder with thousands.")
    return files


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"reference={path} cannot be read: {error}.") from error
    if not (set(_OURS) <= set(arrays) or set(_CLEAN_FID) <= set(arrays)):
        raise ValueError(f"{path} has no statistics, only {', '.join(arrays) or 'an empty archive'}. Use another file.")
    return arrays
