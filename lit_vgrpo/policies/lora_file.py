"""LoRA files of any trainer, converted by diffusers and put into the adapter or the weights that a policy trains.

diffusers' converters and peft's scales were read in diffusers 0.42.1 and peft 0.21.2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lit_vgrpo.errors import one_line
from lit_vgrpo.policies.acceleration import lora_layers
from lit_vgrpo.policies.pipeline import PipelinePolicy
from lit_vgrpo.policies.trained import is_target, name_in_block
from lit_vgrpo.system.hub import LoadError, quiet_libraries

KEY = "model.policy.start_from"
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
Updates = dict[str, tuple[Tensor, Tensor]]
"""Each layer's update ``up @ down`` by name: ``down (r, ...)`` and ``up (out, r, ...)`` with its scale, float32."""
SPELLINGS = {
    **{DOWN: DOWN, UP: UP, ".lora_down.weight": DOWN, ".lora_up.weight": UP},
    **{".lora_A.default.weight": DOWN, ".lora_B.default.weight": UP},
}
"""Endings of the matrices' names in other programs."""
PREFIXES = ("base_model.model.", "diffusion_model.", "transformer.", "unet.", "lora_unet_", "lora_transformer_", "")
OTHER_ADAPTERS = ("lokr_", "hada_", "dora_scale", "lora_magnitude_vector", "lora_te", "text_encoder")
"""Marks that a plain LoRA of the network does not have: LoKr, LoHa, DoRA, text encoders."""


def lora_file_error(policy: PipelinePolicy, file: Path) -> str | None:
    """Return why a file is not a LoRA, in one line, or ``None``; loading checks that it fits the network."""
    try:
        _read(policy, file)
    except LoadError as error:
        return str(error)
    return None


@torch.no_grad()
def put_lora(policy: PipelinePolicy, file: Path) -> None:
    """Load a LoRA file into a policy: into its adapter, or into the weights if the policy trains these.

    The adapter's first ranks take the file's, whose scale is divided by the adapter's; the others are unchanged,
    with B matrices of 0. The adapter then equals the file's LoRA, up to rounding of that quotient.

    Raises:
        LoadError: The file is not a LoRA of this network, or the policy does not train all of its layers.
    """
    kind = type(policy.network)
    with torch.device("meta"):
        network = kind.from_config(policy.network.config)
    updates = read_lora(policy, file, network)
    _refuse_untrained(policy, updates)
    if policy.lora_rank is None:
        for name, (down, up) in updates.items():
            weight = policy.network.get_submodule(name).weight
            weight += (up.flatten(1) @ down.flatten(1)).view(weight.shape)
        return
    for name, (down, up) in updates.items():
        layer = policy.network.get_submodule(name)
        layer.lora_A["default"].weight[: len(down)] = down
        layer.lora_B["default"].weight[:, : len(down)] = up / layer.scaling["default"]


def read_lora(policy: PipelinePolicy, file: Path, network: Any) -> Updates:
    """Return a LoRA file's updates by the names of the network's layers.

    Args:
        policy: The policy; need not be loaded.
        file: Safetensors, under the names of diffusers, kohya's trainer or ai-toolkit.
        network: A diffusers model without weights to compare with, to which an adapter is added.
    """
    tensors, header = _read(policy, file)
    layers = _converted(policy, tensors, network)
    if not layers or _unmatched(layers, network):
        layers = _renamed(tensors, network)
    if odd := _unmatched(layers, network):
        raise LoadError(
            f"{KEY}={policy.start_from} does not fit {type(network).__name__}: {len(odd)} of its {len(tensors)} "
            f"tensors match no layer, the first is {odd[0]}. Is it a LoRA of another model?"
        )
    scales = dict.fromkeys((name.removesuffix(DOWN) for name in layers if name.endswith(DOWN)), 1.0)
    if header is not None:
        scales = _scales_of(header, layers, policy.network_name, network)
    return {name: (layers[name + DOWN], layers[name + UP] * scale) for name, scale in scales.items()}


def _scales_of(header: Mapping[str, Any], layers: Mapping[str, Tensor], prefix: str, network: Any) -> dict[str, float]:
    """Return the scale of each layer by the adapter's options in a file's header, as peft computes it."""
    with quiet_libraries():
        network.load_lora_adapter(
            {f"{prefix}.{name}": tensor for name, tensor in layers.items()},
            prefix=prefix,
            metadata=dict(header),
            adapter_name="file",
            low_cpu_mem_usage=True,
        )
    return {name: layer.scaling["file"] for name, layer in lora_layers(network).items()}


def _read(policy: PipelinePolicy, file: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Return a file's tensors in float32, and the options of the adapter in its header."""
    what = f"{KEY}={policy.start_from}"
    try:
        with safe_open(file, framework="pt") as content:
            tensors = {name: content.get_tensor(name).float() for name in content.keys()}  # noqa: SIM118  not a mapping
            header = json.loads((content.metadata() or {}).get("lora_adapter_metadata", "null"))
    except (OSError, ValueError, SafetensorError) as error:
        raise LoadError(f"{what} cannot be read: {one_line(error)[:200]}. Download or save it again.") from error
    others = [name for name in tensors if any(mark in name for mark in OTHER_ADAPTERS)]
    if others or not any(name.endswith((*SPELLINGS, ".lora.down.weight")) for name in tensors):
        reason = f"it has {others[0]}" if others else "none of its tensors is named lora_A or lora_down"
        raise LoadError(
            f"{what} is not a LoRA of the network alone: {reason}. Merge it into a pipeline by diffusers' fuse_lora."
        )
    if any(not tensor.isfinite().all() for tensor in tensors.values()):
        raise LoadError(f"{what} holds weights that are not finite. Download or save it again.")
    return tensors, header


def _converted(policy: PipelinePolicy, tensors: Mapping[str, Tensor], network: Any) -> dict[str, Tensor]:
    """Return a LoRA's matrices by peft's names, as the family's pipeline reads them; empty if it cannot."""
    import diffusers
    from diffusers.utils import convert_unet_state_dict_to_peft

    family, prefix = getattr(diffusers, policy.pipeline_class), f"{policy.network_name}."
    try:
        with quiet_libraries():
            found, *alphas, _ = family.lora_state_dict(
                dict(tensors), unet_config=network.config, return_alphas=True, return_lora_metadata=True
            )
    except (ValueError, KeyError, IndexError, AssertionError, NotImplementedError, RuntimeError):
        return {}
    ours = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
    renames = {name: name for name in ours}
    if not any("lora_A" in name for name in ours):
        renames = {name: next(iter(convert_unet_state_dict_to_peft({name: tensor}))) for name, tensor in ours.items()}
    layers = {renames[name]: tensor for name, tensor in ours.items()}
    for name, alpha in (next(iter(alphas), None) or {}).items():
        # diffusers 0.42 names those of a UNet's attention after its old processors, and then ignores them
        old = name.removeprefix(prefix).removesuffix(".alpha")
        _scale(layers, renames.get(old, old).removesuffix(DOWN), float(alpha))
    return layers


def _renamed(tensors: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Return a LoRA whose layers have the network's names, up to the prefix and underscores for dots.

    diffusers has no converter for SD 3.5, and others support only the original publisher's names.
    """
    names = {name.replace(".", "_"): name for name, _ in network.named_modules()}
    layers, alphas = {}, {}
    for name, tensor in tensors.items():
        ending = next((ending for ending in (*SPELLINGS, ".alpha") if name.endswith(ending)), "")
        flat = name.removesuffix(ending).replace(".", "_")
        stripped = (flat.removeprefix(prefix.replace(".", "_")) for prefix in PREFIXES)
        layer = next((names[one] for one in stripped if one in names), None)
        if layer is not None and ending == ".alpha":
            alphas[layer] = tensor.item()
        elif ending != ".alpha":
            layers[name if layer is None else layer + SPELLINGS.get(ending, "")] = tensor
    for layer, alpha in alphas.items():
        _scale(layers, layer, alpha)
    return layers


def _scale(layers: dict[str, Tensor], name: str, alpha: float) -> None:
    """Multiply a layer's scale, alpha / rank, into its second matrix."""
    if name + DOWN in layers and name + UP in layers:
        layers[name + UP] = layers[name + UP] * (alpha / len(layers[name + DOWN]))


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
        elif down.shape[1:] != weight.shape[1:] or len(up) != len(weight) or up.shape[1] != len(down):
            odd.append(f"{name} {tuple(tensor.shape)}")
    return odd


def _refuse_untrained(policy: PipelinePolicy, updates: Updates) -> None:
    """Raise LoadError unless the policy trains all layers of a LoRA, with at least its rank."""
    what = f"{KEY}={policy.start_from}"
    if policy.lora_rank is None:
        patterns = policy.train_only or ["*"]
        frozen = [name for name in updates if not any(fnmatchcase(f"{name}.weight", pattern) for pattern in patterns)]
        if frozen:
            raise LoadError(f"{what} changes {frozen[0]}, which model.policy.train_only leaves frozen.")
        return
    rank = max(len(down) for down, _ in updates.values())
    missing = [name for name in updates if not any(is_target(name, target) for target in policy.lora_targets)]
    if rank > policy.lora_rank or missing:
        targets = ",".join(sorted({name_in_block(name) for name in updates}))
        raise LoadError(
            f"{what} adapts {targets} with rank {rank}, more than this run would train. "
            f"Set model.policy.lora_rank={rank} 'model.policy.lora_targets=[{targets}]', or more."
        )
