"""Small random pipelines of the families that no recipe trains in a demo, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    AutoencoderKLWan,
    ChromaPipeline,
    ChromaTransformer2DModel,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    Krea2Pipeline,
    Krea2Transformer2DModel,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from tiny_chat import (
    chat_tokenizer,
    deep_qwen3,
    gemma2,
    gemma_tokenizer,
    mistral3,
    picture_processor,
    pixtral_processor,
    qwen3,
    qwen3_vl,
    qwen3_vl_processor,
    qwen25_vl,
)
from tiny_pipelines import build_pipeline
from tiny_text import t5_encoder, t5_tokenizer, umt5_encoder

_WIDTH = 16  # of the text encoders
_CHANNELS = 4  # of the latents
_LUMINA = (
    "You are an assistant designed to generate superior images with the degree of image-text alignment based on "
    "textual prompts or user prompts. <Prompt Start>"
)


_VIDEO_VAE: dict[str, Any] = {  # four pixels to a latent
    "base_dim": 8,
    "z_dim": _CHANNELS,
    "dim_mult": [1, 1, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True],
    "latents_mean": [-0.5, 0.2, 0.9, 0.1],
    "latents_std": [0.5, 1.5, 0.8, 1.2],
}


def _qwen_vae() -> AutoencoderKLQwenImage:
    """Return Qwen-Image's VAE."""
    return AutoencoderKLQwenImage(**_VIDEO_VAE)


def build_qwen_image_edit(folder: str | Path) -> Path:
    """Write a `QwenImageEditPlusPipeline` folder, which has the parts of `build_qwen_image` and reads pictures."""
    return build_qwen_image(folder, edits=True)


def build_qwen_image(folder: str | Path, seed: int = 0, layers: int = 2, *, edits: bool = False) -> Path:
    """Write a `QwenImagePipeline` folder: 4 x 8 x 8 latents and 16 image tokens for 32 x 32 images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = _qwen_vae()
    transformer = {
        "in_channels": 4 * _CHANNELS,
        "out_channels": _CHANNELS,
        "num_layers": layers,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": _WIDTH,
        "axes_dims_rope": (4, 6, 6),
    }
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        base_shift=0.5,
        max_shift=0.9,
        shift_terminal=0.02,
    )
    denoiser = QwenImageTransformer2DModel, transformer
    tokenizer = chat_tokenizer(edits=edits)
    texts: list[Any] = [(tokenizer, qwen25_vl, _WIDTH)]
    parts = {"processor": picture_processor(tokenizer)} if edits else {}
    kind = QwenImageEditPlusPipeline if edits else QwenImagePipeline
    louder = {"*.add_v_proj.weight": 4.0, "*.img_mod.1.weight": 4.0, "*.attn.to_out.0.weight": 2.0}
    return build_pipeline(kind, folder, seed, vae, denoiser, scheduler, texts, louder, **parts)


def build_flux2(folder: str | Path, seed: int = 0, *, is_distilled: bool = False, dev: bool = False) -> Path:
    """Write a `Flux2KleinPipeline` folder: 16 x 4 x 4 latents and as many image tokens for 32 x 32 images.

    Args:
        dev: write a `Flux2Pipeline`, with another encoder and a network that takes the guidance scale.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae: Any = AutoencoderKLFlux2(
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            block_out_channels=(8, 8, 8),
            layers_per_block=1,
            latent_channels=_CHANNELS,
            norm_num_groups=4,
            mid_block_add_attention=False,
        )
        vae.bn.running_mean.normal_()
        vae.bn.running_var.uniform_(0.5, 2)
    transformer = {
        "in_channels": 4 * _CHANNELS,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 3 * _WIDTH,
        "axes_dims_rope": (4, 4, 4, 4),
        "guidance_embeds": dev,
    }
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    denoiser = Flux2Transformer2DModel, transformer
    louder = {"*.add_v_proj.weight": 4.0, "*_modulation*.weight": 4.0, "*.attn.to_out.0.weight": 2.0}
    if dev:
        tokenizer = chat_tokenizer(special=("[IMG]", "[IMG_BREAK]", "[IMG_END]"), text=SYSTEM_MESSAGE)
        parts = {"tokenizer": pixtral_processor(tokenizer), "text_encoder": mistral3(tokenizer, _WIDTH, seed + 1)}
        return build_pipeline(Flux2Pipeline, folder, seed, vae, denoiser, scheduler, [], louder, **parts)
    texts: list[Any] = [(chat_tokenizer(), deep_qwen3, _WIDTH)]
    distilled = {"is_distilled": is_distilled}
    return build_pipeline(Flux2KleinPipeline, folder, seed, vae, denoiser, scheduler, texts, louder, **distilled)


def build_wan(
    folder: str | Path,
    seed: int = 0,
    vae: Any = None,
    words: list[str] | None = None,
    heads: int = 2,
    layers: int = 2,
    shift: float = 3.0,
    *,
    expanded: bool = False,
    boundary: float | None = None,
) -> Path:
    """Write a `WanPipeline` folder: 4 x 3 x 8 x 8 latents and 48 tokens for 5 frames of 32 x 32 pixels.

    Args:
        vae: a trained autoencoder, which sets the network's channels; ``None`` builds a random one.
        words: the tokenizer's words; ``None`` uses those of the shapes.
        heads: attention heads, 16 channels each.
        layers: layers of the network.
        shift: shift of the scheduler's sigmas.
        expanded: give the network one timestep per token, as in Wan 2.2 5B.
        boundary: add a second network for the times below it, as in Wan 2.2 A14B.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        decoder: Any = vae or AutoencoderKLWan(**_VIDEO_VAE, scale_factor_temporal=2, scale_factor_spatial=4)
    transformer = {
        "num_attention_heads": heads,
        "attention_head_dim": 16,
        "in_channels": decoder.config.z_dim,
        "out_channels": decoder.config.z_dim,
        "text_dim": _WIDTH,
        "freq_dim": 16 * heads,
        "ffn_dim": 32 * heads,
        "num_layers": layers,
        "rope_max_seq_len": 32,
    }
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    texts: list[Any] = [(t5_tokenizer(words=words), umt5_encoder, _WIDTH)]
    denoiser = WanTransformer3DModel, transformer
    louder = {} if vae is not None else {"*.attn2.to_v.weight": 4.0, "*.attn2.to_out.0.weight": 4.0}
    options: dict[str, Any] = {"expand_timesteps": expanded, "transformer_2": None, "boundary_ratio": boundary}
    if boundary is not None:
        first = build_wan(folder, seed + 10, decoder, words, heads, layers, shift)
        options["transformer_2"] = WanTransformer3DModel.from_pretrained(first, subfolder="transformer")
    return build_pipeline(WanPipeline, folder, seed, decoder, denoiser, scheduler, texts, louder, **options)


def build_wan22(folder: str | Path, seed: int = 0) -> Path:
    """Write a `WanPipeline` folder with two networks; see `build_wan`."""
    return build_wan(folder, seed, boundary=0.8)


def build_z_image(folder: str | Path, seed: int = 0) -> Path:
    """Write a `ZImagePipeline` folder: 8 x 8 x 8 latents and 16 image tokens for 32 x 32 images."""
    transformer = {
        "in_channels": 8,
        "dim": 32,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": _WIDTH,
        "axes_dims": [4, 6, 6],
        "axes_lens": [256, 32, 32],
    }
    texts: list[Any] = [(chat_tokenizer(), qwen3, _WIDTH)]
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    denoiser = ZImageTransformer2DModel, transformer
    return build_pipeline(ZImagePipeline, folder, seed, None, denoiser, scheduler, texts)


def build_chroma(folder: str | Path, seed: int = 0) -> Path:
    """Write a `ChromaPipeline` folder: 8 x 8 x 8 latents and 16 image tokens for 32 x 32 images."""
    transformer = {
        "in_channels": 32,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "axes_dims_rope": (4, 6, 6),
        "approximator_num_channels": 16,
        "approximator_hidden_dim": 16,
        "approximator_layers": 1,
    }
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=True)
    texts: list[Any] = [(t5_tokenizer(), t5_encoder, 32)]
    louder = {"*.add_v_proj.weight": 4.0, "*.attn.to_out.0.weight": 2.0}
    denoiser = ChromaTransformer2DModel, transformer
    return build_pipeline(ChromaPipeline, folder, seed, None, denoiser, scheduler, texts, louder)


def build_lumina2(folder: str | Path, seed: int = 0) -> Path:
    """Write a `Lumina2Pipeline` folder: 4 x 4 x 4 latents and 4 image tokens for 32 x 32 images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8,) * 4,
            latent_channels=_CHANNELS,
            norm_num_groups=4,
            scaling_factor=0.4,
            shift_factor=0.1,
            mid_block_add_attention=False,
        )
    transformer = {
        "sample_size": 8,
        "in_channels": _CHANNELS,
        "hidden_size": 24,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "num_attention_heads": 2,
        "num_kv_heads": 1,
        "multiple_of": 8,
        "axes_dim_rope": (4, 4, 4),
        "axes_lens": (264, 16, 16),
        "cap_feat_dim": _WIDTH,
    }
    scheduler = FlowMatchEulerDiscreteScheduler(shift=6.0, use_dynamic_shifting=True)
    texts: list[Any] = [(gemma_tokenizer(_LUMINA), gemma2, _WIDTH)]
    denoiser = Lumina2Transformer2DModel, transformer
    return build_pipeline(Lumina2Pipeline, folder, seed, vae, denoiser, scheduler, texts)


def build_qwen_image21(folder: str | Path, seed: int = 0) -> Path:
    """Write a `QwenImage21Pipeline` folder: 4 x 2 x 2 latents and 4 image tokens for 32 x 32 images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = AutoencoderKLQwenImage21(
            base_dim=8,
            decoder_base_dim=8,
            z_dim=_CHANNELS,
            dim_mult=[1, 1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[-0.5, 0.2, 0.9, 0.1],
            latents_std=[0.5, 1.5, 0.8, 1.2],
        )
    transformer = {
        "in_channels": _CHANNELS,
        "out_channels": _CHANNELS,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "context_in_dim": _WIDTH,
        "axes_dims_rope": (4, 6, 6),
    }
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    tokenizer = chat_tokenizer(edits=True)
    parts = {"processor": qwen3_vl_processor(tokenizer), "text_encoder": qwen3_vl(tokenizer, _WIDTH, seed + 1)}
    denoiser = QwenImage21Transformer2DModel, transformer
    louder = {"*.attn.to_v.weight": 3.0, "*.attn.to_out.0.weight": 3.0}
    return build_pipeline(QwenImage21Pipeline, folder, seed, vae, denoiser, scheduler, [], louder, **parts)


def build_flux2_dev(folder: str | Path) -> Path:
    """Write a `Flux2Pipeline` folder, which has the VAE and the network of `build_flux2`."""
    return build_flux2(folder, dev=True)


def build_krea2(folder: str | Path, seed: int = 0, *, is_distilled: bool = False) -> Path:
    """Write a `Krea2Pipeline` folder: 4 x 8 x 8 latents and 16 image tokens for 32 x 32 images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = _qwen_vae()
    transformer = {
        "in_channels": 4 * _CHANNELS,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "timestep_embed_dim": 16,
        "text_hidden_dim": _WIDTH,
        "num_text_layers": 2,
        "text_num_attention_heads": 1,
        "text_num_key_value_heads": 1,
        "text_intermediate_size": 16,
        "num_layerwise_text_blocks": 1,
        "num_refiner_text_blocks": 1,
        "axes_dims_rope": (4, 6, 6),
    }
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_image_seq_len=6400)
    tokenizer = chat_tokenizer()
    parts = {"tokenizer": tokenizer, "text_encoder": qwen3_vl(tokenizer, _WIDTH, seed + 1, head=False)}
    parts |= {"text_encoder_select_layers": (1, 2), "is_distilled": is_distilled}
    denoiser = Krea2Transformer2DModel, transformer
    louder = {"*.attn.to_v.weight": 3.0, "*.attn.to_out.0.weight": 3.0}
    return build_pipeline(Krea2Pipeline, folder, seed, vae, denoiser, scheduler, [], louder, **parts)


def build_sana(folder: str | Path, seed: int = 0) -> Path:
    """Write a `SanaPipeline` folder: 4 x 4 x 4 latents and 16 image tokens for 32 x 32 images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = AutoencoderDC(
            latent_channels=_CHANNELS,
            attention_head_dim=4,
            encoder_block_out_channels=(8,) * 4,
            decoder_block_out_channels=(8,) * 4,
            encoder_layers_per_block=(1,) * 4,
            decoder_layers_per_block=(1,) * 4,
            encoder_qkv_multiscales=((),) * 4,
            decoder_qkv_multiscales=((),) * 4,
            scaling_factor=0.4,
        )
    transformer = {
        "in_channels": _CHANNELS,
        "out_channels": _CHANNELS,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 2,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 8,
        "cross_attention_dim": 16,
        "caption_channels": _WIDTH,
        "sample_size": 4,
    }
    flow: dict[str, Any] = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    texts: list[Any] = [(gemma_tokenizer(), gemma2, _WIDTH)]
    denoiser = SanaTransformer2DModel, transformer
    scheduler = DPMSolverMultistepScheduler(**flow)
    return build_pipeline(SanaPipeline, folder, seed, vae, denoiser, scheduler, texts)
