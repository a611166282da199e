"""The base class of trainable denoising models: the policy ``pi(o | c)``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_vgrpo.core.batches import in_batches
from lit_vgrpo.core.block_cache import BlockCache
from lit_vgrpo.core.noise import unit_noise
from lit_vgrpo.core.pictures import picture_digest
from lit_vgrpo.core.types import Conditioning, RolloutSpec, is_of_prompt
from lit_vgrpo.policies.contract import PolicyContract, PutStart
from lit_vgrpo.policies.export import save_policy
from lit_vgrpo.policies.fold import FoldedLora, is_folded_for_sampling
from lit_vgrpo.policies.pipeline_folder import misfit, null_components, parts_in_memory, pipeline_errors
from lit_vgrpo.policies.pipeline_loading import read_pipeline
from lit_vgrpo.policies.placement import cast, in_own_precision, place, with_cpu_default
from lit_vgrpo.policies.prompt_encoder import PromptEncoder
from lit_vgrpo.policies.quantised_base import quantisation_error
from lit_vgrpo.policies.speed import quantise_error, speed_up
from lit_vgrpo.policies.trained import choose_trained
from lit_vgrpo.policies.vae import latent_sides, save_memory
from lit_vgrpo.system.hub import LoadError, quiet_libraries


class Policy(PolicyContract):
    """A diffusers pipeline as a policy over images.

    The constructor is cheap: :meth:`check` finds errors without reading weights, :meth:`load` reads them. Only
    ``network`` is a submodule. Text encoders, tokenizers and the VAE stay in the pipeline object, outside
    ``parameters()``, so that checkpoints, DDP buckets and a strategy's casts do not include them.
    """

    prompt_encoder: PromptEncoder

    # --- loading ---------------------------------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Return errors that can be found without reading weights, one line each."""
        if self.loaded:
            return []
        error = quantisation_error(self)
        return [*([error] if error else []), *pipeline_errors(self)]

    def load(self) -> Policy:
        """Check, load the weights and add the adapter; a second call does nothing.

        Raises:
            LoadError: the checkpoint is missing, damaged or of another family, or an option does not fit it.
            RuntimeError: ``start_from`` is given, which :func:`lit_vgrpo.training.start.load_policy` knows.
        """
        for error in self.check():
            raise LoadError(error)
        return self.read()

    @with_cpu_default
    def read(self, put_start: PutStart | None = None) -> Policy:
        """Load as :meth:`load` does, where :meth:`check` has found nothing; does nothing the second time.

        Args:
            put_start: replaces the trained weights by those of the run that ``start_from`` names.
        """
        if self.loaded:
            return self
        self._put_start = put_start
        pipeline = read_pipeline(self)
        with quiet_libraries():
            return self.adopt(pipeline)

    @with_cpu_default
    def adopt(self, pipeline: Any) -> Policy:
        """Use the network of a diffusers pipeline that is already in memory; ``checkpoint`` is then only a name.

        Raises:
            LoadError: the pipeline is of another family, or an option does not fit it.
            RuntimeError: ``start_from`` is given, and the policy was not loaded with its weights.
        """
        put_start = self._put_start
        if self.start_from is not None and put_start is None:
            raise RuntimeError(
                f"start_from={self.start_from} names a run, which a policy cannot read itself. "
                "Call lit_vgrpo.training.start.load_policy(policy) instead of policy.load()."
            )
        if (error := misfit(self, parts_in_memory(pipeline))) is not None:
            raise LoadError(error)
        pipeline.set_progress_bar_config(disable=True)
        for component in pipeline.components.values():
            if isinstance(component, nn.Module):
                component.requires_grad_(False).eval()
        cast(pipeline.vae, torch.float32)
        if all(weight.ndim < 5 for weight in pipeline.vae.parameters()):
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
        if put_start is not None:
            put_start(self)
        if self.gradient_checkpointing:
            self.network.enable_gradient_checkpointing()
        speed_up(self)
        self.path = self.build_path()
        self.latent_shape = self.find_latent_shape()
        return self

    def train(self, mode: bool = True) -> Policy:
        """Stay in eval mode: dropout would make the ratio differ from 1 before any update."""
        return super().train(False)

    def null_components(self, folder: Path) -> dict[str, None]:
        return null_components(folder)

    # --- the model -------------------------------------------------------------------------------------------------

    def autocast(self, dtype: torch.dtype | None = None) -> AbstractContextManager[Any]:
        """Return autocast to a precision, the network's by default, whatever the trainer's is.

        The cache of 16-bit weights is off: it lives as long as the outermost autocast and would outlast a swap of the
        weights, or a pass without gradient. A pass uses each weight only once.
        """
        dtype = dtype or self.dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32, cache_enabled=False)

    @contextmanager
    def sampling(self, spec: RolloutSpec | None = None) -> Iterator[None]:
        """Sample images by an ODE inside: the adapter is merged into the weights where it may be.

        Args:
            spec: its accelerators change how the network computes; ``None`` has none.
        """
        with ExitStack() as stack:
            if spec is not None and spec.quantise is not None:
                stack.enter_context(self.using(self._quantised_network(spec.quantise)))
            elif is_folded_for_sampling(self):
                self.folded = self.folded or FoldedLora(self.network)
                stack.enter_context(self.folded.applied())
            self.cached = None if spec is None or spec.cache is None else self._cached_network(spec.cache)
            if self.cached is not None:
                stack.enter_context(self.cached.sampling())
                stack.enter_context(self.using(self.cached.network))
            yield

    def _cached_network(self, cache: BlockCache) -> Any:
        from lit_vgrpo.policies.acceleration import CachedNetwork

        known = self.cached_networks.get(cache)
        if known is None or known.source is not self.network:
            known = self.cached_networks[cache] = CachedNetwork(self, cache)
        return known

    def _quantised_network(self, kind: Literal["int8", "fp8"]) -> nn.Module:
        from lit_vgrpo.policies.quantised import QuantisedNetwork

        known = self.quantised_networks.get(kind)
        if known is None or known.source is not self.network:
            known = self.quantised_networks[kind] = QuantisedNetwork(self, kind)
        known.refresh()
        network: nn.Module = known.network
        return network

    @classmethod
    def accelerator_errors(cls, spec: RolloutSpec, where: str) -> list[str]:
        """Return why a spec's accelerators do not work on this family or machine, at most one line.

        Args:
            where: the spec's key, for the message.
        """
        if spec.quantise is not None and (error := quantise_error(spec.quantise, f"{where}.quantise")):
            return [error]
        if spec.cache is None or cls.has_cache:
            return []
        return [
            f"{where}.cache={spec.cache.kind} does not work on {cls.__name__}: diffusers' caches skip a transformer's "
            "blocks, and are tested here on SD 3.5 and FLUX.1. Leave it out, or take fewer steps."
        ]

    def start_batch(self) -> None:
        """Let a block cache forget the last batch."""
        if self.cached is not None:
            self.cached.start_batch()

    @property
    def blocks_run(self) -> float | None:
        """Share of the network's blocks that ran in the last :meth:`sampling`; ``None`` without a cache."""
        return None if self.cached is None else self.cached.blocks_run

    def forward(self, z: Tensor, t: Tensor, cond: Conditioning, guidance: float = 1.0) -> Tensor:
        """Return the network's own prediction (velocity or noise), float32.

        Args:
            z: ``(B, C, h, w)``, float32.
            t: ``(B,)`` in [0, 1], float32.
            cond: B rows.
            guidance: classifier-free guidance scale; 1.0 runs one pass instead of two.
        """
        if guidance != 1.0 and (error := self.guidance_error()) is not None:
            raise ValueError(error)
        if self.embeds_guidance:
            scales = torch.full((len(z),), guidance, device=z.device)
            cond = Conditioning({**cond.tensors, "guidance": scales})
        if self.embeds_guidance or guidance == 1.0:
            with self.autocast():
                return self.predict(z, t, cond).float()
        negative = self.negative_of(cond)
        with self.autocast():
            both = self.predict(torch.cat([z, z]), torch.cat([t, t]), negative.joined_with(cond)).float()
        without, with_prompt = both.chunk(2)
        return self.guided(with_prompt, without, guidance)

    def guidance_factor(self, guidance: float) -> int:
        """Return the network passes per prediction: two with classifier-free guidance."""
        return 1 if guidance == 1.0 or self.embeds_guidance else 2

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

    @in_own_precision
    def encode(self, prompts: Sequence[str], references: Sequence[Tensor] | None = None) -> Conditioning:
        """Return prompt embeddings, one row per prompt, float32, on the network's device; cached if possible.

        Args:
            references: the pictures that the prompts edit, ``(3, H, W)``, uint8, for a family that edits.

        Raises:
            ValueError: a family that edits has no pictures, another has some, or one has the wrong size.
        """
        return self.prompt_encoder.encode(prompts, references)

    def encode_each(
        self, prompts: Sequence[str], references: Sequence[Tensor] | None = None
    ) -> tuple[Conditioning, Tensor]:
        """Return the embeddings of the distinct prompts, each encoded once, and the row of each prompt ``(B,)``.

        Args:
            references: as in :meth:`encode`; prompts with different pictures are distinct.
        """
        digests = [""] * len(prompts) if references is None else [picture_digest(picture) for picture in references]
        texts = list(zip(prompts, digests, strict=True))
        distinct = sorted(set(texts))
        rows = torch.tensor([distinct.index(text) for text in texts], device=self.device)
        firsts = [texts.index(text) for text in distinct]
        pictures = None if references is None else [references[i] for i in firsts]
        return self.encode([prompt for prompt, _ in distinct], pictures), rows

    def blank_references(self, number: int) -> list[Tensor] | None:
        """Return black pictures for so many prompts, to measure a pass with; ``None`` if the family edits none."""
        return [torch.zeros(3, *(self.image_size or (1, 1)), dtype=torch.uint8)] * number if self.edits else None

    @torch.no_grad()
    @in_own_precision
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents to images ``(B, 3, H, W)``, float32 in [0, 1]."""
        place([self.pipeline.vae], self.device)

        def decoded(part: Tensor) -> Tensor:
            return (self.vae_decode(part).float() / 2 + 0.5).clamp(0, 1)

        with self.autocast(self.decode_dtype):
            return in_batches(decoded, self._vae_batch_size, latents.float())

    @torch.no_grad()
    @in_own_precision
    def encode_images(self, images: Tensor) -> Tensor:
        """Encode images ``(B, 3, H, W)`` in [0, 1] to latents ``(B, C, h, w)``, the mean of the VAE's posterior."""
        place([self.pipeline.vae], self.device)
        return in_batches(self.vae_encode, self._vae_batch_size, images.to(self.device).float() * 2 - 1)

    @property
    def _vae_batch_size(self) -> int:
        return 1 if self.vae_slicing else self.decode_batch_size  # a sliced VAE would also decode the padding

    def vae_decode(self, latents: Tensor) -> Tensor:
        """Return the VAE's images ``(B, 3, H, W)`` in [-1, 1] of the network's latents ``(B, C, h, w)``."""
        scale, shift = self._latent_affine()
        images: Tensor = self.pipeline.vae.decode(latents / scale + shift, return_dict=False)[0]
        return images

    def vae_encode(self, images: Tensor) -> Tensor:
        """Return the network's latents ``(B, C, h, w)`` of images ``(B, 3, H, W)`` in [-1, 1]."""
        scale, shift = self._latent_affine()
        return (self.pipeline.vae.encode(images).latent_dist.mode() - shift) * scale

    def _latent_affine(self) -> tuple[Any, Any]:
        """Return scale and shift between the VAE's latents and the network's, as in the family's pipeline.

        Numbers, or tensors with one entry per channel.
        """
        config = self.pipeline.vae.config
        return config.scaling_factor, (config.shift_factor or 0.0) if self.uses_latent_shift else 0.0

    def find_latent_shape(self) -> tuple[int, int, int]:
        """Return ``(C, h, w)`` for the image size; LoadError if the VAE or the patches do not divide it."""
        factor = self.pipeline.vae_scale_factor
        patch = getattr(self.network.config, "patch_size", None) or 1
        sides = latent_sides(self.height, self.width, self.network.config.sample_size * factor, factor, patch)
        return self.network.config.in_channels, *sides

    # --- the pipeline's call ---------------------------------------------------------------------------------------

    def pipeline_latents(self, noise: Tensor) -> Tensor:
        """Return ``noise (B, C, h, w)`` as the argument ``latents``: as tokens where the pipeline packs latents."""
        pack = getattr(self.pipeline, "_pack_latents", None)
        return noise if pack is None else pack(noise, *noise.shape)

    def pipeline_guidance(self, guidance: float, prompts: int) -> dict[str, Any]:
        """Return the arguments for a guidance scale and this policy's negative prompt."""
        known = inspect.signature(type(self.pipeline).__call__).parameters
        if self.embeds_guidance:
            return {"guidance_scale": guidance}
        negative = [self.negative_prompt] * prompts
        if "true_cfg_scale" in known:
            return {"true_cfg_scale": guidance, "negative_prompt": negative}
        return {"guidance_scale": guidance, **({"negative_prompt": negative} if self.negative_prompt else {})}

    def save(
        self,
        folder: str | Path,
        weights: Mapping[str, Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Path:
        """Save the trained weights in the diffusers format.

        LoRA: a folder for ``pipe.load_lora_weights``. Full weights: a folder for ``DiffusionPipeline.from_pretrained``.

        Args:
            folder: destination.
            weights: the full trained tensors by their names in the network, if the network itself holds shards.
            dtype: of everything written.
        """
        save_policy(self, Path(folder), weights, dtype)
        return Path(folder)
