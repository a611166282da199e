"""Published sizes of checkpoints of the shipped recipes, for estimates on a machine that has none of their files."""

from __future__ import annotations

import inspect
from itertools import count
from string import ascii_lowercase
from typing import Any

import torch

from lit_vgrpo.policies.base import Policy
from lit_vgrpo.system.hub import quiet_libraries

CLIP_L = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, projection_dim=768)
CLIP_G = dict(
    hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20, projection_dim=1280
)
T5_XXL = dict(d_model=4096, d_ff=10240, d_kv=64, num_heads=64, num_layers=24, feed_forward_proj="gated-gelu")
VAE = dict(
    block_out_channels=(128, 256, 512, 512),
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
    layers_per_block=2,
)
VAE_16 = dict(VAE, latent_channels=16, use_quant_conv=False, use_post_quant_conv=False)
SD35_MEDIUM = dict(
    num_layers=24,
    num_attention_heads=24,
    attention_head_dim=64,
    sample_size=128,
    joint_attention_dim=4096,
    caption_projection_dim=1536,
    pooled_projection_dim=2048,
    pos_embed_max_size=384,
    qk_norm="rms_norm",
    dual_attention_layers=tuple(range(13)),
)
FLUX_DEV = dict(
    num_layers=19,
    num_single_layers=38,
    num_attention_heads=24,
    attention_head_dim=128,
    in_channels=64,
    joint_attention_dim=4096,
    pooled_projection_dim=768,
    guidance_embeds=True,
)
SDXL = dict(
    sample_size=128,
    block_out_channels=(320, 640, 1280),
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    transformer_layers_per_block=(1, 2, 10),
    attention_head_dim=(5, 10, 20),
    cross_attention_dim=2048,
    addition_embed_type="text_time",
    addition_time_embed_dim=256,
    projection_class_embeddings_input_dim=2816,
    use_linear_projection=True,
)
SD15 = dict(sample_size=64, cross_attention_dim=768)
FLUX: dict[str, dict[str, Any]] = dict(transformer=FLUX_DEV, vae=VAE_16, text_encoder=CLIP_L, text_encoder_2=T5_XXL)
KNOWN: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "stabilityai/stable-diffusion-3.5-medium": (
        "StableDiffusion3Pipeline",
        dict(transformer=SD35_MEDIUM, vae=VAE_16, text_encoder=CLIP_L, text_encoder_2=CLIP_G, text_encoder_3=T5_XXL),
    ),
    "black-forest-labs/FLUX.1-dev": ("FluxPipeline", FLUX),
    "black-forest-labs/FLUX.1-Kontext-dev": ("FluxKontextPipeline", FLUX),
    "stabilityai/stable-diffusion-xl-base-1.0": (
        "StableDiffusionXLPipeline",
        dict(unet=SDXL, vae=VAE, text_encoder=CLIP_L, text_encoder_2=CLIP_G),
    ),
    "stable-diffusion-v1-5/stable-diffusion-v1-5": (
        "StableDiffusionPipeline",
        dict(unet=SD15, vae=VAE, text_encoder=CLIP_L),
    ),
}
"""The pipeline of each checkpoint, and arguments of its networks where they differ from the defaults.

Source:
    The config.json files of the checkpoints, on the Hugging Face hub.
"""


def published_pipeline(policy: Policy) -> Any:
    """Return the pipeline of a policy's checkpoint without weights, on the meta device; ``None`` if it is not known.

    Its tokenizers know letters alone: only the length to which they pad counts.
    """
    import diffusers

    if policy.checkpoint not in KNOWN or policy.components:
        return None
    name, sizes = KNOWN[policy.checkpoint]
    kind = getattr(diffusers, name)
    types = inspect.signature(kind.__init__).parameters
    required = [part for part, type_ in types.items() if type_.default is inspect.Parameter.empty and part != "self"]
    scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    if "unet" in sizes:
        scheduler = diffusers.DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False, steps_offset=1)
    with quiet_libraries(), torch.device("meta"):
        parts = {part: _part(types[part].annotation, sizes.get(part)) for part in required}
        return kind(**{**parts, "scheduler": scheduler, **dict.fromkeys(policy.left_out)})


def _part(kind: Any, size: dict[str, Any] | None) -> Any:
    """Return a network of a size, a tokenizer, or ``None`` for another part without a size."""
    from transformers import CLIPTokenizer, T5Tokenizer

    if kind is CLIPTokenizer:
        words = dict(zip([*ascii_lowercase, *(f"{letter}</w>" for letter in ascii_lowercase), "<s>", "</s>"], count()))
        ends = dict(bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="</s>")
        return CLIPTokenizer(vocab=words, merges=[], model_max_length=77, **ends)
    if kind is T5Tokenizer:
        pieces = [(piece, 0.0) for piece in ("<pad>", "</s>", "<unk>", "\u2581", *ascii_lowercase)]
        return T5Tokenizer(vocab=pieces, model_max_length=512, extra_ids=0)
    if size is None:
        return None
    return kind(kind.config_class(**size)) if hasattr(kind, "config_class") else kind(**size)
