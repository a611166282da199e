"""LoRA files of any trainer, converted by diffusers and put into the adapter or the weights that a policy trains.

diffusers' converters and peft's scales were read in diffusers 0.42.1 and peft 0.21.2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lit_vgrpo.errors import counted, one_line
from lit_vgrpo.policies.contract import PolicyContract
from lit_vgrpo.policies.fold import lora_layers
from lit_vgrpo.policies.pipeline_folder import INDEX, config_folder
from lit_vgrpo.policies.trained import is_target, name_in_block
from lit_vgrpo.system.hub import LoadError, quiet_libraries

KEY = "model.policy.start_from"
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
SPELLINGS = {
    **{DOWN: DOWN, UP: UP, ".lora_down.weight": DOWN, ".lora_up.weight": UP},
    **{".lora.down.weight": DOWN, ".lora.up.weight": UP},
    **{".lora_A.default.weight": DOWN, ".lora_B.default.weight": UP},
}
"""Endings of the matrices' names in other programs."""
PREFIXES = ("base_model.model.", "diffusion_model.", "transformer.", "unet.", "lora_unet_", "lora_transformer_", "")
OTHER_ADAPTERS = {"lokr_": "LoKr", "hada_": "LoHa", "dora_scale": "DoRA", "lora_magnitude_vector": "DoRA"}


@dataclass(frozen=True)
class LowRank:
    """The update of one layer's weight: ``up @ down``, with kernels flattened.

    Args:
        down: ``(r, ...)``, float32.
        up: ``(out, r, ...)``, float32, with the file's scale.
    """

    down: Tensor
    up: Tensor

    @property
    def rank(self) -> int:
        return len(self.down)

    def of_weight(self, weight: Tensor) -> Tensor:
        """Return the update in the shape of the layer's weight."""
        return (self.up.flatten(1) @ self.down.flatten(1)).view(weight.shape)


def lora_file_error(policy: PolicyContract, file: Path) -> str | None:
    """Return why a policy cannot start from a LoRA file, in one line, or ``None``; no weights are read.

    Layers are compared with the network only if its configuration is on this machine.
    """
    try:
        network = _network_on_meta(policy)
        if network is None:
            _read(policy, file)
        else:
            _refuse_untrained(policy, read_lora(policy, file, network))
    except LoadError as error:
        return str(error)
    return None


@torch.no_grad()
def put_lora(policy: PolicyContract, file: Path) -> None:
    """Put a LoRA file into a loaded policy: into its adapter, or where it trains the weights themselves, into them.

    The adapter's first ranks take the file's, whose scale is divided by the adapter's own; the others stay as they are,
    with B matrices of 0. The adapter is then the file's LoRA, exactly but for the rounding of that quotient.

    Raises:
        LoadError: the file is no LoRA, or not of this network, or the policy does not train all of its layers.
    """
    kind = type(policy.network)
    with torch.device("meta"):
        network = kind.from_config(policy.network.config)
    updates = read_lora(policy, file, network)
    _refuse_untrained(policy, updates)
    if policy.lora_rank is None:
        for name, update in updates.items():
            weight = policy.network.get_submodule(name).weight
            weight += update.of_weight(weight)
        return
    adapted = {name: layer for name, layer in policy.network.named_modules() if name in updates}
    for name, update in updates.items():
        layer, rank = adapted[name], update.rank
        layer.lora_A["default"].weight[:rank] = update.down
        layer.lora_B["default"].weight[:, :rank] = update.up / layer.scaling["default"]


def read_lora(policy: PolicyContract, file: Path, network: Any) -> dict[str, LowRank]:
    """Return a LoRA file's updates by the names of the network's layers.

    Args:
        policy: need not be loaded.
        file: safetensors, under the names of diffusers, kohya's trainer or ai-toolkit.
        network: a diffusers model without weights to compare with, to which an adapter is added.

    Raises:
        LoadError: it cannot be read, is no LoRA, or some of it does not fit the network.
    """
    tensors, header = _read(policy, file)
    layers = _converted(policy, tensors, network)
    odd = _unmatched(layers, network)
    if odd or not layers:
        by_name = _renamed(tensors, network)
        if others := _unmatched(by_name, network):
            fewer = odd if layers and len(odd) < len(others) else others
            raise LoadError(_misfit(policy, network, tensors, fewer))
        layers = by_name
    scales = dict.fromkeys((name.removesuffix(DOWN) for name in layers if name.endswith(DOWN)), 1.0)
    if header is not None:
        scales = _scales_of(header, layers, policy.network_name, network)
    return {name: LowRank(layers[name + DOWN], layers[name + UP] * scale) for name, scale in scales.items()}


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
    adapted = {id(layer) for layer in lora_layers(network)}
    return {name: layer.scaling["file"] for name, layer in network.named_modules() if id(layer) in adapted}


def _read(policy: PolicyContract, file: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Return a file's tensors in float32, and the options of the adapter in its header."""
    what = f"{KEY}={policy.start_from}"
    try:
        with safe_open(file, framework="pt") as content:
            tensors = {name: content.get_tensor(name).float() for name in content.keys()}  # noqa: SIM118  not a mapping
            header = json.loads((content.metadata() or {}).get("lora_adapter_metadata", "null"))
    except (OSError, ValueError, SafetensorError) as error:
        raise LoadError(f"{what} cannot be read: {one_line(error)[:200]}. Download or save it again.") from error
    for name in tensors:
        for mark, kind in OTHER_ADAPTERS.items():
            if mark in name:
                raise LoadError(f"{what} is a {kind}, not a LoRA: {name}. {_merging(policy)}")
    if any(name.startswith(("lora_te", "text_encoder")) for name in tensors):
        raise LoadError(f"{what} also changes text encoders, which no run trains or exports. {_merging(policy)}")
    if not any(name.endswith((DOWN, *SPELLINGS)) for name in tensors):
        raise LoadError(f"{what} is not a LoRA: none of its {len(tensors)} tensors is named lora_A or lora_down.")
    if any(not tensor.isfinite().all() for tensor in tensors.values()):
        raise LoadError(f"{what} holds weights that are not finite. Download or save it again.")
    return tensors, header


def _merging(policy: PolicyContract) -> str:
    """Return the command that makes a pipeline folder of a checkpoint and a file."""
    script = (
        f'import diffusers; pipe = diffusers.{policy.pipeline_class}.from_pretrained("{policy.checkpoint}"); '
        f'pipe.load_lora_weights("{policy.start_from}"); pipe.fuse_lora(); pipe.unload_lora_weights(); '
        'pipe.save_pretrained("DIR")'
    )
    return f"Merge it: python -c '{script}', then set model.policy.checkpoint=DIR and leave out start_from."


def _converted(policy: PolicyContract, tensors: Mapping[str, Tensor], network: Any) -> dict[str, Tensor]:
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
    own = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
    renames = {name: name for name in own}
    if not any("lora_A" in name for name in own):
        renames = {name: next(iter(convert_unet_state_dict_to_peft({name: tensor}))) for name, tensor in own.items()}
    layers = {renames[name]: tensor for name, tensor in own.items()}
    for name, alpha in (next(iter(alphas), None) or {}).items():
        # diffusers 0.42 names those of a UNet's attention after its old processors, and then ignores them
        old = name.removeprefix(prefix).removesuffix(".alpha")
        _scale(layers, renames.get(old, old).removesuffix(DOWN), float(alpha))
    return layers


def _renamed(tensors: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Return a LoRA whose layers have the network's own names, up to the prefix and underscores for dots.

    diffusers has no converter for SD 3.5, and others know only the names of the model's first publisher.
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
    """Return the tensors that are no pair of matrices of one of the network's layers."""
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


def _misfit(policy: PolicyContract, network: nn.Module, tensors: Mapping[str, Tensor], odd: Sequence[str]) -> str:
    sample = next(name for name, module in network.named_modules() if isinstance(module, nn.Linear))
    return (
        f"{KEY}={policy.start_from} does not fit {type(network).__name__}: {len(odd)} of its "
        f"{len(tensors)} tensors match no layer, the first is {odd[0]}. Expected names such as "
        f"{policy.network_name}.{sample}{DOWN}. Is it a LoRA of another model?"
    )


def _refuse_untrained(policy: PolicyContract, updates: Mapping[str, LowRank]) -> None:
    """Check that the policy trains all layers of a LoRA, with at least its rank.

    Raises:
        LoadError: it does not, with the options to set.
    """
    what = f"{KEY}={policy.start_from}"
    if policy.lora_rank is None:
        patterns = policy.train_only or ["*"]
        frozen = [name for name in updates if not any(fnmatchcase(f"{name}.weight", pattern) for pattern in patterns)]
        if frozen:
            raise LoadError(
                f"{what} changes {counted(len(frozen), 'layer')} that model.policy.train_only leaves frozen, such as "
                f"{frozen[0]}. Set model.policy.lora_rank instead, or train all weights."
            )
        return
    rank = max(update.rank for update in updates.values())
    missing = [name for name in updates if not any(is_target(name, target) for target in policy.lora_targets)]
    needed = []
    if rank > policy.lora_rank:
        needed.append(f"model.policy.lora_rank={rank}")
    if missing:
        targets = ",".join(sorted({name_in_block(name) for name in updates}))
        needed.append(f"'model.policy.lora_targets=[{targets}]'")
    if needed:
        layers = f"{counted(len(updates), 'layer')} up to rank {rank}"
        raise LoadError(f"{what} adapts {layers}, more than this run would train. Set {' '.join(needed)}, or more.")


def _network_on_meta(policy: PolicyContract) -> Any:
    """Return an unloaded policy's network without weights, or ``None`` if its configuration is not on this machine."""
    import diffusers

    folder = config_folder(policy.checkpoint, policy.revision)
    if folder is None:
        return None
    try:
        kind = getattr(diffusers, json.loads((folder / INDEX).read_text())[policy.network_name][1])
        config = kind.load_config(folder / policy.network_name, local_files_only=True)
    except (OSError, ValueError, KeyError, AttributeError):
        return None  # reported by the pipeline's own check
    with torch.device("meta"):
        return kind.from_config(config)
