"""``lightning export``: write a run's weights as files that diffusers loads without this package, or publish them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from tqdm import tqdm

from lit_vgrpo.apps.report.model_card import add_card
from lit_vgrpo.cli.saved_policy import RunOptions, build_policy, load_saved_policy, recipe_of, saved_weights
from lit_vgrpo.config.arguments import flag, option, subcommand
from lit_vgrpo.errors import UserError, counted, one_line, say, suggestion
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.export import save_kohya, save_merged
from lit_vgrpo.policies.pipeline import DTYPES
from lit_vgrpo.system.atomic_folder import vacant_folder, write_new_folder
from lit_vgrpo.training.folder import candidates

DIFFUSERS, KOHYA = "diffusers", "kohya"
HUB_PREFIX = "hub:"


class Target(NamedTuple):
    """Where an export goes: a folder, from where it is uploaded if there is a repository."""

    folder: Path
    repository: str | None = None


def read_target(text: str) -> Target:
    """Return the target that ``--to`` names: a vacant folder, or a repository as ``hub:owner/name``."""
    if not text.startswith(HUB_PREFIX):
        return Target(vacant_folder(text))
    name = text.removeprefix(HUB_PREFIX)
    if name.count("/") != 1:
        raise UserError(f"{text} is not a repository's name. Write {HUB_PREFIX}owner/name.")
    return Target(next(path for path in candidates(Path("exports", Path(name).name)) if not path.exists()), name)


def read_format(text: str) -> str:
    """Return the name of a file format of LoRA adapters."""
    if text not in (DIFFUSERS, KOHYA):
        raise UserError(f"{text} is not a LoRA format. {suggestion(text, (DIFFUSERS, KOHYA))}")
    return text


def read_dtype(text: str) -> torch.dtype:
    """Return the dtype of that name."""
    if text not in DTYPES:
        raise UserError(f"{text} is not known. Use {', '.join(DTYPES)}.")
    return DTYPES[text]


@dataclass(kw_only=True)
class ExportOptions(RunOptions):
    """Options of ``lightning export``; the words are settings of the run's recipe.

    Attributes:
        to: Folder to write, new or empty; or hub:owner/name, to upload what was written to exports/name.
        yes: With hub:, upload without asking.
        public: With hub:, create a public repository instead of a private one.
        merge: Add a LoRA adapter to the weights under it.
        format: File format of an adapter, ``diffusers`` or ``kohya``.
        dtype: Dtype of everything that is written.
    """

    subcommand: ClassVar[str] = "export"

    to: Target = option(read=read_target)
    yes: bool = flag()
    public: bool = flag()
    format: str = option(DIFFUSERS, read_format)
    dtype: torch.dtype = option(torch.float32, read_dtype)
    merge: bool = flag()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.has("to"):
            example = f"exports/{self.run.resolve().name}"
            raise UserError(f"No output folder given. Add --to DIR, for example --to {example}")

    @property
    def kohya_file(self) -> Path:
        """File of an adapter in kohya's format, named like the folder: programs list adapters by that name."""
        return self.to.folder / f"{self.to.folder.resolve().name}.safetensors"


@subcommand(ExportOptions, stopped="Stopped. An export that was reported as written is complete.")
def export(options: ExportOptions) -> int:
    """Write a run's weights: ``RUN --to DIR [options] [key=value ...]``."""
    recipe = recipe_of(options.run, options.words, ["model.policy"], "an export")
    policy = build_policy(recipe)
    refuse_misfit(policy, options)
    policy.ignore_quantisation()  # no frozen weight is written, and a merge must not round them
    saved = saved_weights(options.run, options.checkpoint, options.variant)
    folder, repository = options.to
    if repository is not None:
        check_login(options)
    load_saved_policy(policy, saved, options.variant)
    written = options.kohya_file if options.format == KOHYA else folder
    loaded_from = written if repository is None else Path(repository)
    iterations = saved.progress.iterations
    with write_new_folder(folder, "--to") as draft:
        if options.merge:
            save_merged(policy, draft, options.dtype)
        elif options.format == KOHYA:
            save_kohya(policy, draft / options.kohya_file.name, options.dtype)
        else:
            policy.save(draft, dtype=options.dtype)
        what, lines = add_card(
            draft, options.run, policy, loaded_from, options.variant, iterations, options.dtype, options.merge
        )
    origin = f"{options.variant} weights of {saved.path} after {counted(iterations, 'iteration')}"
    say(f"Written: {written} ({what}): {origin}")
    if repository is not None and not upload(folder, repository, options):
        say(f"Nothing was uploaded. The export is in {folder}.", error=True)
        return 130
    say("\n".join(lines))
    return 0


def check_login(options: ExportOptions) -> None:
    """Raise UserError where an upload could not be confirmed, or there is no token, before anything is written."""
    from huggingface_hub import get_token

    if not options.yes and not sys.stdin.isatty():
        raise UserError("An upload asks for confirmation, and stdin is not a terminal. Add --yes.")
    if get_token() is None:
        raise UserError("Not logged in to the hub. Run hf auth login, or set HF_TOKEN.")


def upload(folder: Path, repository: str, options: ExportOptions) -> bool:
    """List an export's files, and upload them in one commit if that is confirmed.

    Returns:
        False if it was not confirmed.

    Raises:
        UserError: The hub refuses, or cannot be reached.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    say(f"To upload to {api.endpoint}/{repository} (if new, {'public' if options.public else 'private'}):")
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        say(f"  {tqdm.format_sizeof(path.stat().st_size, 'B'):>8}  {path.relative_to(folder)}")
    if not options.yes and input("Upload these files? [y/N] ").strip().lower() not in ("y", "yes"):
        return False
    try:
        api.create_repo(repository, private=not options.public, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload by lightning export")
    except Exception as error:  # the hub's client raises those of its HTTP library, which differs between versions
        advice = f"The export is in {folder}. Upload it later: hf upload {repository} {folder}"
        raise UserError(f"Cannot upload to {repository}: {one_line(error)}. {advice}") from error
    say(f"Uploaded to {repository}.")
    return True


def refuse_misfit(policy: Policy, options: ExportOptions) -> None:
    """Raise UserError if the run's kind of weights cannot be exported as the options ask."""
    if options.format == KOHYA and options.merge:
        raise UserError("--format kohya applies to a LoRA, and --merge leaves none. Leave out one of them.")
    if policy.lora_rank is None and (options.merge or options.format == KOHYA):
        asked = "--merge" if options.merge else f"--format {KOHYA}"
        raise UserError(f"{asked} applies to a LoRA: {options.run} trained the network's weights. Leave it out.")
    if options.format == KOHYA and policy.network_name != "unet":
        raise UserError(
            f"--format {KOHYA} is for the UNets of SD 1.x, 2.x and XL, and {type(policy).__name__} has a "
            f"{policy.network_name}. Leave it out: ComfyUI reads the diffusers format of this family."
        )
