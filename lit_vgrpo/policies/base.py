"""The base class of trainable denoising models: the policy ``pi(o | c)``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lit_vgrpo.core.noise import unit_noise
from lit_vgrpo.core.pictures import picture_digest
from lit_vgrpo.core.probability_paths import ProbabilityPath
from lit_vgrpo.core.types import Conditioning, is_of_prompt
from lit_vgrpo.policies.acceleration import (
    FoldedNetwork,
    compile_network,
    is_folded,
    set_attention_backend,
)
from lit_vgrpo.policies.export import save_policy
from lit_vgrpo.policies.loading import KEY, find_folder, pipeline_misfit, pipeline_on_meta, read_pipeline
from lit_vgrpo.policies.pipeline import PipelinePolicy
from lit_vgrpo.policies.placement import cast, in_own_precision, place, unmasked_on_meta, with_cpu_default
from lit_vgrpo.policies.prompt_encoder import PromptEncoder
from lit_vgrpo.policies.trained import choose_trained
from lit_vgrpo.system.hub import LoadError, quiet_libraries

PutStart = Callable[[Any], None]
"""Loads an earlier run's weights into a loaded policy."""


class Policy(PipelinePolicy):
    """A diffusers pipeline as a policy over images.

    The constructor is cheap: :meth:`check` finds errors without reading weights, :meth:`load` reads them. Only
    ``network`` is a submodule. Text encoders, tokenizers and the VAE stay in the pipeline object, outside
    ``parameters()``, so that checkpoints, DDP buckets and a strategy's casts do not include them.
    """

    solvers: ClassVar[tuple[str, ...]]
    sde_solvers: ClassVar[tuple[str, ...]]
    path_kind: ClassVar[Literal["flow", "vp"]]
    pipeline_options: ClassVar[Mapping[str, Any]] = {}
    """Arguments with which the pipeline's call samples what the policy samples."""
    pipeline_takes_one: ClassVar[bool] = False
    """True if the pipeline's call takes only one prompt."""
    path: ProbabilityPath
    prompt_encoder: PromptEncoder

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
        for error in self.check():
            raise LoadError(error)
        pipeline = read_pipeline(self) if self.given is None else self.given
        with quiet_libraries():
            self.adopt(pipeline, put_start)
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
        for encoder in self.encoders():
            cast(encoder, self.dtype)
            encoder.register_forward_pre_hook(unmasked_on_meta, with_kwargs=True)
        if self.offload_encoders:
            place(self.encoders(), torch.device("cpu"))
        choose_trained(self, self.unused_weights())
        if put_start is not None:
            put_start(self)
        for network in self.networks().values():
            if self.gradient_checkpointing:
                network.enable_gradient_checkpointing()
            if self.attention_backend is not None:
                set_attention_backend(network, self.attention_backend)
        if self.compile_network:
            compile_network(self.network)
        self.path = self.build_path()
        self.latent_shape = self.find_latent_shape()
        if self.encoders() and (room := self.prompt_limit()[1]) < 1:
            length = self.max_sequence_length
            key = f"model.policy.max_sequence_length={length}"
            raise LoadError(f"{key} leaves no token for a prompt: its template takes {length - room}.")
        return self

    def train(self, mode: bool = True) -> Policy:
        """Stay in eval mode: dropout would make the ratio differ from 1 before any update."""
        return super().train(False)

    # --- defined by each family ------------------------------------------------------------------------------------

    @abstractmethod
    def build_path(self) -> ProbabilityPath:
        """Return the probability path of the loaded pipeline."""

    @abstractmethod
    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """Return the family's embeddings by name, one row per prompt, all of the same length or with a mask.

        See :meth:`prompt_length`.
        """

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

    @in_own_precision
    def encode(self, prompts: Sequence[str], references: Sequence[Tensor] | None = None) -> Conditioning:
        """Return prompt embeddings, one row per prompt, float32, on the network's device; cached if possible.

        Args:
            references: The pictures that the prompts edit, uint8, for a family that edits: ``(3, H, W)`` per prompt, or
                ``(N, 3, H, W)`` with several.

        Raises:
            ValueError: A family that edits has no pictures, or another has some.
        """
        return self.prompt_encoder.encode(prompts, references)

    def encode_each(
        self, prompts: Sequence[str], references: Sequence[Tensor] | None = None
    ) -> tuple[Conditioning, Tensor]:
        """Return the embeddings of the distinct prompts, each encoded once, and the row of each prompt ``(B,)``.

        Args:
            references: See :meth:`encode`; prompts with different pictures are distinct.
        """
        digests = [""] * len(prompts) if references is None else [picture_digest(picture) for picture in references]
        texts = list(zip(prompts, digests, strict=True))
        distinct = sorted(set(texts))
        rows = torch.tensor([distinct.index(text) for text in texts], device=self.device)
        firsts = [texts.index(text) for text in distinct]
        pictures = None if references is None else [references[i] for i in firsts]
        return self.encode([prompt for prompt, _ in distinct], pictures), rows

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

    def guidance_factor(self, guidance: float) -> int:
        """Return the network passes per prediction: two with classifier-free guidance."""
        return 1 if guidance == 1.0 or self.embeds_guidance else 2

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample images by an ODE inside; if allowed, with a view of the network into which the adapter is merged.

        Swap weights before entering, not inside.
        """
        if not is_folded(self):
            yield
            return
        if self._folded is None or self._folded.source is not self.network:
            self._folded = FoldedNetwork(self)
        with self._folded.sampling(), self.using(self._folded.network):
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
        save_policy(self, Path(folder), weights, dtype)
        return Path(folder)
