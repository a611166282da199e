"""Wan's video models, beyond the contract of all families."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from policies import contract
from policies.contract import Family
from safetensors.torch import save_file

from lit_vgrpo import OptimizerConfig, RolloutSpec
from lit_vgrpo.core.sampling import sample
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.policies import WanPolicy, two_networks
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.training.saved_weights import load_policy
from lit_vgrpo.training.strategies import FSDP2, ZeRO, strategy_errors
from lit_vgrpo.training.update_guard import drop_zero_gradients

OPTIONS = {"max_sequence_length": 16, "num_frames": 5}
NO_BOUNDARY, NO_SECOND = {"boundary_ratio": None}, {"transformer_2": [None, None]}
LORA = {"start_from": "lora.safetensors", "lora_rank": 2}


@pytest.fixture(scope="module")
def folder(large_folder):
    return large_folder("wan")


def test_a_time_for_each_token_gives_the_pipelines_video(tmp_path):
    import tiny_large_models

    family = Family(WanPolicy, tiny_large_models.build_wan(tmp_path, expanded=True), OPTIONS, size=(32, 48))
    contract.same_image_as_the_pipeline(family, "unipc", guidance=3.0)


def test_a_video_has_its_frames_in_order(folder):
    policy = WanPolicy(str(folder), height=32, width=48, **OPTIONS).load()
    noise = policy.prior([torch.Generator().manual_seed(0)])
    assert noise.shape == (1, 4, 3, 8, 12)
    latents, _ = sample(policy, policy.encode(["a red circle"]), torch.zeros(1).long(), RolloutSpec("unipc", 2), noise)
    video = policy.decode(latents)
    assert video.shape == (1, 5, 3, 32, 48)
    first = policy.decode(latents[:, :, :1])  # the VAE is causal
    torch.testing.assert_close(video[:, :1], first, rtol=0, atol=1e-5)


def test_a_number_of_frames_that_cannot_be_made_is_one_line(folder):
    with pytest.raises(LoadError, match="num_frames=6: the VAE decodes 1 plus a multiple of 2 frames. Use 5 or 7."):
        WanPolicy(str(folder), height=32, width=48, **{**OPTIONS, "num_frames": 6}).load()


@pytest.fixture(scope="module")
def two(large_folder):
    return large_folder("wan22")


def test_each_row_goes_to_the_network_of_its_time(two):
    policy = WanPolicy(str(two), height=32, width=48, **OPTIONS).load()
    z, cond = torch.randn(4, *policy.latent_shape), policy.encode(["a red circle"]).expand(4)
    t = torch.tensor([0.8, 0.1, 1.0, 0.799])  # the boundary is 0.8
    found = policy(z, t, cond)
    for row, name in enumerate(("transformer", "transformer_2", "transformer", "transformer_2")):
        network = getattr(policy.pipeline, name)
        one = network(z[row : row + 1], 1000 * t[row : row + 1], cond.tensors["tokens"][:1], return_dict=False)[0]
        torch.testing.assert_close(found[row], one[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("boundary", [251, 502, 800])
def test_a_step_at_the_boundary_goes_to_the_network_that_diffusers_takes(two, boundary):
    """In float32, 0.251 * 1000 is less than 251."""
    policy = WanPolicy(str(two), height=32, width=48, **OPTIONS).load()
    policy.pipeline.register_to_config(boundary_ratio=boundary / 1000)
    joined = policy.joined([policy.network.transformer, policy.network.transformer_2])
    t = (torch.tensor([boundary - 1, boundary]).double() / 1000).float()
    assert (t * 1000 >= joined.boundary).tolist() == [False, True]


@pytest.mark.parametrize(
    ("entries", "options", "said"),
    [
        (NO_BOUNDARY, {}, "has 2 networks and boundary_ratio=None"),
        (NO_SECOND, {}, "has 1 network and boundary_ratio=0.8"),
        (NO_BOUNDARY | NO_SECOND, {"guidance_scale_2": 3.0}, "guidance_scale_2 has no effect"),
        ({}, LORA, "is a LoRA of one network, but the model has two. Name a run instead."),
    ],
)
def test_what_does_not_fit_two_networks_is_one_line(two, here, entries, options, said):
    index = json.loads((two / "model_index.json").read_text())
    shutil.copytree(two, "two")
    Path("two/model_index.json").write_text(json.dumps({**index, **entries}))
    save_file({"a.lora_A.weight": torch.ones(1, 1)}, LORA["start_from"])
    with pytest.raises(LoadError, match=said):
        load_policy(WanPolicy("two", height=32, width=48, **OPTIONS, **options))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_network_that_no_row_needs_keeps_its_weights_on_any_number_of_ranks(two, monkeypatch, ranks):
    monkeypatch.setattr(two_networks, "rank_and_world_size", lambda: (0, ranks))
    policy = WanPolicy(str(two), lora_rank=2, height=32, width=48, **OPTIONS).load()
    z, cond = torch.randn(1, *policy.latent_shape), policy.encode(["a red circle"])
    policy(z, torch.tensor([0.1]), cond).sum().backward()  # below the boundary
    drop_zero_gradients(policy)
    given = {name.split(".")[1] for name, weight in policy.named_parameters() if weight.grad is not None}
    assert given == {"transformer_2"}


def test_two_networks_are_refused_under_zero_before_they_are_loaded(two, folder):
    rest = OptimizerConfig(), Sizes(1, 2)
    for path, strategy, count in ((two, ZeRO(), 1), (two, FSDP2(), 0), (two, DDPStrategy(), 0), (folder, ZeRO(), 0)):
        assert len([*strategy_errors(strategy, WanPolicy(str(path), **OPTIONS), *rest)]) == count
