"""What the tests of the families share: a family, its inputs, and the parts of the contract that others test too."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from policy_copies import load_copy
from torch import Tensor

from lit_vgrpo.core.noise import image_generators
from lit_vgrpo.core.sampling import sample
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.policies import Conditioning, Policy
from lit_vgrpo.system.hub import LoadError

PROMPTS = ["a red circle on the left", "a blue square on the right", "a green triangle", "a red square at the top"]
NEGATIVE = "a blue square"
HEIGHT, WIDTH = 24, 32  # not square, so that a swap of the two shows
FROM_PURE_NOISE = {"timestep_spacing": "trailing", "clip_sample": False, "set_alpha_to_one": True}
SAME = {"rtol": 1e-3, "atol": 1e-4}  # what a few passes may round differently, of pictures in [0, 1]


def classifier_free(guidance: float, negative: str) -> dict[str, Any]:
    """Return the guidance arguments of most pipelines, for the first two prompts."""
    return {"guidance_scale": guidance, "negative_prompt": [negative] * 2 if negative else None}


@dataclass(frozen=True)
class Family:
    """A policy class and a small folder of its pipeline, which loads in less than a second.

    ``guidance``, ``pack`` and ``edit`` return the pipeline's arguments for a scale and a negative prompt (``""`` for
    none), for latents and for pictures to edit. No output depends on weights that match ``idle``; those that match
    ``unused`` get no gradient at all, so that the policy does not train them.
    """

    policy_class: type[Policy]
    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    guidance: Callable[[float, str], dict[str, Any]] = classifier_free
    pack: Callable[[Tensor], Tensor] = lambda z: z
    prompt_limit: int = 12
    limited_by: str = ""
    train_only: str = "*attn*to_q*"
    idle: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    edit: Callable[[Tensor], dict[str, Any]] = lambda given: {}
    size: tuple[int, int] = (HEIGHT, WIDTH)

    def load(self, folder: Path | None = None, **options: Any) -> Policy:
        """A new policy for a test that changes it."""
        return self.policy_class(str(folder or self.folder), **self.all_options(options)).load()

    def copy(self, **options: Any) -> Policy:
        """The same in a third of the time; only its network and scheduler are new. Options are in float32."""
        return load_copy(self.policy_class, self.folder, **self.all_options(options))

    def all_options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"height": self.size[0], "width": self.size[1], **self.options, **options}

    @cached_property
    def shared(self) -> Policy:
        """A policy that no test changes."""
        return self.load()

    @cached_property
    def shared_with_negative(self) -> Policy:
        return self.load(negative_prompt=NEGATIVE)

    @cached_property
    def shared_pipeline(self) -> Any:
        """A pipeline of which tests change the scheduler alone."""
        return self.pipeline()

    @cached_property
    def original_scheduler(self) -> Any:
        return self.pipeline().scheduler

    def pipeline(self) -> Any:
        """The same weights, as plain diffusers loads them."""
        kind = getattr(diffusers, self.policy_class.pipeline_class)
        pipeline = kind.from_pretrained(self.folder, **self.shared.null_components(self.folder))
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


def adapted(policy: Policy, std: float = 0.1) -> Policy:
    """Load a policy, with an adapter that changes its predictions."""
    policy.load()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in trainable_parameters(policy).items():
            if "lora_B" in name:
                parameter.normal_(std=std, generator=generator)
    return policy


def sampled(policy: Policy, spec: RolloutSpec, numbers: Sequence[int] = range(4), batch_size: int = 2) -> Tensor:
    """Return the latents of some images by their numbers, which also choose one of two prompts."""
    noise = policy.prior(image_generators(1, 0, 0, list(numbers)))
    return sample(policy, policy.encode(PROMPTS[:2]), torch.tensor(numbers) % 2, spec, noise, batch_size)[0]


def pictures(policy: Policy, prompts: Sequence[str]) -> list[Tensor] | None:
    """A picture of noise for each prompt to edit, or as many as the policy takes; ``None`` if the family edits none."""
    if not policy.edits:
        return None
    draws = [torch.Generator().manual_seed(sum(prompt.encode())) for prompt in prompts]
    shape = (policy.references, 3, *policy.image_size)[policy.references == 1 :]
    return [torch.randint(256, shape, generator=draw, dtype=torch.uint8) for draw in draws]


def encoded(policy: Policy, prompts: Sequence[str], edited: Sequence[str] | None = None) -> Conditioning:
    """Prompts, and the pictures that they edit: each its own, or those of the prompts ``edited``."""
    return policy.encode(prompts, pictures(policy, edited or prompts))


def inputs(policy: Policy, size: int = 2) -> tuple[Tensor, Tensor, Conditioning]:
    """Noise, times and prompts of a small batch."""
    noise = policy.prior(image_generators(1, 0, 0, list(range(size))))
    return noise, torch.linspace(0.2, 0.9, size), encoded(policy, PROMPTS[:size])


def same_image_as_the_pipeline(family: Family, solver: str, guidance: float, negative: bool = False) -> None:
    """The same noise becomes the same image as in the diffusers pipeline."""
    policy = family.shared_with_negative if negative else family.shared
    noise, _, cond = inputs(policy)
    latents, times = sample(policy, cond, torch.arange(2), RolloutSpec(solver, 4, guidance), noise)
    assert len(times) == 4
    pipeline, original = family.shared_pipeline, family.original_scheduler
    if solver != "ddim" and isinstance(policy.scheduler(solver, 4), type(original)):
        # the pipeline's, which must not be told anything by the policy
        pipeline.scheduler = type(original).from_config(original.config)
    elif solver == "ddim":
        pipeline.scheduler = diffusers.DDIMScheduler.from_config(original.config, **FROM_PURE_NOISE)
    else:  # not all take what the pipeline would set them with
        pipeline.scheduler = policy.scheduler(solver, 4)
        pipeline.scheduler.set_timesteps = lambda steps=None, device=None, sigmas=None, mu=None: None
    known = inspect.signature(type(pipeline).__call__).parameters
    given = {name: value for name, value in family.options.items() if name in known}
    size, drawn, scheduler = 1 if policy.pipeline_takes_one else 2, [], pipeline.scheduler
    for rows in (slice(i, i + size) for i in range(0, 2, size)):
        pipeline.scheduler = deepcopy(scheduler)
        if policy.edits:
            given |= family.edit(torch.stack(pictures(policy, PROMPTS[rows])).float() / 255)
        drawn += pipeline(
            prompt=PROMPTS[rows],
            num_inference_steps=4,
            latents=family.pack(noise[rows].clone()),
            output_type="pt",
            height=family.size[0],
            width=family.size[1],
            **family.guidance(guidance, NEGATIVE if negative else ""),
            **given,
        )[0]
    images = torch.stack(list(drawn))[..., :3, :, :]  # some add transparency
    assert images.shape[-3:] == (3, *family.size)
    torch.testing.assert_close(policy.decode(latents), images, **SAME)


def a_negative_prompt_counts_with_guidance_alone(family: Family) -> None:
    if family.shared.embeds_guidance:
        with pytest.raises(LoadError, match="negative_prompt has no effect. Leave it out"):
            family.load(negative_prompt=NEGATIVE)
        return
    plain, negative = family.shared, family.shared_with_negative
    given, of_negative = inputs(plain), inputs(negative)
    with torch.no_grad():
        assert torch.equal(plain(*given), negative(*of_negative))
        assert (plain(*given, 3.0) - negative(*of_negative, 3.0)).abs().max() > 1e-4


def long_prompts_are_cut_with_one_warning(family: Family) -> None:
    policy, limit = family.load(), family.prompt_limit
    long = "a red circle on the left " * 12
    said = rf"1 of 2 prompts are longer than the {limit} tokens of {family.limited_by}\w*, which truncates them"
    with pytest.warns(UserWarning, match=said) as caught:
        encoded(policy, [PROMPTS[0], long])
        cut = encoded(policy, [long])
    assert len([w for w in caught if "longer than" in str(w.message)]) == 1
    for name, value in encoded(policy, [long + "with a blue square below it"], [long]).tensors.items():
        assert torch.equal(value, cut.tensors[name]), name
    if not family.shared.embeds_guidance:
        policy = family.load(negative_prompt=long)
        with pytest.warns(UserWarning, match=said.replace("2 prompts", "1 negative prompts")):
            policy(*inputs(policy), 3.0)


def bfloat16_keeps_trained_weights_in_float32(family: Family) -> None:
    """The network computes in bfloat16, what is trained and all around it stays in float32."""
    policy = family.load(lora_rank=2, dtype="bfloat16")
    assert {p.dtype for p in trainable_parameters(policy).values()} == {torch.float32}
    assert {p.dtype for p in policy.network.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in policy.pipeline.vae.parameters()} == {torch.float32}
    noise, t, cond = inputs(policy)
    assert {value.dtype for value in cond.tensors.values()} == {torch.float32}
    prediction = policy(noise, t, cond, 2.0)
    assert prediction.dtype == torch.float32
    exact = family.shared(*inputs(family.shared), 2.0)
    error = (prediction - exact).norm() / exact.norm()
    assert 1e-4 < error < 0.1
    assert policy.decode(noise).dtype == torch.float32
    prediction.mean().backward()


def trained_weights_are_saved_as_a_pipeline(family: Family, folder: Path, **trained: Any) -> None:
    policy = family.load(**trained)
    with torch.no_grad():
        for parameter in trainable_parameters(policy).values():
            parameter.add_(0.1)
    policy.save(folder)
    again = family.load(folder)
    for (name, saved), (_, kept) in zip(again.named_parameters(), policy.named_parameters(), strict=True):
        assert torch.equal(saved, kept), name
    with torch.no_grad():
        torch.testing.assert_close(again(*inputs(again)), policy(*inputs(policy)), rtol=1e-4, atol=1e-5)
