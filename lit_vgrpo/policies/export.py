"""Export of a policy in the formats of diffusers, kohya and ComfyUI."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lit_vgrpo.policies.placement import written_in
from lit_vgrpo.system.hub import quiet_libraries

LORA_FILE = "pytorch_lora_weights.safetensors"  # diffusers' name
SD2_TEXT_WIDTH = 1024  # of the text encoder of Stable Diffusion 2.x


def save_adapter(
    pipeline: Any,
    networks: Mapping[str, Any],
    folder: Path,
    weights: Mapping[str, Tensor] | None,
    dtype: torch.dtype,
    base: str,
) -> None:
    """Write the adapters of a pipeline's networks, see :meth:`lit_vgrpo.policies.Policy.save`.

    Args:
        networks: The trained networks by their names in the pipeline.
        base: Name of the base model.
    """
    name = f"{next(iter(networks))}_lora"
    for (key, network), (_, options) in zip(networks.items(), lora_calls(pipeline, networks), strict=True):
        config = network.peft_config["default"].to_dict()
        config |= {"lora_alpha": config["r"], "base_model_name_or_path": base}
        layers = _layers_of_adapter(network, weights and _own_weights(networks, key, weights), dtype)
        if loads_adapters(pipeline):
            given = {f"{name}_layers": layers, f"{name}_adapter_metadata": config}
            pipeline.save_lora_weights(folder, weight_name=options.get("weight_name"), **given)
            continue
        header = {f"{key}.{option}": value for option, value in config.items()}
        text = json.dumps(header, indent=2, sort_keys=True, default=sorted)  # some values are sets
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"{key}.{name}": tensor.contiguous() for name, tensor in layers.items()}
        save_file(tensors, folder / options["weight_name"], {"format": "pt", "lora_adapter_metadata": text})


def loads_adapters(pipeline: Any) -> bool:
    """Return whether a pipeline has ``load_lora_weights``; otherwise its networks' ``load_lora_adapter`` load one."""
    return hasattr(pipeline, "load_lora_weights")


def lora_calls(pipeline: Any, networks: Iterable[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return what loads an adapter's files, one per network: a method's name from the pipeline on, and its options."""
    first, *second = networks
    files = {first: LORA_FILE, **{name: LORA_FILE.replace(".", "_2.") for name in second}}
    if not loads_adapters(pipeline):  # without the name, diffusers 0.42.1 looks for a .bin file
        return [(f"{name}.load_lora_adapter", {"weight_name": file, "prefix": name}) for name, file in files.items()]
    into = {name: {f"load_into_{name}": True} for name in second}
    options = [{"weight_name": file, **into.get(name, {})} for name, file in files.items()]
    return [("load_lora_weights", each) for each in (options if second else [{}])]


def save_pipeline(
    pipeline: Any,
    networks: Mapping[str, Any],
    folder: Path,
    weights: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a pipeline folder, with the given weights in its networks, see :meth:`lit_vgrpo.policies.Policy.save`."""
    try:
        for name, network in networks.items():
            own = None if weights is None else _own_weights(networks, name, weights)
            setattr(pipeline, name, network if own is None else _whole(network, own))
        modules = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
        with quiet_libraries(), written_in(modules, dtype):
            pipeline.save_pretrained(folder)
    finally:
        for name, network in networks.items():
            setattr(pipeline, name, network)


def merge_adapter(networks: Iterable[Any]) -> None:
    """Merge the adapter into the weights, in float32, which represents frozen weights of any type exactly."""
    for network in networks:
        network.float()
        network.fuse_lora()
        network.unload_lora()


def save_kohya(network: Any, file: Path, base: str, dtype: torch.dtype = torch.float32) -> None:
    """Write a UNet's adapter under the names of kohya's trainer, which programs without diffusers expect.

    The header names the base model; without it, WebUI assumes Stable Diffusion 1.
    """
    from diffusers.utils import convert_state_dict_to_kohya

    layers = {f"unet.{name}": tensor for name, tensor in _layers_of_adapter(network, None, dtype).items()}
    config, rank = network.config, str(network.peft_config["default"].r)
    is_xl, is_second = config.addition_embed_type == "text_time", config.cross_attention_dim == SD2_TEXT_WIDTH
    header = {
        "ss_base_model_version": "sdxl_base_v1-0" if is_xl else "sd_v2" if is_second else "sd_v1",
        "ss_sd_model_name": base,
        "ss_v2": str(is_second),
        "ss_network_module": "networks.lora",
        "ss_network_dim": rank,
        "ss_network_alpha": rank,
    }
    save_file(convert_state_dict_to_kohya(layers), file, header)


def save_comfyui(
    networks: Iterable[Any], comfyui_names: Mapping[str, str], file: Path, dtype: torch.dtype = torch.float32
) -> None:
    """Write an adapter of linear layers under ComfyUI's names (:attr:`lit_vgrpo.policies.Policy.comfyui_names`).

    For a module that fuses several of diffusers', ``B`` is block-diagonal and the rank is the sum of their ranks. The
    file of a second network has ``_2`` at the end of its name.
    """
    for number, network in enumerate(networks, start=1):
        layers, modules = _layers_of_adapter(network, None, dtype), dict(network.named_modules())
        trained = {name.removesuffix(".lora_A.weight") for name in layers if ".lora_A." in name}
        parts = fused_modules(modules, comfyui_names)
        kept = trained.difference(*parts.values())
        tensors = {}
        for target, names in [*parts.items(), *((name, [name]) for name in kept)]:
            if trained.isdisjoint(names):
                continue
            for name in set(names) - trained:  # part of a fused module, but without an adapter
                layers[f"{name}.lora_A.weight"] = torch.zeros(0, modules[name].in_features, dtype=dtype)
                layers[f"{name}.lora_B.weight"] = torch.zeros(modules[name].out_features, 0, dtype=dtype)
            down, up = ([layers[f"{name}.lora_{side}.weight"] for name in names] for side in "AB")
            tensors[f"diffusion_model.{target}.lora_A.weight"] = torch.cat(down)
            tensors[f"diffusion_model.{target}.lora_B.weight"] = torch.block_diag(*up)
        save_file(tensors, file if number == 1 else file.with_stem(f"{file.stem}_{number}"))


def fused_modules(modules: Iterable[str], comfyui_names: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the modules that each of ComfyUI's names stands for, in the order of their outputs."""
    parts: dict[str, list[str]] = {}
    for old, new in comfyui_names.items():
        for name in modules:
            if f".{name}".endswith(f".{old}"):
                parts.setdefault(name.removesuffix(old) + new, []).append(name)
    return parts


def _own_weights(networks: Mapping[str, Any], name: str, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the weights of one of several networks, by their names in that network."""
    prefix = "" if len(networks) == 1 else f"{name}."
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}


def _layers_of_adapter(network: Any, weights: Mapping[str, Tensor] | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the adapter's tensors by peft's names, with the scale alpha / rank multiplied into the B matrices.

    Few programs read alpha from a file's header; without it they assume a scale of 1, which is then correct.
    """
    from peft.utils import get_peft_model_state_dict

    config = network.peft_config["default"]
    layers = get_peft_model_state_dict(network, state_dict=weights)
    scale = config.lora_alpha / config.r
    scaled = {name: scale * tensor if ".lora_B." in name else tensor for name, tensor in layers.items()}
    return {name: tensor.to(dtype).contiguous() for name, tensor in scaled.items()}


def _whole(network: Any, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a network of the same class with the given weights, without copies."""
    # FSDP2 replaces the network's class by a subclass.
    kind: Any = next(cls for cls in type(network).__mro__ if cls.__module__.startswith("diffusers."))
    with torch.device("meta"):
        whole = kind.from_config(network.config)
    buffers = {name: value for name, value in network.state_dict().items() if name not in weights}
    whole.load_state_dict({**buffers, **weights}, assign=True)
    return whole
