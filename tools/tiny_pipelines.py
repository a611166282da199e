"""Small diffusers pipelines with fresh random denoisers: real folders, a few megabytes each.

A builder writes to ``folder``, which it creates, and takes the ``seed`` of all random weights, a trained ``vae``
(``None`` writes an untrained one, for tests) and ``small``, which asks for a still smaller denoiser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from tiny_text import (
    EOS,
    clip_tokenizer,
    t5_encoder,
    t5_tokenizer,
    text_config,
    text_encoder,
    text_encoder_with_projection,
)
from tiny_vae import LATENT_CHANNELS, LATENT_SIZE, new_vae
from torch import nn
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer, CLIPVisionConfig

from lit_vgrpo.tiny.words import LETTERS, PROMPT

_TEXT_WIDTH = 32
_LATENT_DIFFUSION_BETAS: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
WORDS_LATENT_SIZE = 10  # of the longer side

Text = tuple[Any, Callable[[Any, int, int], nn.Module], int]
"""A tokenizer, and the encoder that is made of it, a width and a seed."""
Prediction = Literal["epsilon", "v_prediction"]


def words_tokenizer(pad_token: str = EOS) -> CLIPTokenizer:
    """Return a tokenizer for the words task: each word of the sentence and each quoted letter is one token."""
    return clip_tokenizer(pad_token=pad_token, words=PROMPT.split('"')[0].split(), letters=LETTERS.lower())


def build_sd3(
    folder: str | Path,
    seed: int = 0,
    vae: AutoencoderKL | None = None,
    *,
    small: bool = False,
    t5: bool = False,
    shift: float = 1.0,
    task: Literal["shapes", "words"] = "shapes",
) -> Path:
    """Write a `StableDiffusion3Pipeline` folder: 32 x 32 images, 8 x 8 x 8 latents, 16 image tokens.

    For the words, images are 16 x 40 when asked for with that height and width: 8 x 4 x 10 latents, 10 image tokens.

    Without T5 it loads with ``from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)``, as such folders do.

    Args:
        small: a transformer of about 0.05 M parameters instead of 0.6 M.
        t5: add a small T5 encoder.
        shift: of the scheduler's timestep grid.
        task: whose words the tokenizers know, and whose images the transformer's positions cover.
    """
    heads, layers = (2, 2) if small else (4, 4)
    latent_size = LATENT_SIZE if task == "shapes" else WORDS_LATENT_SIZE
    tokenizer = clip_tokenizer if task == "shapes" else words_tokenizer
    transformer = {
        "sample_size": latent_size,
        "patch_size": 2,
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "num_layers": layers,
        "attention_head_dim": 16,
        "num_attention_heads": heads,
        "joint_attention_dim": 2 * _TEXT_WIDTH,
        "caption_projection_dim": 16 * heads,
        "pooled_projection_dim": 2 * _TEXT_WIDTH,
        "pos_embed_max_size": latent_size // 2,
        "qk_norm": "rms_norm",
    }
    texts: list[Text] = [
        (tokenizer(), text_encoder_with_projection, _TEXT_WIDTH),
        # SDXL's and SD3's second one pads with "!" too
        (tokenizer(pad_token="!"), text_encoder_with_projection, _TEXT_WIDTH),
    ]
    without: dict[str, None] = {"text_encoder_3": None, "tokenizer_3": None}
    if t5:
        texts.append((t5_tokenizer(), t5_encoder, 2 * _TEXT_WIDTH))
        without = {}
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    denoiser = SD3Transformer2DModel, transformer
    return build_pipeline(StableDiffusion3Pipeline, folder, seed, vae, denoiser, scheduler, texts, **without)


def build_unet(
    folder: str | Path,
    seed: int = 0,
    vae: AutoencoderKL | None = None,
    *,
    small: bool = False,
    prediction_type: Prediction = "epsilon",
) -> Path:
    """Write a `StableDiffusionPipeline` folder: 32 x 32 images, 8 x 8 x 8 latents.

    Args:
        small: a UNet of about 0.1 M parameters instead of 1 M.
        prediction_type: what the scheduler takes the network's output for.
    """
    options = {"steps_offset": 1, "timestep_spacing": "trailing", "prediction_type": prediction_type}
    scheduler = DDIMScheduler(**_LATENT_DIFFUSION_BETAS, clip_sample=False, set_alpha_to_one=False, **options)
    texts: list[Text] = [(clip_tokenizer(), text_encoder, 2 * _TEXT_WIDTH)]
    without: dict[str, Any] = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return build_pipeline(StableDiffusionPipeline, folder, seed, vae, _unet(small), scheduler, texts, **without)


def build_sdxl(
    folder: str | Path,
    seed: int = 0,
    vae: AutoencoderKL | None = None,
    *,
    small: bool = False,
    prediction_type: Prediction = "epsilon",
) -> Path:
    """Write a `StableDiffusionXLPipeline` folder: 32 x 32 images, 8 x 8 x 8 latents.

    Args:
        small: a UNet of about 0.08 M parameters instead of 1.4 M.
        prediction_type: what the scheduler takes the network's output for.
    """
    denoiser = _unet(
        small,
        transformer_layers_per_block=1 if small else (1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + _TEXT_WIDTH,  # six sizes and the pooled text
    )
    options: dict[str, Any] = {"steps_offset": 1, "timestep_spacing": "leading", "prediction_type": prediction_type}
    scheduler = EulerDiscreteScheduler(**_LATENT_DIFFUSION_BETAS, **options)
    texts: list[Text] = [
        (clip_tokenizer(), text_encoder, _TEXT_WIDTH),
        (clip_tokenizer(pad_token="!"), text_encoder_with_projection, _TEXT_WIDTH),
    ]
    options = {"force_zeros_for_empty_prompt": True, "add_watermarker": False}
    return build_pipeline(StableDiffusionXLPipeline, folder, seed, vae, denoiser, scheduler, texts, **options)


def build_flux(
    folder: str | Path,
    seed: int = 0,
    vae: AutoencoderKL | None = None,
    *,
    small: bool = False,
    guidance_embeds: bool = True,
    dynamic_shift: bool = True,
    layers: int | None = None,
    edits: bool = False,
    words: list[str] | None = None,
) -> Path:
    """Write a `FluxPipeline` folder: 8 x 8 x 8 latents and 16 image tokens for 32 x 32 images.

    The pipeline's own size is 128 latents a side, 512 pixels: give a height and a width wherever one is used.

    Args:
        small: a transformer of about 0.08 M parameters instead of 0.7 M.
        guidance_embeds: the network takes the guidance scale as an input, as FLUX.1-dev does.
        dynamic_shift: the scheduler's shift grows with the image, as FLUX.1-dev's does; else it is 1, as schnell's.
        layers: blocks of either kind; by default 1 if small, else 3.
        edits: write a `FluxKontextPipeline`, which has the same parts.
        words: the tokenizers' words; ``None`` takes those of the shapes.
    """
    heads, depth = (2, 1) if small else (4, 3)
    transformer = {
        "in_channels": 4 * LATENT_CHANNELS,  # 2 x 2 latents make one token
        "num_layers": layers or depth,
        "num_single_layers": layers or depth,
        "attention_head_dim": 16,
        "num_attention_heads": heads,
        "joint_attention_dim": 2 * _TEXT_WIDTH,
        "pooled_projection_dim": _TEXT_WIDTH,
        "guidance_embeds": guidance_embeds,
        "axes_dims_rope": (4, 6, 6),
    }
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0 if dynamic_shift else 1.0,
        use_dynamic_shifting=dynamic_shift,
        base_image_seq_len=256,
        max_image_seq_len=4096,
        base_shift=0.5,
        max_shift=1.15,
    )
    texts: list[Text] = [
        (clip_tokenizer(words=words), text_encoder, _TEXT_WIDTH),
        (t5_tokenizer(words=words), t5_encoder, 2 * _TEXT_WIDTH),
    ]
    kind = FluxKontextPipeline if edits else FluxPipeline
    return build_pipeline(kind, folder, seed, vae, (FluxTransformer2DModel, transformer), scheduler, texts)


def build_clip(folder: str | Path, seed: int = 0) -> Path:
    """Write a small random `CLIPModel` with its processor: the format that preference rewards load."""
    tokenizer = clip_tokenizer(max_length=77)
    text = text_config(tokenizer, _TEXT_WIDTH, _TEXT_WIDTH)
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        projection_dim=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=32)
        model = CLIPModel(config)
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    model.eval().save_pretrained(folder)
    CLIPProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return Path(folder)


def _unet(small: bool, **options: Any) -> tuple[Any, dict[str, Any]]:
    return UNet2DConditionModel, {
        "sample_size": LATENT_SIZE,
        "cross_attention_dim": 2 * _TEXT_WIDTH,
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "block_out_channels": (8, 16) if small else (32, 64),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "attention_head_dim": 4,
        **options,
    }


def build_pipeline(
    kind: Any,
    folder: str | Path,
    seed: int,
    vae: Any | None,
    denoiser: tuple[Any, dict[str, Any]],
    scheduler: Any,
    texts: Sequence[Text],
    louder: Mapping[str, float] | None = None,
    **parts: Any,
) -> Path:
    """Write a folder of a kind of pipeline.

    Args:
        denoiser: its class and configuration.
        texts: in the pipeline's order; encoder k gets the seed ``seed + k``.
        louder: factors of weights by patterns of their names, so that prompts show in the images.
        parts: what else the pipeline takes.
    """
    network, configuration = denoiser
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built = network(**configuration)
    for name, value in built.named_parameters():
        for pattern, factor in (louder or {}).items():
            value.data *= factor if fnmatchcase(name, pattern) else 1
    parts["unet" if network is UNet2DConditionModel else "transformer"] = built
    for number, (tokenizer, encoder, width) in enumerate(texts, start=1):
        place = f"_{number}" if number > 1 else ""
        parts |= {f"tokenizer{place}": tokenizer, f"text_encoder{place}": encoder(tokenizer, width, seed + number)}
    if vae is None:  # a scale, and a shift where the family has one, that are not trivial
        shift = {"shift_factor": 0.1} if "transformer" in parts else {}
        vae = new_vae(seed, scaling_factor=0.8, **shift)
    pipeline = kind(scheduler=scheduler, vae=vae, **parts)
    for module in pipeline.components.values():
        if isinstance(module, nn.Module):
            module.eval()
    pipeline.save_pretrained(folder, safe_serialization=True)
    return Path(folder)
