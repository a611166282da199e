"""Upload of an export to a model hub: listed first, and confirmed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lit_vgrpo.errors import UserError, counted, one_line, say
from lit_vgrpo.system.hub import hub_error
from lit_vgrpo.training.folder import candidates

HUB_PREFIX = "hub:"
LOCAL_ROOT = Path("exports")
"""Folder of the exports that are uploaded; they stay there."""
LOG_IN = "Run hf auth login, or set HF_TOKEN"
OF_EVERY_REPOSITORY = {".gitattributes"}
MOST_NAMED = 3
NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


@dataclass(frozen=True)
class Repository:
    """A model repository on the hub.

    Attributes:
        name: ``owner/name``.
        files: What it holds; ``None`` if it does not exist yet.
    """

    name: str
    files: frozenset[str] | None

    def refuse_other_content(self, folder: Path) -> None:
        """Check that the repository holds no file that an upload of the folder would leave beside its own.

        Raises:
            UserError: It does.
        """
        other = sorted((self.files or frozenset()) - set(files_of(folder)) - OF_EVERY_REPOSITORY)
        if other:
            named = ", ".join(other[:MOST_NAMED]) + (", ..." if len(other) > MOST_NAMED else "")
            raise UserError(
                f"{self.name} holds {counted(len(other), 'file')} that this export does not have ({named}). "
                f"Nothing was uploaded; the export is in {folder}. Choose another name, or delete them there."
            )


def read_repository_name(text: str) -> str:
    """Return the ``owner/name`` or ``name`` after ``hub:``; raise UserError if the hub allows no such name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    name = text.removeprefix(HUB_PREFIX)
    try:
        validate_repo_id(name)
        is_valid = NAME.fullmatch(name) is not None
    except HFValidationError:
        is_valid = False
    if not is_valid:
        raise UserError(f"{text} is no repository's name. Write {HUB_PREFIX}owner/name, of letters, digits, - _ and .")
    return name


def new_local_folder(name: str) -> Path:
    """Return a folder in ``exports/`` that does not exist yet, named like the repository."""
    return next(path for path in candidates(LOCAL_ROOT / name.rpartition("/")[2]) if not path.exists())


def find_repository(name: str, can_ask: bool) -> Repository:
    """Ask the hub who the user is and what the repository holds; nothing is changed there.

    Args:
        can_ask: The upload will be confirmed by an option or in a terminal.

    Raises:
        UserError: It could not be confirmed, there is no valid token, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    if not can_ask:
        raise UserError(f"--to {HUB_PREFIX}{name} asks before it uploads, and this is no terminal. Add --yes.")
    if get_token() is None:
        raise UserError(f"Not logged in to the hub. {LOG_IN} to a token that may write; nothing was exported.")
    api = HfApi()
    users: list[str] = []
    with hub_errors(name):
        if (error := hub_error(lambda: users.append(api.whoami()["name"]))) is not None:
            raise error
        full = name if "/" in name else f"{users[0]}/{name}"
        try:
            return Repository(full, frozenset(api.list_repo_files(full)))
        except RepositoryNotFoundError:
            return Repository(full, None)


def files_of(folder: Path) -> dict[str, Path]:
    """Return the files of an export by their paths in it."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def upload(folder: Path, repository: Repository, is_public: bool, confirm: Callable[[], bool]) -> bool:
    """List an export's files, and upload exactly these in one commit if that is confirmed.

    Args:
        is_public: Create the repository public; one that exists stays as it is.

    Returns:
        False if it was not confirmed.

    Raises:
        UserError: The hub refuses, or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    repository.refuse_other_content(folder)
    files = files_of(folder)
    there = repository.files
    kind = f"new, {'public' if is_public else 'private'}" if there is None else "exists"
    api = HfApi()
    say(f"To upload to {api.endpoint}/{repository.name} ({kind}):")
    for name, path in files.items():
        replaced = "  replaces the file there" if name in (there or ()) else ""
        say(f"  {size(path.stat().st_size):>9}  {name}{replaced}")
    say(f"  {size(sum(path.stat().st_size for path in files.values())):>9}  {counted(len(files), 'file')}")
    if not confirm():
        return False
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        with hub_errors(repository.name, folder):
            if there is None:
                api.create_repo(repository.name, private=not is_public, exist_ok=True)
            operations = [CommitOperationAdd(name, path) for name, path in files.items()]
            api.create_commit(repository.name, operations, commit_message="Upload by lightning export")
    finally:
        enable_progress_bars()
    return True


def ask() -> bool:
    """Ask in the terminal whether to upload; anything but y means no."""
    try:
        return input("Upload these files? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def can_ask() -> bool:
    """Return True if a person can answer."""
    return sys.stdin is not None and sys.stdin.isatty()


def size(num_bytes: int) -> str:
    """Return a file's size in decimal units, as hubs show it.

    >>> size(812), size(65_432), size(2_500_000_000)
    ('812 B', '65.4 kB', '2.5 GB')
    """
    number, units = float(num_bytes), iter(("B", "kB", "MB", "GB"))
    unit = next(units)
    while number >= 1000 and unit != "GB":
        number, unit = number / 1000, next(units)
    return f"{num_bytes} B" if unit == "B" else f"{number:.1f} {unit}"


@contextmanager
def hub_errors(name: str, folder: Path | None = None) -> Iterator[None]:
    """Turn errors of requests to the hub into one line.

    Args:
        folder: The export, once there is one.

    Raises:
        UserError: A request failed.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    where = "" if folder is None else f" The export is in {folder}: upload it later with hf upload {name} {folder}"
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise UserError(f"HF_HUB_OFFLINE is set. Unset it to upload.{where}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        why = {
            401: f"the token is not valid. {LOG_IN}.",
            403: "the token may not write there. Make one that may on the hub's page of access tokens, then log in "
            "with hf auth login.",
            429: "too many requests. Try again in a few minutes.",
        }.get(status, f"{error.server_message or error} (status {status}).")
        raise UserError(f"The hub refuses {name}: {why}{where}") from error
    except Exception as error:  # the hub's client raises those of its HTTP library, which differs between versions
        raise UserError(
            f"Cannot upload to {name} at {constants.ENDPOINT}: {one_line(error) or 'no answer'}.{where}"
        ) from error
