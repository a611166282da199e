"""Contract of every model family, as functions that the tests of a family call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from helpers import in_order
from torch import Tensor

from lit_vgrpo.core.batches import BATCH_SIZE
from lit_vgrpo.core.noise import image_generators
from lit_vgrpo.core.rollout import RolloutSpec
from lit_vgrpo.core.sampling import sample, sample_chain
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.policies import Conditioning, Policy
from lit_vgrpo.system.hub import LoadError

PROMPTS = in_order(
    ["a red circle on the left", "a blue square on the right", "a green triangle", "a red square at the top"]
)
NEGATIVE = "a blue square"
COLOURS, SHAPES = ("red", "blue", "green", "yellow"), ("circle", "square", "triangle")
HEIGHT, WIDTH = 24, 32  # not square, so that a swap of the two shows
FROM_PURE_NOISE = {"timestep_spacing": "trailing", "clip_sample": False, "set_alpha_to_one": True}
SAME = {"rtol": 1e-3, "atol": 1e-4}  # what a few passes may round differently, of pictures in [0, 1]


def classifier_free(guidance: float, negative: str) -> dict[str, Any]:
    """Return the guidance arguments of most pipelines, for the first two prompts."""
    return {"guidance_scale": guidance, "negative_prompt": [negative] * 2 if negative else None}


@dataclass(frozen=True)
class Family:
    """A policy class and a small folder of its pipeline.

    Args:
        policy_class: what is tested.
        folder: a pipeline folder that loads in less than a second.
        options: of every policy that is made.
        guidance: the pipeline's arguments for a scale and a negative prompt, ``""`` for none.
        pack: image-like latents as the pipeline's call takes them.
        prompt_limit: tokens of a prompt that the encoder sees which limits its length.
        limited_by: how that encoder's class name starts.
        train_only: a pattern that matches some of the network's weights.
        idle: patterns of weights that no output depends on.
        edit: the pipeline's arguments for pictures to edit, unchanged.
        unused: the same of weights that get no gradient at all, so that the policy does not train them.
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

    def load(self, **options: Any) -> Policy:
        """A policy of its own for a test that changes it."""
        sizes = {"height": HEIGHT, "width": WIDTH}
        return self.policy_class(str(self.folder), **{**sizes, **self.options, **options}).load()

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
    def own_scheduler(self) -> Any:
        """The scheduler that the folder names."""
        return self.pipeline().scheduler

    def pipeline(self) -> Any:
        """The same weights, as plain diffusers loads them."""
        kind = getattr(diffusers, self.policy_class.pipeline_class)
        pipeline = kind.from_pretrained(self.folder, **self.shared.null_components(self.folder))
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


def pictures(policy: Policy, prompts: Sequence[str]) -> list[Tensor] | None:
    """A picture of noise for each prompt to edit; ``None`` if the family edits none."""
    if not policy.edits:
        return None
    draws = [torch.Generator().manual_seed(sum(prompt.encode())) for prompt in prompts]
    return [torch.randint(256, (3, HEIGHT, WIDTH), generator=draw, dtype=torch.uint8) for draw in draws]


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
    latents, times = sample(policy, cond, torch.arange(2), RolloutSpec(solver, 3, guidance), noise)
    assert len(times) == 3
    pipeline = family.shared_pipeline
    own = family.own_scheduler
    if solver == "euler":  # the pipeline's own, which must not be told anything by the policy
        pipeline.scheduler = type(own).from_config(own.config)
    elif solver == "ddim":
        pipeline.scheduler = diffusers.DDIMScheduler.from_config(own.config, **FROM_PURE_NOISE)
    else:  # not all take what the pipeline would set them with
        pipeline.scheduler = policy.scheduler(solver, 3)
        pipeline.scheduler.set_timesteps = _keep_times
    given = {name: value for name, value in family.options.items() if name == "max_sequence_length"}
    size, drawn, scheduler = 1 if policy.pipeline_takes_one else 2, [], pipeline.scheduler
    for rows in (slice(i, i + size) for i in range(0, 2, size)):
        pipeline.scheduler = deepcopy(scheduler)
        if policy.edits:
            given |= family.edit(torch.stack(pictures(policy, PROMPTS[rows])).float() / 255)
        drawn += pipeline(
            prompt=PROMPTS[rows],
            num_inference_steps=3,
            latents=family.pack(noise[rows].clone()),
            output_type="pt",
            height=HEIGHT,
            width=WIDTH,
            **family.guidance(guidance, NEGATIVE if negative else ""),
            **given,
        ).images
    images = torch.stack(drawn)
    assert images.shape == (2, 3, HEIGHT, WIDTH)
    torch.testing.assert_close(policy.decode(latents), images, **SAME)


def prompts_show_in_the_pictures(family: Family) -> None:
    """Another prompt, and another negative one, move pictures by far more than what counts as the same above."""
    noise, _, _ = inputs(family.shared)
    policies, pictures = [family.shared, family.shared], []
    prompts = [PROMPTS[:2], PROMPTS[2:]]
    if not family.shared.embeds_guidance:
        policies, prompts = [*policies, family.shared_with_negative], [*prompts, PROMPTS[:2]]
    for policy, words in zip(policies, prompts, strict=True):
        spec = RolloutSpec(policy.solvers[0], 3, 3.0)
        latents, _ = sample(policy, encoded(policy, words, PROMPTS[:2]), torch.arange(2), spec, noise)
        pictures.append(policy.decode(latents))
    for other in pictures[1:]:
        assert (other - pictures[0]).abs().amax(dim=(1, 2, 3)).min() > 10 * (SAME["rtol"] + SAME["atol"])


def _keep_times(num_inference_steps=None, device=None, sigmas=None, mu=None):
    """Stands in for a scheduler's ``set_timesteps`` where the policy has set them."""


def unknown_solvers_are_refused(family: Family) -> None:
    for solver in {"euler", "dpm++", "unipc", "ddim", "heun"} - set(family.shared.solvers):
        with pytest.raises(ValueError, match="does not exist on the"):
            family.shared.scheduler(solver, 3)


def gradient_reaches_exactly_the_trained_weights(family: Family, **trained: Any) -> None:
    """Full weights, an adapter (``lora_rank``) or some names (``train_only``)."""
    policy = family.load(**trained).train()
    names = [name.removeprefix("network.") for name, _ in policy.named_parameters()]
    if "lora_rank" in trained:
        expected = {name for name in names if ".lora_" in name}
    else:
        patterns = trained.get("train_only", ["*"])
        expected = {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
    expected -= {name for name in expected if any(fnmatchcase(name, unused) for unused in family.unused)}
    assert expected
    assert {name.removeprefix("network.") for name in trainable_parameters(policy)} == expected

    noise, t, cond = inputs(policy)
    policy(noise, t, cond).square().mean().backward()
    gradients = {name: p.grad for name, p in policy.network.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected
    # A of an adapter gets a gradient once B is not zero
    zero = {name for name, gradient in gradients.items() if not gradient.any() and ".lora_A." not in name}
    assert zero == {
        name for name in expected if any(fnmatchcase(name, idle) for idle in family.idle) and ".lora_A." not in name
    }

    assert not any(module.training for module in policy.modules())
    for helper in policy.helpers():
        assert not any(module.training for module in helper.modules())
        assert not any(parameter.requires_grad or parameter.grad is not None for parameter in helper.parameters())
    assert {name.split(".")[0] for name in policy.state_dict()} == {"network"}


def checkpointing_changes_no_gradient(family: Family) -> None:
    policies = family.load(lora_rank=2), family.load(lora_rank=2, gradient_checkpointing=True)
    for policy in policies:
        policy(*inputs(policy), 2.0).square().mean().backward()
    plain, cheap = (trainable_parameters(policy) for policy in policies)
    assert policies[1].network.is_gradient_checkpointing
    for name, parameter in plain.items():
        torch.testing.assert_close(cheap[name].grad, parameter.grad, rtol=1e-4, atol=1e-6)


def a_fresh_adapter_changes_nothing(family: Family) -> None:
    adapted = family.load(lora_rank=4, lora_alpha=8)
    with torch.no_grad():
        prediction = adapted(*inputs(adapted))
        torch.testing.assert_close(prediction, family.shared(*inputs(family.shared)), rtol=1e-5, atol=1e-6)


def a_row_does_not_depend_on_its_batch(family: Family) -> None:
    """A batch of one is the row of a batch of four up to float error, prompts included."""
    policy = family.shared
    noise, t, cond = inputs(policy, 4)
    guidances = (1.0, 3.0)
    with torch.no_grad():
        for guidance in guidances:
            four = policy(noise, t, cond, guidance)
            for i, prompt in enumerate(PROMPTS):
                one = policy(noise[i : i + 1], t[i : i + 1], encoded(policy, [prompt]), guidance)
                torch.testing.assert_close(one, four[i : i + 1], rtol=1e-4, atol=1e-5)
    assert (four[0] - four[1]).abs().max() > 1e-3


def an_image_has_the_same_bits_anywhere(family: Family) -> None:
    """Alone, beside others, in another order, and spread over calls as two or three ranks would: embeddings too."""
    policy = family.shared
    count = BATCH_SIZE + 3
    prompts = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES][:count]
    noise = policy.prior(image_generators(1, 0, 0, list(range(count))))
    ode = RolloutSpec(policy.solvers[0], 2, 1.0 if policy.embeds_guidance else 3.0)
    sde = RolloutSpec(policy.sde_solvers[0], 2)

    def found(ids: list[int]) -> list[Tensor]:
        cond = encoded(policy, [prompts[i] for i in ids])
        rows, start = torch.arange(len(ids)), noise[ids]
        latents, _ = sample(policy, cond, rows, ode, start, BATCH_SIZE)
        draws = image_generators(2, 0, 0, ids)
        _, _, chain = sample_chain(policy, cond, rows, sde, start, draws, BATCH_SIZE)
        images = policy.decode(latents)
        return [*cond.tensors.values(), latents, chain.states, chain.log_probs, images, policy.encode_images(images)]

    every = list(range(count))
    together = found(every)
    for spread in ([[4]], [every[::-1]], [every[:2], every[2:]], [every[0::3], every[1::3], every[2::3]]):
        calls = zip(*map(found, spread), strict=True)
        order = [i for ids in spread for i in ids]
        for whole, parts in zip(together, calls, strict=True):
            assert torch.equal(torch.cat(parts), whole[order])


def padding_changes_no_prediction(family: Family) -> None:
    """Of prompts with a mask, whose lengths differ; the prompts of other families have one length."""
    policy = family.shared
    if policy.prompt_length() is None:
        return
    noise, t, cond = inputs(policy, 4)
    tokens, mask = (cond.tensors[name] for name in ("tokens", "mask"))
    lengths = mask.sum(dim=1).int().tolist()
    assert len(set(lengths)) > 1
    others = {name: value for name, value in cond.tensors.items() if name not in ("tokens", "mask")}
    rows = [
        Conditioning(
            {"tokens": tokens[i, None, :n], "mask": mask[i, None, :n]}
            | {name: value[i, None] for name, value in others.items()}
        )
        for i, n in enumerate(lengths)
    ]
    joined = reduce(Conditioning.joined_with, rows)
    assert torch.equal(joined.tensors["tokens"], tokens[:, : max(lengths)])
    noisy = Conditioning({"tokens": tokens + 9 * (mask == 0).unsqueeze(2), "mask": mask, **others})
    with torch.no_grad():
        padded = policy(noise, t, cond)
        for other in (joined, noisy):
            torch.testing.assert_close(policy(noise, t, other), padded, rtol=1e-4, atol=1e-5)


def noise_depends_on_the_image_number_alone(family: Family) -> None:
    many, one = (family.shared.prior(image_generators(1, 0, 5, ids)) for ids in ([3, 4, 5], [4]))
    assert torch.equal(many[1:2], one)


def prompts_and_guidance_count(family: Family) -> None:
    """Each input of the network reaches its output, and guidance costs what the policy says."""
    policy = family.shared
    noise, t, cond = inputs(policy)
    passes = _count_passes(policy)
    with torch.no_grad(), passes as rows:
        plain = policy(noise, t, cond)
        other_prompt = policy(noise, t, encoded(policy, PROMPTS[2:4], PROMPTS[:2]))
        other_time = policy(noise, t / 2, cond)
        assert rows == [2, 2, 2]
        guided = policy(noise, t, cond, 3.0)
        assert sum(rows[3:]) == 2 * policy.guidance_factor(3.0)
        others = [other_prompt, other_time, guided]
        if policy.edits:
            others.append(policy(noise, t, encoded(policy, PROMPTS[:2], PROMPTS[2:4])))
    for other in others:
        assert (other - plain).abs().amax(dim=(1, 2, 3)).min() > 1e-4


class _count_passes:
    """The number of rows in each call of a policy's network."""

    def __init__(self, policy: Policy) -> None:
        self.network, self.rows = policy.network, []

    def __enter__(self) -> list[int]:
        self.hook = self.network.register_forward_hook(lambda *call: self.rows.append(len(call[-1][0])))
        return self.rows

    def __exit__(self, *_: object) -> None:
        self.hook.remove()


def a_negative_prompt_counts_with_guidance_alone(family: Family) -> None:
    if family.shared.embeds_guidance:
        with pytest.raises(LoadError, match=rf"negative_prompt='{NEGATIVE}' has no effect.*Leave it out"):
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
    said = rf"1 of 2 prompts are longer than the {limit} tokens of {family.limited_by}\w*, which sees only their start"
    with pytest.warns(UserWarning, match=said) as caught:
        encoded(policy, [PROMPTS[0], long])
        cut = encoded(policy, [long])
    assert len([w for w in caught if "longer than" in str(w.message)]) == 1
    for name, value in encoded(policy, [long + "with a blue square below it"], [long]).tensors.items():
        assert torch.equal(value, cut.tensors[name]), name


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


def helpers_follow_the_network_to_its_device(family: Family) -> None:
    """On the ``meta`` device, which refuses every tensor that stays behind."""
    policy = family.load(lora_rank=2).to("meta")
    policy.autocast = nullcontext  # torch has none for this device
    assert policy.device.type == "meta"
    noise, _, cond = inputs(policy)
    t = torch.tensor([0.2, 0.9], device="meta")
    for tensor in (noise, *cond.tensors.values(), policy.decode(noise)):
        assert tensor.device.type == "meta"
    for guidance in (1.0, 3.0):
        prediction = policy(noise, t, cond, guidance)
        assert (prediction.device.type, prediction.shape) == ("meta", noise.shape)
    assert {p.device.type for helper in policy.helpers() for p in helper.parameters()} == {"meta"}


def decode_and_encode_are_inverse_up_to_the_vae(family: Family) -> None:
    policy = family.shared
    images = policy.decode(inputs(policy)[0])
    assert images.shape == (2, 3, HEIGHT, WIDTH)
    assert (images.min() >= 0, images.max() <= 1) == (True, True)
    assert policy.encode_images(images).shape == (2, *policy.latent_shape)


def trained_weights_are_saved_as_a_pipeline(family: Family, folder: Path, **trained: Any) -> None:
    policy = family.load(**trained)
    with torch.no_grad():
        for parameter in trainable_parameters(policy).values():
            parameter.add_(0.1)
    policy.save(folder)
    sizes = {"height": HEIGHT, "width": WIDTH}
    again = family.policy_class(str(folder), **{**sizes, **family.options}).load()
    for (name, saved), (_, kept) in zip(again.named_parameters(), policy.named_parameters(), strict=True):
        assert torch.equal(saved, kept), name
    with torch.no_grad():
        torch.testing.assert_close(again(*inputs(again)), policy(*inputs(policy)), rtol=1e-4, atol=1e-5)


def an_adapter_is_saved_so_that_the_pipeline_loads_it(family: Family, folder: Path) -> None:
    policy = family.load(lora_rank=2, lora_alpha=4)
    with torch.no_grad():
        for name, parameter in trainable_parameters(policy).items():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    policy.save(folder)
    pipeline = family.pipeline()
    pipeline.load_lora_weights(str(folder))
    sizes = {"height": HEIGHT, "width": WIDTH}
    other = family.policy_class(str(family.folder), **{**sizes, **family.options}).adopt(pipeline)
    with torch.no_grad():
        trained = policy(*inputs(policy))
        torch.testing.assert_close(other(*inputs(other)), trained, rtol=1e-4, atol=1e-5)
        assert (family.shared(*inputs(family.shared)) - trained).abs().max() > 1e-3
