"""Every family through the same checks, on small real pipelines."""

from fnmatch import fnmatchcase
from functools import reduce
from operator import attrgetter

import pytest
import torch
from helpers import repeating
from policies import contract
from policies.contract import PROMPTS, SAME, encoded, inputs
from policies.families import FAMILIES, FIRST, NETWORKS, REPEATS, SLOW
from rollouts import sample_chain

from lit_vgrpo.core.batches import BATCH_SIZE
from lit_vgrpo.core.noise import image_generators
from lit_vgrpo.core.sampling import sample
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.policies import Conditioning, SD3Policy
from lit_vgrpo.policies.checks import inputs_count
from lit_vgrpo.policies.export import lora_calls
from lit_vgrpo.policies.meta import AutocastOnMeta

COLOURS, SHAPES = ("red", "blue", "green", "yellow"), ("circle", "square", "triangle")

VARIANTS = ("sd3_t5", "unet_v", "sdxl_v", "flux_cfg", "flux2_dev", *SLOW)
"""Another checkpoint of a family that has a case."""
SOLVERS = [(name, 0) for name in (*FAMILIES, "sdxl_v")]
SOLVERS += [(name, place) for name in FAMILIES if name not in VARIANTS for place in (1, 2)]
of_each_network = pytest.mark.parametrize("family", repeating(NETWORKS, slow=REPEATS), indirect=True)


@pytest.mark.parametrize(
    ("family", "position"),
    repeating(
        SOLVERS,
        slow=[(name, place) for name, place in SOLVERS if (place or name in VARIANTS) and name not in FIRST],
    ),
    indirect=["family"],
)
def test_same_noise_same_image_as_the_pipeline(family, position):
    for solver in family.policy_class.solvers[position : position + 1]:
        contract.same_image_as_the_pipeline(family, solver, guidance=1.0)
        contract.same_image_as_the_pipeline(family, solver, guidance=3.0)
        if not family.shared.embeds_guidance:
            contract.same_image_as_the_pipeline(family, solver, guidance=3.0, negative=True)


def test_prompts_show_in_the_pictures(family):
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


def test_unknown_solvers_are_refused(family):
    for solver in {"euler", "dpm++", "unipc", "ddim", "heun"} - set(family.shared.solvers):
        with pytest.raises(ValueError, match="does not exist on"):
            family.shared.scheduler(solver, 3)


def test_a_policys_own_solver_can_be_chosen():
    with pytest.raises(ValueError, match="solver=own_ode does not exist"):
        RolloutSpec("own_ode")
    type("Own", (SD3Policy,), {"solvers": ("own_ode",)})
    assert RolloutSpec("own_ode").solver == "own_ode"


@of_each_network
@pytest.mark.parametrize("trained", ["full", "adapter", "partial"])
def test_gradient_reaches_exactly_the_trained_weights(family, trained):
    options = {"full": {}, "adapter": {"lora_rank": 2}, "partial": {"train_only": [family.train_only]}}[trained]
    policy = family.copy(**options).train()
    names = [name.removeprefix("network.") for name, _ in policy.named_parameters()]
    if "lora_rank" in options:
        expected = {name for name in names if ".lora_" in name}
    else:
        patterns = options.get("train_only", ["*"])
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
    for helper in (*policy.encoders(), policy.pipeline.vae):
        assert not any(module.training for module in helper.modules())
        assert not any(parameter.requires_grad or parameter.grad is not None for parameter in helper.parameters())
    assert {name.split(".")[0] for name in policy.state_dict()} == {"network"}


@of_each_network
def test_checkpointing_changes_no_gradient(family):
    policies = family.copy(lora_rank=2), family.copy(lora_rank=2, gradient_checkpointing=True)
    for policy in policies:
        policy(*inputs(policy), 2.0).square().mean().backward()
    plain, cheap = (trainable_parameters(policy) for policy in policies)
    assert all(network.is_gradient_checkpointing for network in policies[1].networks().values())
    for name, parameter in plain.items():
        torch.testing.assert_close(cheap[name].grad, parameter.grad, rtol=1e-4, atol=1e-6)


@of_each_network
def test_a_fresh_adapter_changes_nothing(family):
    adapted = family.copy(lora_rank=4, lora_alpha=8)
    with torch.no_grad():
        prediction = adapted(*inputs(adapted))
        torch.testing.assert_close(prediction, family.shared(*inputs(family.shared)), rtol=1e-5, atol=1e-6)


def test_a_row_does_not_depend_on_its_batch(family):
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


@of_each_network
def test_an_image_has_the_same_bits_anywhere(family):
    """Alone, beside others, in another order, and spread over calls as two or three ranks would: embeddings too."""
    policy = family.shared
    count = BATCH_SIZE + 3
    prompts = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES][:count]
    noise = policy.prior(image_generators(1, 0, 0, list(range(count))))
    ode = RolloutSpec(policy.solvers[0], 2, 1.0 if policy.embeds_guidance else 3.0)
    sde = RolloutSpec(policy.sde_solvers[0], 2)

    def found(ids):
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


def test_padding_changes_no_prediction(family):
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
    padding = (mask == 0).view(*mask.shape, *[1] * (tokens.ndim - 2))
    noisy = Conditioning({"tokens": tokens + 9 * padding, "mask": mask, **others})
    with torch.no_grad():
        padded = policy(noise, t, cond)
        for other in (joined, noisy):
            torch.testing.assert_close(policy(noise, t, other), padded, rtol=1e-4, atol=1e-5)


def test_prompts_and_guidance_count(family):
    """Each input of the network reaches its output, and guidance costs what the policy says."""
    policy, rows = family.shared, []
    inputs_count(policy)
    hook = policy.network.register_forward_hook(lambda *call: rows.append(len(call[-1][0])))
    with torch.no_grad():
        for guidance in (1.0, 3.0):
            rows.clear()
            policy(*inputs(policy), guidance)
            assert sum(rows) == 2 * policy.guidance_factor(guidance)
    hook.remove()


def test_a_negative_prompt_counts_with_guidance_alone(family):
    contract.a_negative_prompt_counts_with_guidance_alone(family)


def test_decoding_keeps_the_gradient(family):
    policy = family.shared
    latents = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    leaf = latents.clone().requires_grad_()
    images = policy.decode_with_gradient(leaf)
    (gradient,) = torch.autograd.grad((images * torch.linspace(0, 1, images.shape[-1])).sum(), leaf)
    assert gradient.flatten(1).norm(dim=1).min() > 0
    torch.testing.assert_close(images.detach(), policy.decode(latents))
    assert policy.decode_with_gradient(leaf, halved=True).shape[-2] * 2 == images.shape[-2]


def test_the_negative_prompts_pass_may_keep_no_graph(family):
    policy, given = family.shared, inputs(family.shared)
    whole, detached = policy(*given, 3.0), policy(*given, 3.0, detach_negative=True)
    torch.testing.assert_close(detached, whole, **SAME)
    weights = [*trainable_parameters(policy).values()]
    columns = torch.linspace(0, 1, whole.shape[-1])  # Lumina 2's guidance keeps the length of a row
    losses = [(value.square() * columns).sum() for value in (whole, detached)]
    ends = [torch.autograd.grad(loss, weights, allow_unused=True) for loss in losses]
    differs = any(
        one is not None and not torch.allclose(one, other, rtol=1e-2) for one, other in zip(*ends, strict=True)
    )
    assert differs != policy.embeds_guidance


def test_long_prompts_are_cut_with_one_warning(family, capfd):
    contract.long_prompts_are_cut_with_one_warning(family)
    assert "truncated" not in capfd.readouterr().err


@of_each_network
def test_bfloat16_keeps_trained_weights_in_float32(family):
    contract.bfloat16_keeps_trained_weights_in_float32(family)


SINUSOIDS = ("Timesteps", "QwenImage21TemporalTimesteps", "TimestepEmbedder", "Krea2TimestepEmbedding")
"""What the networks call the first module that sees the time."""


def times_seen(policy, t):
    seen, (noise, _, cond) = [], inputs(policy)
    for module in policy.network.modules():
        if type(module).__name__ in SINUSOIDS:
            module.register_forward_pre_hook(lambda _, given: seen.append(given[0].float().flatten()))
    with torch.no_grad():
        policy(noise, t, cond)
    return torch.cat(seen)


@pytest.mark.parametrize(
    "family", repeating(NETWORKS, slow=[name for name in REPEATS if name != "qwen_image"]), indirect=True
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_network_sees_the_times_at_which_pairs_are_made(family, dtype):
    """Some round the time to 16 bits before its sinusoid, so that 0.9 is 0.8984 in bfloat16."""
    if (family.policy_class.__name__, dtype) == ("SanaPolicy", "float16"):
        pytest.skip("is refused: test_float16_is_refused_where_linear_attention_overflows")
    policy, exact, differs = family.load(dtype=dtype), family.copy(), []
    for start in (0.1234, 0.9):
        t = torch.tensor([start, 0.3337])
        snapped = policy.path.snap(t)
        assert (snapped - t).abs().max() < 4e-3
        torch.testing.assert_close(times_seen(policy, snapped), times_seen(exact, snapped), rtol=1e-6, atol=0)
        differs.append(not torch.allclose(times_seen(policy, t), times_seen(exact, t), rtol=1e-6))
    assert any(differs) == (getattr(policy, "time_scale", None) is not None)


@of_each_network
def test_helpers_follow_the_network_to_its_device(family):
    """On the ``meta`` device, which refuses every tensor that stays behind."""
    policy = family.load(lora_rank=2).to("meta")
    policy.autocast = lambda dtype=None: AutocastOnMeta()  # torch has none for this device
    assert policy.device.type == "meta"
    noise, _, cond = inputs(policy)
    t = torch.tensor([0.2, 0.9], device="meta")
    for tensor in (noise, *cond.tensors.values(), policy.decode(noise)):
        assert tensor.device.type == "meta"
    for guidance in (1.0, 3.0):
        prediction = policy(noise, t, cond, guidance)
        assert (prediction.device.type, prediction.shape) == ("meta", noise.shape)
    frozen = (*policy.encoders(), policy.pipeline.vae)
    assert {p.device.type for helper in frozen for p in helper.parameters()} == {"meta"}


@of_each_network
def test_trained_weights_are_saved_as_a_pipeline(family, tmp_path):
    contract.trained_weights_are_saved_as_a_pipeline(family, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("family", FIRST, indirect=True)
def test_weights_of_which_some_are_trained_are_saved_as_a_pipeline(family, tmp_path):
    contract.trained_weights_are_saved_as_a_pipeline(family, tmp_path / "out", train_only=[family.train_only])


@of_each_network
def test_an_adapter_is_saved_so_that_the_pipeline_loads_it(family, tmp_path):
    policy = family.load(lora_rank=2, lora_alpha=4)
    with torch.no_grad():
        for name, parameter in trainable_parameters(policy).items():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    folder = tmp_path / "lora"
    policy.save(folder)
    pipeline = family.pipeline()
    for method, options in lora_calls(pipeline, policy.network_names):
        attrgetter(method)(pipeline)(str(folder), **options)
    other = family.policy_class(str(family.folder), **family.all_options({})).adopt(pipeline)
    with torch.no_grad():
        trained = policy(*inputs(policy))
        torch.testing.assert_close(other(*inputs(other)), trained, rtol=1e-4, atol=1e-5)
        assert (family.shared(*inputs(family.shared)) - trained).abs().max() > 1e-3
