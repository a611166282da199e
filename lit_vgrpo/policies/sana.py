"""Sana (arXiv 2410.10629)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from lit_vgrpo.core.types import Conditioning
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.flow import FlowPolicy
from lit_vgrpo.policies.loading import call_parameters

MASK = "prompt_mask"  # not core.types.MASK: all prompts have one length


class SanaPolicy(FlowPolicy):
    """``SanaPipeline`` as a policy on a rectified flow.

    The first solver is the pipeline's. Prompts follow the pipeline's instruction, negative prompts do not. Images have
    the requested size: call the pipeline with ``use_resolution_binning=False``.
    """

    pipeline_class: ClassVar[str] = "SanaPipeline"
    pipeline_solver: ClassVar[str] = "dpm++"
    solvers: ClassVar[tuple[str, ...]] = ("dpm++", "euler", "unipc")
    uses_latent_shift: ClassVar[bool] = False
    default_lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    pipeline_options: ClassVar[dict[str, Any]] = {"use_resolution_binning": False}
    find_latent_shape = Policy.find_latent_shape

    def __init__(self, checkpoint: str, max_sequence_length: int = 300, **options: Any) -> None:
        super().__init__(checkpoint, max_sequence_length=max_sequence_length, **options)

    def scheduler_misfit(self, scheduler: Any) -> str | None:
        if scheduler.config.get("use_flow_sigmas") and scheduler.config.get("algorithm_type") == "dpmsolver++":
            return None
        return f"comes with {type(scheduler).__name__}, but Sana needs dpmsolver++ with use_flow_sigmas."

    def vae_encode(self, images: Tensor) -> Tensor:
        return self.pipeline.vae.encode(images).latent * self.pipeline.vae.config.scaling_factor

    def prompt_limit(self) -> tuple[Any, int, str]:
        # the network also sees the instruction's first and last token
        return self.pipeline.tokenizer, self.max_sequence_length - 1, type(self.pipeline.text_encoder).__name__

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        instruction = call_parameters(self.pipeline)["complex_human_instruction"].default
        return self._encoded(prompts, instruction)

    def encode_negative(self) -> dict[str, Tensor]:
        return self._encoded([self.negative_prompt], None)

    def _encoded(self, prompts: list[str], instruction: list[str] | None) -> dict[str, Tensor]:
        tokens, mask, *_ = self.pipeline_embeddings(prompts, complex_human_instruction=instruction)
        return {"tokens": tokens, MASK: mask}

    def predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        steps, scale = self.pipeline.scheduler.config.num_train_timesteps, self.network.config.timestep_scale
        tokens, mask = cond.tensors["tokens"], cond.tensors[MASK]
        prediction = self.network(z, tokens, t * steps * scale, encoder_attention_mask=mask, return_dict=False)[0]
        return prediction[:, : z.shape[1]]  # without a learned variance
