"""The options of a policy, and the parts of its diffusers pipeline."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_vgrpo.core.batches import BATCH_SIZE, in_batches
from lit_vgrpo.core.ranges import BatchSize, OnlyWith, PositiveFloat, Range, Seed, checked
from lit_vgrpo.policies.placement import in_own_precision, place
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.system.paths import resolve_path

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INDEX = "model_index.json"


@checked
class PipelinePolicy(nn.Module):
    """The options of a policy and its pipeline's parts, extended by :class:`~lit_vgrpo.policies.base.Policy`.

    Args:
        checkpoint: A hub name, a local pipeline folder, or ``shipped:...``; in Python also a pipeline in memory, whose
            networks are then trained.
        variant: Variant of the pipeline's weight files, such as ``fp16``; ``None`` uses the default files.
        revision: Branch, tag or commit of a hub repository; ``None`` uses its main branch.
        lora_rank: Rank of the LoRA adapter; ``None`` trains the full weights.
        lora_alpha: LoRA scale numerator; ``None`` uses the rank.
        lora_targets: Name suffixes of the modules to adapt; ``None`` uses the family's attention projections.
        quantisation: Keep the frozen weights of the network's blocks in 4 bits (``nf4``) or 8 (``int8``), under a LoRA
            in float32; ``None`` keeps them in ``dtype``.
        train_only: Shell-style patterns of the parameters to train, such as ``*.attn.*``; ``None`` trains all, or the
            adapter.
        start_from: Run folder or checkpoint of an earlier run, or a LoRA file (a path, or ``owner/name[/file]`` of the
            hub), whose weights are this run's start and reference; ``None`` starts from the pipeline.
        start_weights: Use that run's trained weights or their EMA.
        height: Image height in pixels; ``None`` uses the model's default.
        width: Image width in pixels; ``None`` uses the model's default.
        dtype: Autocast type of the network, and storage type of frozen weights; trained weights, the VAE's weights and
            all arithmetic outside the two networks stay float32.
        negative_prompt: The prompt that guidance moves away from.
        gradient_checkpointing: Save activation memory at the cost of a second forward pass.
        decode_batch_size: Images per VAE pass; smaller batches are padded, so that an image does not depend on its
            batch.
        decode_dtype: Autocast type of the VAE while it decodes; 16 bits change images by about a grey level.
        vae_tiling: Decode large images in overlapping tiles, which changes them slightly.
        embedding_cache: Folder that caches prompt embeddings; ``None`` for no cache.
        embedding_cache_gb: Maximum size of the folder; the least recently used embeddings are deleted first.
        offload_encoders: Keep the text encoders in CPU memory while they are not used.
        compile: Compile the network with ``torch.compile``, for rollouts and training.
        attention_backend: One of diffusers' attention backends by name; ``None`` leaves the choice to diffusers.
        fold_lora: Merge the adapter into the weights during ODE sampling; ``None`` does so where possible. float32
            only.
        init_seed: Seed of the adapter's initial weights.
    """

    pipeline_class: ClassVar[str]
    network_name: ClassVar[str]
    default_lora_targets: ClassVar[tuple[str, ...]]
    comfyui_names: ClassVar[Mapping[str, str]] = {}
    """Maps suffixes of diffusers' module names to ComfyUI's, if ComfyUI does not read the former. Modules with the same
    ComfyUI name are fused there, with their outputs in this order."""
    edits: ClassVar[bool] = False
    """True if every prompt comes with a picture, of the size of the images."""
    references: int = 1
    """Pictures per prompt, for a family that edits."""
    num_frames: int | None = None
    """Frames per video; ``None`` for images."""
    packed: ClassVar[int] = 1
    """Latents per side in one of the network's ``in_channels`` inputs."""
    may_lack: ClassVar[tuple[str, ...]] = ()
    """Text encoders that a pipeline may lack, with their tokenizers."""
    uses_latent_shift: ClassVar[bool] = True
    decodes_with_gradient: ClassVar[bool] = True
    """False if :meth:`vae_decode` keeps no graph."""
    network: Any  # a diffusers model, the only submodule
    latent_shape: tuple[int, ...]
    """``(C, h, w)``, or ``(C, f, h, w)`` for a video."""
    size_in: str = "model.policy"  # the section with height and width, for messages

    def __init__(
        self,
        checkpoint: str,
        lora_rank: Annotated[int, Range(1, 16_384)] | None = None,
        lora_alpha: Annotated[int, Range(1, 65_536), OnlyWith("lora_rank")] | None = None,
        lora_targets: Annotated[list[str], OnlyWith("lora_rank")] | None = None,
        train_only: list[str] | None = None,
        quantisation: Literal["nf4", "int8"] | None = None,
        start_from: str | None = None,
        start_weights: Annotated[Literal["trained", "ema"], OnlyWith("start_from")] = "trained",
        height: Annotated[int, Range(1, 16_384)] | None = None,
        width: Annotated[int, Range(1, 16_384)] | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        negative_prompt: str = "",
        gradient_checkpointing: bool = False,
        decode_batch_size: BatchSize = BATCH_SIZE,
        decode_dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        vae_tiling: bool = False,
        embedding_cache: str | None = None,
        embedding_cache_gb: PositiveFloat = 20.0,
        offload_encoders: bool = False,
        compile: bool = False,
        attention_backend: str | None = None,
        fold_lora: bool | None = None,
        init_seed: Seed = 0,
        variant: str | None = None,
        revision: str | None = None,
    ) -> None:
        super().__init__()
        if lora_rank is not None and train_only is not None:
            raise ValueError("train_only and lora_rank are both set, but lora_rank trains only an adapter. Remove one.")
        if fold_lora and (lora_rank is None or dtype != "float32"):  # 16 bits would round small updates away
            raise ValueError("fold_lora=true needs lora_rank and dtype=float32. Remove fold_lora.")
        if quantisation is not None and (lora_rank is None or compile or fold_lora):
            raise ValueError(f"quantisation={quantisation} needs lora_rank, without compile and without fold_lora.")
        self.given: Any = None  # a pipeline in memory, until load; its name is then the checkpoint
        if not isinstance(checkpoint, str | PathLike):
            if not hasattr(checkpoint, "components"):
                needed = f"a hub name, a folder or a {self.pipeline_class}"
                raise TypeError(f"checkpoint is of {type(checkpoint).__name__}. Give {needed}.")
            self.given, checkpoint = checkpoint, checkpoint.config.get("_name_or_path") or type(checkpoint).__name__
        elif not str(checkpoint):
            raise ValueError("checkpoint= is empty. Name a pipeline: a folder, or owner/name on the hub.")
        else:
            resolve_path(checkpoint)  # refuses a shipped: path that leaves the installed folder
        self.checkpoint = str(checkpoint)
        self.variant, self.revision = variant, revision
        self.lora_rank = lora_rank
        self.lora_alpha = lora_alpha if lora_alpha is not None else lora_rank
        self.lora_targets = list(lora_targets or self.default_lora_targets)
        self.train_only = None if train_only is None else list(train_only)
        self.quantisation: Literal["nf4", "int8"] | None = quantisation
        self.start_from, self.start_weights = start_from, start_weights
        self.height, self.width = height, width
        self.dtype = DTYPES[dtype]
        self.negative_prompt = negative_prompt
        self.gradient_checkpointing = gradient_checkpointing
        self.decode_batch_size, self.decode_dtype = decode_batch_size, DTYPES[decode_dtype]
        self.vae_tiling = vae_tiling
        self.embedding_cache, self.embedding_cache_gb = embedding_cache, embedding_cache_gb
        self.offload_encoders = offload_encoders
        self.compile_network = compile
        self.attention_backend = attention_backend
        self.fold_lora = fold_lora
        self.init_seed = init_seed
        self.pipeline: Any = None
        self.draft: Any = None  # the pipeline without weights that a check built, or the policy that used it
        self._is_checked = False
        self._folded: Any = None  # the network's view for sampling, created on first use

    @contextmanager
    def using(self, network: nn.Module) -> Iterator[None]:
        """Replace the network inside the block."""
        original, self.network = self.network, network
        try:
            yield
        finally:
            self.network = original

    def ignore_start(self) -> None:
        """Load without the run of ``start_from``, since a checkpoint's weights replace it."""
        self.start_from = None

    def ignore_quantisation(self) -> None:
        """Load the frozen weights unquantised, since they are written or merged into."""
        self.quantisation = None

    def ignore_speed(self) -> None:
        """Load without ``compile`` and ``attention_backend``, which start slowly and were chosen elsewhere."""
        self.compile_network, self.attention_backend = False, None

    @property
    def trains_all(self) -> bool:
        """True if all of the network's weights are trained."""
        return self.lora_rank is None and self.train_only is None

    @property
    def loaded(self) -> bool:
        return self.pipeline is not None

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @property
    def network_names(self) -> tuple[str, ...]:
        """The names of the trained networks in the pipeline; several are submodules of ``network``."""
        return (self.network_name,)

    def networks(self) -> dict[str, Any]:
        """Return the trained networks by their names in the pipeline."""
        names = self.network_names
        return {name: self.network if len(names) == 1 else getattr(self.network, name) for name in names}

    def joined(self, networks: Sequence[Any]) -> Any:
        """Return the pipeline's networks, in the order of :attr:`network_names`, as one."""
        return networks[0]

    def helpers(self) -> list[nn.Module]:
        """Return the frozen parts: text encoders and VAE."""
        parts = self.pipeline.components.items()
        return [part for name, part in parts if isinstance(part, nn.Module) and name not in self.network_names]

    def encoders(self) -> list[nn.Module]:
        """Return the frozen parts that encode prompts."""
        return [helper for helper in self.helpers() if helper is not self.pipeline.vae]

    def null_components(self, folder: Path) -> dict[str, None]:
        """Return components that are null in the folder's index; diffusers needs each as an argument."""
        path = folder / INDEX
        index = json.loads(path.read_text()) if path.is_file() else {}
        return {name: None for name, value in index.items() if isinstance(value, list) and value[:1] == [None]}

    def misfit(self, pipeline: Any) -> str | None:
        """Return why a pipeline would be trained wrongly, as a phrase that follows its name, or ``None``."""
        vae = pipeline.vae.config
        latents = self.packed**2 * (vae.get("latent_channels") or vae.get("z_dim") or 0)
        for name, network in ((name, getattr(pipeline, name, None)) for name in self.network_names):
            taken = latents if network is None else network.config.in_channels
            if latents and taken != latents:
                what = "inpaints, edits or follows an image, or has parts of several models"
                return f"has a {name} of {taken} channels for latents of {latents}: it {what}. Use another model."
        return None

    def autocast(self, dtype: torch.dtype | None = None) -> AbstractContextManager[Any]:
        """Return autocast to a precision, by default the network's, regardless of the trainer's.

        The cache of 16-bit weights is off: it lives as long as the outermost autocast and would outlast a swap of the
        weights, or a pass without gradient. A pass uses each weight only once.
        """
        dtype = dtype or self.dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32, cache_enabled=False)

    @property
    def pixels_per_latent(self) -> int:
        """Pixels along a latent's side."""
        return self.pipeline.vae_scale_factor

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width in pixels; ``None`` before loading, unless both are options."""
        if self.loaded:
            *_, height, width = self.latent_shape
            return height * self.pixels_per_latent, width * self.pixels_per_latent
        return None if self.height is None or self.width is None else (self.height, self.width)

    def pipeline_references(self, pictures: Tensor) -> dict[str, Any]:
        """Return the arguments that pass the pipeline's call the pictures of :meth:`encode_edits` unchanged."""
        return {"image": pictures}

    def pipeline_latents(self, noise: Tensor) -> Tensor:
        """Return ``noise (B, C, h, w)`` as the argument ``latents``: as tokens where the pipeline packs latents."""
        pack = getattr(self.pipeline, "_pack_latents", None)
        return noise if pack is None else pack(noise, *noise.shape)

    def pipeline_guidance(self, guidance: float, prompts: int) -> dict[str, Any]:
        """Return the arguments for a guidance scale and this policy's negative prompt."""
        if self.embeds_guidance:
            return {"guidance_scale": guidance}
        negative = [self.negative_prompt] * prompts
        if "true_cfg_scale" in inspect.signature(type(self.pipeline).__call__).parameters:
            return {"true_cfg_scale": guidance, "negative_prompt": negative}
        return {"guidance_scale": guidance, **({"negative_prompt": negative} if self.negative_prompt else {})}

    @contextmanager
    def sized(self, height: int | None, width: int | None) -> Iterator[None]:
        """Use the evaluation's size inside the block; ``None`` keeps a side. LoadError if loaded and impossible."""
        before = self.height, self.width, self.size_in, self.latent_shape if self.loaded else (0, 0, 0)
        self.height, self.width, self.size_in = height or self.height, width or self.width, "model.evaluation"
        try:
            if self.loaded and (height or width):
                self.latent_shape = self.find_latent_shape()
            yield
        finally:
            self.height, self.width, self.size_in = before[:3]
            if self.loaded:
                self.latent_shape = before[3]

    def find_latent_shape(self) -> tuple[int, ...]:
        """Return ``(C, h, w)`` for the image size; LoadError if the VAE or the patches do not divide it."""
        config = self.network.config
        sides = self.latent_sides(config.sample_size, getattr(config, "patch_size", None) or 1)
        return config.in_channels, *sides

    def latent_sides(self, default: int, patch_size: int) -> tuple[int, int]:
        """Return the VAE's latents along height and width.

        Args:
            default: Latents along a side whose size is ``None``.
            patch_size: Latents per patch.

        Raises:
            LoadError: A side is not a whole number of patches.
        """
        factor = getattr(self.pipeline, "vae_scale_factor", self.pixels_per_latent)
        multiple = factor * patch_size
        for name, pixels in (("height", self.height), ("width", self.width)):
            if pixels is not None and pixels % multiple:
                raise LoadError(f"{self.size_in}.{name}={pixels} is not a multiple of {multiple} (VAE factor x patch).")
        height, width = (default if side is None else side // factor for side in (self.height, self.width))
        return height, width

    def _latent_affine(self) -> tuple[Any, Any]:
        """Return scale and shift between the VAE's latents and the network's, as in the family's pipeline.

        Numbers, or tensors with one entry per channel.
        """
        config = self.pipeline.vae.config
        return config.scaling_factor, (config.shift_factor or 0.0) if self.uses_latent_shift else 0.0

    def vae_latents(self, latents: Tensor) -> Tensor:
        """Return the VAE's latents for the network's latents ``(B, C, h, w)``."""
        scale, shift = self._latent_affine()
        return latents / scale + shift

    def vae_decode(self, latents: Tensor) -> Tensor:
        """Return the images ``(B, 3, H, W)`` in [-1, 1] of the VAE's latents ``(B, C, h, w)``."""
        return self.pipeline.vae.decode(latents, return_dict=False)[0]

    def vae_encode(self, images: Tensor) -> Tensor:
        """Return the network's latents ``(B, C, h, w)`` of images ``(B, 3, H, W)`` in [-1, 1]."""
        scale, shift = self._latent_affine()
        return (self.pipeline.vae.encode(images).latent_dist.mode() - shift) * scale

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents to images ``(B, 3, H, W)``, float32 in [0, 1]."""
        return in_batches(self._decoded, self.decode_batch_size, latents.float())

    def decode_with_gradient(self, latents: Tensor, halved: bool = False) -> Tensor:
        """Do the same in one VAE pass and keep the graph; if possible, the backward pass recomputes the VAE's blocks.

        Latents may be a crop. The clamp to [0, 1] passes no gradient outside this range.

        Args:
            halved: Return images at half the resolution, decoded from the VAE's latents averaged over 2 x 2.
        """
        if not self.pipeline.vae.is_gradient_checkpointing:
            with suppress(ValueError):  # this VAE does not support it
                self.pipeline.vae.enable_gradient_checkpointing()
        return self._decoded(latents, halved)

    @in_own_precision
    def _decoded(self, latents: Tensor, halved: bool = False) -> Tensor:
        place([self.pipeline.vae], self.device)
        with self.autocast(self.decode_dtype):
            of_vae = self.vae_latents(latents)
            if halved:
                pooled = F.avg_pool2d(of_vae.flatten(0, -4), 2, ceil_mode=True)
                of_vae = pooled.unflatten(0, of_vae.shape[:-3])
            return (self.vae_decode(of_vae).float() / 2 + 0.5).clamp(0, 1)

    @torch.no_grad()
    @in_own_precision
    def encode_images(self, images: Tensor) -> Tensor:
        """Encode images ``(B, 3, H, W)`` in [0, 1] to latents ``(B, C, h, w)``, the mean of the VAE's posterior."""
        place([self.pipeline.vae], self.device)
        return in_batches(self.vae_encode, self.decode_batch_size, images.to(self.device).float() * 2 - 1)
