"""Embeddings through the cache, and text encoders that wait on the CPU; on every family's small pipeline."""

import shutil
from contextlib import contextmanager

import pytest
import torch
import zoo
from diffusers import DiffusionPipeline
from helpers import repeating
from policies.contract import adapted, inputs
from policies.families import NETWORKS
from support.pretended_gpu import is_on_gpu, pretended_gpu

from lit_vgrpo.apps.memory.shares import tensors_of
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.policies import AutoPolicy, SD3Policy, prompt_encoder
from lit_vgrpo.policies.embeddings import encoder_fingerprint
from lit_vgrpo.policies.placement import placed, waiting
from lit_vgrpo.tiny.shapes import render

A, B, C = "a red circle on the left", "a blue square on the right", "a green triangle"
CPU, META = torch.device("cpu"), torch.device("meta")


def equal(one, other):
    return one.tensors.keys() == other.tensors.keys() and all(
        torch.equal(value, other.tensors[name]) for name, value in one.tensors.items()
    )


@contextmanager
def prompts_encoded(policy):
    """Number of rows in each pass of the first text encoder."""
    sizes = []
    hook = policy.pipeline.text_encoder.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(args[0] if args else kwargs["input_ids"])), with_kwargs=True
    )
    yield sizes
    hook.remove()


def without_encoders(policy):
    """The same policy, whose encoders can neither compute nor be moved."""
    for encoder in policy.encoders():
        encoder.to(META)
    return policy


def test_a_prompt_is_encoded_once_while_memory_has_room(families, monkeypatch):
    policy = families("sdxl").load()
    plain = policy.encode([A, B])
    with prompts_encoded(policy) as sizes:
        assert equal(policy.encode([B, A]), plain.select(torch.tensor([1, 0])))
        assert sizes == []
        recent = policy.prompt_encoder._recent
        size = sum(value.nbytes for row in recent.values() for value in row.values())
        monkeypatch.setattr(prompt_encoder, "MAX_BYTES_IN_MEMORY", size)  # room for two
        policy.encode([A])
        policy.encode([C])
        assert len(sizes) == 1
        assert equal(policy.encode([A]), plain.select(torch.tensor([0])))
        assert len(sizes) == 1
        assert equal(policy.encode([B]), plain.select(torch.tensor([1])))  # was used longest ago
        assert len(sizes) == 2


def test_a_cold_cache_changes_no_bit_and_a_warm_one_needs_no_encoder(families, tmp_path):
    for name in ("sd3_t5", "sdxl", "flux"):
        family = families(name)
        plain = family.shared.encode([A, B])
        policy = family.load(embedding_cache=str(tmp_path))
        assert equal(policy.encode([A, B]), plain)
        with prompts_encoded(policy) as sizes:
            assert equal(policy.encode([B, A]), plain.select(torch.tensor([1, 0])))
        assert not sizes
        assert equal(without_encoders(policy).encode([B]), plain.select(torch.tensor([1])))


def test_only_what_is_missing_is_encoded_and_each_prompt_once(families, tmp_path):
    family = families("unet_eps")
    for policy in (family.load(), family.load(embedding_cache=str(tmp_path))):
        with prompts_encoded(policy) as sizes:
            rows = policy.encode([A, B, A, A])
            assert sizes == [1, 1]
            assert equal(rows, policy.encode([A, B]).select(torch.tensor([0, 1, 0, 0])))
    with prompts_encoded(policy) as sizes:
        mixed = policy.encode([C, A, C, B])
        assert sizes == [1]
    assert equal(mixed, family.shared.encode([C, A, C, B]))


def test_the_negative_prompt_is_kept_apart_from_the_prompts(families, tmp_path):
    family = families("sdxl")
    policy = family.load(embedding_cache=str(tmp_path))
    empty, negative = policy.encode([""]), policy.negative()
    assert not negative.tensors["tokens"].any()  # what this family's pipeline makes of none
    assert empty.tensors["tokens"].any()
    again = family.load(embedding_cache=str(tmp_path))
    with prompts_encoded(again) as sizes:
        assert equal(again.encode([""]), empty)
        assert equal(again.negative(), negative)
    assert not sizes


def test_the_fingerprint_is_of_the_encoders_and_not_of_where_they_lie(families, tmp_path):
    family = families("sd3_t5")
    first = encoder_fingerprint(family.shared)
    folder = shutil.copytree(family.folder, tmp_path / "elsewhere")
    policy = type(family.shared)(str(folder), max_sequence_length=8, lora_rank=2, height=16, width=16).load()
    assert encoder_fingerprint(policy) == first
    policy.encode([A])  # tokenizers remember how they were last asked to fill up
    assert encoder_fingerprint(policy) == first


def test_the_fingerprint_changes_with_every_part_of_an_encoder(families):
    policy = families("sd3_t5").load()
    pipeline, found = policy.pipeline, [encoder_fingerprint(policy)]
    with torch.no_grad():
        next(pipeline.text_encoder_2.parameters()).add_(1e-3)
    found.append(encoder_fingerprint(policy))
    pipeline.text_encoder.config.hidden_act = "gelu"
    found.append(encoder_fingerprint(policy))
    pipeline.tokenizer_2.add_tokens(["chartreuse"])
    found.append(encoder_fingerprint(policy))
    pipeline.tokenizer_2.pad_token = "chartreuse"
    found.append(encoder_fingerprint(policy))
    pipeline.tokenizer.model_max_length = 7
    found.append(encoder_fingerprint(policy))
    assert len(set(found)) == 6


def test_the_fingerprint_changes_with_templates_and_with_what_a_processor_holds(families):
    krea, qwen = (families(name).load() for name in ("krea2", "qwen_image21"))
    assert encoder_fingerprint(families("qwen_image21").load()) == encoder_fingerprint(qwen)
    changes = [
        (krea, lambda: krea.pipeline.register_to_config(text_encoder_select_layers=[2, 1])),
        (krea, lambda: setattr(krea.pipeline.tokenizer, "chat_template", "{{ messages }}")),
        (qwen, lambda: setattr(qwen.pipeline.processor, "chat_template", "{{ messages }}")),
        (qwen, lambda: setattr(qwen.pipeline.processor.tokenizer, "chat_template", "{{ messages }}")),
        (qwen, lambda: qwen.pipeline.processor.tokenizer.add_tokens(["chartreuse"])),
    ]
    for policy, change in changes:
        before = encoder_fingerprint(policy)
        change()
        assert encoder_fingerprint(policy) != before


@pytest.mark.parametrize("name", ["z_image", "qwen_image_edit"])
def test_a_16_bit_encoder_keeps_its_rotary_frequencies_as_the_pipeline_does(families, name):
    """Rounded ones change the embeddings, and the cache tells them apart."""
    policy = families(name).load(dtype="bfloat16")
    pictures = [torch.arange(3 * 24 * 32, dtype=torch.uint8).view(3, 24, 32)] if policy.edits else None
    found, fingerprint = policy.encode([A], pictures), encoder_fingerprint(policy)
    policy.pipeline.text_encoder = DiffusionPipeline.from_pretrained(
        families(name).folder, torch_dtype=torch.bfloat16
    ).text_encoder
    policy.prompt_encoder = prompt_encoder.PromptEncoder(policy)
    assert equal(policy.encode([A], pictures), found)
    assert encoder_fingerprint(policy) == fingerprint
    policy.pipeline.text_encoder.to(torch.bfloat16)
    assert encoder_fingerprint(policy) != fingerprint


def test_the_fingerprint_changes_with_the_options_that_matter(families):
    family = families("sd3_t5")
    options = [{}, {"dtype": "bfloat16"}, {"max_sequence_length": 5}, {"use_t5": False}]
    assert len({encoder_fingerprint(family.load(**changed)) for changed in options}) == len(options)


def addresses(modules):
    return [(name, tensor.data_ptr()) for module in modules for name, tensor in module.state_dict().items()]


def test_modules_are_elsewhere_for_a_while_and_then_their_own_again(families):
    encoders = families("sd3_t5").shared.encoders()
    before = addresses(encoders)

    def gather():
        return [tensor for module in encoders for tensor in (*module.parameters(), *module.buffers())]

    count = len(gather())
    with placed(encoders, META):
        assert {tensor.device for tensor in gather()} == {META}
        assert len(gather()) == count  # T5 has one table under two names
        assert not any(p.requires_grad for module in encoders for p in module.parameters())
    assert addresses(encoders) == before


def test_offloaded_encoders_are_with_the_network_only_while_they_encode(families):
    seen = []
    for offload in (True, False):
        policy = families("sd3").load(offload_encoders=offload)
        policy.network.to(META)  # a second device that every machine has
        policy.pipeline.text_encoder.register_forward_pre_hook(
            lambda module, args: seen.append(next(module.parameters()).device)
        )
        assert policy.encode([A, B]).tensors["tokens"].device == META
        devices = {p.device for encoder in policy.encoders() for p in encoder.parameters()}
        assert devices == ({CPU} if offload else {META})
    assert seen == [META] * 4  # one prompt at a time


def bytes_on_gpu(tensors):
    """Those of the tensors on the pretended GPU, whose storages may be empty."""
    storages = [tensor.untyped_storage() for tensor in tensors if is_on_gpu(tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def step_on_gpu(policy):
    """Gradients and weights after a pass with guidance, and the bytes of network and encoders before every pass."""
    network, encoders, seen = policy.network, policy.encoders(), []

    def look(*_):
        seen.append((bytes_on_gpu(tensors_of(network)), bytes_on_gpu(t for one in encoders for t in tensors_of(one))))

    weights = list(network.parameters())
    for module in (network, *encoders):
        module.register_forward_pre_hook(look)
    noise, t, cond = inputs(policy)
    policy(noise, t.to("cuda"), cond, 1.0 if policy.guidance_error() else 2.0).square().mean().backward()
    policy.scheduler(policy.solvers[0], 3)  # a learned policy watches a call for it
    assert all(one is other for one, other in zip(network.parameters(), weights, strict=True))
    return [value.detach().cpu() for p in weights for value in (p, p.grad) if value is not None], seen


LEARNED = "AuraFlowPipeline"


@pytest.mark.parametrize("name", repeating([*NETWORKS, LEARNED], slow=[n for n in NETWORKS if n != "sd3"]))
def test_encoders_and_a_waiting_network_are_never_on_a_gpu_together(families, name):
    """No family reads a weight while it encodes, every weight stays the same object, and no bit changes."""
    options, results = {"lora_rank": 2, "offload_encoders": True}, []
    for waits in (False, True):
        if name == LEARNED:
            policy = AutoPolicy(zoo.build(name), height=32, width=48, offload_network=waits, **options).load()
        else:
            policy = families(name).load(offload_network=waits, **options)
        with pretended_gpu():
            values, seen = step_on_gpu(adapted(policy).to("cuda"))
            whole, trained = (
                bytes_on_gpu(which) for which in (tensors_of(policy.network), trainable_parameters(policy).values())
            )
        assert {of_network for of_network, of_encoders in seen if not of_encoders} == {whole}
        assert {of_network for of_network, of_encoders in seen if of_encoders} == {trained if waits else whole}
        results.append(values)
    assert len(results[0]) > len(list(policy.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_what_cannot_wait_stays():
    """Weights on a CPU, trained ones, and those of which a rank has only a part; an error brings all back."""
    layers = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in ("frozen", "tied", "sharded", "trained")})
    layers.requires_grad_(False)["trained"].requires_grad_(True)
    layers["tied"].weight = layers["frozen"].weight
    layers["frozen"].register_buffer("buffer", torch.ones(2))

    def held():
        return {name: tensor.untyped_storage().nbytes() for name, tensor in layers.state_dict().items()}

    before = held()
    with waiting(layers):
        assert held() == before
    with pretended_gpu():
        layers.to("cuda")
        for weight in layers["sharded"].parameters():
            weight.ds_tensor = weight  # ZeRO-3's mark
        values = {name: value.clone() for name, value in layers.state_dict().items()}
        with pytest.raises(InterruptedError), waiting(layers):  # noqa: PT012
            left = {name for name, size in held().items() if size}
            assert left == {name for name in before if name.startswith(("sharded", "trained"))}
            raise InterruptedError
        assert all(torch.equal(value, values[name]) for name, value in layers.state_dict().items())


def test_a_network_whose_weights_are_all_trained_cannot_wait():
    for options, message in (
        ({"offload_encoders": True}, "offload_network=true has no effect on trained weights. Set lora_rank, or "),
        ({"lora_rank": 2}, "offload_network=True has no effect with offload_encoders=False. Set offload_network=False"),
    ):
        with pytest.raises(ValueError, match=message):
            SD3Policy("shipped:assets/tiny_sd3", offload_network=True, **options)


def test_images_need_the_vae_alone(families):
    policy = without_encoders(families("sd3").load())
    latents = torch.zeros(1, *policy.latent_shape)
    assert policy.encode_images(policy.decode(latents)).shape == latents.shape


def test_tiling_above_the_tiles_size_changes_images_a_little():
    # a trained VAE, whose tiles look like the picture that they are cut from
    plain, tiled = (SD3Policy("shipped:assets/tiny_sd3", vae_tiling=tiling).load() for tiling in (False, True))
    vae = tiled.pipeline.vae
    vae.tile_sample_min_size, vae.tile_latent_min_size = 16, 4
    passes = []
    vae.decoder.register_forward_pre_hook(lambda module, args: passes.append(max(args[0].shape[-2:])))
    places = [("red", "circle", "on the left"), ("blue", "square", "on the right")]
    pictures = torch.stack([render(*place, generator=torch.Generator().manual_seed(0)) for place in places])
    latents = plain.encode_images(pictures)
    whole, joined = plain.decode(latents), tiled.decode(latents)
    assert max(passes) == 4
    assert 0 < (joined - whole).abs().mean() < 0.06


@pytest.mark.parametrize(("dtype", "levels"), [("bfloat16", 6), ("float16", 1)])
def test_sixteen_bits_change_images_by_a_few_grey_levels(dtype, levels):
    """2.9 and .35 at most in 384 images, on one CPU; a value near 1 of bfloat16 alone is up to half a level off."""
    whole, rounded = (SD3Policy("shipped:assets/tiny_sd3", decode_dtype=name).load() for name in ("float32", dtype))
    latents = whole.prior([torch.Generator().manual_seed(0)])
    found = rounded.decode(latents)
    assert found.dtype == torch.float32
    assert next(rounded.pipeline.vae.parameters()).dtype == torch.float32  # as it is exported
    assert 0 < (found - whole.decode(latents)).abs().max() <= levels / 255


def test_gradients_that_underflow_in_float16_pass_through_the_vae():
    gradients = []
    for name in ("float32", "float16"):
        policy = SD3Policy("shipped:assets/tiny_sd3", decode_dtype=name).load()
        leaf = policy.prior([torch.Generator().manual_seed(0)]).requires_grad_()
        gradients += torch.autograd.grad(1e-3 * policy.decode_with_gradient(leaf).mean(), leaf)
    exact, found = gradients
    assert (found - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("overflows", [False, True])
def test_auto_decodes_in_float16_where_no_pixel_changes_by_half_a_grey_level(overflows):
    """In float16, values above 65,504 are infinite."""
    plain, policy = (SD3Policy("shipped:assets/tiny_sd3", decode_dtype=name).load() for name in ("float32", "auto"))
    latents = plain.prior([torch.Generator().manual_seed(seed) for seed in range(3)])
    for one in (plain, policy):
        if overflows:  # undone by the norm that follows
            one.pipeline.vae.decoder.conv_in.weight.data *= 1e6
    exact = plain.decode(latents)
    assert torch.equal(policy.decode(latents), exact)
    assert policy.decode_dtype == torch.float32  # a CPU gains nothing
    with pretended_gpu():
        found = policy.to("cuda").decode(latents.to("cuda")).cpu()
        assert policy.decode_dtype == (torch.float32 if overflows else torch.float16)
        assert torch.equal(found, exact) is overflows
        assert (found - exact).abs().max() < 0.7 / 255


def test_auto_tries_float16_at_the_policys_size(monkeypatch):
    policy = SD3Policy("shipped:assets/tiny_sd3", decode_dtype="auto").load()
    decode, shapes = policy.vae_decode, []
    monkeypatch.setattr(policy, "vae_decode", lambda latents: shapes.append(latents.shape[1:]) or decode(latents))
    with pretended_gpu():
        policy.to("cuda")
        with policy.sized(16, 16):  # an evaluation's
            policy.decode(policy.prior([torch.Generator().manual_seed(0)]))
            own = policy.latent_shape
    assert shapes == [policy.latent_shape, policy.latent_shape, own]
    assert own != policy.latent_shape
