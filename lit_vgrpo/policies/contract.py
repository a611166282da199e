"""The options of a policy, and what a model family must provide."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lit_vgrpo.core.batches import BATCH_SIZE
from lit_vgrpo.core.probability_paths import ProbabilityPath
from lit_vgrpo.core.ranges import BatchSize, ClosedUnitInterval, PositiveFloat, Range, Seed, checked
from lit_vgrpo.core.types import Conditioning
from lit_vgrpo.system.paths import resolve_path

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Parts = Mapping[str, Mapping[str, Any] | None]
"""A pipeline's components by name, with their configurations, or ``None`` for a component without one."""
PutStart = Callable[[Any], None]
"""Loads an earlier run's weights into a loaded policy."""


@checked
class PolicyContract(nn.Module):
    """A policy's interface to loading, encoding and export, extended by :class:`~lit_vgrpo.policies.base.Policy`.

    Args:
        checkpoint: a hub name, a local pipeline folder, or ``shipped:...``.
        variant: variant of the pipeline's weight files, such as ``fp16``; ``None`` uses the default files.
        revision: branch, tag or commit of a hub repository; ``None`` uses its main branch.
        lora_rank: rank of the LoRA adapter; ``None`` trains the full weights.
        lora_alpha: LoRA scale numerator; ``None`` uses the rank.
        lora_targets: name suffixes of the modules to adapt; ``None`` uses the family's attention projections.
        quantisation: keep the frozen weights of the network's blocks in 4 bits (``nf4``) or 8 (``int8``), under a LoRA
            in float32; ``None`` keeps them in ``dtype``.
        lora_dropout: must be 0, or the ratio would not be 1 before an update.
        train_only: shell-style patterns of the parameters to train, such as ``*.attn.*``; ``None`` trains all, or the
            adapter.
        start_from: run folder or checkpoint of an earlier run, or a LoRA file (a path, or ``owner/name[/file]`` of the
            hub), whose weights are this run's start and reference; ``None`` starts from the pipeline.
        start_weights: use that run's trained weights or their EMA.
        height: image height in pixels; ``None`` uses the model's default.
        width: image width in pixels; ``None`` uses the model's default.
        dtype: autocast type of the network, and storage type of frozen weights; trained weights, the VAE's weights and
            all arithmetic outside the two networks stay float32.
        negative_prompt: the prompt that guidance moves away from.
        gradient_checkpointing: save activation memory at the cost of a second forward pass.
        decode_batch_size: images per VAE pass; smaller batches are padded, so that an image does not depend on its
            batch.
        decode_dtype: autocast type of the VAE while it decodes; 16 bits change images by about a grey level.
        vae_slicing: decode one image at a time.
        vae_tiling: decode large images in overlapping tiles, which changes them slightly.
        embedding_cache: folder that caches prompt embeddings; ``None`` for no cache.
        embedding_cache_gb: maximum size of the folder; the least recently used embeddings are deleted first.
        offload_encoders: keep the text encoders in CPU memory while they are not used.
        compile: compile the network with ``torch.compile``, for rollouts and training.
        attention_backend: one of diffusers' attention backends by name; ``None`` leaves the choice to diffusers.
        fold_lora: merge the adapter into the weights during ODE sampling; ``None`` does so where possible. float32
            only.
        init_seed: seed of the adapter's initial weights.
    """

    pipeline_class: ClassVar[str]
    network_name: ClassVar[str]
    solvers: ClassVar[tuple[str, ...]]
    sde_solvers: ClassVar[tuple[str, ...]]
    path_kind: ClassVar[Literal["flow", "vp"]]
    default_lora_targets: ClassVar[tuple[str, ...]]
    uses_latent_shift: ClassVar[bool] = True
    has_cache: ClassVar[bool] = False
    """True if diffusers' block caches work on the network."""
    pipeline_options: ClassVar[Mapping[str, Any]] = {}
    """Arguments with which the pipeline's call samples what the policy samples."""
    needs_diffusers: ClassVar[str] = "0.41"
    """The first version of diffusers with this family."""
    edits: ClassVar[bool] = False
    """True if every prompt comes with a picture, of the size of the images."""
    pipeline_takes_one: ClassVar[bool] = False
    """True if the pipeline's call takes one prompt alone."""
    network: Any  # a diffusers model, the only submodule
    path: ProbabilityPath
    latent_shape: tuple[int, int, int]

    def __init__(
        self,
        checkpoint: str,
        lora_rank: Annotated[int, Range(1, 16_384, example=32)] | None = None,
        lora_alpha: Annotated[int, Range(1, 65_536, example=32)] | None = None,
        lora_targets: list[str] | None = None,
        lora_dropout: ClosedUnitInterval | None = None,
        train_only: list[str] | None = None,
        quantisation: Literal["nf4", "int8"] | None = None,
        start_from: str | None = None,
        start_weights: Literal["trained", "ema"] = "trained",
        height: Annotated[int, Range(1, 16_384)] | None = None,
        width: Annotated[int, Range(1, 16_384)] | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        negative_prompt: str = "",
        gradient_checkpointing: bool = False,
        decode_batch_size: BatchSize = BATCH_SIZE,
        decode_dtype: Literal["float32", "bfloat16", "float16"] = "float32",
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
        for error in option_errors({**adapter, "lora_dropout": lora_dropout, "train_only": train_only}):
            raise ValueError(error)
        if start_weights != "trained" and start_from is None:
            raise ValueError(f"start_weights={start_weights} has no effect without start_from. Set start_from=RUN too.")
        if fold_lora and dtype != "float32":
            raise ValueError(sixteen_bit_fold_error(DTYPES[dtype]))
        resolve_path(checkpoint)  # refuses a shipped: path that leaves the installed folder
        self.checkpoint = checkpoint
        self.variant, self.revision = variant, revision
        self.lora_rank = lora_rank
        self.lora_alpha = lora_alpha if lora_alpha is not None else lora_rank
        self.lora_targets = list(lora_targets or self.default_lora_targets)
        self.train_only = None if train_only is None else list(train_only)
        self.quantisation: Literal["nf4", "int8"] | None = quantisation
        self.start_from, self.start_weights = start_from, start_weights
        self._put_start: PutStart | None = None
        self.height, self.width = height, width
        self.dtype = DTYPES[dtype]
        self.negative_prompt = negative_prompt
        self.gradient_checkpointing = gradient_checkpointing
        self.decode_batch_size, self.decode_dtype = decode_batch_size, DTYPES[decode_dtype]
        self.vae_slicing, self.vae_tiling = vae_slicing, vae_tiling
        self.embedding_cache, self.embedding_cache_gb = embedding_cache, embedding_cache_gb
        self.offload_encoders = offload_encoders
        self.compile_network = compile
        self.attention_backend = attention_backend
        self.fold_lora = fold_lora
        self.init_seed = init_seed
        self.pipeline: Any = None
        self.folded: Any = None  # created on first use
        self.cached: Any = None  # while images are sampled with a block cache, and afterwards
        self.cached_networks: dict[Any, Any] = {}  # by cache, created on first use
        self.quantised_networks: dict[str, Any] = {}  # by 8-bit type, created on first use

    @contextmanager
    def using(self, network: nn.Module) -> Iterator[None]:
        """Replace the network inside the block."""
        own, self.network = self.network, network
        try:
            yield
        finally:
            self.network = own

    def ignore_start(self) -> None:
        """Load without the run of ``start_from``, since a checkpoint's weights come after."""
        self.start_from = None

    def ignore_quantisation(self) -> None:
        """Load the frozen weights whole, since they are written or merged into."""
        self.quantisation = None

    def ignore_speed(self) -> None:
        """Load without ``compile`` and ``attention_backend``, which take long to start and were chosen elsewhere."""
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
    def embeds_guidance(self) -> bool:
        """True if the network takes the guidance scale as an input, so that guidance needs no second pass.

        ``cond.tensors["guidance"]`` is then the scale of each row, ``(B,)``.
        """
        return False

    @property
    def pixels_per_latent(self) -> int:
        """Pixels along a latent's side."""
        return self.pipeline.vae_scale_factor

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width in pixels; ``None`` before loading, unless both are options."""
        if self.loaded:
            _, height, width = self.latent_shape
            return height * self.pixels_per_latent, width * self.pixels_per_latent
        return None if self.height is None or self.width is None else (self.height, self.width)

    def helpers(self) -> list[nn.Module]:
        """Return the frozen parts: text encoders and VAE."""
        return [c for c in self.pipeline.components.values() if isinstance(c, nn.Module) and c is not self.network]

    def encoders(self) -> list[nn.Module]:
        """Return the frozen parts that encode prompts."""
        return [helper for helper in self.helpers() if helper is not self.pipeline.vae]

    # --- defined by each family ------------------------------------------------------------------------------------

    def misfit(self, parts: Parts) -> str | None:
        """Return why a pipeline cannot be trained, as a phrase that follows its name, or ``None``.

        Args:
            parts: components by name with their configurations, in which defaults may be absent.
        """
        return None

    def distilled_by(self, parts: Parts) -> str | None:
        """Return what shows that a pipeline was distilled to a few steps, as a phrase, or ``None``.

        Args:
            parts: as in :meth:`misfit`.
        """
        return None

    @abstractmethod
    def null_components(self, folder: Path) -> dict[str, None]:
        """Return components that are null in the folder's index; diffusers needs each as an argument."""

    def lora_names(self, layers: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the adapter's tensors under the names that the family's pipeline expects."""
        return layers

    def unused_weights(self) -> tuple[str, ...]:
        """Return shell-style patterns of the network's weights that no output depends on, which are never trained."""
        return ()

    def guidance_error(self) -> str | None:
        """Return why no scale but 1 may be used, in one line, or ``None``; the policy need not be loaded."""
        return None

    def guided(self, with_prompt: Tensor, without: Tensor, guidance: float) -> Tensor:
        """Return the guided prediction of two passes, ``(B, C, h, w)``, float32.

        A scale of 1 is ``with_prompt`` in every family, whatever its pipeline counts from.
        """
        return without + guidance * (with_prompt - without)

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

    @abstractmethod
    def build_path(self) -> ProbabilityPath:
        """Return the probability path of the loaded pipeline."""

    @abstractmethod
    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """Return the family's embeddings by name, one row per prompt, all of one length or with a mask.

        See :meth:`prompt_length`.
        """

    def encode_edits(self, prompts: list[str], pictures: Tensor) -> dict[str, Tensor]:
        """Return the embeddings of prompts and of the pictures that they edit, for a family that edits.

        The names of those of the pictures alone start with ``reference``; all have one row per prompt.

        Args:
            pictures: ``(B, 3, H, W)``, float32 in [0, 1], of the size of the images.
        """
        raise NotImplementedError

    def pipeline_references(self, pictures: Tensor) -> dict[str, Any]:
        """Return the arguments by which the pipeline's call gets pictures ``(B, 3, H, W)`` in [0, 1] unchanged."""
        return {"image": pictures}

    def encode_negative(self) -> dict[str, Tensor]:
        """Return the embeddings of the negative prompt, one row; override if the pipeline treats an empty one apart."""
        return self.encode_prompts([self.negative_prompt])

    @abstractmethod
    def predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        """Run one network pass, converting to the network's units of time."""

    @abstractmethod
    def scheduler(self, solver: str, steps: int) -> Any:
        """Return a new diffusers scheduler with timesteps set; ValueError for a solver that the path lacks."""

    @abstractmethod
    def scheduler_times(self, scheduler: Any) -> Tensor:
        """Return the scheduler's timesteps as times in (0, 1], float32, ``(S,)``."""


def option_errors(options: dict[str, Any]) -> list[str]:
    """Return errors in the options that choose the trained weights, one line each."""
    rank, dropout, only = options["lora_rank"], options["lora_dropout"], options["train_only"]
    alpha, targets = options["lora_alpha"], options["lora_targets"]
    errors = []
    if dropout:
        errors.append(
            f"lora_dropout={dropout} would make the policy differ from the one that rolled out, and the ratio would "
            "not be 1 before any update. Leave it out."
        )
    if alpha is not None and rank is None:
        errors.append(f"lora_alpha={alpha} has no effect without lora_rank. Set lora_rank=32 too, or lora_alpha=null.")
    if targets is not None and not targets:
        errors.append("lora_targets=[] is empty. Give suffixes such as attn.to_q, or null for the default.")
    if targets and rank is None:
        errors.append(f"lora_targets={list(targets)} has no effect without lora_rank. Set lora_rank=32 too.")
    if only is not None and rank is not None:
        errors.append("train_only and lora_rank are both given, but lora_rank trains only an adapter. Leave one out.")
    if only is not None and not only:
        errors.append("train_only=[] is empty. Give patterns such as '*.attn.*', or null for all weights.")
    return errors


def sixteen_bit_fold_error(dtype: torch.dtype) -> str:
    """Return why an adapter is not merged into 16-bit weights, in one line."""
    name = str(dtype).removeprefix("torch.")
    return (
        f"fold_lora=true needs dtype=float32: {name} weights would lose up to 92 % of a small update by rounding. "
        "Leave fold_lora out."
    )
