"""Small random checkpoints of diffusers' text-to-image, text-to-video and edit pipelines, made without the hub.

    pipeline = build("AuraFlowPipeline")
    image = pipeline("a red circle", **call_of("AuraFlowPipeline"), output_type="pt")[0]

Each entry of :data:`ZOO` is one pipeline class. Weights have unit gain, so that another prompt visibly changes the
image after three steps. A class name may be followed by a variant: ``WanPipeline/two_networks``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import diffusers
import tiny_chat
import tiny_text
import torch
import transformers
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from PIL import Image
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder  # the lazy module's is changed by diffusers

STEPS = 3
WIDTH = 16  # of the text encoders
CHANNELS = 4  # of the latents
HEADS = dict(num_attention_heads=2, attention_head_dim=16)
SAME = dict(in_channels=CHANNELS, out_channels=CHANNELS)
PACKED = dict(HEADS, in_channels=4 * CHANNELS, num_layers=1, num_single_layers=1, axes_dims_rope=(4, 6, 6))
"""FLUX.1's network and those like it, which read 2 x 2 latents as a token."""
REFINED = dict(num_layers=1, num_single_layers=1, num_refiner_layers=1, text_embed_dim=WIDTH)
LUMINA = dict(sample_size=8, in_channels=CHANNELS, num_layers=2, num_attention_heads=2, multiple_of=8)
LTX = dict(in_channels=8, out_channels=8, num_layers=2, cross_attention_dim=32, caption_channels=WIDTH)
COG_VIEW = dict(num_layers=2, text_embed_dim=WIDTH, time_embed_dim=16, condition_dim=4, sample_size=16)
STATISTICS = dict(latents_mean=[-0.5, 0.2, 0.9, 0.1], latents_std=[0.5, 1.5, 0.8, 1.2])
WAN_VAE = dict(STATISTICS, z_dim=CHANNELS, base_dim=8, num_res_blocks=1, dim_mult=[1, 1, 2])

SMALL, LARGE = dict(height=32, width=48), dict(height=64, width=32)
COARSE = dict(size=dict(height=64, width=96), other=dict(height=96, width=64))  # where 8 pixels are one latent
VIDEO = dict(size=dict(SMALL, num_frames=5), other=dict(LARGE, num_frames=9))


@dataclass(frozen=True)
class Entry:
    """One pipeline.

    Attributes:
        parts: Return the components and options of the pipeline's constructor.
        size: The arguments of a cheap call that set the image's size.
        other: The same for a second size.
        off: The arguments that turn classifier-free guidance off.
        on: The arguments that turn it on; empty if no argument does.
        picture: Height and width of a picture that each call gets as ``image``.
        options: Further arguments of each call.
    """

    parts: Callable[[], dict[str, Any]]
    size: Mapping[str, int] = field(default_factory=lambda: SMALL)
    other: Mapping[str, int] = field(default_factory=lambda: LARGE)
    off: Mapping[str, Any] = field(default_factory=lambda: {"guidance_scale": 1.0})
    on: Mapping[str, Any] = field(default_factory=lambda: {"guidance_scale": 3.0})
    picture: tuple[int, int] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


ZOO: dict[str, Entry] = {}


def pipeline(name: str, **arguments: Any) -> Callable[..., Any]:
    """Register the decorated function, which returns a pipeline's parts; arguments as in :class:`Entry`."""
    known = {key: arguments.pop(key) for key in ("size", "other", "off", "on", "picture") if key in arguments}

    def register(parts):
        ZOO[name] = Entry(parts, **known, options=arguments)
        return parts

    return register


def variant(name: str, base: str, more: Callable[[], dict[str, Any]] = dict, **changes: Any) -> None:
    """Register another entry's pipeline with other parts; changes as in :class:`Entry`."""
    ZOO[name] = replace(ZOO[base], parts=lambda: ZOO[base].parts() | more(), **changes)


def build(name: str, seed: int = 0) -> Any:
    """Return the pipeline of an entry, in memory."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(crc32(name.encode()) + seed)
        kind, given = getattr(diffusers, name.partition("/")[0]), ZOO[name].parts()
        built = assembled(kind, given) if issubclass(kind, diffusers.ModularPipeline) else kind(**given)
    built.set_progress_bar_config(disable=True)
    for part in built.components.values():
        if isinstance(part, nn.Module):
            part.eval().requires_grad_(True)  # as from_pretrained leaves them
    return built


def assembled(kind: type, given: Mapping[str, Any]) -> Any:
    """Return a modular pipeline of the given components."""
    built = kind()
    built.update_components(**{name: part for name, part in given.items() if name in built.components})
    return built


def save(name: str, folder: str | Path, seed: int = 0) -> Path:
    """Write the folder of an entry's pipeline."""
    built = build(name, seed)
    is_modular = isinstance(built, diffusers.ModularPipeline)
    built.save_pretrained(str(folder), **{"overwrite_modular_index": True} if is_modular else {})
    return Path(folder)


def call_of(name: str, *, guided: bool = False, other_size: bool = False) -> dict[str, Any]:
    """Return the arguments of a cheap call, without prompt, generator and output type."""
    kind = ZOO[name]
    size, guidance = kind.other if other_size else kind.size, kind.on if guided else kind.off
    picture = {} if kind.picture is None else {"image": draw_picture(*kind.picture)}
    return {"num_inference_steps": STEPS, **kind.options, **size, **guidance, **picture}


def draw_picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """Return a picture of coarse random colors."""
    pixels = torch.randint(256, (4, 4, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy()).resize((width, height))


# --- networks and schedulers ------------------------------------------------------------------------------------------

# fmt: off
NETWORKS: dict[str, dict[str, Any]] = {
    "AllegroTransformer3DModel": dict(SAME, num_attention_heads=2, attention_head_dim=24, num_layers=2,
        cross_attention_dim=48, caption_channels=WIDTH, sample_width=6, sample_height=4, sample_frames=2),
    "AuraFlowTransformer2DModel": dict(HEADS, **SAME, num_mmdit_layers=1, num_single_dit_layers=1, sample_size=16,
        caption_projection_dim=32, joint_attention_dim=WIDTH, pos_embed_max_size=256),
    "BriaFibo2Transformer2DModel": dict(in_channels=4, dim=32, n_layers=3, n_refiner_layers=1, n_heads=2,
        cap_feat_dim=3 * WIDTH, axes_dims=(4, 6, 6), injection_layer_ids=(0, 1, 1, 2, 2), perceiver_num_layers=1,
        min_num_gist_tokens=4, max_num_gist_tokens=8, gist_step=4, gist_min_text_len=4, gist_max_text_len=64),
    "BriaFiboTransformer2DModel": dict(PACKED, in_channels=CHANNELS, joint_attention_dim=WIDTH,
        text_encoder_dim=WIDTH // 2),
    "BriaTransformer2DModel": dict(PACKED, joint_attention_dim=WIDTH),
    "ChromaTransformer2DModel": dict(PACKED, joint_attention_dim=WIDTH, approximator_num_channels=16,
        approximator_hidden_dim=16, approximator_layers=1),
    "CogVideoXTransformer3DModel": dict(HEADS, **SAME, num_layers=2, text_embed_dim=WIDTH, time_embed_dim=16,
        sample_width=6, sample_height=4, sample_frames=5, max_text_seq_length=16,
        use_rotary_positional_embeddings=True),
    "CogView3PlusTransformer2DModel": dict(HEADS, **SAME, **COG_VIEW, pos_embed_max_size=32),
    "CogView4Transformer2DModel": dict(HEADS, **SAME, **COG_VIEW, rope_axes_dim=(8, 8)),
    "CosmosTransformer3DModel": dict(HEADS, in_channels=CHANNELS + 1, out_channels=CHANNELS, num_layers=2,
        mlp_ratio=2, text_embed_dim=WIDTH, adaln_lora_dim=4, max_size=(8, 16, 16), rope_scale=(2.0, 1.0, 1.0)),
    "EasyAnimateTransformer3DModel": dict(HEADS, **SAME, num_layers=2, mmdit_layers=1, patch_size=2,
        time_embed_dim=16, text_embed_dim=WIDTH, add_norm_text_encoder=True),
    "ErnieImageTransformer2DModel": dict(hidden_size=32, num_attention_heads=2, num_layers=2, ffn_hidden_size=64,
        in_channels=4 * CHANNELS, out_channels=4 * CHANNELS, text_in_dim=WIDTH, rope_axes_dim=(4, 6, 6)),
    "Flux2Transformer2DModel": dict(PACKED, axes_dims_rope=(4, 4, 4, 4), joint_attention_dim=3 * WIDTH),
    "Flux3Transformer2DModel": dict(HEADS, in_channels=4 * CHANNELS, cond_in_channels=4 * CHANNELS, num_layers=1,
        num_single_layers=2, joint_attention_dim=8 * WIDTH, timestep_channels=16, axes_dims_rope=(4, 4, 4, 4)),
    "FluxTransformer2DModel": dict(PACKED, joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH,
        guidance_embeds=True),
    "GlmImageTransformer2DModel": dict(HEADS, **SAME, num_layers=2, text_embed_dim=WIDTH, time_embed_dim=16,
        condition_dim=4, prior_vq_quantizer_codebook_size=66),
    "HiDreamImageTransformer2DModel": dict(HEADS, **SAME, num_layers=1, num_single_layers=1, patch_size=8,
        axes_dims_rope=(8, 4, 4), llama_layers=[0, 1], caption_channels=[WIDTH, WIDTH], text_emb_dim=2 * WIDTH),
    "HunyuanDiT2DModel": dict(HEADS, in_channels=CHANNELS, sample_size=8, patch_size=2, num_layers=2, hidden_size=32,
        cross_attention_dim=WIDTH, cross_attention_dim_t5=WIDTH, pooled_projection_dim=16),
    "HunyuanImageTransformer2DModel": dict(HEADS, **SAME, **REFINED, rope_axes_dim=(8, 8), text_embed_2_dim=WIDTH),
    "HunyuanVideo15Transformer3DModel": dict(HEADS, in_channels=2 * CHANNELS + 1, out_channels=CHANNELS,
        num_layers=2, num_refiner_layers=1, rope_axes_dim=(4, 6, 6), text_embed_dim=WIDTH, text_embed_2_dim=WIDTH,
        image_embed_dim=8, task_type="t2v"),
    "HunyuanVideoTransformer3DModel": dict(HEADS, **SAME, **REFINED, rope_axes_dim=(4, 6, 6),
        pooled_projection_dim=WIDTH),
    "Ideogram4Transformer2DModel": dict(HEADS, in_channels=4 * CHANNELS, num_layers=2, intermediate_size=32,
        adaln_dim=8, llm_features_dim=13 * WIDTH, mrope_section=(4, 2, 2)),
    "Kandinsky5Transformer3DModel": dict(in_visual_dim=CHANNELS, out_visual_dim=CHANNELS, in_text_dim=WIDTH,
        in_text_dim2=WIDTH, ff_dim=64, time_dim=16, model_dim=32, num_text_blocks=1, num_visual_blocks=2,
        axes_dims=(4, 6, 6)),
    "Krea2Transformer2DModel": dict(HEADS, in_channels=4 * CHANNELS, num_layers=2, num_key_value_heads=1,
        intermediate_size=32, timestep_embed_dim=16, text_hidden_dim=WIDTH, num_text_layers=2,
        axes_dims_rope=(4, 6, 6), text_num_attention_heads=1, text_num_key_value_heads=1,
        text_intermediate_size=16, num_layerwise_text_blocks=1, num_refiner_text_blocks=1),
    "LatteTransformer3DModel": dict(HEADS, in_channels=CHANNELS, out_channels=2 * CHANNELS, num_layers=1,
        sample_size=8, patch_size=2, cross_attention_dim=32, caption_channels=WIDTH, video_length=4,
        attention_bias=True, norm_type="ada_norm_single", norm_elementwise_affine=False, num_embeds_ada_norm=1000,
        activation_fn="gelu-approximate"),
    "LongCatImageTransformer2DModel": dict(PACKED, in_channels=64, joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH),
    "LTX2VideoTransformer3DModel": dict(HEADS, **LTX, rope_double_precision=False, audio_in_channels=4,
        audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=8, audio_cross_attention_dim=16),
    "LTXVideoTransformer3DModel": dict(HEADS, **LTX),
    "Lumina2Transformer2DModel": dict(LUMINA, hidden_size=24, num_kv_heads=1, num_refiner_layers=1,
        axes_dim_rope=(4, 4, 4), axes_lens=(300, 16, 16), cap_feat_dim=WIDTH),
    "LuminaNextDiT2DModel": dict(LUMINA, hidden_size=32, num_kv_heads=2, cross_attention_dim=WIDTH),
    "MochiTransformer3DModel": dict(HEADS, in_channels=12, num_layers=2, pooled_projection_dim=16,
        text_embed_dim=WIDTH, time_embed_dim=16, max_sequence_length=16),
    "MotionAdapter": dict(block_out_channels=(16, 24), motion_layers_per_block=1, motion_norm_num_groups=8,
        motion_num_attention_heads=2, motion_mid_block_layers_per_block=1),
    "NucleusMoEImageTransformer2DModel": dict(num_attention_heads=2, attention_head_dim=32, num_layers=2,
        axes_dims_rope=(8, 12, 12), in_channels=4 * CHANNELS, out_channels=CHANNELS, joint_attention_dim=WIDTH,
        num_key_value_heads=1, num_experts=4, moe_intermediate_dim=16, capacity_factors=2.0,
        dense_moe_strategy="leave_first_block_dense"),
    "OmniGenTransformer2DModel": dict(in_channels=CHANNELS, hidden_size=32, num_attention_heads=2,
        num_key_value_heads=2, num_layers=2, intermediate_size=64, pad_token_id=0, time_step_dim=16,
        rope_scaling=dict(long_factor=[1] * 8, short_factor=[1] * 8, type="su")),
    "OvisImageTransformer2DModel": dict(PACKED, out_channels=4 * CHANNELS, joint_attention_dim=WIDTH),
    "PixArtTransformer2DModel": dict(HEADS, in_channels=CHANNELS, out_channels=2 * CHANNELS, num_layers=2,
        cross_attention_dim=32, sample_size=16, caption_channels=WIDTH),
    "PRXTransformer2DModel": dict(in_channels=CHANNELS, context_in_dim=WIDTH, hidden_size=32, num_heads=2, depth=2,
        axes_dim=[8, 8]),
    "QwenImage21Transformer2DModel": dict(HEADS, **SAME, num_layers=2, context_in_dim=WIDTH, axes_dims_rope=(4, 6, 6)),
    "QwenImageTransformer2DModel": dict(HEADS, in_channels=4 * CHANNELS, out_channels=CHANNELS, num_layers=2,
        axes_dims_rope=(4, 6, 6), joint_attention_dim=WIDTH),
    "SanaTransformer2DModel": dict(SAME, num_attention_heads=2, attention_head_dim=8, num_layers=2, sample_size=4,
        caption_channels=WIDTH, num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16),
    "SanaVideoTransformer3DModel": dict(HEADS, **SAME, num_layers=2, sample_size=8, caption_channels=WIDTH,
        cross_attention_dim=32, num_cross_attention_heads=2, cross_attention_head_dim=16),
    "SD3Transformer2DModel": dict(HEADS, **SAME, sample_size=16, num_layers=2, caption_projection_dim=32,
        pos_embed_max_size=32, joint_attention_dim=2 * WIDTH, pooled_projection_dim=2 * WIDTH,
        dual_attention_layers=(0,)),
    "UNet2DConditionModel": dict(SAME, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), block_out_channels=(16, 24), layers_per_block=1,
        attention_head_dim=4, sample_size=8, norm_num_groups=8, cross_attention_dim=WIDTH),
    "ZImageTransformer2DModel": dict(in_channels=CHANNELS, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2,
        n_kv_heads=2, cap_feat_dim=WIDTH, axes_dims=[4, 6, 6], axes_lens=[256, 32, 32]),
    "AutoencoderKLCosmos": dict(latent_channels=CHANNELS, encoder_block_out_channels=(8,) * 4, resolution=64,
        decode_block_out_channels=(8,) * 4, num_layers=1, attention_resolutions=(8,), latents_mean=None,
        latents_std=None),
    "AutoencoderKLHunyuanImage": dict(in_channels=3, out_channels=3, latent_channels=CHANNELS, layers_per_block=1,
        block_out_channels=(32, 32, 32), spatial_compression_ratio=4, sample_size=64, scaling_factor=0.8),
    "AutoencoderKLHunyuanVideo15": dict(latent_channels=CHANNELS, block_out_channels=(8, 16, 16), layers_per_block=1,
        spatial_compression_ratio=4, temporal_compression_ratio=2),
    "AutoencoderKLLTX2Audio": dict(base_channels=4, latent_channels=2, mel_bins=8, ch_mult=(1, 1, 2),
        num_res_blocks=1),
    "AutoencoderKLLTX2Video": dict(latent_channels=8, block_out_channels=(8, 8, 16, 32), layers_per_block=(1,) * 5,
        decoder_block_out_channels=(8, 16, 32), decoder_layers_per_block=(1,) * 4, spatial_compression_ratio=32,
        temporal_compression_ratio=8),
    "AutoencoderKLLTXVideo": dict(latent_channels=8, block_out_channels=(8,) * 4, layers_per_block=(1,) * 5,
        decoder_block_out_channels=(8,) * 4, decoder_layers_per_block=(1,) * 5),
    "AutoencoderKLMochi": dict(encoder_block_out_channels=(32,) * 4, decoder_block_out_channels=(32,) * 4,
        layers_per_block=(1,) * 5, add_attention_block=(False,) * 5),
    "AutoencoderKLQwenImage": dict(WAN_VAE, temperal_downsample=[False, True]),
    "AutoencoderKLQwenImage21": dict(WAN_VAE, dim_mult=[1] * 5, temperal_downsample=[False] * 4, decoder_base_dim=8),
    "AutoencoderKLWan": dict(WAN_VAE, temperal_downsample=[False, True], scale_factor_temporal=2,
        scale_factor_spatial=4),
}
# fmt: on
"""Small configurations. Autoencoders make a latent of 4 pixels and 2 frames, unless their class fixes other sizes."""
WAN = dict(HEADS, **SAME, text_dim=WIDTH, freq_dim=32, ffn_dim=64, num_layers=2, rope_max_seq_len=64)
for name in ("WanTransformer3DModel", "SkyReelsV2Transformer3DModel", "AnyFlowTransformer3DModel"):
    NETWORKS[name] = WAN
NETWORKS["ChronoEditTransformer3DModel"] = WAN
NETWORKS["WanVACETransformer3DModel"] = dict(WAN, vace_layers=[0], vace_in_channels=2 * CHANNELS + 16)
LOUDER = {"*.add_v_proj.weight": 4, "*.attn2.to_v.weight": 4, "context_embedder.weight": 4, "*.to_out.0.weight": 3}
"""Gains where the text enters, so that prompts show in the images."""


@torch.no_grad()
def spread(model: nn.Module) -> Any:
    """Draw matrices and kernels of unit gain, and small values for biases and whatever starts at zero."""
    for module in model.modules():
        for name, value in module.named_parameters(recurse=False):
            if isinstance(module, nn.Embedding):
                value.normal_()
            elif value.ndim > 1 and name == "weight":
                value.normal_(0, 1 / math.sqrt(value[0].numel()))
            elif name.endswith("_proj"):  # of experts
                value.normal_(0, 1 / math.sqrt(value.shape[1]))
            elif name == "bias" or not value.any():
                value.normal_(0, 0.2)
    for name, value in model.named_parameters():
        value.mul_(math.prod(gain for pattern, gain in LOUDER.items() if fnmatchcase(name, pattern)))
    return model


def network(name: str, **config: Any) -> Any:
    """Return a diffusers model of random weights, small where the configuration does not say otherwise."""
    return spread(getattr(diffusers, name)(**NETWORKS.get(name, {}) | config))


def parts(vae: Any, denoiser: Any, scheduler: Any, *texts: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the parts of a pipeline."""
    kind = "unet" if isinstance(denoiser, diffusers.UNet2DConditionModel) else "transformer"
    shared = {} if vae is None else {"vae": vae}
    for text in texts:
        shared |= text
    return {**shared, kind: denoiser, "scheduler": scheduler, **more}


flow = diffusers.FlowMatchEulerDiscreteScheduler
shifted_flow = partial(flow, use_dynamic_shifting=True)  # the shift grows with the image, as FLUX.1's
flow_kind = dict(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
flow_unipc = partial(diffusers.UniPCMultistepScheduler, **flow_kind)
flow_dpm = partial(diffusers.DPMSolverMultistepScheduler, **flow_kind)
COG = dict(prediction_type="v_prediction", rescale_betas_zero_snr=True, clip_sample=False)
cog_ddim, cog_dpm = (
    partial(kind, **COG) for kind in (diffusers.CogVideoXDDIMScheduler, diffusers.CogVideoXDPMScheduler)
)


def diffusion(name: str = "DDIMScheduler", **config: Any) -> Any:
    """Return a scheduler of Stable Diffusion's path."""
    betas = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1)
    return getattr(diffusers, name)(**betas | config)


# --- autoencoders -----------------------------------------------------------------------------------------------------


def kl(blocks: int = 3, name: str = "AutoencoderKL", **config: Any) -> Any:
    """Return an image autoencoder that divides a side by ``2 ** (blocks - 1)``."""
    down, up = ("DownEncoderBlock2D",) * blocks, ("UpDecoderBlock2D",) * blocks
    sizes = dict(block_out_channels=(8,) * blocks, latent_channels=CHANNELS, norm_num_groups=4, layers_per_block=1)
    scale = {} if name == "AutoencoderKLFlux2" else {"scaling_factor": 0.8}
    shape = dict(down_block_types=down, up_block_types=up, mid_block_add_attention=False)
    return network(name, **sizes | scale | shape | config)


shifted_kl = partial(kl, shift_factor=0.1)
THIN = dict(norm_num_groups=2, block_out_channels=(4,) * 4)  # for pictures of a megapixel


def flux2_vae() -> Any:
    """Return FLUX.2's autoencoder: 4 pixels to a latent, 2 x 2 latents to a token, statistics of tokens."""
    vae = kl(name="AutoencoderKLFlux2")
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2)
    return vae


def dc_vae() -> Any:
    """Return Sana's autoencoder: 8 pixels to a latent."""
    each = dict(layers_per_block=(1,) * 4, block_out_channels=(8,) * 4, qkv_multiscales=((),) * 4)
    sides = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in each.items()}
    return network("AutoencoderDC", **sides, latent_channels=CHANNELS, attention_head_dim=4, scaling_factor=0.4)


wan_vae, qwen_vae = partial(network, "AutoencoderKLWan"), partial(network, "AutoencoderKLQwenImage")


def cube_vae(name: str, **config: Any) -> Any:
    """Return a video autoencoder of the older kind: 8 pixels and 4 frames to a latent."""
    sizes = dict(block_out_channels=(8,) * 4, layers_per_block=1, latent_channels=CHANNELS, norm_num_groups=2)
    return network(name, **sizes | config)


hunyuan_vae = partial(cube_vae, "AutoencoderKLHunyuanVideo", mid_block_add_attention=False)


# --- text encoders ----------------------------------------------------------------------------------------------------

SYSTEM_WORDS = """
As an image captioning expert, generate a descriptive text prompt based on content suitable for input to text-to-image
model You are a prompt engineer Describe the video by detailing following aspects main content and theme of objects
Actions events behaviors temporal relationships physical movement changes background environment light style atmosphere
camera angles movements transitions used in this video helpful assistant Your task is create detailed caption
"""
LUMINA_WORDS = """You are an assistant designed to generate superior images with the degree of image-text alignment
based on textual prompts or user prompts. <Prompt Start>"""
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>")
MROPE = dict(rope_type="default", mrope_section=[1, 1, 2], rope_theta=1e4)


@cache
def chat_words(pictures: bool = False, template: str = tiny_chat.TEMPLATE, special: tuple[str, ...] = HEADERS) -> Any:
    """Return a byte-level tokenizer with a chat template, which knows the words of the pipelines' system prompts."""
    tokenizer = tiny_chat.chat_tokenizer(edits=pictures, special=special, text=SYSTEM_WORDS)
    tokenizer.chat_template = template
    return tokenizer


@cache
def glm_words() -> Any:
    """Return a tokenizer that starts each text, also an empty one, with GLM's two tokens."""
    words = tiny_chat.chat_tokenizer(special=("[gMASK]", "<sop>"))
    start = [(token, words.convert_tokens_to_ids(token)) for token in ("[gMASK]", "<sop>")]
    words.backend_tokenizer.post_processor = TemplateProcessing(single="[gMASK] <sop> $A", special_tokens=start)
    kind = transformers.PreTrainedTokenizerFast
    return kind(tokenizer_object=words.backend_tokenizer, pad_token=words.pad_token, eos_token=words.eos_token)


def language_model(name: str | type, tokenizer: Any, config_name: str = "", **config: Any) -> Any:
    """Return a random language model of transformers of three layers."""
    kind: Any = getattr(transformers, name) if isinstance(name, str) else name
    special = dict(pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    sizes = dict(hidden_size=WIDTH, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    options = dict(special, **sizes, vocab_size=len(tokenizer), num_hidden_layers=3)
    return spread(kind((getattr(transformers, config_name) if config_name else kind.config_class)(**options | config)))


def text(tokenizer: Any, encoder: Any, number: str = "") -> dict[str, Any]:
    """Return the parts of a text encoder."""
    return {f"tokenizer{number}": tokenizer, f"text_encoder{number}": encoder}


def clip(number: str = "", *, projection: bool = True, length: int = 12) -> dict[str, Any]:
    """Return CLIP."""
    tokenizer = tiny_text.clip_tokenizer(length)
    kind = tiny_text.text_encoder_with_projection if projection else tiny_text.text_encoder
    return text(tokenizer, kind(tokenizer, WIDTH, seed=len(number)), number)


plain_clip = partial(clip, projection=False)


def t5(number: str = "", name: str = "T5EncoderModel", length: int = 16, width: int = WIDTH, words: Any = None) -> Any:
    """Return T5 or one of its kind."""
    tokenizer = words or tiny_text.t5_tokenizer(length)
    return text(tokenizer, spread(tiny_text.t5_encoder(tokenizer, width, kind=getattr(transformers, name))), number)


def byt5(number: str = "_2") -> dict[str, Any]:
    """Return ByT5, which reads the words in quotes."""
    return t5(number, words=transformers.ByT5Tokenizer())


umt5 = partial(t5, name="UMT5EncoderModel")


def chat(name: str = "Qwen3Model", **config: Any) -> dict[str, Any]:
    """Return a language model that reads a chat."""
    return text(chat_words(), language_model(name, chat_words(), **config))


def gemma(name: str = "Gemma2Model", words: str = "") -> dict[str, Any]:
    """Return Gemma."""
    tokenizer = tiny_chat.gemma_tokenizer(words)
    return text(tokenizer, language_model(name, tokenizer))


def qwen25_vl() -> dict[str, Any]:
    """Return Qwen2.5-VL."""
    return text(chat_words(True), spread(tiny_chat.qwen25_vl(chat_words(True), WIDTH)))


def qwen3_vl(**options: Any) -> dict[str, Any]:
    """Return Qwen3-VL with its processor."""
    words = chat_words(True)
    encoder = spread(tiny_chat.qwen3_vl(words, WIDTH, **options))
    return {"processor": tiny_chat.qwen3_vl_processor(words), "text_encoder": encoder}


def pictures() -> Any:
    """Return the processor of Qwen2.5-VL, which shrinks pictures to at most four tokens, so that the words count."""
    processor = tiny_chat.picture_processor(chat_words(True))
    processor.image_processor.size = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
    return processor


# --- images -----------------------------------------------------------------------------------------------------------

CFG = dict(true_cfg_scale=3.0, negative_prompt="a dog")
UNCHECKED = dict(safety_checker=None, feature_extractor=None, requires_safety_checker=False)
UNBINNED = dict(use_resolution_binning=False)  # or another size would be chosen
unet = partial(network, "UNet2DConditionModel")


def sizes_unet(**config):
    """Return a UNet that also reads sizes and a pooled text, as SDXL's."""
    sizes = dict(addition_embed_type="text_time", addition_time_embed_dim=8, transformer_layers_per_block=(1, 2))
    return unet(**sizes, projection_class_embeddings_input_dim=6 * 8 + WIDTH, use_linear_projection=True, **config)


def stable_diffusion(denoiser=unet, scheduler="EulerDiscreteScheduler", *texts, **more):
    return parts(kl(), denoiser(), diffusion(scheduler), *(texts or (plain_clip(),)), **more)


sdxl_unet = partial(sizes_unet, cross_attention_dim=2 * WIDTH)
pndm = partial(diffusion, "PNDMScheduler", skip_prk_steps=True)
pipeline("StableDiffusionPipeline")(lambda: stable_diffusion(**UNCHECKED) | {"scheduler": pndm()})
pipeline("StableDiffusionXLPipeline")(
    lambda: stable_diffusion(sdxl_unet, "EulerDiscreteScheduler", plain_clip(), clip("_2"), add_watermarker=False)
)
pipeline("StableDiffusionXLPipeline/one_encoder")(
    lambda: stable_diffusion(
        partial(sizes_unet, cross_attention_dim=WIDTH),
        "EulerDiscreteScheduler",
        text(None, None),
        clip("_2"),
        add_watermarker=False,
    )
)
pipeline("LatentConsistencyModelPipeline", off={}, on={})(
    lambda: stable_diffusion(partial(unet, time_cond_proj_dim=32), "LCMScheduler", **UNCHECKED)
)
pipeline("StableDiffusionInstructPix2PixPipeline", size={}, other={}, picture=(32, 48))(
    lambda: stable_diffusion(partial(unet, in_channels=8), "EulerAncestralDiscreteScheduler", **UNCHECKED)
)
pipeline("AnimateDiffPipeline", size=dict(SMALL, num_frames=4), other=dict(LARGE, num_frames=4))(
    lambda: stable_diffusion(unet, motion_adapter=network("MotionAdapter"))
)


@pipeline("StableDiffusion3Pipeline", max_sequence_length=16)
def stable_diffusion3():
    texts = clip(), clip("_2"), t5("_3", width=2 * WIDTH)
    return parts(shifted_kl(), network("SD3Transformer2DModel"), flow(shift=3.0), *texts)


variant(
    "StableDiffusion3Pipeline/no_t5",
    "StableDiffusion3Pipeline",
    lambda: dict.fromkeys(("text_encoder_3", "tokenizer_3")),
)


def flux(**config):
    denoiser = network("FluxTransformer2DModel", **config)
    return parts(shifted_kl(), denoiser, shifted_flow(), plain_clip(), t5("_2"))


FLUX = dict(off={}, on=CFG, max_sequence_length=16)
KONTEXT = dict(FLUX, picture=(32, 32), max_area=32 * 48, _auto_resize=False)
pipeline("FluxPipeline", **FLUX)(flux)
pipeline("FluxPipeline/schnell", **FLUX)(lambda: flux(guidance_embeds=False) | {"scheduler": flow()})
pipeline("FluxKontextPipeline", **KONTEXT)(partial(flux, num_layers=2))
pipeline("ChromaPipeline", max_sequence_length=16)(
    lambda: parts(shifted_kl(), network("ChromaTransformer2DModel"), shifted_flow(), t5())
)


def flux2(*texts, **config):
    return parts(flux2_vae(), network("Flux2Transformer2DModel", **config), shifted_flow(shift=3.0), *texts)


@pipeline("Flux2Pipeline", off={}, on={}, max_sequence_length=64)
def flux2_dev():
    words = tiny_chat.chat_tokenizer(special=("[IMG]", "[IMG_BREAK]", "[IMG_END]"), text=SYSTEM_MESSAGE)
    return flux2(text(tiny_chat.pixtral_processor(words), tiny_chat.mistral3(words, WIDTH)))


pipeline("Flux2KleinPipeline", max_sequence_length=32)(
    lambda: flux2(chat("Qwen3ForCausalLM", num_hidden_layers=27), guidance_embeds=False)
)
variant("Flux2KleinPipeline/edit", "Flux2KleinPipeline", picture=(64, 64))
variant("Flux2KleinKVPipeline", "Flux2KleinPipeline", picture=(64, 64), off={}, on={})
pipeline("AuraFlowPipeline", max_sequence_length=16)(
    lambda: parts(kl(), network("AuraFlowTransformer2DModel"), flow(shift=1.73), umt5())
)
pipeline("OvisImagePipeline", max_sequence_length=48)(
    lambda: parts(shifted_kl(), network("OvisImageTransformer2DModel"), shifted_flow(), chat())
)


def pixart(**config):
    return parts(kl(), network("PixArtTransformer2DModel", **config), diffusion("DPMSolverMultistepScheduler"), t5())


pipeline("PixArtSigmaPipeline", **UNBINNED, max_sequence_length=16)(pixart)
pipeline("PixArtAlphaPipeline", **UNBINNED, max_sequence_length=16)(
    partial(pixart, sample_size=128, num_attention_heads=3, cross_attention_dim=48)  # 128 reads sizes, too
)
cog_flow = partial(shifted_flow, base_shift=0.25, max_shift=0.75, time_shift_type="linear")
glm = partial(language_model, "GlmModel")
pipeline("CogView4Pipeline", max_sequence_length=32)(
    lambda: parts(kl(), network("CogView4Transformer2DModel"), cog_flow(), text(glm_words(), glm(glm_words())))
)
pipeline("CogView3PlusPipeline", **COARSE, max_sequence_length=16)(
    lambda: parts(kl(blocks=4), network("CogView3PlusTransformer2DModel"), cog_ddim(), t5())
)


@pipeline("HiDreamImagePipeline", size=dict(height=256, width=256), other=dict(height=128, width=512))
def hidream():
    words = tiny_chat.chat_tokenizer(max_length=16)
    llama = language_model("LlamaForCausalLM", words)
    llama.set_attn_implementation("eager")  # the pipeline asks for attention maps
    texts = clip(length=218), clip("_2", length=218), t5("_3"), text(words, llama, "_4")
    return parts(shifted_kl(blocks=2), network("HiDreamImageTransformer2DModel"), shifted_flow(), *texts)


def longcat(**config):
    vae = shifted_kl(**config, latent_channels=16)
    return parts(vae, network("LongCatImageTransformer2DModel"), shifted_flow(), qwen25_vl(), text_processor=pictures())


thin = dict(blocks=6, block_out_channels=(4,) * 6, norm_num_groups=2)  # for pictures of a megapixel
pipeline("LongCatImagePipeline", enable_prompt_rewrite=False)(longcat)
pipeline("LongCatImageEditPipeline", picture=(64, 64), size={}, other={})(partial(longcat, **thin))


def kandinsky5(vae, **config):
    texts = plain_clip("_2", length=77), qwen25_vl(), {"tokenizer": pictures()}
    return parts(vae, network("Kandinsky5Transformer3DModel", **config), flow(shift=3.0), *texts)


KANDINSKY = dict(size=dict(height=640, width=1408), other=dict(height=1152, width=896))  # it takes no smaller
LONG = dict(size=dict(SMALL, num_frames=21), other=dict(LARGE, num_frames=25))  # its tail needs five latent frames
pipeline("Kandinsky5T2IPipeline", **KANDINSKY, max_sequence_length=96)(lambda: kandinsky5(kl(blocks=4)))
pipeline("Kandinsky5T2VPipeline", **VIDEO, max_sequence_length=96)(lambda: kandinsky5(hunyuan_vae()))
pipeline("Kandinsky5I2VPipeline", **LONG, max_sequence_length=96, picture=(32, 48))(
    lambda: kandinsky5(hunyuan_vae(), visual_cond=True)
)
pipeline("BriaPipeline", max_sequence_length=16)(
    lambda: parts(shifted_kl(), network("BriaTransformer2DModel"), shifted_flow(), t5())
)


@pipeline("BriaFiboPipeline")
def bria_fibo():
    encoder = chat("SmolLM3ForCausalLM", hidden_size=WIDTH // 2, vocab_size=128_001)  # the pipeline uses token 128000
    vae = wan_vae(dim_mult=[1] * 5, temperal_downsample=[False, False, True, True])
    return parts(vae, network("BriaFiboTransformer2DModel"), shifted_flow(), encoder)


pipeline("BriaFibo2Pipeline")(
    lambda: parts(flux2_vae(), network("BriaFibo2Transformer2DModel"), shifted_flow(), qwen3_vl(layers=36))
)


@pipeline("HunyuanImagePipeline", off={}, on={})
def hunyuan_image():
    vae, denoiser = network("AutoencoderKLHunyuanImage"), network("HunyuanImageTransformer2DModel")
    return parts(vae, denoiser, flow(shift=5.0), qwen25_vl(), byt5())


guider = partial(diffusers.AdaptiveProjectedMixGuidance, guidance_scale=3.0, adaptive_projected_guidance_start_step=1)
variant("HunyuanImagePipeline/guided", "HunyuanImagePipeline", lambda: dict(guider=guider(), ocr_guider=guider()))


@pipeline("HunyuanDiTPipeline", **COARSE, **UNBINNED)
def hunyuan_dit():
    letters = ["##" + chr(letter) for letter in range(97, 123)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *tiny_text.task_words(), *map(chr, range(33, 127)), *letters]
    tokenizer = transformers.BertTokenizer(vocab={word: i for i, word in enumerate(dict.fromkeys(words))})
    bert = dict(vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=32, num_attention_heads=2)
    encoder = spread(transformers.BertModel(transformers.BertConfig(**bert, num_hidden_layers=2)))
    texts = text(tokenizer, encoder), t5("_2", length=256)
    scheduler = diffusion("DDPMScheduler", clip_sample=False)
    return parts(kl(blocks=4), network("HunyuanDiT2DModel"), scheduler, *texts, **UNCHECKED)


pipeline("LuminaPipeline", max_sequence_length=16)(
    lambda: parts(kl(blocks=4), network("LuminaNextDiT2DModel"), flow(), gemma("GemmaModel"))
)
lumina2_texts = partial(gemma, words=LUMINA_WORDS)
pipeline("Lumina2Pipeline", max_sequence_length=64)(
    lambda: parts(shifted_kl(blocks=4), network("Lumina2Transformer2DModel"), flow(shift=6.0), lumina2_texts())
)


def qwen_image(vae, **config):
    scheduler = shifted_flow(max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02)
    return parts(vae, network("QwenImageTransformer2DModel", **config), scheduler, qwen25_vl())


def qwen_edit(**config):
    """Return the parts of an edit pipeline, which enlarges pictures to about a megapixel: 32 pixels to a latent."""
    vae = qwen_vae(dim_mult=[1] * 6, temperal_downsample=[False] * 4 + [True], base_dim=2)
    return qwen_image(vae, **config) | {"processor": pictures()}


QWEN = dict(off=dict(true_cfg_scale=1.0), on=CFG)
QWEN_EDIT = dict(QWEN, size=dict(height=128, width=192), other=dict(height=256, width=128), picture=(56, 56))
LAYERED = dict(size=dict(layers=2), other=dict(layers=3), picture=(64, 64))
layered = partial(qwen_edit, use_additional_t_cond=True, use_layer3d_rope=True)
pipeline("QwenImagePipeline", **QWEN)(lambda: qwen_image(qwen_vae()))
pipeline("QwenImageEditPipeline", **QWEN_EDIT)(qwen_edit)
pipeline("QwenImageEditPlusPipeline", **QWEN_EDIT)(partial(qwen_edit, num_layers=1))
pipeline("QwenImageLayeredPipeline", **QWEN, **LAYERED)(layered)


@pipeline("QwenImage21Pipeline", **QWEN)
def qwen_image21():
    vae, denoiser = network("AutoencoderKLQwenImage21"), network("QwenImage21Transformer2DModel")
    return parts(vae, denoiser, shifted_flow(shift=3.0), qwen3_vl())


pipeline("ErnieImagePipeline", use_pe=False)(
    lambda: parts(flux2_vae(), network("ErnieImageTransformer2DModel"), flow(shift=3.0), chat("MistralModel"))
)


@pipeline("PRXPipeline", **UNBINNED, tokenizer_max_length=16)
def prx():
    words = tiny_chat.gemma_tokenizer()
    encoder = language_model(T5GemmaEncoder, words, "T5GemmaModuleConfig", dropout_rate=0.0)
    encoder.config.encoder = encoder.config.to_dict()  # where diffusers looks for it
    return parts(shifted_kl(), network("PRXTransformer2DModel"), flow(shift=3.0), text(words, encoder))


@pipeline("PRXPixelPipeline", **UNBINNED)
def prx_pixel():
    denoiser = network("PRXTransformer2DModel", in_channels=3, patch_size=8, bottleneck_size=8)
    return parts(None, denoiser, flow(), chat(), prompt_max_tokens=32)


def sana(scheduler, **config):
    return parts(dc_vae(), network("SanaTransformer2DModel", **config), scheduler(), gemma())


SANA = dict(UNBINNED, size=dict(height=32, width=64), other=dict(height=64, width=64), max_sequence_length=16)
pipeline("SanaPipeline", **SANA)(partial(sana, flow_dpm))
pipeline("SanaSprintPipeline", **SANA, off=dict(intermediate_timesteps=None), on={})(
    partial(sana, diffusers.SCMScheduler, guidance_embeds=True, qk_norm="rms_norm_across_heads")
)
FROM_ZERO = dict(off=dict(guidance_scale=0.0), on=dict(guidance_scale=2.0))
pipeline("ZImagePipeline", **FROM_ZERO, max_sequence_length=32)(
    lambda: parts(shifted_kl(), network("ZImageTransformer2DModel"), flow(shift=3.0), chat())
)


@pipeline("Krea2Pipeline", **FROM_ZERO, max_sequence_length=48)
def krea2():
    texts = text(chat_words(), spread(tiny_chat.qwen3_vl(chat_words(), WIDTH, head=False)))
    scheduler = shifted_flow(max_image_seq_len=6400)
    return parts(qwen_vae(), network("Krea2Transformer2DModel"), scheduler, texts, text_encoder_select_layers=(1, 2))


pipeline("NucleusMoEImagePipeline")(
    lambda: parts(qwen_vae(), network("NucleusMoEImageTransformer2DModel"), shifted_flow(), qwen3_vl(layers=9))
)


@pipeline("Ideogram4Pipeline", max_sequence_length=32, guidance_schedule=None)
def ideogram4():
    denoiser, unconditional = (network("Ideogram4Transformer2DModel") for _ in range(2))
    words = chat_words(template=tiny_chat.PARTS_TEMPLATE)
    encoder = text(words, spread(tiny_chat.qwen3_vl(words, WIDTH, layers=36, head=False)))
    return parts(flux2_vae(), denoiser, flow(), encoder, unconditional_transformer=unconditional)


@pipeline("OmniGenPipeline", **COARSE)
def omnigen():
    words = tiny_chat.chat_tokenizer()
    denoiser = network("OmniGenTransformer2DModel", vocab_size=len(words))
    return parts(kl(blocks=4), denoiser, flow(invert_sigmas=True), tokenizer=words)


@pipeline("GlmImagePipeline", **COARSE)
def glm_image():
    named = dict(image_token="<|image|>", grid_bos_token="<sop>", grid_eos_token="<eop>")
    words = chat_words(special=tuple(named.values()))
    kept = dict(pad_token=words.pad_token, bos_token="<|im_start|>", extra_special_tokens=named)
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=words.backend_tokenizer, **kept)
    image = words.convert_tokens_to_ids("<|image|>")
    inner = dict(vocab_size=len(words), hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, pad_token_id=0)
    inner |= dict(num_attention_heads=2, num_key_value_heads=1, vision_vocab_size=66, rope_parameters=MROPE)
    vision = dict(depth=1, hidden_size=8, num_heads=1, intermediate_size=8, image_size=64)
    config = dict(text_config=inner, vision_config=vision, image_start_token_id=64, image_end_token_id=65)
    config |= dict(image_token_id=image, vq_config=dict(embed_dim=8, num_embeddings=64, latent_channels=8))
    prior = spread(transformers.GlmImageForConditionalGeneration(transformers.GlmImageConfig(**config)))
    prior.generation_config.eos_token_id = None  # a random model would stop early
    images = transformers.GlmImageImageProcessor()
    processor = transformers.GlmImageProcessor(images, words, chat_template=tiny_chat.PARTS_TEMPLATE)
    vae, denoiser = kl(blocks=4, **STATISTICS), network("GlmImageTransformer2DModel")
    return parts(vae, denoiser, cog_flow(), byt5(""), processor=processor, vision_language_encoder=prior)


@cache
def glm_pieces() -> tuple[TemporaryDirectory, Path]:
    """Return the folder of a SentencePiece model, which lives as long as this, and the file."""
    import sentencepiece

    words, model, folder = [*tiny_text.task_words(), *map(chr, range(33, 127))], BytesIO(), TemporaryDirectory()
    options = dict(vocab_size=200, hard_vocab_limit=False, minloglevel=2, model_writer=model)
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(words * 4), **options)
    file = Path(folder.name) / "tokenizer.model"
    file.write_bytes(model.getvalue())
    return folder, file


def kolors():
    from diffusers.pipelines.kolors import text_encoder, tokenizer

    sizes = dict(num_layers=2, padded_vocab_size=256, hidden_size=WIDTH, ffn_hidden_size=32, kv_channels=8)
    sizes |= dict(num_attention_heads=2, seq_length=256, add_qkv_bias=True, original_rope=True)
    encoder = spread(text_encoder.ChatGLMModel(text_encoder.ChatGLMConfig(**sizes)))
    for weight in encoder.parameters():
        if weight.ndim == 1:
            weight.data.fill_(1)  # the model leaves them uninitialised
    texts = text(tokenizer.ChatGLMTokenizer(str(glm_pieces()[1])), encoder)
    denoiser = partial(sizes_unet, encoder_hid_dim=WIDTH, encoder_hid_dim_type="text_proj")
    return stable_diffusion(denoiser, "EulerDiscreteScheduler", texts)


if find_spec("sentencepiece"):  # which diffusers needs to import the class
    pipeline("KolorsPipeline", max_sequence_length=16)(kolors)


# --- videos -----------------------------------------------------------------------------------------------------------


@pipeline("HunyuanVideoPipeline", **VIDEO, on=CFG, max_sequence_length=32)
def hunyuan_video():
    texts = chat("LlamaModel", num_hidden_layers=4), plain_clip("_2", length=77)
    return parts(hunyuan_vae(), network("HunyuanVideoTransformer3DModel"), flow(shift=7.0), *texts)


@pipeline("HunyuanVideo15Pipeline", **VIDEO, off={}, on={})
def hunyuan_video15():
    vae, denoiser = network("AutoencoderKLHunyuanVideo15"), network("HunyuanVideo15Transformer3DModel")
    texts = chat("Qwen2_5_VLTextModel", rope_parameters=MROPE), byt5()
    return parts(vae, denoiser, flow(shift=5.0), *texts, guider=diffusers.ClassifierFreeGuidance(guidance_scale=3.0))


unguided = partial(diffusers.ClassifierFreeGuidance, enabled=False)
variant("HunyuanVideo15Pipeline/unguided", "HunyuanVideo15Pipeline", lambda: {"guider": unguided()})


def wan(kind="Wan", scheduler=flow_unipc, **config):
    return parts(wan_vae(), network(f"{kind}Transformer3DModel", **config), scheduler(), umt5())


def wan_picture(kind="Wan"):
    """Return the parts of a pipeline that reads a picture's latents, with a mask, and its CLIP embeddings."""
    config = dict(hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.CLIPVisionConfig(**config, image_size=16, patch_size=8)
    sizes = dict(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    encoder = spread(transformers.CLIPVisionModel(config))
    vision = dict(image_encoder=encoder, image_processor=transformers.CLIPImageProcessor(**sizes))
    return wan(kind, in_channels=2 * CHANNELS + 2, image_dim=WIDTH, added_kv_proj_dim=32) | vision


def second(**config):
    return dict(transformer_2=network("WanTransformer3DModel", **config), boundary_ratio=0.8)


SHORT_TEXT = dict(VIDEO, max_sequence_length=16)
PICTURED = dict(SHORT_TEXT, picture=(32, 48))
pictured = dict(in_channels=2 * CHANNELS + 2)
anyflow = partial(wan, "AnyFlow", partial(diffusers.FlowMapEulerDiscreteScheduler, shift=3.0))
pipeline("WanPipeline", **SHORT_TEXT)(wan)
pipeline("WanPipeline/two_networks", **SHORT_TEXT)(lambda: wan() | second(num_attention_heads=3))
pipeline("WanPipeline/expanded", **SHORT_TEXT)(lambda: wan() | {"expand_timesteps": True})
pipeline("WanImageToVideoPipeline", **PICTURED)(wan_picture)
pipeline("WanImageToVideoPipeline/two_networks", **PICTURED)(lambda: wan(**pictured) | second(**pictured))
variant("WanImageToVideoPipeline/expanded", "WanPipeline/expanded", picture=(32, 48))
pipeline("WanVACEPipeline", **SHORT_TEXT)(partial(wan, "WanVACE"))
pipeline("ChronoEditPipeline", **PICTURED)(partial(wan_picture, "ChronoEdit"))
pipeline("AnyFlowPipeline", **SHORT_TEXT)(anyflow)
pipeline("SkyReelsV2Pipeline", **SHORT_TEXT)(partial(wan, "SkyReelsV2"))
pipeline("SkyReelsV2DiffusionForcingPipeline", **SHORT_TEXT)(partial(wan, "SkyReelsV2"))
pipeline("SkyReelsV2ImageToVideoPipeline", **PICTURED)(partial(wan_picture, "SkyReelsV2"))


@pipeline("LTXPipeline", **dict(SHORT_TEXT, size=dict(height=32, width=64, num_frames=9)))
def ltx():
    vae, denoiser = network("AutoencoderKLLTXVideo"), network("LTXVideoTransformer3DModel")
    last = vae.encoder.conv_out.conv
    last.weight.data[-1], last.bias.data[-1] = 0, -30  # it encodes a picture without noise
    return parts(vae, denoiser, shifted_flow(shift_terminal=0.1), t5())


variant("LTXImageToVideoPipeline", "LTXPipeline", picture=(32, 64))


def gemma3(tokenizer):
    """Return a Gemma 3 whose vision tower is as small as can be."""
    inner = language_model("Gemma3TextModel", tokenizer, num_hidden_layers=2).config
    vision = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, patch_size=8)
    config = dict(text_config=inner, vision_config=dict(vision, image_size=16), mm_tokens_per_image=4)
    return spread(transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(**config)))


LTX2_OFF = dict(guidance_scale=1.0, stg_scale=0.0, modality_scale=1.0, guidance_rescale=0.0)
LTX2_OFF |= {f"audio_{name}": value for name, value in LTX2_OFF.items()}
LTX2_SIZES = dict(size=dict(height=64, width=96, num_frames=9), other=dict(height=96, width=64, num_frames=17))


@pipeline("LTX2Pipeline", **LTX2_SIZES, off=LTX2_OFF, on=dict(LTX2_OFF, guidance_scale=3.0), max_sequence_length=16)
def ltx2():
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

    one = dict(num_attention_heads=2, attention_head_dim=8, num_layers=1, num_learnable_registers=8)
    both = {f"{kind}_connector_{key}": value for kind in ("video", "audio") for key, value in one.items()}
    connectors = spread(LTX2TextConnectors(WIDTH, 3, rope_double_precision=False, **both))
    vocoder = spread(LTX2Vocoder(16, 8, upsample_kernel_sizes=[4, 4], upsample_factors=[2, 2]))
    more = dict(audio_vae=network("AutoencoderKLLTX2Audio"), connectors=connectors, vocoder=vocoder)
    vae, denoiser = network("AutoencoderKLLTX2Video"), network("LTX2VideoTransformer3DModel")
    words = tiny_chat.gemma_tokenizer()
    return parts(vae, denoiser, shifted_flow(shift_terminal=0.1), text(words, gemma3(words)), **more)


variant("LTX2ImageToVideoPipeline", "LTX2Pipeline", picture=(64, 96), options=dict(max_sequence_length=16, image_crf=0))
MOCHI = dict(size=dict(SMALL, num_frames=7), other=dict(LARGE, num_frames=13))


@pipeline("MochiPipeline", **MOCHI, max_sequence_length=16)
def mochi():
    vae, denoiser = network("AutoencoderKLMochi"), network("MochiTransformer3DModel")
    return parts(vae, denoiser, flow(invert_sigmas=True), t5())


def cogvideox(scheduler=cog_dpm, **config):
    vae, denoiser = cube_vae("AutoencoderKLCogVideoX"), network("CogVideoXTransformer3DModel", **config)
    last = vae.encoder.conv_out.conv
    last.weight.data[CHANNELS:], last.bias.data[CHANNELS:] = 0, -30  # it encodes a picture without noise
    return parts(vae, denoiser, scheduler(), t5())


COG_VIDEO = dict(SHORT_TEXT, size=dict(SMALL, num_frames=9), other=dict(LARGE, num_frames=17))
pipeline("CogVideoXPipeline", **COG_VIDEO)(cogvideox)
pipeline("CogVideoXPipeline/ddim", **COG_VIDEO)(partial(cogvideox, cog_ddim))
pipeline("CogVideoXImageToVideoPipeline", **COG_VIDEO, picture=(32, 48))(partial(cogvideox, in_channels=2 * CHANNELS))
TILE = dict(height=128, width=128, num_frames=24)  # of Allegro's autoencoder


@pipeline("AllegroPipeline", size=TILE, other=dict(TILE, width=176), max_sequence_length=16)
def allegro():
    vae = cube_vae("AutoencoderKLAllegro", sample_size=128)
    vae.enable_tiling()  # it cannot decode otherwise
    return parts(vae, network("AllegroTransformer3DModel"), diffusion("EulerAncestralDiscreteScheduler"), t5())


pipeline("LattePipeline", size=dict(SMALL, video_length=4), other=dict(LARGE, video_length=4))(
    lambda: parts(kl(), network("LatteTransformer3DModel"), diffusion(clip_sample=False), t5(length=120))
)
magvit = partial(cube_vae, "AutoencoderKLMagvit")
pipeline("EasyAnimatePipeline", **VIDEO, on=dict(guidance_scale=3.0, negative_prompt="a dog"))(
    lambda: parts(magvit(), network("EasyAnimateTransformer3DModel"), flow(), qwen25_vl())
)
pipeline("SanaVideoPipeline", size=dict(SANA["size"], frames=5), other=dict(SANA["other"], frames=9), **UNBINNED)(
    lambda: parts(wan_vae(), network("SanaVideoTransformer3DModel"), flow_dpm(), gemma())
)


class PassingGuard:
    """Cosmos' safety checker, whose package its pipelines demand, passes everything here."""

    def to(self, *args):
        return self

    def check_text_safety(self, prompt):
        return True

    def check_video_safety(self, frames):
        return frames


def cosmos(vae, scheduler, *texts, **config):
    denoiser = network("CosmosTransformer3DModel", **config)
    return parts(vae, denoiser, scheduler, *texts, safety_checker=PassingGuard())


@pipeline("CosmosTextToWorldPipeline", **dict(SHORT_TEXT, size=dict(SMALL, num_frames=9)))
def cosmos_text_to_world():
    vae = network("AutoencoderKLCosmos")
    vae.decoder.conv_out.conv_t.weight.data.mul_(0.2)
    noise = dict(sigma_min=0.002, sigma_max=80, sigma_data=0.5, final_sigmas_type="sigma_min")
    return cosmos(vae, diffusers.EDMEulerScheduler(**noise), t5(), in_channels=CHANNELS)


def cosmos2(**config):
    return cosmos(wan_vae(), flow(use_karras_sigmas=True), t5(), extra_pos_embed_type=None, **config)


@pipeline("Cosmos2_5_PredictBasePipeline", **VIDEO)
def cosmos25():
    texts = dict(use_crossattn_projection=True, crossattn_proj_in_channels=2 * WIDTH)
    texts |= dict(encoder_hidden_states_channels=WIDTH, extra_pos_embed_type=None)
    return cosmos(wan_vae(), flow_unipc(), qwen25_vl(), **texts)


pipeline("Cosmos2TextToImagePipeline", max_sequence_length=16)(partial(cosmos2, in_channels=CHANNELS))
pipeline("Cosmos2VideoToWorldPipeline", **PICTURED)(cosmos2)


# --- modular pipelines ------------------------------------------------------------------------------------------------

GUIDED = dict(off={}, on={})  # by a component


@pipeline("Flux3ModularPipeline", **GUIDED)
def flux3():
    texts = qwen3_vl(layers=32)  # of which its blocks choose eight
    words = texts.pop("processor")
    words.chat_template = tiny_chat.TEMPLATE
    return parts(flux2_vae(), network("Flux3Transformer2DModel"), flow(shift=6.93), texts, tokenizer=words)


def modular(name: str, base: str, more: Callable[[], dict[str, Any]] = dict, **changes: Any) -> None:
    """Register a modular pipeline of the parts of another entry's pipeline; changes as in :class:`Entry`."""
    variant(name, base, more, **GUIDED | changes)


for name in (
    "Flux",
    "Flux2Klein",
    "HunyuanVideo15",
    "LTX",
    "QwenImage",
    "StableDiffusion3",
    "StableDiffusionXL",
    "Wan",
):
    modular(f"{name}ModularPipeline", f"{name}Pipeline")
modular("ZImageModularPipeline", "ZImagePipeline")
modular("ErnieImageModularPipeline", "ErnieImagePipeline", options={})  # it rewrites prompts, where no option tells
modular("Flux2KleinBaseModularPipeline", "Flux2KleinPipeline")
modular("QwenImage21ModularPipeline", "QwenImage21Pipeline")
variant("Flux3ModularPipeline/edit", "Flux3ModularPipeline", picture=(64, 64))
distilled = partial(network, "Flux3Transformer2DModel", flow_map=True)
modular("Flux3DistilledModularPipeline", "Flux3ModularPipeline", lambda: {"transformer": distilled()})


@partial(modular, "Krea2ModularPipeline", "Krea2Pipeline")
def krea2_layers():
    """Return an encoder with the layers that the blocks choose, and its network."""
    encoder = tiny_chat.qwen3_vl(chat_words(), WIDTH, layers=36, head=False)
    return {"text_encoder": spread(encoder), "transformer": network("Krea2Transformer2DModel", num_text_layers=12)}
