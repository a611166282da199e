"""What a denoising model must offer to be trained: the policy ``pi(o | c)``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lit_vgrpo.batches import BATCH_SIZE, in_batches
from lit_vgrpo.hub import LoadError, quiet_libraries
from lit_vgrpo.paths import resolve_path
from lit_vgrpo.policies.conditioning import Conditioning
from lit_vgrpo.policies.export import save_policy
from lit_vgrpo.policies.fold import FoldedLora, folded_for_sampling
from lit_vgrpo.policies.image_size import latent_side
from lit_vgrpo.policies.paths import ProbabilityPath
from lit_vgrpo.policies.pipeline_folder import Parts, misfit, null_components, parts_in_memory, pipeline_faults
from lit_vgrpo.policies.pipeline_loading import read_pipeline
from lit_vgrpo.policies.placement import cast, place, with_cpu_default
from lit_vgrpo.policies.precision import in_own_precision
from lit_vgrpo.policies.prompt_encoder import PromptEncoder
from lit_vgrpo.policies.speed import speed_up
from lit_vgrpo.policies.start import load_start, start_fault
from lit_vgrpo.policies.trained import choose_trained, option_faults
from lit_vgrpo.policies.vae import save_memory
from lit_vgrpo.ranges import BatchSize, ClosedUnitInterval, PositiveFloat, Range, Seed, checked

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@checked
class Policy(nn.Module):
    """A diffusers pipeline seen as a policy over images.

    Building one is cheap: :meth:`check` finds faults without reading weights, :meth:`load` reads them. Only
    ``network`` is a submodule. Text encoders, tokenizers and the VAE stay in the pipeline object, outside
    ``parameters()``, so that neither checkpoints nor DDP buckets nor a strategy's casts touch them.

    Args:
        checkpoint: a hub name, a local pipeline folder, or ``shipped:...``.
        variant: which of the weights that a pipeline holds, such as ``fp16``; ``None`` takes those without a name.
        revision: branch, tag or commit of a hub repository; ``None`` takes its main branch.
        lora_rank: rank of the LoRA adapter; ``None`` trains the full weights.
        lora_alpha: LoRA scale numerator; ``None`` takes the rank.
        lora_targets: module name endings the adapter goes to; ``None`` takes the family's attention projections.
        lora_dropout: refused but for 0: the ratio would not be 1 before an update.
        train_only: shell-style patterns of the parameters to train, such as ``*.attn.*``; ``None`` trains all, or the
            adapter.
        start_from: run folder or checkpoint of an earlier run, whose trained weights this one starts from and takes
            for its reference; ``None`` starts from the pipeline as it is.
        start_weights: of that run, the trained weights or their EMA.
        height: image height in pixels; ``None`` takes the model's own.
        width: image width in pixels; ``None`` takes the model's own.
        dtype: autocast type of the network, and storage type of whatever is frozen; trained weights and all
            arithmetic outside the network stay float32, and so does the VAE.
        negative_prompt: what guidance moves away from.
        gradient_checkpointing: trade a second forward pass for activation memory.
        decode_batch_size: images the VAE takes at once; fewer are filled up, so that an image has the same bits
            whatever else is decoded.
        vae_slicing: let the VAE take one image at a time.
        vae_tiling: let the VAE take large images in overlapping tiles, which changes them a little.
        embedding_cache: folder that keeps the prompts' embeddings, so that each is computed once; ``None`` for none.
        embedding_cache_gb: most the folder may hold; the oldest embeddings go first.
        offload_encoders: keep the text encoders in the CPU's memory while they are not at work.
        compile: compile the network with ``torch.compile``, for rollouts and training.
        attention_backend: one of diffusers' attention backends by name; ``None`` leaves the choice to diffusers.
        fold_lora: add the adapter to the weights while images are sampled by an ODE; ``None`` does so where it is
            exact up to float error.
        init_seed: seed of the adapter's initial weights.
    """

    pipeline_class: ClassVar[str]
    network_name: ClassVar[str]
    solvers: ClassVar[tuple[str, ...]]
    sde_solvers: ClassVar[tuple[str, ...]]
    path_kind: ClassVar[Literal["flow", "vp"]]
    default_lora_targets: ClassVar[tuple[str, ...]]
    uses_latent_shift: ClassVar[bool] = True
    pipeline_options: ClassVar[Mapping[str, Any]] = {}
    """Arguments of the pipeline's call without which it draws something else than the policy does."""
    network: Any  # a diffusers model, the only submodule
    path: ProbabilityPath
    prompt_encoder: PromptEncoder

    def __init__(
        self,
        checkpoint: str,
        lora_rank: Annotated[int, Range(1, 16_384, example=32)] | None = None,
        lora_alpha: Annotated[int, Range(1, 65_536, example=32)] | None = None,
        lora_targets: list[str] | None = None,
        lora_dropout: ClosedUnitInterval | None = None,
        train_only: list[str] | None = None,
        start_from: str | None = None,
        start_weights: Literal["trained", "ema"] = "trained",
        height: Annotated[int, Range(1, 16_384)] | None = None,
        width: Annotated[int, Range(1, 16_384)] | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        negative_prompt: str = "",
        gradient_checkpointing: bool = False,
        decode_batch_size: BatchSize = BATCH_SIZE,
        vae_slicing: bool = False,
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
        adapter = {"lora_rank": lora_rank, "lora_alpha": lora_alpha, "lora_targets": lora_targets}
        for fault in option_faults({**adapter, "lora_dropout": lora_dropout, "train_only": train_only}):
            raise ValueError(fault)
        if start_weights != "trained" and start_from is None:
            raise ValueError(f"start_weights={start_weights} has no effect without start_from. Set start_from=RUN too.")
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r} is not known. Use {', '.join(DTYPES)}.")
        resolve_path(checkpoint)  # refuses a shipped: path that leads out of the installed folder
        self.checkpoint = checkpoint
        self.variant, self.revision = variant, revision
        self.lora_rank = lora_rank
        self.lora_alpha = lora_alpha if lora_alpha is not None else lora_rank
        self.lora_targets = list(lora_targets or self.default_lora_targets)
        self.train_only = None if train_only is None else list(train_only)
        self.start_from, self.start_weights = start_from, start_weights
        self.height, self.width = height, width
        self.dtype = DTYPES[dtype]
        self.negative_prompt = negative_prompt
        self.gradient_checkpointing = gradient_checkpointing
        self.decode_batch_size = decode_batch_size
        self.vae_slicing, self.vae_tiling = vae_slicing, vae_tiling
        self.embedding_cache, self.embedding_cache_gb = embedding_cache, embedding_cache_gb
        self.offload_encoders = offload_encoders
        self.compile_network = compile
        self.attention_backend = attention_backend
        self.fold_lora = fold_lora
        self.init_seed = init_seed
        self.pipeline: Any = None
        self.folded: FoldedLora | None = None  # made when first used

    # --- loading ---------------------------------------------------------------------------------------------------

    @property
    def trains_all(self) -> bool:
        """Whether all of the network's weights are trained, and none is frozen."""
        return self.lora_rank is None and self.train_only is None

    @property
    def loaded(self) -> bool:
        return self.pipeline is not None

    def check(self) -> list[str]:
        """Faults that can be found without reading weights, a line each; empty when there are none."""
        if self.loaded:
            return []
        faults = pipeline_faults(self)
        if self.start_from is not None:
            fault = start_fault(self.start_from, self.start_weights)
            faults += [fault] if fault else []
        return faults

    @with_cpu_default
    def load(self) -> Policy:
        """Read the weights and put the adapter in; does nothing the second time.

        Raises:
            LoadError: the checkpoint is missing, damaged or of another family, or an option does not fit it.
        """
        if self.loaded:
            return self
        for fault in self.check():
            raise LoadError(fault)
        pipeline = read_pipeline(self)
        with quiet_libraries():
            return self.adopt(pipeline)

    @with_cpu_default
    def adopt(self, pipeline: Any) -> Policy:
        """Train the network of a diffusers pipeline that is already in memory; ``checkpoint`` is then only a name.

        Raises:
            LoadError: the pipeline is none of the family's, or an option does not fit it.
        """
        if (fault := misfit(self, parts_in_memory(pipeline))) is not None:
            raise LoadError(fault)
        pipeline.set_progress_bar_config(disable=True)
        for component in pipeline.components.values():
            if isinstance(component, nn.Module):
                component.requires_grad_(False).eval()
        cast(pipeline.vae, torch.float32)
        pipeline.vae.to(memory_format=torch.channels_last)
        save_memory(pipeline.vae, slicing=self.vae_slicing, tiling=self.vae_tiling)
        self.pipeline = pipeline
        self.prompt_encoder = PromptEncoder(self)
        self.network = getattr(pipeline, self.network_name)
        for encoder in self.encoders():
            cast(encoder, self.dtype)
        if self.offload_encoders:
            place(self.encoders(), torch.device("cpu"))
        if self.trains_all:
            cast(self.network, torch.float32)
        choose_trained(self)
        load_start(self)
        if self.gradient_checkpointing:
            self.network.enable_gradient_checkpointing()
        speed_up(self)
        self.path = self.build_path()
        self.latent_shape = self.find_latent_shape()
        return self

    def misfit(self, parts: Parts) -> str | None:
        """What of a pipeline's parts speaks against it, as a phrase that follows the pipeline's name, or ``None``.

        Args:
            parts: by name, with the entries of their configurations, of which those left at a default may be absent.
        """
        return None

    def null_components(self, folder: Path) -> dict[str, None]:
        """Components that are null in the folder's index: diffusers refuses the folder unless told of each."""
        return null_components(folder)

    def helpers(self) -> list[nn.Module]:
        """The frozen parts: text encoders and VAE."""
        return [c for c in self.pipeline.components.values() if isinstance(c, nn.Module) and c is not self.network]

    def encoders(self) -> list[nn.Module]:
        """The frozen parts that read prompts."""
        return [helper for helper in self.helpers() if helper is not self.pipeline.vae]

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def train(self, mode: bool = True) -> Policy:
        """Stay in eval mode: dropout would make the ratio differ from 1 before any update."""
        return super().train(False)

    # --- the model -------------------------------------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[Any]:
        """The one precision of the network, the same in rollout and training, whatever the trainer's own is.

        Without autocast's cache of weights in 16 bits, which lives as long as the outermost autocast: there it would
        outlast a swap of the weights, and a pass without gradient. A pass takes each weight once.
        """
        enabled = self.dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=enabled, cache_enabled=False)

    def sampling(self) -> AbstractContextManager[None]:
        """Inside, images are sampled by an ODE: the adapter is folded into the weights where it may be."""
        return folded_for_sampling(self)

    def forward(self, z: Tensor, t: Tensor, cond: Conditioning, guidance: float = 1.0) -> Tensor:
        """The network's own prediction (velocity or noise), float32.

        Args:
            z: ``(B, C, h, w)``, float32.
            t: ``(B,)`` in [0, 1], float32.
            cond: B rows.
            guidance: classifier-free guidance scale; 1.0 runs one pass instead of two.
        """
        if self.embeds_guidance:
            scales = torch.full((len(z),), guidance, device=z.device)
            cond = Conditioning({**cond.tensors, "guidance": scales})
        if self.embeds_guidance or guidance == 1.0:
            with self.autocast():
                return self.predict(z, t, cond).float()
        negative = self.negative().expand(len(z))
        with self.autocast():
            both = self.predict(torch.cat([z, z]), torch.cat([t, t]), negative.joined_with(cond)).float()
        without, with_prompt = both.chunk(2)
        return without + guidance * (with_prompt - without)

    @property
    def embeds_guidance(self) -> bool:
        """Whether the network takes the guidance scale as an input, so that guidance costs no second pass.

        Its ``cond.tensors["guidance"]`` is then the scale of each row, ``(B,)``.
        """
        return False

    def guidance_factor(self, guidance: float) -> int:
        """Network passes of one prediction: classifier-free guidance takes two."""
        return 1 if guidance == 1.0 or self.embeds_guidance else 2

    @in_own_precision
    def negative(self) -> Conditioning:
        """The embedding of the negative prompt, one row, computed once."""
        return self.prompt_encoder.negative()

    def prior(self, generators: Sequence[torch.Generator]) -> Tensor:
        """``z_1``: unit Gaussian noise, one generator an image, ``(B, C, h, w)``, the same on every device."""
        return torch.stack([torch.randn(self.latent_shape, generator=g) for g in generators]).to(self.device)

    @in_own_precision
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Prompt embeddings, one row a prompt, float32, on the network's device; from the cache where it has them."""
        return self.prompt_encoder.encode(prompts)

    def encode_each(self, prompts: Sequence[str]) -> tuple[Conditioning, Tensor]:
        """The embeddings of the different prompts, each encoded once, and the row of each prompt ``(B,)``."""
        distinct = sorted(set(prompts))
        rows = torch.tensor([distinct.index(prompt) for prompt in prompts], device=self.device)
        return self.encode(distinct), rows

    def prompt_limit(self) -> tuple[Any, int, str]:
        """The tokenizer that cuts long prompts, to how many tokens, and the name of its encoder."""
        tokenizer = self.pipeline.tokenizer
        return tokenizer, tokenizer.model_max_length, type(self.pipeline.text_encoder).__name__

    @torch.no_grad()
    @in_own_precision
    def decode(self, latents: Tensor) -> Tensor:
        """Images ``(B, 3, H, W)``, float32 in [0, 1]."""
        place([self.pipeline.vae], self.device)
        scale, shift = self._latent_affine()

        def decoded(part: Tensor) -> Tensor:
            images: Tensor = self.pipeline.vae.decode(part / scale + shift, return_dict=False)[0]
            return (images / 2 + 0.5).clamp(0, 1)

        return in_batches(decoded, self._vae_batch_size, latents.float())

    @torch.no_grad()
    @in_own_precision
    def encode_images(self, images: Tensor) -> Tensor:
        """Latents ``(B, C, h, w)`` of images ``(B, 3, H, W)`` in [0, 1]: the mean of the VAE's posterior."""
        place([self.pipeline.vae], self.device)
        scale, shift = self._latent_affine()
        pixels = images.to(self.device).float() * 2 - 1
        latents = in_batches(
            lambda part: self.pipeline.vae.encode(part).latent_dist.mode(), self._vae_batch_size, pixels
        )
        return (latents - shift) * scale

    @property
    def _vae_batch_size(self) -> int:
        return 1 if self.vae_slicing else self.decode_batch_size  # a sliced VAE would take what fills up too

    def _latent_affine(self) -> tuple[Any, Any]:
        """Scale and shift between the VAE's latents and the network's, as the family's own pipeline applies them.

        Numbers, or tensors with an entry a channel.
        """
        config = self.pipeline.vae.config
        return config.scaling_factor, (config.shift_factor or 0.0) if self.uses_latent_shift else 0.0

    def find_latent_shape(self) -> tuple[int, int, int]:
        """``(C, h, w)`` for the asked image size; LoadError where the VAE or the patches do not divide it."""
        factor = self.pipeline.vae_scale_factor
        patch = getattr(self.network.config, "patch_size", None) or 1
        default = self.network.config.sample_size * factor
        height, width = (
            latent_side(name, pixels if pixels is not None else default, factor, patch)
            for name, pixels in (("height", self.height), ("width", self.width))
        )
        return self.network.config.in_channels, height, width

    def save(
        self,
        folder: str | Path,
        weights: Mapping[str, Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Path:
        """Write what was trained so that diffusers loads it back.

        LoRA: a folder for ``pipe.load_lora_weights``. Full weights: a folder for ``DiffusionPipeline.from_pretrained``.

        Args:
            folder: where to.
            weights: the trained tensors by their names in the network, whole, where the network itself holds shards.
            dtype: of all that is written.
        """
        save_policy(self, Path(folder), weights, dtype)
        return Path(folder)

    def lora_names(self, layers: dict[str, Tensor]) -> dict[str, Tensor]:
        """The adapter's tensors under the names that the family's pipeline reads."""
        return layers

    # --- what a family says ----------------------------------------------------------------------------------------

    @abstractmethod
    def build_path(self) -> ProbabilityPath:
        """The probability path of the loaded pipeline."""

    @abstractmethod
    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """The family's embeddings by name, one row a prompt, all prompts of one length."""

    def encode_negative(self) -> dict[str, Tensor]:
        """The embeddings of the negative prompt, one row; a family whose pipeline leaves an empty one out says how."""
        return self.encode_prompts([self.negative_prompt])

    @abstractmethod
    def predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        """One network pass, in the network's own units of time."""

    @abstractmethod
    def scheduler(self, solver: str, steps: int) -> Any:
        """A fresh diffusers scheduler whose timesteps are set; ValueError for a solver the path does not have."""

    @abstractmethod
    def scheduler_times(self, scheduler: Any) -> Tensor:
        """The scheduler's timesteps as times in (0, 1], float32, ``(S,)``."""
