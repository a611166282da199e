"""Loading of a policy's diffusers pipeline, from a folder or the hub, and checks of its files before loading."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from lit_vgrpo.policies.components import KEY as COMPONENTS
from lit_vgrpo.policies.components import component_class, component_folder, downloaded_component
from lit_vgrpo.policies.modular import (
    MODULAR_INDEX,
    assembled,
    has_modular_index,
    own_folder,
    part_folder,
    read_modular_index,
)
from lit_vgrpo.system.hub import (
    LoadError,
    cached_file,
    download_command,
    download_small_files,
    explain_unloadable,
    file_at_hand,
    headers_only,
    leave_silent_hub,
    load_network,
    loading,
    local_folder,
    quiet_libraries,
    tokenizer_error,
    weight_files,
)
from lit_vgrpo.system.process import bar

KEY = "model.policy.checkpoint"
INDEX = "model_index.json"
SCHEDULER = "scheduler/scheduler_config.json"
REMEDY = f"Download or save it again, or set {KEY} to a different pipeline."
LIBRARIES = ("diffusers", "transformers")
ONE_FILE = (".safetensors", ".ckpt", ".pt", ".pth", ".bin")
NEEDED = re.compile(r"(scheduler|vae|processor|text_encoder|tokenizer)(_\d)?")
"""Names of the parts that a policy needs besides its network, if its pipeline has them."""
NOT_HONOURED = ("thresholding", "clip_sample")
"""Options of schedulers that change predicted images, which no sampler of this package does."""
DISTILLED_NAMES = re.compile(r"(?:^|[-_.])(schnell|turbo|lightning|lcm|hyper|distilled)(?=$|[-_.])", re.IGNORECASE)
"""Words in the names of models distilled to a few steps; their files seldom show it."""
FEW_STEP_SCHEDULERS = ("LCMScheduler", "TCDScheduler")


class Loadable(Protocol):
    """What this file reads of a :class:`~lit_vgrpo.policies.base.Policy`, which it must not import."""

    pipeline_class: ClassVar[str]
    network_name: ClassVar[str]
    may_lack: ClassVar[tuple[str, ...]]
    checkpoint: str
    variant: str | None
    revision: str | None
    lora_rank: int | None
    dtype: torch.dtype
    components: dict[str, str]
    given: Any
    draft: Any

    @property
    def network_names(self) -> tuple[str, ...]: ...
    def null_components(self, folder: Path) -> dict[str, None]: ...
    def misfit(self, pipeline: Any) -> str | None: ...


def find_folder(policy: Loadable) -> Path | None:
    """Return the folder of a policy's pipeline, which may be incomplete in the hub's cache; ``None`` if it is not here.

    Raises:
        LoadError: The policy cannot use it, judged by its small files.
    """
    name, needed, variant = f"{KEY}={policy.checkpoint}", policy.pipeline_class, policy.variant
    path = local_folder(policy.checkpoint)
    if path is not None and path.is_file():
        convert = f"diffusers.{needed}.from_single_file('{path}').save_pretrained('DIR')"
        advice = f'Convert it: python -c "import diffusers; {convert}", then set {KEY}=DIR.'
        if path.suffix.lower() not in ONE_FILE or not hasattr(family_of(policy), "from_single_file"):
            advice = f"Use a folder with {INDEX} and unquantised weights, or a hub name."
        raise LoadError(f"{name} is a file, not a pipeline folder. {advice}")
    kind_name = find_pipeline_class(policy.checkpoint, policy.revision, variant=policy.variant)
    if kind_name not in (None, needed):
        raise LoadError(
            f"{name} is a {kind_name}, {type(policy).__name__} needs {needed}. Use another class_path, or AutoPolicy."
        )
    if (folder := config_folder(policy.checkpoint, policy.revision)) is None:
        return None
    parts = _parts(policy, folder)
    if (error := _lacking(policy, parts)) is not None:
        raise LoadError(
            f"{name} {error} In its {INDEX}, it is null or absent. To take another checkpoint's, set {COMPONENTS}."
        )
    for part, source in policy.components.items():
        is_here = issubclass(parts[part], nn.Module) and local_folder(source) is not None
        if is_here and not weight_files(component_folder(part, source)).keys() & {variant, None}:
            raise LoadError(f"{COMPONENTS}.{part}={source} has no weights. Download or save it again.")
    if path is None:
        return folder
    own = {part: own_folder(folder, part) for part in parts if part not in policy.components}
    own = {part: place for part, place in own.items() if place.is_dir() or (folder / INDEX).is_file()}
    files = {part: weight_files(place) for part, place in own.items()}
    for part, place in own.items():
        file = place / "tokenizer_config.json" if part.startswith("tokenizer") else place
        if not file.exists():
            missing = file.relative_to(folder)
            null = f", or set {part} to [null, null] there" if part in policy.may_lack else ""
            advice = f"Save or download the pipeline again{null}."
            raise LoadError(f"{name} lacks {missing}, which its {INDEX} names. {advice}")
        kind = parts[part]
        if issubclass(kind, nn.Module) and not files[part].keys() & {variant, None}:
            advice = f"Set model.policy.variant={next(iter(files[part]))}." if files[part] else REMEDY
            raise LoadError(f"{name} has no weights in {part}/. {advice}")
    if variant and not any(variant in variants for variants in files.values()):
        raise LoadError(f"{name} has no weights of model.policy.variant={variant}. Leave it out.")
    return folder


def family_of(policy: Loadable) -> Any:
    """Return the class of a policy's pipeline."""
    import diffusers

    return getattr(diffusers, policy.pipeline_class, None) or type(policy.given)  # imports lazily


def encoder_of(name: str) -> str:
    """Return the name of the text encoder of a tokenizer, or any other name as it is."""
    return name.replace("tokenizer", "text_encoder")


def _parts(policy: Loadable, folder: Path) -> dict[str, Any]:
    """Return the classes of a folder's parts by name, without those that are null or left out.

    Raises:
        LoadError: A class is not in diffusers or transformers; any other module named in a folder is not imported.
    """
    nulls, parts = policy.null_components(folder), dict[str, Any]()
    for name, entry in read_index(folder).items():
        match entry:
            case [str() as library, str() as kind] if name not in nulls:
                parts[name] = getattr(import_module(library), kind, None) if library in LIBRARIES else None
                if not inspect.isclass(parts[name]):
                    known = " or ".join(LIBRARIES)
                    raise LoadError(f"{folder / INDEX}: {name} is {library}.{kind}, not a class of {known}.")
    components = policy.components.items()
    return parts | {
        name: component_class(family_of(policy), name, source, parts.get(name)) for name, source in components
    }


def _part_folder(policy: Loadable, folder: Path, name: str) -> Path:
    """Return the folder of a part of the pipeline in ``folder``."""
    if name in policy.components:
        return component_folder(name, policy.components[name])
    return part_folder(folder, name, policy.checkpoint, policy.revision, policy.variant)


def _lacking(policy: Loadable, present: dict[str, Any]) -> str | None:
    """Return which needed parts are not among those of a pipeline, as a phrase, or ``None``."""
    parts = [name for name in inspect.signature(family_of(policy)).parameters if NEEDED.fullmatch(name)]
    spared = [name for name in policy.may_lack if present.get(name) is None]
    needed = [name for name in parts if encoder_of(name) not in spared]
    names = [name for name in (policy.network_name, *needed) if present.get(name) is None]
    return f"has no {' and no '.join(names)}, but {type(policy).__name__} needs it." if names else None


def pipeline_misfit(policy: Loadable, pipeline: Any) -> str | None:
    """Return why a pipeline would be trained wrongly or not at all, as a phrase that follows its name, or ``None``."""
    if policy.pipeline_class not in (kind.__name__ for kind in type(pipeline).__mro__):
        return f"is a {type(pipeline).__name__}, {type(policy).__name__} needs {policy.pipeline_class}."
    parts: dict[str, Any] = pipeline.components
    if policy.given is not None and (error := _lacking(policy, parts)) is not None:  # else found in its index
        return error
    if any(hasattr(part, "_hf_hook") for part in parts.values()):
        return "is offloaded by accelerate. Call its remove_all_hooks(), and see the option offload_encoders."
    for name in policy.network_names:
        if hooks := hooks_of(parts[name]):
            use = "Load it again, without a cache, group offloading or layerwise casting."
            return f"has diffusers' hooks {', '.join(hooks)} in its {name}. {use}"
        if hasattr(parts[name], "_orig_mod"):
            return f"has a compiled {name}. Pass it uncompiled, with compile=True."
        if getattr(parts[name], "peft_config", None) and (policy.lora_rank is not None or policy.given is not None):
            return f"has a LoRA in its {name}. Call fuse_lora() and unload_lora_weights() of the pipeline first."
    networks = [part for part in parts.values() if isinstance(part, nn.Module)]
    if policy.given is not None and any(weight.is_meta for network in networks for weight in network.parameters()):
        return "has networks without weights, on the meta device."
    for option in NOT_HONOURED:
        if pipeline.scheduler.config.get(option) and option in inspect.signature(type(pipeline.scheduler)).parameters:
            return f"has a scheduler with {option}, which is not supported. Set it to false in the scheduler's config."
    for name in parts if policy.draft is None else ():  # with a draft, only sizes count
        read = "tokenizer" if "tokenizer" in parts else "(tokenizer|processor)"  # else a processor is another part's
        part, encoder = parts[name], parts.get(re.sub(f"^{read}", "text_encoder", name))
        if part is not None and encoder not in (None, part):
            tokenizer, embeddings = getattr(part, "tokenizer", part), encoder.get_input_embeddings().num_embeddings
            if (error := tokenizer_error(tokenizer, embeddings)) is not None:
                return f"has a {name} that {error}. Save or download the pipeline again."
    return policy.misfit(pipeline)


def hooks_of(network: nn.Module | None) -> list[str]:
    """Return the names of the hooks that diffusers set in a network: of caches, offloading and layerwise casting."""
    registries = (getattr(module, "_diffusers_hook", None) for module in ([] if network is None else network.modules()))
    return sorted({name for registry in registries if registry is not None for name in registry.hooks})


def call_parameters(pipeline: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a pipeline's call."""
    return inspect.signature(type(pipeline).__call__).parameters


def find_pipeline_class(
    checkpoint: str, revision: str | None = None, what_to_set: str = KEY, variant: str | None = None
) -> str | None:
    """Return the class that a pipeline's index names, downloaded if necessary; ``None`` if unavailable.

    Raises:
        LoadError: The checkpoint cannot be found, or the index is damaged.
    """
    name = INDEX
    if (reason := explain_unloadable(checkpoint, INDEX, what_to_set, revision, variant)) is not None:
        name, is_absent = MODULAR_INDEX, "EntryNotFound" in reason  # else the hub cannot be asked
        if file_at_hand(checkpoint, name, revision) is None and (
            not is_absent or explain_unloadable(checkpoint, name, what_to_set, revision) is not None
        ):
            raise LoadError(reason)
    index = small_file(checkpoint, name, revision)
    if index is None:
        return None
    try:
        return str(json.loads(index.read_text())["_class_name"])
    except (ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{index} is damaged. Save or download the pipeline again.") from error


def read_index(folder: Path) -> dict[str, Any]:
    """Return the index of a pipeline's folder: the library and class of each part, and options; empty if it has none.

    Raises:
        LoadError: It is a modular pipeline's whose blocks are not in diffusers.
    """
    if has_modular_index(folder):
        return read_modular_index(folder)
    path = folder / INDEX
    index: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return index


def small_file(checkpoint: str, name: str, revision: str | None = None) -> Path | None:
    """Return one of a pipeline's small files, downloaded if necessary; ``None`` if it is unavailable."""
    if local_folder(checkpoint) is None and cached_file(checkpoint, name, revision) is None:
        from huggingface_hub import hf_hub_download

        leave_silent_hub()
        with suppress(Exception):  # the next line tells
            hf_hub_download(checkpoint, name, revision=revision)
    return file_at_hand(checkpoint, name, revision)


def read_pipeline(policy: Loadable) -> Any:
    """Load a policy's pipeline with its weights, in the types that the policy trains and computes in.

    Raises:
        LoadError: The pipeline cannot be downloaded, lacks something or is damaged.
    """
    if local_folder(policy.checkpoint) is None:
        leave_silent_hub()
    # Keep the downloads' progress bars: they may be the slowest part of the start.
    with quiet_libraries(shows_bars=True):
        for name, source in policy.components.items():
            downloaded_component(name, source, policy.variant)
    folder = local_folder(policy.checkpoint)
    if folder is None:
        index = config_folder(policy.checkpoint, policy.revision)
        left_out = dict.fromkeys(policy.components) | ({} if index is None else policy.null_components(index))
        command = download_command(policy.checkpoint, INDEX, policy.revision, policy.variant)
        remedy = f"Run: {command}, or set {KEY}=/a/local/folder."
        with loading(policy.checkpoint, remedy), quiet_libraries(shows_bars=True):
            versions = {"revision": policy.revision, "variant": policy.variant}
            family = family_of(policy)
            if index is not None and not hasattr(family, "download"):
                return _assembled(policy, index)  # which downloads the parts of a modular pipeline
            folder = Path(family.download(policy.checkpoint, **versions, **left_out))
    return _assembled(policy, folder)


def pipeline_on_meta(policy: Loadable, folder: Path) -> Any:
    """Return the pipeline of a folder without weights, in float32; ``None`` if not all of its small files can be had.

    Those of a hub repository, a few MB of configurations and tokenizers, are downloaded if some are missing.

    Raises:
        LoadError: A part cannot be built, or its tensors differ from those in the headers of its files.
    """
    with headers_only():
        try:
            return _assembled(policy, folder, "Checking")
        except LoadError:
            if all(local_folder(source) is not None for source in (policy.checkpoint, *policy.components.values())):
                raise
        with suppress(Exception):  # a hub that cannot be asked, or another error in the files, which loading reports
            download_small_files(policy.checkpoint, policy.revision)
            return _assembled(policy, folder, "Checking")
    return None


def _assembled(policy: Loadable, folder: Path, verb: str = "Loading") -> Any:
    """Return the pipeline of a folder; ``verb`` is the title of the bar."""
    # Trained weights and the VAE must not be rounded when loaded.
    network_dtype = torch.float32 if policy.lora_rank is None else policy.dtype
    dtypes = {**dict.fromkeys(policy.network_names, network_dtype), "vae": torch.float32}
    networks, parts = dict[str, Any](), _parts(policy, folder)
    kinds = {name: kind for name, kind in parts.items() if issubclass(kind, nn.Module)}
    with quiet_libraries(), bar(verb, total=len(kinds)) as loaded:
        for name, kind in kinds.items():
            loaded.set_description_str(f"{verb} {name}")
            with loading(policy.checkpoint, REMEDY):
                place = _part_folder(policy, folder, name)
            files = weight_files(place)
            variant = policy.variant if policy.variant in files else None
            is_safe = all(file.suffix == ".safetensors" for file in files.get(variant, ()))
            dtype = dtypes.get(name, policy.dtype)
            options = {"variant": variant, "use_safetensors": is_safe, "dtype": dtype}
            remedy = f"Name another one in {COMPONENTS}.{name}." if name in policy.components else REMEDY
            networks[name] = load_network(kind, str(place), remedy, **options)
            loaded.update()
        with loading(policy.checkpoint, REMEDY):
            is_modular = has_modular_index(folder)
            for name in (parts if is_modular else policy.components).keys() - kinds.keys():
                networks[name] = parts[name].from_pretrained(_part_folder(policy, folder, name))
            if is_modular:
                return assembled(family_of(policy), folder, networks)
            given = {**policy.null_components(folder), **networks}
            return family_of(policy).from_pretrained(folder, local_files_only=True, **given)


def distillation_warning(policy: Loadable) -> str | None:
    """Return a one-line warning if a model's index, scheduler or name marks it as distilled, else ``None``."""
    flag, named = "is_distilled", DISTILLED_NAMES.search(Path(policy.checkpoint).name)
    if config_value(policy, INDEX, flag):
        sign = f"{flag} in its {INDEX}"
    elif named is not None:
        sign = f"its name has {named[1]}"
    elif (scheduler := config_value(policy, SCHEDULER, "_class_name")) in FEW_STEP_SCHEDULERS:
        sign = f"its scheduler is {scheduler}"
    else:
        return None
    return (
        f"{KEY}={policy.checkpoint} looks distilled to a few steps ({sign}). Trained directly, it "
        "may lose detail over thousands of updates. Train its base model, or keep the run short and near its start: "
        "model.objective.anchor_weight=1 model.objective.anchor_decay=0.3."
    )


def config_folder(checkpoint: str, revision: str | None = None) -> Path | None:
    """Return the local folder with a pipeline's index: the checkpoint itself or a folder of the hub's cache."""
    found = (file_at_hand(checkpoint, name, revision) for name in (INDEX, MODULAR_INDEX))
    return next((index.parent for index in found if index is not None), None)


def bare_network(policy: Loadable) -> Any:
    """Return a policy's network without weights, from its configuration on this machine; ``None`` if it is absent."""
    folder = config_folder(policy.checkpoint, policy.revision)
    with suppress(LoadError, OSError, ValueError, KeyError), headers_only():  # loading tells the reason
        if folder is not None:
            kind = _parts(policy, folder)[policy.network_name]
            return load_network(kind, str(_part_folder(policy, folder, policy.network_name)), REMEDY)
    return None


def config_value(policy: Loadable, file: str, key: str) -> Any:
    """Return a value in one of a pipeline's JSON files on this machine, or ``None``."""
    if policy.given is not None:
        part = policy.given if file == INDEX else getattr(policy.given, file.partition("/")[0], None)
        return None if part is None else {"_class_name": type(part).__name__, **part.config}.get(key)
    folder = config_folder(policy.checkpoint, policy.revision)
    part, _, name = file.rpartition("/")
    try:
        if folder is None:
            return None
        place = _part_folder(policy, folder, part) if part in policy.components else folder / part
        return (read_index(folder) if file == INDEX else json.loads((place / name).read_text()))[key]
    except (LoadError, OSError, ValueError, KeyError, TypeError):
        return None
