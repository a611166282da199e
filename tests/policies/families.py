"""Every model family, small."""

from functools import cache

import torch.nn.functional as F
from diffusers import Flux2KleinPipeline
from policies.contract import Family

from lit_vgrpo.core.pixels import to_pil
from lit_vgrpo.policies import (
    ChromaPolicy,
    Flux2DevEditPolicy,
    Flux2DevPolicy,
    Flux2EditPolicy,
    Flux2Policy,
    FluxPolicy,
    KontextPolicy,
    Krea2Policy,
    Lumina2Policy,
    QwenImage21Policy,
    QwenImageEditPolicy,
    QwenImagePolicy,
    SanaPolicy,
    SD3Policy,
    SDXLPolicy,
    UNetPolicy,
    WanPolicy,
    ZImagePolicy,
)

SLOW = ("qwen_image_edit", "flux2_edit", "flux2_dev_edit")
LARGE = ("qwen_image", "flux2", "z_image", "chroma", "lumina2", "qwen_image21", "flux2_dev", "krea2", "sana", "wan")
LARGE += ("wan22",)
FAMILIES = ("sd3", "sd3_t5", "unet_eps", "unet_v", "sdxl", "flux", "flux_cfg", "kontext", *LARGE, *SLOW)
FIRST = ("sd3", "unet_eps", "flux")
REPEATS = tuple(name for name in FAMILIES if name not in FIRST)
"""Families that repeat what a test shows on one of each kind."""
NETWORKS = tuple(name for name in FAMILIES if name not in ("sd3_t5", "unet_v", "flux_cfg", "flux2_dev_edit"))
"""Families without those that share their network's code with another."""

CLIP = {"prompt_limit": 12, "limited_by": "CLIPText"}
T5 = {"prompt_limit": 16, "limited_by": "T5"}
UMT5 = {"prompt_limit": 16, "limited_by": "UMT5"}
IDLE = ("transformer_blocks.1.attn.add_q_proj.*", "transformer_blocks.1.attn.norm_added_q.*")
"""The last block of SD3 and Qwen-Image has no use for what its text tokens become."""


def make_family(name, sd3_folder, unet_folder, sdxl_folder, flux_folder, large_folder):
    """One of :data:`FAMILIES` or ``sdxl_v``, on folders that the fixtures of these names make."""
    if name in (*LARGE, *SLOW):
        return make_large_family(name, large_folder(name.removesuffix("_edit") if name.startswith("flux2") else name))
    if name.startswith("sd3"):
        t5 = name == "sd3_t5"
        limits = {**T5, "prompt_limit": 8} if t5 else CLIP  # the lower of T5's and CLIP's
        return Family(SD3Policy, sd3_folder(t5), {"max_sequence_length": 8 if t5 else 4}, **limits, idle=IDLE)
    prediction = "v_prediction" if name.endswith("_v") else "epsilon"
    if name.startswith("unet"):
        return Family(UNetPolicy, unet_folder(prediction), **CLIP)
    if name.startswith("sdxl"):
        return Family(SDXLPolicy, sdxl_folder(prediction), **CLIP)
    kontext = {"edit": unresized} if name == "kontext" else {}
    return Family(
        KontextPolicy if kontext else FluxPolicy,
        flux_folder(name == "flux", bool(kontext)),
        {"max_sequence_length": 16},
        guidance=embedded if name == "flux" else true_cfg,
        pack=pack,
        **T5,
        **kontext,
    )


def make_large_family(name, folder):
    """One of :data:`LARGE` or :data:`SLOW`; their limits are less by the tokens of the chat template."""
    options = {"max_sequence_length": 48}
    if name == "qwen_image21":
        limits = {"prompt_limit": 40, "limited_by": "Qwen3VL"}
        return Family(QwenImage21Policy, folder, options, guidance=true_cfg_of_one, pack=flat, size=(32, 64), **limits)
    if name.startswith("qwen_image"):
        edits = {"edit": as_files, "guidance": true_cfg_of_one} if name == "qwen_image_edit" else {}
        return Family(
            QwenImageEditPolicy if edits else QwenImagePolicy,
            folder,
            options,
            pack=pack,
            **{"guidance": true_cfg, **edits},
            prompt_limit=34 if edits else 43,
            limited_by="Qwen2_5_VL",
            idle=IDLE,
            unused=("transformer_blocks.1.attn.to_add_out.*", "transformer_blocks.1.txt_mlp.*"),
        )
    if name == "chroma":
        return Family(ChromaPolicy, folder, {"max_sequence_length": 16}, pack=pack, **T5)
    if name == "lumina2":
        return Family(Lumina2Policy, folder, options, prompt_limit=20, limited_by="Gemma2", size=(32, 48))
    if name.startswith("flux2"):
        kinds = {"flux2": Flux2Policy, "flux2_edit": Flux2EditPolicy, "flux2_dev": Flux2DevPolicy}
        dev = name.startswith("flux2_dev")
        edits = {"edit": as_files, "size": (64, 80)} if name.endswith("edit") else {}
        limits = {"prompt_limit": 27 if dev else 21, "limited_by": "Mistral3" if dev else "Qwen3", **edits}
        kind = kinds.get(name, Flux2DevEditPolicy)
        guidance = embedded if dev else negative_embedded(folder, 1 if edits else 2)
        return Family(kind, folder, {"max_sequence_length": 64 if dev else 48}, guidance=guidance, **limits)
    if name == "krea2":
        limits = {"prompt_limit": 43, "limited_by": "Qwen3VL"}
        return Family(Krea2Policy, folder, options, guidance=from_zero, pack=pack, **limits)
    if name.startswith("wan"):
        options = {"max_sequence_length": 16, "num_frames": 5}
        limits = {"size": (32, 48), "train_only": "*attn1.to_q*", **UMT5}
        options |= {"guidance_scale_2": 1.5} if name == "wan22" else {}
        return Family(WanPolicy, folder, options, **limits)
    if name == "sana":
        limits = {"prompt_limit": 15, "limited_by": "Gemma2", "train_only": "*attn*.to_q*"}
        return Family(SanaPolicy, folder, {"max_sequence_length": 16}, guidance=unbinned, size=(32, 64), **limits)
    limits = {"prompt_limit": 40, "limited_by": "Qwen3"}
    return Family(ZImagePolicy, folder, options, guidance=from_zero, **limits, train_only="*attention.to_q*")


def unresized(given):
    """Kontext's pipeline resizes pictures and images unless it is told otherwise."""
    return {"image": given, "max_area": given.shape[2] * given.shape[3], "_auto_resize": False}


def pack(z):
    """FLUX's pipeline takes latents as tokens of 2 x 2."""
    return F.pixel_unshuffle(z, 2).flatten(2).transpose(1, 2)


def flat(z):
    """Qwen-Image-2.1's pipeline takes latents as tokens."""
    return z.flatten(2).transpose(1, 2)


def embedded(guidance, negative):
    return {"guidance_scale": guidance}


def as_files(given):
    return {"image": to_pil(given.flatten(0, -4))}


def unbinned(guidance, negative):
    """Sana's pipeline chooses another size unless it is told otherwise."""
    return {"use_resolution_binning": False, "guidance_scale": guidance, "negative_prompt": negative}


def true_cfg_of_one(guidance, negative):
    return {"true_cfg_scale": guidance, "negative_prompt": negative}


def true_cfg(guidance, negative):
    return {"true_cfg_scale": guidance, "negative_prompt": [negative] * 2}


def from_zero(guidance, negative):
    """Z-Image's pipeline counts a scale from 0."""
    return {"guidance_scale": guidance - 1, "negative_prompt": [negative] * 2}


def negative_embedded(folder, rows):
    """FLUX.2's pipeline takes no negative prompt but its embedding."""

    @cache
    def embedding(negative):
        pipeline = Flux2KleinPipeline.from_pretrained(folder)
        return pipeline.encode_prompt([negative] * rows, max_sequence_length=48)[0]

    def guided(guidance, negative):
        return {"guidance_scale": guidance, "negative_prompt_embeds": embedding(negative)}

    return guided
