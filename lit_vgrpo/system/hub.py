"""Checkpoints in folders and on the hub: checks, and quiet loading of all that they hold."""

from __future__ import annotations

import logging
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_vgrpo.errors import causes, counted, one_line
from lit_vgrpo.system.paths import SHIPPED_PREFIX, resolve_path

HUB_TIMEOUT_S = 4.0
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]  # all but weights
CONFIGS = ("config.json", "tokenizer_config.json", "scheduler_config.json", "preprocessor_config.json")
BATCHES_SEEN = "num_batches_tracked"  # of a batch norm; no output depends on it
PACKED = "quantization_config"  # in the configuration of a network whose weights are quantised
LONGEST_REASON = 300  # characters of a library's message
ORIGIN_KEYS = (
    "_name_or_path", "_commit_hash", "transformers_version", "_diffusers_version", "dtype", "torch_dtype"
)  # fmt: skip
OUT_OF_MEMORY = re.compile(r"out of memory|allocate memory|bad_alloc|\(os error 12\)|start new thread", re.IGNORECASE)
FREE_MEMORY = "Free memory, raise its limit (ulimit -v, or the job's), or load less: another dtype, or a smaller model."
WEIGHTS = re.compile(
    # a network's weights, with or without a variant, which is before or (formerly) after the number of a shard
    r"(?:diffusion_pytorch_model|pytorch_model|model)(?:\.(\w+))?(?:-\d{5}-of-\d{5})?(?:\.(\w+))?\.(?:safetensors|bin)"
)
LEAST_KNOWN = 0.9  # share of the token embeddings that a tokenizer knows; more than 0.99 in published models
PROBES, LEAST_WORDS, LEAST_LETTERS = 1024, 8, 3  # tokens to try, words among them for a judgement, letters of a word

_headers_only = ContextVar("_headers_only", default=False)
_CACHED = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/[^/]+/?$")
_NOT_HERE = re.compile(r"Cannot load \S+: not in the local cache and (.+?)\. Run: (.+?), or set (\S+)=/a")
_ASKED_FOR = re.compile(r" for \S+(?= ended)")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)


class LoadError(RuntimeError):
    """A checkpoint cannot be used; the message is one line."""


@contextmanager
def quiet_libraries(shows_bars: bool = False) -> Iterator[None]:
    """Silence diffusers, transformers and the hub below errors, and their progress bars unless ``shows_bars``."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    with ExitStack() as stack:
        for library in (diffusers_logging, transformers_logging):
            if library.is_progress_bar_enabled() and not shows_bars:
                library.disable_progress_bar()
                stack.callback(library.enable_progress_bar)
        # peft imports bitsandbytes if installed, which logs messages about kernels
        levels = dict.fromkeys(("diffusers", "transformers", "huggingface_hub", "bitsandbytes"), logging.ERROR)
        levels["diffusers.modular_pipelines"] = logging.CRITICAL  # it logs every exception that it raises
        for logger, level in ((logging.getLogger(name), level) for name, level in levels.items()):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(level)
        yield


@contextmanager
def loading(checkpoint: str, remedy: str) -> Iterator[None]:
    """Turn any error of a library in loading a checkpoint into a LoadError of one line, with the remedy."""
    try:
        yield
    except LoadError:
        raise
    except Exception as error:  # libraries may raise anything on other files
        lines = str(error).strip().split("\n")
        reason = one_line(" ".join(lines[: 1 + lines[0].endswith(":")])[:LONGEST_REASON]).rstrip(".:")
        reason = f"there is no {reason}" if isinstance(error, KeyError) else reason or type(error).__name__
        for cause in causes(error):
            if isinstance(cause, MemoryError) or OUT_OF_MEMORY.search(str(cause)):
                reason, remedy = f"out of memory ({one_line(cause)[:200]})", FREE_MEMORY
        raise LoadError(f"Cannot load {checkpoint}: {reason}. {remedy}") from error


def local_folder(checkpoint: str) -> Path | None:
    """Return the folder that a checkpoint names, or None for a hub name such as ``owner/name``.

    A name that is both means the folder, as in diffusers and transformers. A path need not exist. ValueError as in
    :func:`~lit_vgrpo.system.paths.resolve_path`.
    """
    path = resolve_path(checkpoint)
    looks_local = checkpoint.startswith((SHIPPED_PREFIX, "/", ".", "~")) or not _HUB_NAME.fullmatch(checkpoint)
    return path if looks_local or path.exists() else None


def source_of(checkpoint: str) -> str:
    """Return the argument of ``from_pretrained`` for a checkpoint: its folder, or its hub name."""
    if (folder := local_folder(checkpoint)) is not None:
        return str(folder)
    leave_silent_hub()
    return checkpoint


def leave_silent_hub() -> None:
    """Use only the hub's cache from now on if the hub, which is asked once, accepts a request and never answers.

    Libraries wait for most answers without a limit. A refused connection fails at once and needs no such help.
    """
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and _is_silent(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = True
        warnings.warn(
            f"{constants.ENDPOINT} did not answer within {HUB_TIMEOUT_S:g} s. Only its cache is used.", stacklevel=2
        )


@cache
def _is_silent(endpoint: str) -> bool:
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # of httpx or httpx2; the next request reports others
        return "Timeout" in type(error).__name__
    return False


def base_name(checkpoint: str) -> str:
    """Return a checkpoint's public name: its hub name, also of a folder in the hub's cache, or its folder's name.

    >>> base_name("/root/hub/models--owner--name/snapshots/0123abcd"), base_name("/data/my_model")
    ('owner/name', 'my_model')
    """
    if (folder := local_folder(checkpoint)) is None:
        return checkpoint
    cached = _CACHED.search(f"{folder}")
    return folder.name if cached is None else "/".join(cached.groups())


def cached_file(checkpoint: str, filename: str, revision: str | None = None) -> Path | None:
    """Return a hub repository's file in the hub's cache, or None."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(checkpoint, filename, revision=revision)
    return Path(path) if isinstance(path, str) else None


def file_at_hand(checkpoint: str, filename: str, revision: str | None = None) -> Path | None:
    """Return a checkpoint's file on this machine, in its folder or the hub's cache, or None; nothing is downloaded."""
    folder = local_folder(checkpoint)
    path = cached_file(checkpoint, filename, revision) if folder is None else folder / filename
    return path if path is not None and path.is_file() else None


def download_small_files(checkpoint: str, revision: str | None = None) -> Path:
    """Download a hub repository's configurations, tokenizers and indices of weights; any error of the hub is raised."""
    from huggingface_hub import HfApi, snapshot_download

    HfApi().repo_info(checkpoint, revision=revision or "main", timeout=HUB_TIMEOUT_S)  # the next line has no limit
    return Path(snapshot_download(checkpoint, revision=revision, allow_patterns=SMALL_FILES))


def fetched_folder(repository: str, folder: str, revision: str | None = None, variant: str | None = None) -> Path:
    """Return a folder of a hub repository in the hub's cache, downloaded if necessary; any error of the hub is raised.

    Inside :func:`headers_only` that is only its small files, otherwise also its weights, of the variant if it has that.
    """
    from huggingface_hub import HfApi, snapshot_download

    leave_silent_hub()
    inside = f"{folder}/" if folder else ""
    configs = (cached_file(repository, inside + name, revision) for name in CONFIGS)
    cached = next((config.parent for config in configs if config is not None), None)
    if _headers_only.get():
        return cached or download_small_files(repository, revision) / folder
    try:
        files = HfApi().list_repo_files(repository, revision=revision)
    except Exception:
        if cached is None:
            raise
        return cached
    weights = weight_names(file.removeprefix(inside) for file in files if file.startswith(inside))
    patterns = [inside + name for name in (*weights.get(variant, weights.get(None, [])), *SMALL_FILES)]
    return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns)) / folder


def explain_unloadable(
    checkpoint: str, filename: str, what_to_set: str, revision: str | None = None, variant: str | None = None
) -> str | None:
    """Return why a checkpoint cannot be loaded, in one line, or None, judged by one of its files.

    Looks for ``filename`` in the local folder, then in the hub's cache, then asks the hub once, unless
    ``HF_HUB_OFFLINE`` is set.

    Args:
        checkpoint: A local folder, a ``shipped:`` path or a hub name ``owner/name``.
        filename: A file that every such checkpoint has, such as ``model_index.json``.
        what_to_set: The recipe's key of the checkpoint, for the message.
        revision: Branch, tag or commit of a hub repository; ``None`` is its main branch.
        variant: Variant of the weights that is wanted, for the message.
    """
    try:
        folder = local_folder(checkpoint)
    except ValueError as error:
        return str(error)
    if folder is not None:
        if not folder.is_dir():
            return f"{folder} is not a folder. Set {what_to_set} to a folder with {filename}, or to a hub name."
        if not (folder / filename).is_file():
            return f"{folder} has no {filename}. Set {what_to_set} to a folder that has it, or to a hub name."
        return None
    if cached_file(checkpoint, filename, revision) is not None:
        return None
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import GatedRepoError

    reason = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            get_hf_file_metadata(hf_hub_url(checkpoint, filename, revision=revision), timeout=HUB_TIMEOUT_S)
        except Exception as error:  # any error of the network too
            reason = f"asking the hub for {filename} ended with {type(error).__name__}"
            if isinstance(error, GatedRepoError):
                reason = f"you must accept its licence on the hub, {constants.ENDPOINT}/{checkpoint}, and log in"
        else:
            return None
    remedy = f"Run: {download_command(checkpoint, filename, revision, variant)}, or set {what_to_set}=/a/local/folder."
    return f"Cannot load {checkpoint}: not in the local cache and {reason}. {remedy}"


def download_command(checkpoint: str, filename: str, revision: str | None = None, variant: str | None = None) -> str:
    """Return the command that downloads what a run reads of a hub repository that has a file of this name.

    >>> download_command("owner/name", "config.json", "v3")
    'hf download owner/name --revision v3'
    >>> print(download_command("owner/name", "model_index.json", variant="fp16"))
    python -c "import diffusers; diffusers.DiffusionPipeline.download('owner/name', variant='fp16')"
    """
    if filename == "model_index.json":  # repositories of pipelines have the weights in several formats
        which = "".join(f", {k}='{v}'" for k, v in {"revision": revision, "variant": variant}.items() if v)
        return f"python -c \"import diffusers; diffusers.DiffusionPipeline.download('{checkpoint}'{which})\""
    return f"hf download {checkpoint}" + (f" --revision {revision}" if revision else "")


def with_commands(errors: list[str]) -> list[str]:
    """Return errors with those of :func:`explain_unloadable` that have one reason as a line, and a line per command.

    >>> lacks = "Cannot load {0}: not in the local cache and it is late. Run: hf download {0}, or set {1}=/a"
    >>> print("\\n".join(with_commands([lacks.format("a/b", "x"), lacks.format("c/d", "y"), lacks.format("c/d", "z")])))
    Cannot load models: not in the local cache and it is late. Run these commands, or set the options to local folders:
    hf download a/b # or set x
    hf download c/d # or set y, z
    >>> print("\\n".join(with_commands([lacks.format("c/d", "y"), lacks.format("c/d", "z")])))
    Cannot load c/d: not in the local cache and it is late. Run: hf download c/d # or set y, z to a local folder
    """
    lacking: dict[str, dict[str, list[str]]] = {}
    reasons: list[str | None] = []
    for match in map(_NOT_HERE.match, errors):
        reasons.append(match and _ASKED_FOR.sub("", match[1]))
        if match is not None:
            lacking.setdefault(str(reasons[-1]), {}).setdefault(match[2], []).append(match[3])
    shown: list[str] = []
    for error, reason in zip(errors, reasons, strict=True):
        commands = lacking.get(reason or "", {})
        advice = "Run these commands, or set the options to local folders:"
        lines = [f"{command} # or set {', '.join(keys)}" for command, keys in commands.items()]
        what = f"Cannot load models: not in the local cache and {reason}. {advice}"
        start = f"{error.partition(':')[0]}: not in the local cache and {reason}. Run:"
        one = [f"{start} {line} to a local folder" for line in lines]
        is_double = sum(map(len, commands.values())) > 1
        shown += [what, *lines] if len(lines) > 1 else one if is_double else [error]
    return list(dict.fromkeys(shown))


def without_origin(config: Any) -> Any:
    """Return a configuration without entries about the model's origin, or its dtype, which its parameters show."""
    if not isinstance(config, dict):
        return config
    return {key: without_origin(value) for key, value in config.items() if key not in ORIGIN_KEYS}


# --- networks and tokenizers ------------------------------------------------------------------------------------------


@contextmanager
def headers_only() -> Iterator[None]:
    """Load networks on the meta device inside, from their configurations and the headers of such files as are here."""
    token = _headers_only.set(True)
    try:
        with quiet_libraries():
            yield
    finally:
        _headers_only.reset(token)


def load_network(kind: Any, checkpoint: str, remedy: str, **options: Any) -> Any:
    """Load a network of diffusers or transformers, or of an Auto class, with options of its ``from_pretrained``.

    Raises:
        LoadError: A file is missing or damaged, or a tensor of the network or of its files has no counterpart.
    """
    source, is_local = source_of(checkpoint), local_folder(checkpoint) is not None
    with loading(checkpoint, remedy):
        if is_local and not (Path(source) / "config.json").is_file():
            raise FileNotFoundError("it has no config.json")  # without it, transformers uses the class's defaults
        if _headers_only.get():
            network, info = _from_headers(kind, checkpoint, options.get("variant"))
            info |= {} if is_local else {"missing_keys": ()}  # other files may be downloaded later
        else:
            # in diffusers, this option refuses packed weights
            is_packed = hasattr(kind, "load_config") and PACKED in kind.load_config(source)
            options |= {"output_loading_info": True, "ignore_mismatched_sizes": not is_packed}
            network, info = kind.from_pretrained(source, **options)
            # diffusers takes the names in shards from their index
            info["missing_keys"] = {*info["missing_keys"], *(n for n, p in network.named_parameters() if p.is_meta)}
        _refuse_differences(network, info, source)
    return network


def _refuse_differences(network: Any, info: Mapping[str, Any], source: str) -> None:
    """Raise ValueError if a network's tensors differ from those of its files, except where no output depends on it."""
    shapes = {name: f"{name} ({' x '.join(map(str, shape))})" for name, shape, *_ in info.get("mismatched_keys", ())}
    missing = {name: name for name in info.get("missing_keys", ()) if name not in shapes}
    unstored = {name for name, _ in network.named_buffers()}  # any more
    unread = {n: n for n in info.get("unexpected_keys", ()) if not (n in unstored or n.endswith(BATCHES_SEEN))}
    if unread and not hasattr(network, "load_config"):
        from transformers import PretrainedConfig

        writers = PretrainedConfig.get_config_dict(source)[0].get("architectures")
        if type(network).__name__ not in (writers or ()):  # a larger model wrote the files
            parts = {name for name, _ in network.named_children()}
            unread = {name: name for name in unread if name.partition(".")[0] in parts}
    if any(".base_layer." in name for name in unread):
        raise ValueError("it was saved with a LoRA in it: call fuse_lora() and unload_lora_weights() before saving")
    problems = (("missing", missing), ("not read", unread), ("of another shape", shapes))
    if texts := [f"{counted(len(n), 'weight')} {problem}, such as {n[min(n)]}" for problem, n in problems if n]:
        raise ValueError("; ".join(texts))


def _from_headers(kind: Any, checkpoint: str, variant: str | None) -> tuple[Any, dict[str, Any]]:
    """Return a network on the meta device, and how its tensors differ from those in the headers of its files."""
    from transformers import AutoConfig

    config_file = file_at_hand(checkpoint, "config.json")
    assert config_file is not None  # headers are read where a check has found it
    folder, is_diffusers = config_file.parent, hasattr(kind, "load_config")
    read = kind.load_config if is_diffusers else getattr(kind, "config_class", AutoConfig).from_pretrained
    config = read(folder, local_files_only=True)
    with torch.device("meta"):
        network = kind(config) if hasattr(kind, "config_class") else kind.from_config(config)
    files = weight_files(folder).get(variant, [])
    tensors = {name: tensor for file in files for name, tensor in read_weights(file).items()}
    if not tensors or PACKED in (config if is_diffusers else config.to_dict()):
        return network, {}
    if not is_diffusers:
        options = {"output_loading_info": True, "ignore_mismatched_sizes": True, "dtype": torch.float32}
        options |= {"config": config, "state_dict": tensors, "device_map": {"": "meta"}}
        with torch.device("cpu"):  # transformers refuses to load inside torch.device("meta")
            loaded: tuple[Any, dict[str, Any]] = type(network).from_pretrained(None, **options)
            return loaded
    if len(files) == 1:
        network._fix_state_dict_keys_on_load(tensors)  # as in from_pretrained
    own, ignored = network.state_dict(), "|".join(kind._keys_to_ignore_on_load_unexpected or ["^$"])
    return network, {
        "missing_keys": own.keys() - tensors.keys(),
        "unexpected_keys": {name for name in tensors.keys() - own.keys() if not re.search(ignored, name)},
        "mismatched_keys": {(n, t.shape) for n, t in tensors.items() if n in own and t.shape != own[n].shape},
    }


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return a file's tensors by name, on the CPU; anything else would have to be unpickled and raises an error."""
    if path.suffix != ".safetensors":
        place, mmap = "meta" if _headers_only.get() else "cpu", zipfile.is_zipfile(path)
        weights: dict[str, Tensor] = torch.load(path, map_location=place, weights_only=True, mmap=mmap)
        return weights
    from safetensors import safe_open
    from safetensors.torch import load_file

    if not _headers_only.get():
        return load_file(path)
    with safe_open(path, framework="pt") as file:
        return {name: torch.empty(file.get_slice(name).get_shape(), device="meta") for name in file.keys()}  # noqa: SIM118


def weight_files(folder: Path) -> dict[str | None, list[Path]]:
    """Return a network's weight files by variant, preferring safetensors; shards count only with their index."""
    names = weight_names(path.name for path in folder.glob("*") if path.is_file())  # a link may lead nowhere
    return {which: [folder / name for name in names] for which, names in names.items()}


def weight_names(names: Iterable[str]) -> dict[str | None, list[str]]:
    """Return those of the names of a folder's files that :func:`weight_files` reads, by variant."""
    known = sorted(names)
    has_index, by_variant = any(".index." in name for name in known), dict[str | None, list[str]]()
    for name in known:
        if (match := WEIGHTS.fullmatch(name)) is not None and (has_index or "-of-" not in name):
            by_variant.setdefault(match[1] or match[2], []).append(name)
    return {which: [f for f in files if f.endswith(".safetensors")] or files for which, files in by_variant.items()}


def tokenizer_error(tokenizer: Any, embeddings: int) -> str | None:
    """Return why a tokenizer is not that of an encoder with a number of token embeddings, as a phrase, or ``None``."""
    size, words = len(tokenizer), 0
    if size < LEAST_KNOWN * embeddings or tokenizer.vocab_size > embeddings:  # an added token may have none
        return f"has {counted(size, 'token')}, but its encoder {embeddings}"
    for number in range(0, size, max(1, size // PROBES)):
        text = tokenizer.decode([number])  # perhaps with a space in front, which some tokens have
        if text.strip().isalpha() and len(text.strip()) >= LEAST_LETTERS:
            if number in tokenizer(text, truncation=True)["input_ids"]:
                return None
            words += 1
    return "finds no word of its own vocabulary, as without its merges" if words >= LEAST_WORDS else None
