"""``lightning export``: write a run's weights as files that diffusers loads without this package, or publish them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from lit_vgrpo.apps.report.loading import load_lines
from lit_vgrpo.apps.report.model_card import add_card
from lit_vgrpo.cli.export_upload import (
    HUB_PREFIX,
    Repository,
    ask,
    can_ask,
    find_repository,
    new_local_folder,
    read_repository_name,
    upload,
)
from lit_vgrpo.cli.saved_policy import RunOptions, build_policy, load_saved_policy, recipe_of, saved_weights
from lit_vgrpo.errors import UserError, counted, report, say
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.export import save_kohya, save_merged
from lit_vgrpo.system.atomic_folder import vacant_folder, write_new_folder

DIFFUSERS, KOHYA = "diffusers", "kohya"


class Target(NamedTuple):
    """Where an export goes: a folder, from where it is uploaded if there is a repository."""

    folder: Path
    repository: str | None = None


def read_target(text: str) -> Target:
    """Return the target that ``--to`` names: a vacant folder, or a repository as ``hub:owner/name``."""
    if not text.startswith(HUB_PREFIX):
        return Target(vacant_folder(text))
    name = read_repository_name(text)
    return Target(new_local_folder(name), name)


@dataclass(kw_only=True)
class ExportOptions(RunOptions):
    """Options of ``lightning export``, whose help describes them."""

    to: Target
    yes: bool = False
    public: bool = False
    format: str = DIFFUSERS
    dtype: torch.dtype = torch.float32
    merge: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format == KOHYA and self.merge:
            raise UserError("--format kohya applies to a LoRA, and --merge leaves none. Leave out one of them.")
        if (self.yes or self.public) and self.to.repository is None:
            raise UserError(f"--{'yes' if self.yes else 'public'} is for uploads. Write --to {HUB_PREFIX}owner/name.")

    @property
    def kohya_file(self) -> Path:
        """File of an adapter in kohya's format, named like the folder: programs list adapters by that name."""
        return self.to.folder / f"{self.to.folder.resolve().name}.safetensors"

    @property
    def written(self) -> Path:
        """Folder or file that diffusers loads."""
        return self.kohya_file if self.format == KOHYA else self.to.folder


def export(options: ExportOptions) -> int:
    """Write a run's weights: ``RUN --to DIR [options] [key=value ...]``."""
    recipe = recipe_of(options.run, options.words, ["model.policy"], "an export")
    policy = build_policy(recipe)
    refuse_misfit(policy, options)
    policy.ignore_quantisation()  # no frozen weight is written, and a merge must not round them
    saved = saved_weights(options.run, options.checkpoint, options.variant)
    name = options.to.repository
    repository = None if name is None else find_repository(name, options.yes or can_ask())
    load_saved_policy(policy, saved, options.variant)
    loaded_from = options.written if repository is None else Path(repository.name)
    with write_new_folder(options.to.folder, "--to") as draft:
        if options.merge:
            save_merged(policy, draft, options.dtype)
        elif options.format == KOHYA:
            save_kohya(policy, draft / options.kohya_file.name, options.dtype)
        else:
            policy.save(draft, dtype=options.dtype)
        iterations = saved.progress.iterations
        add_card(draft, options.run, policy, loaded_from, options.variant, iterations, options.dtype, options.merge)
    what, lines = load_lines(policy, loaded_from, options.dtype, options.merge, options.to.folder)
    origin = f"{options.variant} weights of {saved.path} after {counted(iterations, 'iteration')}"
    say(f"Written: {options.written} ({what}): {origin}")
    status = 0 if repository is None else _publish(options, repository)
    if status == 0:
        say("\n".join(lines))
    return status


def _publish(options: ExportOptions, repository: Repository) -> int:
    folder = options.to.folder
    try:
        if upload(folder, repository, options.public, lambda: options.yes or ask()):
            say(f"Uploaded to {repository.name}.")
            return 0
        report([f"Nothing was uploaded. The export is in {folder}."])
    except KeyboardInterrupt:
        report([f"Stopped, perhaps before the upload was complete. The export is in {folder}."])
    return 130


def refuse_misfit(policy: Policy, options: ExportOptions) -> None:
    """Check that the run's kind of weights can be exported as the options ask; raise UserError if it cannot."""
    if policy.lora_rank is None and (options.merge or options.format == KOHYA):
        asked = "--merge has nothing to merge" if options.merge else f"--format {KOHYA} applies to a LoRA"
        raise UserError(f"{asked}: {options.run} trained the network's own weights, not a LoRA. Leave it out.")
    if options.format == KOHYA and policy.network_name != "unet":
        raise UserError(
            f"--format {KOHYA} is for the UNets of SD 1.x, 2.x and XL, and {type(policy).__name__} has a "
            f"{policy.network_name}. Leave it out: ComfyUI reads the diffusers format of this family."
        )
