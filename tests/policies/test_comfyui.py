"""Names of exported adapters against those that ComfyUI's ``model_lora_keys_unet`` maps.

Read in ComfyUI's source (github.com/Comfy-Org/ComfyUI): ``comfy/lora.py`` at 17358c8, ``comfy/utils.py`` at 09708ea,
``comfy/model_base.py`` at 094c74c, ``comfy/ldm/lumina/model.py`` at 617048a.
"""

import re

import pytest
import torch
from diffusers import WanPipeline
from helpers import repeating
from safetensors.torch import load_file

from lit_vgrpo import policies
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.policies.export import save_comfyui

QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
DOUBLE = {f"transformer_blocks.N.{name}" for name in (*QKV, "attn.to_out.0", "attn.to_add_out")}
DOUBLE |= {f"transformer_blocks.N.attn.add_{name}_proj" for name in "qkv"}
SINGLE = {f"single_transformer_blocks.N.{name}" for name in (*QKV, "attn.to_qkv_mlp_proj", "attn.to_out")}
FLUX = DOUBLE | SINGLE  # `flux_to_diffusers`, which is also used for the subclasses Flux2 and Chroma
KREA = {
    f"{block}.N.{name}"  # `krea2_to_diffusers`
    for block in ("transformer_blocks", "text_fusion.layerwise_blocks", "text_fusion.refiner_blocks")
    for name in (*QKV, "attn.to_gate", "attn.to_out.0")
}
Z_IMAGE = {  # `z_image_to_diffusers`
    f"{block}.N.attention.{name}"
    for block in ("layers", "context_refiner", "noise_refiner")
    for name in ("to_q", "to_k", "to_v", "to_out.0")
}
READ = {
    "flux2": ("Flux2Policy", FLUX),
    "flux2_dev": ("Flux2DevPolicy", FLUX),
    "chroma": ("ChromaPolicy", FLUX),
    "krea2": ("Krea2Policy", KREA),
    "qwen_image": ("QwenImagePolicy", DOUBLE),  # ComfyUI's modules have diffusers' names
    "qwen_image21": ("QwenImage21Policy", DOUBLE),
    "z_image": ("ZImagePolicy", Z_IMAGE),
}
"""Modules that are mapped under the prefix ``transformer.``, with ``N`` for the number of a block."""
BLOCK = (
    "adaLN_modulation.1",
    "attention.out",
    "attention.qkv",
    "feed_forward.w1",
    "feed_forward.w2",
    "feed_forward.w3",
)
LUMINA = {f"{block}.N.{name}" for block in ("layers", "noise_refiner") for name in BLOCK}
LUMINA |= {f"context_refiner.N.{name}" for name in BLOCK[1:]} | {"x_embedder", "cap_embedder.1"}
LUMINA |= {"t_embedder.mlp.0", "t_embedder.mlp.2", "final_layer.linear", "final_layer.adaLN_modulation.1"}
"""All linear layers of ComfyUI's ``NextDiT``; each is mapped under the prefix ``diffusion_model.``."""


def trained(cls, folder, **options):
    policy = getattr(policies, cls)(str(folder), height=32, width=32, lora_rank=2, lora_alpha=4, **options).load()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainable_parameters(policy).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return policy


def unnumbered(tensors, prefix):
    modules = {name.rpartition(".lora_")[0] for name in tensors}
    assert all(name.startswith(prefix) for name in modules)
    return {re.sub(r"(?<=blocks|layers|efiner)\.\d+\.", ".N.", name.removeprefix(prefix)) for name in modules}


@pytest.mark.parametrize("family", repeating(READ, slow=[*READ][1:]))
def test_comfyui_maps_every_layer_of_the_diffusers_format(large_folder, tmp_path, family):
    cls, mapped = READ[family]
    trained(cls, large_folder(family)).save(tmp_path)
    found = unnumbered(load_file(tmp_path / "pytorch_lora_weights.safetensors"), "transformer.")
    assert set() < found <= mapped


ALL = ["to_q", "to_k", "to_v", "to_out.0", "linear", "linear_1", "linear_2", "linear_3", "x_embedder"]
ALL.append("caption_embedder.1")


@pytest.mark.slow
@pytest.mark.parametrize("targets", [None, ["attn.to_k", "attn.to_q", "x_embedder"], ALL])
def test_comfyuis_weights_of_lumina2_change_as_diffusers_do(large_folder, tmp_path, targets):
    policy = trained("Lumina2Policy", large_folder("lumina2"), max_sequence_length=48, lora_targets=targets)
    save_comfyui(policy.networks().values(), policy.comfyui_names, tmp_path / "a.safetensors")
    tensors = load_file(tmp_path / "a.safetensors")
    found = unnumbered(tensors, "diffusion_model.")
    assert found == LUMINA if targets is ALL else found < LUMINA
    modules, compared = {name.rpartition(".lora_")[0] for name in tensors}, set()
    for name in modules:
        compared |= set(parts(name))
        update = tensors.pop(f"{name}.lora_B.weight") @ tensors.pop(f"{name}.lora_A.weight")
        torch.testing.assert_close(update, torch.cat([change(policy, part) for part in parts(name)]), msg=name)
    assert not tensors
    adapted = {name for name, layer in policy.network.named_modules() if hasattr(layer, "lora_A")}
    assert adapted <= compared


WAN = {f"blocks.N.{block}.{name}" for block in ("self_attn", "cross_attn") for name in "qkvo"}
WAN |= {f"{name}.{number}" for name in ("blocks.N.ffn", "text_embedding", "time_embedding") for number in (0, 2)}
WAN |= {"time_projection.1", "head.head"}
"""All linear layers of ComfyUI's ``WanModel`` (``comfy/ldm/wan/model.py`` at 93d859c), under ``diffusion_model.``."""


@pytest.mark.parametrize(
    "targets", [None, ["to_q", "net.0.proj", "net.2", "linear_1", "linear_2", "time_proj", "proj_out"]]
)
def test_the_names_of_wans_authors_lead_back_to_diffusers(large_folder, tmp_path, targets):
    sizes = {"max_sequence_length": 16, "num_frames": 5, "lora_targets": targets}
    policy = trained("WanPolicy", large_folder("wan22"), **sizes)
    save_comfyui(policy.networks().values(), policy.comfyui_names, tmp_path / "a.safetensors")
    for file, network in zip(("a", "a_2"), policy.networks().values(), strict=True):
        tensors = load_file(tmp_path / f"{file}.safetensors")
        assert unnumbered(tensors, "diffusion_model.") < WAN
        read = WanPipeline.lora_state_dict(dict(tensors))
        adapted = {name: layer for name, layer in network.named_modules() if hasattr(layer, "lora_A")}
        assert len(read) == 2 * len(adapted)
        for name, layer in adapted.items():
            up, down = (read[f"transformer.{name}.lora_{side}.weight"] for side in "BA")
            torch.testing.assert_close(up @ down, layer.get_delta_weight("default"), msg=name)


DIFFUSERS = {
    "attention.out": "attn.to_out.0",
    "attention.": "attn.",
    "feed_forward.w": "feed_forward.linear_",
    "final_layer.adaLN_modulation.1": "norm_out.linear_1",
    "adaLN_modulation.1": "norm1.linear",
    "final_layer.linear": "norm_out.linear_2",
    "t_embedder.mlp.0": "time_caption_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_caption_embed.timestep_embedder.linear_2",
    "cap_embedder": "time_caption_embed.caption_embedder",
}
"""What diffusers' ``convert_lumina2_to_diffusers`` replaces."""


def parts(name):
    """diffusers' modules of one of ComfyUI's."""
    name = name.removeprefix("diffusion_model.")
    for old, new in DIFFUSERS.items():
        name = name.replace(old, new)
    return [name.replace("qkv", part) for part in ("to_q", "to_k", "to_v")] if "qkv" in name else [name]


def change(policy, name):
    layer = policy.network.get_submodule(name)
    if hasattr(layer, "lora_A"):
        return layer.get_delta_weight("default").detach()
    return torch.zeros(layer.out_features, layer.in_features)
