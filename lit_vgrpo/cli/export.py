"""``lightning export``: write a run's weights as files that diffusers loads without this package, or publish them."""

from __future__ import annotations

import sys
from pathlib import Path

from tqdm import tqdm

from lit_vgrpo.cli.saved_policy import ChosenRun, build_policy, load_saved_policy, recipe_of
from lit_vgrpo.errors import UserError, one_line, say, shell_line
from lit_vgrpo.options import HUB_PREFIX, Export
from lit_vgrpo.policies.base import DTYPES, Policy
from lit_vgrpo.policies.export import merge_adapter, save_comfyui, save_kohya, save_pipeline
from lit_vgrpo.policies.modular import readdress
from lit_vgrpo.report.model_card import add_card
from lit_vgrpo.system.hub import base_name
from lit_vgrpo.system.paths import typed_path, vacant_folder, write_new_folder
from lit_vgrpo.training.folder import candidates

DIFFUSERS, KOHYA, COMFYUI = "diffusers", "kohya", "comfyui"
MODELS = {KOHYA: "the UNets of SD 1.x, 2.x and XL", COMFYUI: "Lumina 2 and Wan"}


def export(options: Export) -> int:
    """Write a run's weights: ``RUN --to DIR [options] [key=value ...]``."""
    folder, repository = read_target(options.to)
    run = ChosenRun.of(options)
    policy = build_policy(recipe_of(run.folder, run.words, ["model.policy"], "an export"))
    refuse_misfit(policy, options, run.folder)
    quantisation, policy.quantisation = policy.quantisation, None  # none is written, and a merge must round nothing
    (saved, variant), dtype = run.read_weights(), DTYPES[options.dtype]
    if repository is not None:
        check_login(options)
    load_saved_policy(policy, saved, variant)
    name = f"{folder.resolve().name}.safetensors"  # like the folder: other programs list adapters by file name
    written = folder if options.format == DIFFUSERS else folder / name
    loaded_from = (written if options.format == KOHYA else folder) if repository is None else Path(repository)
    advice = "Choose another folder: --to DIR."
    with write_new_folder(folder, advice) as draft:
        if options.merge:
            merge_adapter(policy.networks().values())
            save_pipeline(policy.pipeline, policy.networks(), draft, dtype=dtype)
        elif options.format == KOHYA:
            save_kohya(policy.network, draft / name, base_name(policy.checkpoint), dtype)
        else:
            policy.save(draft, dtype=dtype)
        readdress(draft, repository or folder.name)  # a modular pipeline names it in its index
    if options.format == COMFYUI:  # diffusers cannot read ComfyUI's file
        with write_new_folder(folder, advice, replace=True) as draft:
            save_comfyui(policy.networks().values(), policy.comfyui_names, draft / name, dtype)
    policy.quantisation = quantisation
    about = variant, saved.progress.iterations, dtype, options.merge, saved.is_whole
    what, lines = add_card(folder, run.folder, policy, loaded_from, *about)
    say(f"Written: {written} ({what}): {saved.origin(variant)}")
    if repository is not None and not upload(folder, repository, options):
        say(f"Nothing was uploaded. The export is in {folder}.", error=True)
        return 130
    say("\n".join(lines))
    return 0


def read_target(text: str) -> tuple[Path, str | None]:
    """Return the folder to write, and the repository to upload it to if ``--to`` is ``hub:owner/name``."""
    if not text.startswith(HUB_PREFIX):
        return vacant_folder(text), None
    name = text.removeprefix(HUB_PREFIX)
    if name.count("/") != 1:
        raise UserError(f"{text} is not a repository name. Use {HUB_PREFIX}owner/name.")
    base = typed_path("exports") / Path(name).name
    return next(path for path in candidates(base) if not path.exists()), name


def check_login(options: Export) -> None:
    """Raise UserError before anything is written if an upload could not be confirmed, or there is no token."""
    from huggingface_hub import get_token

    if not options.yes and not sys.stdin.isatty():
        raise UserError("An upload asks for confirmation, and stdin is not a terminal. Add --yes.")
    if get_token() is None:
        raise UserError("Not logged in to the hub. Run hf auth login, or set HF_TOKEN.")


def upload(folder: Path, repository: str, options: Export) -> bool:
    """List an export's files and upload them in one commit; return False if unconfirmed, raise UserError if refused."""
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
        advice = f"The export is in {folder}. Upload it later: {shell_line('hf', 'upload', repository, folder)}"
        raise UserError(f"Cannot upload to {repository}: {one_line(error)}. {advice}") from error
    say(f"Uploaded to {repository}.")
    return True


def refuse_misfit(policy: Policy, options: Export, run: Path) -> None:
    """Raise UserError if the run's kind of weights cannot be exported as the options ask."""
    is_other = options.format != DIFFUSERS
    if is_other and options.merge:
        raise UserError(f"--format {options.format} needs a LoRA, but --merge removes it. Use only one of them.")
    if policy.lora_rank is None and (options.merge or is_other):
        asked = "--merge" if options.merge else f"--format {options.format}"
        raise UserError(f"{asked} applies to a LoRA: {run} trained the network's weights. Leave it out.")
    fitting = KOHYA if policy.network_name == "unet" else COMFYUI if policy.comfyui_names else DIFFUSERS
    if is_other and options.format != fitting:
        models, name = MODELS[options.format], type(policy).__name__
        raise UserError(f"--format {options.format} is for {models}, not for {name}. Use --format {fitting}.")
