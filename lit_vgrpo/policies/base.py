"""The base class of trainable denoising models: the policy ``pi(o | c)``."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpointed

from lit_vgrpo.core.batches import BATCH_SIZE, in_batches
from lit_vgrpo.core.noise import unit_noise
from lit_vgrpo.core.pixels import to_pil
from lit_vgrpo.core.probability_paths import ProbabilityPath
from lit_vgrpo.core.ranges import BatchSize, OnlyWith, PositiveFloat, Range, checked
from lit_vgrpo.core.sharding import is_sharded
from lit_vgrpo.core.solvers import SOLVERS
from lit_vgrpo.core.types import Conditioning, RolloutSpec, is_of_prompt
from lit_vgrpo.policies.acceleration import FoldedNetwork, compile_network, lora_layers, set_attention_backend
from lit_vgrpo.policies.export import save_adapter, save_pipeline
from lit_vgrpo.policies.loading import (
    KEY,
    call_parameters,
    encoder_of,
    family_of,
    find_folder,
    pipeline_misfit,
    pipeline_on_meta,
    read_index,
    read_pipeline,
)
from lit_vgrpo.policies.placement import (
    cast,
    in_own_precision,
    place,
    restored_on_error,
    unmasked_on_meta,
    with_cpu_default,
)
from lit_vgrpo.policies.prompt_encoder import PromptEncoder
from lit_vgrpo.policies.trained import add_adapter, choose_trained, quantise, refuse_unknown_targets
from lit_vgrpo.policies.two_networks import TwoNetworks, rows_sharing_time
from lit_vgrpo.system.hub import LoadError, base_name, quiet_libraries
from lit_vgrpo.system.paths import resolve_path

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PutStart = Callable[[Any], None]
"""Loads an earlier run's weights into a loaded policy."""


@checked
class Policy(nn.Module):
    """A diffusers pipeline as a policy over images.

    The constructor is cheap: :meth:`check` finds errors without reading weights, :meth:`load` reads them. Only
    ``network`` is a submodule. Text encoders, tokenizers and the VAE stay in the pipeline object, outside
    ``parameters()``, so that checkpoints, DDP buckets and a strategy's casts do not include them.

    Args:
        checkpoint: A hub name, a local pipeline folder, or ``shipped:...``; in Python also a pipeline in memory, whose
            networks are then trained.
        variant: Variant of the pipeline's weight files, such as ``fp16``; ``None`` uses the default files.
        revision: Branch, tag or commit of a hub repository; ``None`` uses its main branch.
        components: Networks and tokenizers from other checkpoints, by name: ``{vae: madebyollin/sdxl-vae-fp16-fix}``.
            Each is a folder or a hub name, of the part alone or of a whole pipeline.
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
        decode_dtype: Autocast type of the VAE while it decodes; 16 bits change images by about a grey level. ``auto``
            is float16 on a GPU if no pixel of an image decoded from noise then changes by half a grey level.
            Gradients of rewards use bfloat16 in place of float16, in which they underflow.
        vae_tiling: Decode large images in overlapping tiles, which changes them slightly.
        embedding_cache: Folder that caches prompt embeddings; ``None`` for no cache.
        embedding_cache_gb: Maximum size of the folder; the least recently used embeddings are deleted first.
        offload_encoders: Keep the text encoders in CPU memory while they are not used.
        offload_network: Keep the network's frozen weights in CPU memory while prompts are encoded, for a GPU that
            cannot hold both; sharded weights stay.
        compile: Compile the network with ``torch.compile``, for rollouts and training; ``auto`` does so in a
            run on a GPU in 16 bits that is long enough to gain from it.
        attention_backend: One of diffusers' attention backends by name; ``None`` leaves the choice to diffusers.
        fold_lora: Merge the adapter into the weights during ODE sampling; ``None`` does so where possible. float32
            only.
    """

    TO_PASS: ClassVar[str] = 'Wrap a pipeline, its folder or its hub name: policy=AutoPolicy("owner/name")'
    pipeline_class: ClassVar[str]
    network_name: ClassVar[str]
    default_lora_targets: ClassVar[tuple[str, ...]]
    solvers: ClassVar[tuple[str, ...]]
    sde_solvers: ClassVar[tuple[str, ...]]
    path_kind: ClassVar[Literal["flow", "vp"]]
    pipeline_options: ClassVar[Mapping[str, Any]] = {}
    """Arguments with which the pipeline's call samples what the policy samples."""
    pipeline_takes_one: ClassVar[bool] = False
    """True if the pipeline must be called with one prompt at a time."""
    left_out: tuple[str, ...] = ()
    """Components of the pipeline that are not loaded."""
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
    network: Any  # a diffusers model, the only submodule
    path: ProbabilityPath
    prompt_encoder: PromptEncoder
    latent_shape: tuple[int, ...]
    """``(C, h, w)``, or ``(C, f, h, w)`` for a video."""
    size_in: str = "model.policy"  # the section with height and width, for messages

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        named = (vars(cls).get(name) for name in ("solvers", "sde_solvers"))
        SOLVERS.update(dict.fromkeys(solver for names in named if isinstance(names, tuple) for solver in names))

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
        decode_dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32",
        vae_tiling: bool = False,
        embedding_cache: str | None = None,
        embedding_cache_gb: PositiveFloat = 20.0,
        offload_encoders: bool = False,
        offload_network: Annotated[bool, OnlyWith("offload_encoders")] = False,
        compile: bool | Literal["auto"] = False,
        attention_backend: str | None = None,
        fold_lora: bool | None = None,
        variant: str | None = None,
        revision: str | None = None,
        components: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        if lora_rank is not None and train_only is not None:
            raise ValueError("train_only and lora_rank are both set, but lora_rank trains only an adapter. Remove one.")
        if fold_lora and (lora_rank is None or dtype != "float32"):  # 16 bits would round small updates away
            raise ValueError("fold_lora=true needs lora_rank and dtype=float32. Remove fold_lora.")
        if quantisation is not None and (lora_rank is None or compile is True or fold_lora):
            raise ValueError(f"quantisation={quantisation} needs lora_rank, without compile and without fold_lora.")
        if offload_network and lora_rank is None and train_only is None:
            raise ValueError("offload_network=true has no effect on trained weights. Set lora_rank, or remove it.")
        self.given: Any = None  # a pipeline in memory, until load; its name is then the checkpoint
        if not isinstance(checkpoint, str | PathLike):
            if not hasattr(checkpoint, "components"):
                needed = f"a hub name, a folder or a {self.pipeline_class}"
                raise TypeError(f"checkpoint is of {type(checkpoint).__name__}. Give {needed}.")
            if components:
                raise ValueError("components= is for pipelines by name. Set the parts of your pipeline before.")
            self.given, checkpoint = checkpoint, checkpoint.config.get("_name_or_path") or type(checkpoint).__name__
        elif not str(checkpoint):
            raise ValueError("checkpoint= is empty. Name a pipeline: a folder, or owner/name on the hub.")
        else:
            resolve_path(checkpoint)  # refuses a shipped: path that leaves the installed folder
        self.checkpoint = str(checkpoint)
        self.variant, self.revision = variant, revision
        self.components = dict(components or {})
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
        self.decode_batch_size = decode_batch_size
        self.decode_dtype = DTYPES.get(decode_dtype, torch.float32)  # auto's until the first decode, and in estimates
        self._tries_float16 = decode_dtype == "auto"
        self.vae_tiling = vae_tiling
        self.embedding_cache, self.embedding_cache_gb = embedding_cache, embedding_cache_gb
        self.offload_encoders, self.offload_network = offload_encoders, offload_network
        self.compile_network: bool | Literal["auto"] = compile
        self.attention_backend = attention_backend
        self.fold_lora = fold_lora
        self.pipeline: Any = None
        self.draft: Any = None  # the pipeline without weights that a check built, or the policy that used it
        self._is_checked = False
        self._folded: Any = None  # the network's view for sampling, created on first use

    def __getattr__(self, name: str) -> Any:
        if name in ("network", "path", "latent_shape", "prompt_encoder") and not self.loaded:
            raise RuntimeError(f"{type(self).__name__} is not loaded and has no {name}. Call policy.load() first.")
        return super().__getattr__(name)

    def check(self) -> list[str]:
        """Return errors that can be found without reading weights, one line each; at most one about the checkpoint.

        A first check builds the pipeline on the meta device, and compares its parts with the headers of their files.
        """
        if self.loaded:
            return []
        try:
            with quiet_libraries():
                folder = find_folder(self) if self.given is None else None
                if self._is_checked and self.given is None:
                    return []
                draft = None if folder is None else pipeline_on_meta(self, folder)
                pipeline = draft if self.given is None else self.given
                error = None if pipeline is None else pipeline_misfit(self, pipeline)
        except LoadError as reason:
            return [str(reason)]
        if error is not None:
            return [f"{KEY}={self.checkpoint} {error}"]
        self._is_checked, self.draft = True, draft
        return []

    @with_cpu_default
    def load(self, put_start: PutStart | None = None) -> Policy:
        """Check, load the weights and add the adapter; a second call does nothing.

        Args:
            put_start: Replaces the trained weights with those of the run that ``start_from`` names.

        Raises:
            LoadError: The checkpoint is missing, damaged or of another family, or an option does not fit it.
            RuntimeError: ``start_from`` is given, which needs :func:`lit_vgrpo.training.saved_weights.load_policy`.
        """
        if self.loaded:
            return self
        self._is_checked = True  # loading finds what a check finds in headers
        try:
            for error in self.check():
                raise LoadError(error)
            pipeline = read_pipeline(self) if self.given is None else self.given
            with quiet_libraries(), restored_on_error(self.given):
                self.adopt(pipeline, put_start)
        except BaseException:
            self._is_checked, self.pipeline = False, None
            raise
        self.given = self.draft = None
        return self

    @with_cpu_default
    def adopt(self, pipeline: Any, put_start: PutStart | None = None) -> Policy:
        """Use the network of a diffusers pipeline that is already in memory; ``checkpoint`` is then only a name.

        Args:
            put_start: See :meth:`load`.

        Raises:
            LoadError: The pipeline or an option does not fit the family.
            RuntimeError: ``start_from`` is given, but no ``put_start``.
        """
        if self.start_from is not None and put_start is None:
            raise RuntimeError(f"start_from={self.start_from} names a run. Call saved_weights.load_policy(policy).")
        if (error := pipeline_misfit(self, pipeline)) is not None:
            raise LoadError(f"{KEY}={self.checkpoint} {error}")
        pipeline.set_progress_bar_config(disable=True)
        for component in pipeline.components.values():
            if isinstance(component, nn.Module):
                component.requires_grad_(False).eval()
        cast(pipeline.vae, torch.float32)
        if all(weight.ndim < 5 for weight in pipeline.vae.parameters()):
            pipeline.vae.to(memory_format=torch.channels_last)
        if self.vae_tiling:
            pipeline.vae.enable_tiling()
        self.pipeline = pipeline
        self.prompt_encoder = PromptEncoder(self)
        self.network = self.joined([getattr(pipeline, name) for name in self.network_names])
        processors = (getattr(module, "processor", None) for module in self.network.modules())
        if self.dtype == torch.float16 and any("LinearAttn" in type(one).__name__ for one in processors):  # as Sana's
            why = "overflows under autocast, also where the pipeline in float16 does not. Use bfloat16 or float32."
            raise LoadError(f"model.policy.dtype=float16: the linear attention of {type(self).__name__} {why}")
        for encoder in self.encoders():
            cast(encoder, self.dtype)
            encoder.register_forward_pre_hook(unmasked_on_meta, with_kwargs=True)
        if self.offload_encoders:
            place(self.encoders(), torch.device("cpu"))
        if self.lora_rank is not None:
            if self.quantisation is not None:
                quantise(self.network, self.quantisation, self.dtype)
            if self.lora_targets != list(self.default_lora_targets):  # small networks may lack some of the defaults
                refuse_unknown_targets(self.network, self.lora_targets)
            rank, alpha = self.lora_rank, self.lora_alpha or self.lora_rank
            add_adapter(self.networks().values(), rank, alpha, self.lora_targets)
        patterns = None if self.lora_rank is not None else self.train_only or ["*"]
        choose_trained(self.network, patterns, self.unused_weights(), self.dtype)
        if put_start is not None:
            put_start(self)
        for network in self.networks().values():
            if self.gradient_checkpointing:
                network.enable_gradient_checkpointing(partial(checkpointed, use_reentrant=False))  # with keywords too
            if self.attention_backend is not None:
                set_attention_backend(network, self.attention_backend)
        if self.compile_network is True:
            compile_network(self.network)
        self.path = self.build_path()
        self.latent_shape = self.find_latent_shape()
        if self.encoders() and (room := self.prompt_limit()[1]) < 1:
            length = self.max_sequence_length
            key = f"model.policy.max_sequence_length={length}"
            raise LoadError(f"{key} leaves no token for a prompt: its template takes {length - room}.")
        return self

    def targets_in(self, network: nn.Module) -> list[str]:
        """Return the targets of the adapter in the policy's network, which may be without weights."""
        return self.lora_targets

    def train(self, mode: bool = True) -> Policy:
        """Stay in eval mode: dropout would make the ratio differ from 1 before any update."""
        return super().train(False)

    # --- the network and the pipeline's parts ----------------------------------------------------------------------

    @contextmanager
    def using(self, network: nn.Module) -> Iterator[None]:
        """Replace the network inside the block."""
        original, self.network = self.network, network
        try:
            yield
        finally:
            self.network = original

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
        many = len(self.network_names) > 1
        return {name: getattr(self.network, name) if many else self.network for name in self.network_names}

    def joined(self, networks: Sequence[Any]) -> Any:
        """Return the pipeline's networks, in the order of :attr:`network_names`, as one."""
        if len(networks) == 1:
            return networks[0]
        boundary = self.pipeline.config.boundary_ratio * self.pipeline.scheduler.config.num_train_timesteps
        return TwoNetworks(networks[0], networks[1], boundary * (1 - 1e-6))  # a float32 time at it may be rounded down

    def encoders(self) -> list[nn.Module]:
        """Return the frozen parts that encode prompts."""
        others, parts = {*self.network_names, "vae"}, self.pipeline.components.items()
        return [part for name, part in parts if isinstance(part, nn.Module) and name not in others]

    def family_options(self) -> dict[str, Any]:
        """Return the values of the options that the family adds to this class's."""
        known = inspect.signature(Policy).parameters
        names = {name for cls in type(self).__mro__ for name in inspect.signature(cls).parameters} - known.keys()
        return {name: getattr(self, name, None) for name in sorted(names)}

    def null_components(self, folder: Path) -> dict[str, None]:
        """Return components that are null in the folder's index, absent from it, or left out.

        diffusers needs each as an argument.
        """
        index = read_index(folder)
        nulls = [name for name, value in index.items() if isinstance(value, list) and value[:1] == [None]]
        parts = inspect.signature(family_of(self)).parameters if self.may_lack else ()
        absent = [name for name in parts if name not in index and encoder_of(name) in self.may_lack]
        return dict.fromkeys([*nulls, *absent, *self.left_out])

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
        return {"image": to_pil(pictures.flatten(0, -4))}

    def pipeline_latents(self, noise: Tensor) -> Tensor:
        """Return ``noise (B, C, h, w)`` as the argument ``latents``: as tokens where the pipeline packs latents."""
        pack = getattr(self.pipeline, "_pack_latents", None)
        return noise if pack is None else pack(noise, *noise.shape)

    def pipeline_guidance(self, guidance: float, prompts: int) -> dict[str, Any]:
        """Return the arguments for a guidance scale and this policy's negative prompt."""
        if self.embeds_guidance:
            return {"guidance_scale": guidance}
        negative = [self.negative_prompt] * prompts
        if "true_cfg_scale" in call_parameters(self.pipeline):
            return {"true_cfg_scale": guidance, "negative_prompt": negative}
        return {"guidance_scale": guidance, **({"negative_prompt": negative} if self.negative_prompt else {})}

    def pipeline_parts(self, guidance: float) -> dict[str, Any]:
        """Return the components, by name, that set a pipeline's guidance scale instead of an argument of its call."""
        return {}

    def scheduler_lines(self, spec: RolloutSpec) -> list[str]:
        """Return the lines of Python that give ``pipe`` the scheduler of :meth:`scheduler`, or none for its own."""
        chosen = self.scheduler(spec.ode_solver(self.solvers), spec.steps)
        kind, config, own = type(chosen), chosen.config, self.pipeline.scheduler
        defaults = {name: option.default for name, option in inspect.signature(kind).parameters.items()}
        lines = []
        if kind is not type(own) or any(config[name] != own.config.get(name) for name in defaults):
            given = [f"{name}={config[name]!r}" for name in defaults if config[name] != defaults[name]]
            lines.append(f"pipe.scheduler = diffusers.{kind.__name__}({', '.join(given)})")
            call = inspect.unwrap(type(self.pipeline).__call__).__code__  # Bria's reads more than other schedulers have
            read = [name for name in own.config if name not in config and name in call.co_names]
            if read:
                kept = ", ".join(f"{name}={own.config[name]!r}" for name in read)
                lines.append(f"pipe.scheduler.register_to_config({kept})")
        if (chosen.timesteps[:2].diff() == 0).any():  # most pipelines would start at the second of two that are equal
            lines.append("pipe.scheduler.index_for_timestep = lambda *_: 0")
        return lines

    @contextmanager
    def sized(self, height: int | None, width: int | None) -> Iterator[None]:
        """Use the evaluation's size inside the block; ``None`` keeps a side. LoadError if loaded and impossible."""
        if self.loaded:
            self._choose_decode_dtype()  # at the policy's size
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
                below = pixels // multiple * multiple
                near = " or ".join(str(side) for side in (below, below + multiple) if side)
                what = f"{self.size_in}.{name}={pixels} is not a multiple of {multiple} (VAE factor x patch)"
                raise LoadError(f"{what}. Set {name}={near}.")
        height, width = (default if side is None else side // factor for side in (self.height, self.width))
        return height, width

    # --- defined by each family ------------------------------------------------------------------------------------

    @abstractmethod
    def build_path(self) -> ProbabilityPath:
        """Return the probability path of the loaded pipeline."""

    @abstractmethod
    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """Return the family's embeddings by name, one row per prompt, all of the same length or with a mask.

        See :meth:`prompt_length`.
        """

    def pipeline_embeddings(self, prompts: list[str], **options: Any) -> tuple[Any, ...]:
        """Return what the pipeline's ``encode_prompt`` returns; without more options, for prompts alone."""
        given: dict[str, Any] = {"prompt_2": prompts, "prompt_3": prompts, "device": self.device}
        given |= {"num_images_per_prompt": 1, "do_classifier_free_guidance": False}
        given["max_sequence_length"] = getattr(self, "max_sequence_length", None)
        known = inspect.signature(self.pipeline.encode_prompt).parameters
        given = {name: value for name, value in given.items() if name in known}
        return self.pipeline.encode_prompt(prompts, **given | options)

    @abstractmethod
    def predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        """Run one network pass, converting to the network's units of time."""

    @abstractmethod
    def scheduler(self, solver: str, steps: int) -> Any:
        """Return a new diffusers scheduler with timesteps set; ValueError for a solver that the path lacks."""

    @abstractmethod
    def scheduler_times(self, scheduler: Any) -> Tensor:
        """Return the scheduler's timesteps as times in (0, 1], float32, ``(S,)``."""

    # --- overridden by some families -------------------------------------------------------------------------------

    def description(self) -> list[str]:
        """Return how the policy uses its pipeline, one line per fact, if it learned it."""
        return []

    def unused_weights(self) -> tuple[str, ...]:
        """Return shell-style patterns of the network's weights that no output depends on, which are never trained."""
        return ()

    @property
    def embeds_guidance(self) -> bool:
        """True if the network takes the guidance scale as an input, so that guidance needs no second pass.

        ``cond.tensors["guidance"]`` is then the scale of each row, ``(B,)``.
        """
        return False

    def guidance_error(self) -> str | None:
        """Return why no scale but 1 may be used, in one line, or ``None``; the policy need not be loaded."""
        return None

    def guidance_at(self, t: Tensor, guidance: float) -> Any:
        """Return the guidance scale at times ``(B,)``: a number, or a tensor that broadcasts with the predictions."""
        return guidance

    def guided(self, with_prompt: Tensor, without: Tensor, guidance: Any) -> Tensor:
        """Return the guided prediction of two passes, ``(B, C, h, w)``, float32.

        A scale of 1 is ``with_prompt`` in every family, regardless of its pipeline's convention.
        """
        return without + guidance * (with_prompt - without)

    @property
    def embedding_key(self) -> str:
        """What embeddings depend on besides the encoders and the text, such as the size of the images."""
        return ""

    def prompt_length(self) -> int | None:
        """Return the length in tokens that prompts with a mask are padded to.

        ``None`` if :meth:`encode_prompts` gives all prompts one length. Otherwise all its tensors are ``(B, L, ...)``,
        one is named ``mask``, and only the tokens in the mask are cached and reach the network.
        """
        return None

    def prompt_limit(self) -> tuple[Any, int, str]:
        """Return the tokenizer that truncates long prompts, its limit in tokens, and the name of its encoder."""
        tokenizer = self.pipeline.tokenizer
        return tokenizer, tokenizer.model_max_length, type(self.pipeline.text_encoder).__name__

    def encode_negative(self) -> dict[str, Tensor]:
        """Return the negative prompt's embeddings, one row; override if the pipeline special-cases an empty one."""
        return self.encode_prompts([self.negative_prompt])

    def encode_edits(self, prompts: list[str], pictures: Tensor) -> dict[str, Tensor]:
        """Return the embeddings of prompts and of the pictures that they edit, for a family that edits.

        Names of embeddings of the pictures alone start with ``reference``; all have one row per prompt.

        Args:
            pictures: ``(B, 3, H, W)``, or ``(B, N, 3, H, W)`` with several per prompt, float32 in [0, 1], of the size
                of the images.
        """
        raise NotImplementedError

    # --- prompts and predictions -----------------------------------------------------------------------------------

    @in_own_precision
    def encode(self, prompts: Sequence[str], references: Sequence[Tensor] | None = None) -> Conditioning:
        """Return prompt embeddings, one row per prompt, float32, on the network's device; cached if possible.

        Args:
            references: The pictures that the prompts edit, uint8, for a family that edits: ``(3, H, W)`` per prompt, or
                ``(N, 3, H, W)`` with several.

        Raises:
            ValueError: A family that edits has no pictures, or another has some.
        """
        cond, rows = self.prompt_encoder.encode(prompts, references)
        return cond if len(cond) == len(rows) else cond.select(rows)

    @in_own_precision
    def encode_each(
        self, prompts: Sequence[str], references: Sequence[Tensor] | None = None
    ) -> tuple[Conditioning, Tensor]:
        """Return the embeddings of the distinct prompts, each encoded once, and the row of each prompt ``(B,)``.

        Args:
            references: See :meth:`encode`; prompts with different pictures are distinct.
        """
        return self.prompt_encoder.encode(prompts, references)

    def blank_references(self, number: int) -> list[Tensor] | None:
        """Return black pictures for ``number`` prompts, to measure a pass with; ``None`` if the family edits none."""
        several = [self.references] if self.references > 1 else []
        shape = (*several, 3, *(self.image_size or (1, 1)))
        return [torch.zeros(shape, dtype=torch.uint8)] * number if self.edits else None

    @in_own_precision
    def negative(self) -> Conditioning:
        """Return the embedding of the negative prompt, one row, computed once."""
        return self.prompt_encoder.negative()

    def negative_of(self, cond: Conditioning) -> Conditioning:
        """Return the negative prompt's conditioning for each row, with the row's picture if there is one."""
        references = {name: value for name, value in cond.tensors.items() if not is_of_prompt(name)}
        return Conditioning({**self.negative().expand(len(cond)).tensors, **references})

    def prior(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Sample ``z_1``: unit Gaussian noise ``(B, C, h, w)``, one generator per image, the same on every device."""
        return unit_noise(generators, self.latent_shape).to(self.device)

    def forward(
        self, z: Tensor, t: Tensor, cond: Conditioning, guidance: float = 1.0, detach_negative: bool = False
    ) -> Tensor:
        """Return the network's prediction (velocity or noise), float32.

        Args:
            z: ``(B, C, h, w)``, float32.
            t: ``(B,)`` in [0, 1], float32.
            cond: B rows.
            guidance: Classifier-free guidance scale; 1.0 runs one pass instead of two.
            detach_negative: Keep no graph of the negative prompt, which then has a separate pass.
        """
        if guidance != 1.0 and (error := self.guidance_error()) is not None:
            raise ValueError(error)
        if self.embeds_guidance:
            scales = torch.full((len(z),), guidance, device=z.device)
            cond = Conditioning({**cond.tensors, "guidance": scales})
        if self.embeds_guidance or guidance == 1.0:
            with self.autocast():
                return self.predict(z, t, cond).float()
        negative, scale = self.negative_of(cond), self.guidance_at(t, guidance)
        with self.autocast():
            if detach_negative:
                with torch.no_grad():
                    without = self.predict(z, t, negative).float()
                return self.guided(self.predict(z, t, cond).float(), without, scale)
            both = self.predict(torch.cat([z, z]), torch.cat([t, t]), negative.joined_with(cond)).float()
        without, with_prompt = both.chunk(2)
        return self.guided(with_prompt, without, scale)

    def sampled(self, z: Tensor, cond: Conditioning) -> Tensor:
        """Return the clean latents of those at the end of sampling ``(B, C, h, w)``."""
        return z

    def guidance_factor(self, guidance: float) -> int:
        """Return the network passes per prediction: two with classifier-free guidance."""
        return 1 if guidance == 1.0 or self.embeds_guidance else 2

    @property
    def is_folded(self) -> bool:
        """True if the adapter is merged for sampling: all the network's weights are whole and in float32.

        In 16 bits rounding would lose up to 92 % of a small update.
        """
        if self.fold_lora is False or self.lora_rank is None or self.quantisation is not None:
            return False
        weights = [layer.get_base_layer().weight for layer in lora_layers(self.network).values()]
        return self.dtype == torch.float32 and not any(w.dtype != torch.float32 or is_sharded(w) for w in weights)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample images by an ODE inside; if allowed, with a view of the network into which the adapter is merged.

        Swap weights before entering, not inside.
        """
        if not self.is_folded:
            with rows_sharing_time(self.network):
                yield
            return
        if self._folded is None or self._folded.source is not self.network:
            self._folded = FoldedNetwork(self.network, self.compile_network is True)
        with self._folded.sampling(), self.using(self._folded.network), rows_sharing_time(self.network):
            yield

    def save(
        self, folder: str | Path, weights: Mapping[str, Tensor] | None = None, dtype: torch.dtype = torch.float32
    ) -> Path:
        """Save the trained weights in the diffusers format.

        LoRA: a folder for ``pipe.load_lora_weights``. Full weights: a folder for ``DiffusionPipeline.from_pretrained``.

        Args:
            folder: Destination.
            weights: The full trained tensors by their names in the network, if the network itself holds shards.
            dtype: Dtype of everything written, because the parts of a pipeline must match.
        """
        folder, networks = Path(folder), self.networks()
        if self.lora_rank is None:
            save_pipeline(self.pipeline, networks, folder, weights, dtype)
        else:
            save_adapter(self.pipeline, networks, folder, weights, dtype, base_name(self.checkpoint))
        return folder

    # --- images and latents ----------------------------------------------------------------------------------------

    def _latent_affine(self) -> tuple[Any, Any]:
        """Return scale and shift between the VAE's latents and the network's, as in the family's pipeline.

        Numbers, or tensors with one entry per channel if the VAE has statistics of its channels.
        """
        config = self.pipeline.vae.config
        statistics = config.get("latents_mean"), config.get("latents_std")
        if None in statistics:
            return config.scaling_factor, (config.shift_factor or 0.0) if self.uses_latent_shift else 0.0
        sides = [1] * (len(self.latent_shape) - 1)
        mean, std = (torch.tensor(values, device=self.device).reshape(1, -1, *sides) for values in statistics)
        return config.get("scaling_factor", 1.0) / std, mean

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

        It decodes in bfloat16 where :meth:`decode` does in float16. Latents may be a crop. The clamp to [0, 1] passes
        no gradient outside this range.

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
        self._choose_decode_dtype()
        # Without a loss scale, gradients underflow in float16, whose smallest number is 6e-8.
        is_too_narrow = torch.is_grad_enabled() and self.decode_dtype == torch.float16
        with self.autocast(torch.bfloat16 if is_too_narrow else self.decode_dtype):
            latents = self.vae_latents(latents)
            if halved:
                pooled = F.avg_pool2d(latents.flatten(0, -4), 2, ceil_mode=True)
                latents = pooled.unflatten(0, latents.shape[:-3])
            return (self.vae_decode(latents).float() / 2 + 0.5).clamp(0, 1)

    @torch.no_grad()
    def _choose_decode_dtype(self) -> None:
        """Decode in float16 from now on if the images then round as in float32; NaN of an overflow does not."""
        if not self._tries_float16 or self.device.type != "cuda":
            return
        self._tries_float16 = False
        noise = self.prior([torch.Generator().manual_seed(0)])  # the same on every rank and after a resume
        exact, self.decode_dtype = self._decoded(noise), torch.float16
        if not (self._decoded(noise) - exact).abs().max() < 0.5 / 255:
            self.decode_dtype = torch.float32

    @torch.no_grad()
    @in_own_precision
    def encode_images(self, images: Tensor) -> Tensor:
        """Encode images ``(B, 3, H, W)`` in [0, 1] to latents ``(B, C, h, w)``, the mean of the VAE's posterior."""
        place([self.pipeline.vae], self.device)
        return in_batches(self.vae_encode, self.decode_batch_size, images.to(self.device).float() * 2 - 1)
