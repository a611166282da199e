"""LoRA files of any trainer, converted by diffusers and put into the adapter or the weights that a policy trains.

diffusers' converters and peft's scales were read in diffusers 0.42.1 and peft 0.21.2.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lit_vgrpo.errors import one_line
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.export import fused_modules
from lit_vgrpo.policies.loading import bare_network
from lit_vgrpo.policies.trained import is_target, name_in_block
from lit_vgrpo.system.hub import LoadError, loading, quiet_libraries, read_weights

KEY = "model.policy.start_from"
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
PEFT_STEM, PEFT_CONFIG = "adapter_model", "adapter_config.json"
"""The files that peft's ``save_pretrained`` writes, the first with one of the suffixes."""
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
Updates = dict[str, tuple[Tensor, Tensor]]
"""Each layer's update ``up @ down`` by name: ``down (r, ...)`` and ``up (out, r, ...)`` with its scale, float32."""
SPELLINGS = {
    **{DOWN: DOWN, UP: UP, ".lora_A.default.weight": DOWN, ".lora_B.default.weight": UP},
    **{".lora_down.weight": DOWN, ".lora_up.weight": UP, ".lora.down.weight": DOWN, ".lora.up.weight": UP},
}
"""Endings of the matrices' names in other programs."""
PREFIXES = ("base_model.model.", "diffusion_model.", "transformer.", "unet.", "lora_unet_", "lora_transformer_", "")
ALPHA = ".alpha"
RESPELT = ((DOWN, UP), (".lora_down.weight", ".lora_up.weight"))
"""Endings under which diffusers' converters look for a model's authors' names, behind ``diffusion_model.``."""
FREE = {
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"),  # read here, or seen in the tensors
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "inference_mode"),
    *("base_model_name_or_path", "revision", "task_type", "auto_mapping", "peft_version", "fan_in_fan_out"),
    *("eva_config", "corda_config", "lora_ga_config", "loftq_config", "velora_config"),
}
"""Options in peft's ``adapter_config.json`` that may have any value; others must be off or have peft's default."""
KEEPING_BASE = {("init_lora_weights", value) for value in ("gaussian", "eva", "orthogonal", "mica")}
"""Initialisations that leave the base's weights unchanged; pissa, olora, corda, lora_ga and loftq change them."""
REMEDY = "Use a plain LoRA of this model, or merge it with its trainer's tools and set model.policy.checkpoint."


def lora_file_error(policy: Policy, file: Path) -> str | None:
    """Return why a policy cannot start from a file, in one line, or ``None``; the policy need not be loaded."""
    try:
        network = bare_network(policy)
        if network is not None:
            _refuse_untrained(policy, read_lora(policy, file, network), network)
    except LoadError as error:
        return str(error)
    return None


@torch.no_grad()
def put_lora(policy: Policy, file: Path) -> None:
    """Load a LoRA file into a policy: into its adapter, or into the weights if the policy trains these.

    The adapter's first ranks take the file's, whose scale is divided by the adapter's; the others are unchanged,
    with B matrices of 0. The adapter then equals the file's LoRA, up to rounding of that quotient.

    Raises:
        LoadError: The file is not a LoRA of this network, or the policy does not train all of its layers.
    """
    kind = type(next(iter(policy.networks().values())))
    with torch.device("meta"):
        network = kind.from_config(policy.network.config)
    updates = read_lora(policy, file, network)
    _refuse_untrained(policy, updates, network)
    if policy.lora_rank is None:
        for name, (down, up) in updates.items():
            weight = policy.network.get_submodule(name).weight
            weight += (up.flatten(1) @ down.flatten(1)).view(weight.shape)
        return
    for name, (down, up) in updates.items():
        layer = policy.network.get_submodule(name)
        layer.lora_A["default"].weight[: len(down)] = down
        layer.lora_B["default"].weight[:, : len(down)] = up / layer.scaling["default"]


@torch.inference_mode(mode=False)
@torch.enable_grad()
def read_lora(policy: Policy, file: Path, network: Any) -> Updates:
    """Return a LoRA file's updates by the names of the network's layers.

    Args:
        policy: The policy; need not be loaded.
        file: A file with one of :data:`SUFFIXES`, under the names of any program that diffusers can convert, or of the
            network's layers.
        network: A diffusers model without weights to compare with.

    Raises:
        LoadError: The file cannot be read, or a tensor of it has no place in the network.
    """
    if len(policy.network_names) > 1:
        raise LoadError(
            f"{KEY}={policy.start_from} is a LoRA of one network, but the model has two. Name a run instead."
        )
    with loading(f"{KEY}={policy.start_from}", "Download or save it again."):
        tensors, config = _read(policy, file)
        layers = _layers_of(policy, tensors, network)
        names = [name.removesuffix(DOWN) for name in layers if name.endswith(DOWN)]
        pairs = {name: (layers[name + DOWN].detach(), layers[name + UP].detach()) for name in names}
        updates = {name: (down, up * _scale_of(config, name, len(down))) for name, (down, up) in pairs.items()}
        if any(not (down.isfinite().all() and up.isfinite().all()) for down, up in updates.values()):
            raise ValueError("contains weights that are not finite")
        return updates


def _scale_of(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """Return a layer's scale from an adapter's options, as peft computes it; 1 if they define none."""
    from peft.utils.other import get_pattern_key

    patterns = config.get("alpha_pattern") or {}
    alpha: float = patterns.get(get_pattern_key(list(patterns), layer), config.get("lora_alpha", rank))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _read(policy: Policy, file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a file's tensors in float32, and the adapter's options in its header or in peft's file next to it."""
    what, prefix = f"{KEY}={policy.start_from}", f"{policy.network_name}."
    weights, header = read_weights(file), {}
    if not (weights and all(isinstance(value, Tensor) for value in weights.values())):
        raise ValueError("contains no tensors, or something else")
    tensors = {name: tensor.float() for name, tensor in weights.items()}
    if file.suffix == SUFFIXES[0]:
        with safe_open(file, framework="pt") as content:
            header = json.loads((content.metadata() or {}).get("lora_adapter_metadata", "{}"))
    if file.stem == PEFT_STEM:
        header = json.loads((file.parent / PEFT_CONFIG).read_text(encoding="utf-8"))
    config = {name.removeprefix(prefix): value for name, value in header.items()}
    if (variant := _variant(config)) is not None:
        raise LoadError(f"{what} is not a plain LoRA: its adapter's options have {variant}. {REMEDY}")
    if config and (alphas := [name for name in tensors if name.endswith(ALPHA)]):
        raise LoadError(
            f"{what} has two LoRA scales, in its adapter's options and in {alphas[0]}. Save it with one of them."
        )
    _fold_alphas(tensors)
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}, config


def _variant(config: Mapping[str, Any]) -> str | None:
    """Return an adapter's option under which its tensors are not a plain LoRA of the base model, or ``None``."""
    from peft import LoraConfig

    plain = LoraConfig().to_dict()
    for name, value in config.items():
        is_plain = name in FREE or "." in name or not value or value == plain.get(name)  # with a dot: of other networks
        if not is_plain and (name, str(value).lower()) not in KEEPING_BASE:
            return f"{name}={value}"
    return None


def _unused(tensors: Mapping[str, Tensor], layers: Mapping[str, Tensor]) -> list[str]:
    """Return the file's tensors on which no converted tensor depends: converters drop those that they do not know."""
    if not layers:
        return list(tensors)
    total = torch.stack([tensor.sum() for tensor in layers.values()]).sum()
    gradients = torch.autograd.grad(total, list(tensors.values()), allow_unused=True)
    return [name for name, gradient in zip(tensors, gradients, strict=True) if gradient is None]


def _fold_alphas(tensors: dict[str, Tensor]) -> None:
    """Multiply each alpha of a layer, divided by its rank, into the layer's second matrix."""
    for name in [name for name in tensors if name.endswith(ALPHA)]:
        stem = name.removesuffix(ALPHA)
        names = {matrix: stem + ending for ending, matrix in SPELLINGS.items() if stem + ending in tensors}
        if names.keys() == {DOWN, UP}:
            tensors[names[UP]] = tensors[names[UP]] * (tensors.pop(name).item() / len(tensors[names[DOWN]]))


def _layers_of(policy: Policy, tensors: Mapping[str, Tensor], network: Any) -> dict[str, Tensor]:
    """Return a LoRA's matrices by peft's names: the first reading of its names that has a place for every tensor.

    Raises:
        LoadError: There is none; with the error of diffusers' converter for the file's own names.
    """
    error, odds = "", list[list[str]]()
    for named in (tensors, None, *(_respelt(tensors, *endings) for endings in RESPELT)):
        try:
            layers = _converted(policy, named, network) if named else _renamed(policy, tensors, network)
        except Exception as caught:  # a converter may ask for any name, also for the alphas
            if named is tensors and ALPHA not in str(caught):
                error = f" (diffusers: {type(caught).__name__}: {one_line(caught)[:200]})"
            continue
        odd = [*_unmatched(layers, network), *_unused(tensors, layers)]
        if not odd:
            return layers
        if not named or named is tensors:
            odds.append(odd)
    fewest = min(odds, key=len)
    first = min(fewest, key=lambda name: (_parts(name)[1] != "", name.endswith(ALPHA)))
    raise LoadError(
        f"{KEY}={policy.start_from} is not a LoRA of {type(network).__name__} alone: {len(fewest)} of its "
        f"{len(tensors)} tensors do not fit, such as {first}.{error} {REMEDY}"
    )


def _parts(name: str) -> tuple[str, str]:
    """Return a layer's name without a program's prefix, and which of its matrices a tensor is, empty if none."""
    ending = next((ending for ending in SPELLINGS if name.endswith(ending)), "")
    stem = name.removesuffix(ending)
    for prefix in PREFIXES:
        stem = stem.removeprefix(prefix)
    return stem, SPELLINGS.get(ending, "")


def _respelt(tensors: Mapping[str, Tensor], down: str, up: str) -> dict[str, Tensor]:
    """Return a LoRA under names that diffusers' converters know, whatever its own prefix and endings are."""
    parts, endings = {name: _parts(name) for name in tensors}, {DOWN: down, UP: up}
    names = {name: f"diffusion_model.{stem}{endings[matrix]}" for name, (stem, matrix) in parts.items() if matrix}
    return {names.get(name, name): tensor for name, tensor in tensors.items()}


def _converted(policy: Policy, tensors: Mapping[str, Tensor], network: Any) -> dict[str, Tensor]:
    """Return a LoRA's matrices by peft's names, as the family's pipeline reads them.

    Tensors that the pipeline would pass to other networks keep their names.
    """
    import diffusers
    from diffusers.utils import convert_unet_state_dict_to_peft

    family, prefix = getattr(diffusers, policy.pipeline_class), f"{policy.network_name}."
    with quiet_libraries():
        converted, *_ = family.lora_state_dict(dict(tensors), unet_config=network.config, return_lora_metadata=True)
    ours = {name.removeprefix(prefix): tensor for name, tensor in converted.items()}
    if not any("lora_A" in name for name in ours):
        ours = {next(iter(convert_unet_state_dict_to_peft({name: tensor}))): tensor for name, tensor in ours.items()}
    return ours


def _renamed(policy: Policy, tensors: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Return a LoRA whose layers have the names of the network or of its authors, with underscores or dots.

    diffusers has no converter for SD 3.5, and others need all layers of a file.
    """
    modules = dict(network.named_modules())
    places = {**{name: [name] for name in modules}, **fused_modules(modules, policy.comfyui_names)}
    flat = {name.replace(".", "_"): layers for name, layers in places.items()}
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, matrix = _parts(name)
        layers = flat.get(stem.replace(".", "_"), []) if matrix else []
        sizes = [len(getattr(modules[layer], "weight", ())) for layer in layers]
        parts = tensor.split(sizes) if matrix == UP and sum(sizes) == len(tensor) else [tensor] * len(layers)
        renamed |= {layer + matrix: part for layer, part in zip(layers, parts, strict=True)} or {name: tensor}
    return renamed


def _unmatched(layers: Mapping[str, Tensor], network: nn.Module) -> list[str]:
    """Return the tensors that do not belong to a pair of matrices of one of the network's layers."""
    modules = dict(network.named_modules())
    odd = []
    for name, tensor in layers.items():
        layer = name.removesuffix(DOWN).removesuffix(UP)
        weight = getattr(modules.get(layer), "weight", None)
        down, up = layers.get(layer + DOWN), layers.get(layer + UP)
        if weight is None or layer == name or down is None or up is None:
            odd.append(name)
        elif down.shape[1:] != weight.shape[1:] or len(up) != len(weight) or not up.shape[1] == len(down) > 0:
            odd.append(f"{name} {tuple(tensor.shape)}")
    return odd


def _refuse_untrained(policy: Policy, updates: Updates, network: nn.Module) -> None:
    """Raise LoadError unless the policy trains all layers of a LoRA, with at least its rank."""
    what = f"{KEY}={policy.start_from}"
    if policy.lora_rank is None:
        patterns = policy.train_only or ["*"]
        frozen = [name for name in updates if not any(fnmatchcase(f"{name}.weight", pattern) for pattern in patterns)]
        if frozen:
            raise LoadError(f"{what} changes {frozen[0]}, which model.policy.train_only leaves frozen.")
        return
    rank = max(len(down) for down, _ in updates.values())
    trained = policy.targets_in(network)
    missing = [name for name in updates if not any(is_target(name, target) for target in trained)]
    if rank > policy.lora_rank or missing:
        targets = ",".join(sorted({name_in_block(name) for name in updates}))
        raise LoadError(
            f"{what} adapts {targets} with rank {rank}, more than this run would train. "
            f"Set model.policy.lora_rank={rank} 'model.policy.lora_targets=[{targets}]', or more."
        )
