"""The LoRA file that ``start_from`` names: on this machine, or in a repository of the hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lit_vgrpo.errors import suggestion
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.lora_file import KEY, lora_file_error
from lit_vgrpo.system.hub import LoadError, cached_file, explain_unloadable, loading
from lit_vgrpo.system.paths import CONFIG_NAME, resolve_path

if TYPE_CHECKING:
    from huggingface_hub import HfApi

SUFFIX, DEFAULT_FILE = ".safetensors", "pytorch_lora_weights.safetensors"
PICKLES = (".bin", ".pt", ".pth")
EVERY_REPOSITORY_HAS = ".gitattributes"
_HUB_FILE = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:/([\w./-]+\.safetensors))?", re.ASCII)
_RUNS = "runs"


@dataclass(frozen=True)
class LoraPlace:
    """A LoRA file.

    Args:
        name: as the recipe names it.
        path: the file, if it is a local one.
        repository: the hub's repository otherwise.
        filename: the file in it; ``None`` takes its only one, or the one with diffusers' name.
    """

    name: str
    path: Path | None = None
    repository: str = ""
    filename: str | None = None

    def at_hand(self) -> Path | None:
        """Return the file if it is on this machine."""
        return self.path or cached_file(self.repository, self.filename or DEFAULT_FILE)

    def fetch(self) -> Path:
        """Return the file, downloaded if necessary.

        Raises:
            LoadError: it cannot be downloaded, or the repository has several.
        """
        if (path := self.at_hand()) is not None:
            return path
        from huggingface_hub import HfApi, hf_hub_download

        with loading(self.name, f"Run: hf download {self.repository}, or set {KEY}=/a/local/file{SUFFIX}."):
            return Path(hf_hub_download(self.repository, self.filename or self._only_one(HfApi())))

    def _only_one(self, hub: HfApi) -> str:
        names = [name for name in hub.list_repo_files(self.repository) if name.endswith(SUFFIX)]
        if DEFAULT_FILE in names or len(names) == 1:
            return DEFAULT_FILE if DEFAULT_FILE in names else names[0]
        known = suggestion("", [f"{self.repository}/{name}" for name in names]) if names else "It has none."
        raise LoadError(f"{KEY}={self.name} must name one {SUFFIX} file. {known}")

    def error(self, policy: Policy) -> str | None:
        """Return why a policy cannot start from it, in one line, or ``None``; nothing is downloaded."""
        path = self.at_hand()
        if path is not None:
            return lora_file_error(policy, path)
        return explain_unloadable(self.repository, self.filename or EVERY_REPOSITORY_HAS, KEY)


def find_lora(start_from: str, start_weights: str = "trained") -> LoraPlace | None:
    """Return the LoRA file that ``start_from`` names, or ``None`` if it can only be a run.

    Args:
        start_from: a file, a folder with one, ``owner/name`` or ``owner/name/file.safetensors`` of the hub.
        start_weights: must be ``"trained"`` for a LoRA file.

    Raises:
        LoadError: the folder has several files, or the file is of another kind.
    """
    place = _place(start_from)
    if place is not None and start_weights != "trained":
        raise LoadError(f"model.policy.start_weights={start_weights} has no effect on a LoRA file. Leave it out.")
    return place


def _place(start_from: str) -> LoraPlace | None:
    try:
        path = resolve_path(start_from)
    except ValueError as error:
        raise LoadError(str(error)) from error
    if path.is_dir():
        return None if (path / CONFIG_NAME).is_file() else _in_folder(start_from, path)
    if path.suffix in PICKLES and path.is_file():
        raise LoadError(f"{KEY}={start_from} is a pickle, which could run any code. Save the LoRA as {SUFFIX}.")
    if path.is_file():
        return LoraPlace(start_from, path) if path.suffix == SUFFIX else None
    named = _HUB_FILE.fullmatch(start_from)
    first = start_from.partition("/")[0]
    if named is None or first == _RUNS or Path(first).is_dir():
        if path.suffix == SUFFIX:
            raise LoadError(f"{KEY}={start_from} does not exist. {_near(path)}")
        return None
    return LoraPlace(start_from, None, named[1], named[2])


def _in_folder(start_from: str, folder: Path) -> LoraPlace | None:
    files = sorted(file.name for file in folder.glob(f"*{SUFFIX}"))
    if len(files) > 1 and DEFAULT_FILE not in files:
        raise LoadError(
            f"{KEY}={start_from} has {len(files)} files. {suggestion('', [f'{start_from}/{f}' for f in files])}"
        )
    if not files:
        return None
    return LoraPlace(start_from, folder / (DEFAULT_FILE if DEFAULT_FILE in files else files[0]))


def _near(path: Path) -> str:
    known = sorted(str(file) for file in path.parent.glob(f"*{SUFFIX}"))
    return suggestion(str(path), known) if known else "Give a file, or owner/name of the hub."
