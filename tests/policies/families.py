"""Every model family, small."""

import torch.nn.functional as F
from policies.contract import Family

from lit_vgrpo.policies import FluxPolicy, SD3Policy, SDXLPolicy, UNetPolicy

FAMILIES = ("sd3", "sd3_t5", "unet_eps", "unet_v", "sdxl", "flux", "flux_cfg")

CLIP = {"prompt_limit": 12, "limited_by": "CLIPText"}
T5 = {"prompt_limit": 16, "limited_by": "T5"}
# the last block of an SD3 network has no use for what its text tokens become
SD3_IDLE = ("transformer_blocks.1.attn.add_q_proj.*", "transformer_blocks.1.attn.norm_added_q.*")


def make_family(name, sd3_folder, unet_folder, sdxl_folder, flux_folder):
    """One of :data:`FAMILIES` or ``sdxl_v``, on folders that the fixtures of these names make."""
    if name.startswith("sd3"):
        t5 = name == "sd3_t5"
        return Family(SD3Policy, sd3_folder(t5), {"max_sequence_length": 8 if t5 else 4}, **CLIP, idle=SD3_IDLE)
    prediction = "v_prediction" if name.endswith("_v") else "epsilon"
    if name.startswith("unet"):
        return Family(UNetPolicy, unet_folder(prediction), **CLIP)
    if name.startswith("sdxl"):
        return Family(SDXLPolicy, sdxl_folder(prediction), **CLIP)
    return Family(
        FluxPolicy,
        flux_folder(name == "flux"),
        {"max_sequence_length": 16},
        guidance=embedded if name == "flux" else true_cfg,
        pack=pack,
        **T5,
    )


def pack(z):
    """FLUX's pipeline takes latents as tokens of 2 x 2."""
    return F.pixel_unshuffle(z, 2).flatten(2).transpose(1, 2)


def embedded(guidance, negative):
    return {"guidance_scale": guidance}


def true_cfg(guidance, negative):
    return {"true_cfg_scale": guidance, "negative_prompt": [negative] * 2}
