"""Wan's video models, beyond the contract of all families."""

import json

import pytest
import torch
from policies import contract
from policies.contract import Family

from lit_vgrpo import RolloutSpec
from lit_vgrpo.core.sampling import sample
from lit_vgrpo.policies import WanPolicy
from lit_vgrpo.system.hub import LoadError

OPTIONS = {"max_sequence_length": 16, "num_frames": 5}


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


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("num_frames", 6, "num_frames=6: the VAE decodes 1 plus a multiple of 2 frames. Use 5 or 7."),
        ("height", 36, "height=36 is not a multiple of 8"),
    ],
)
def test_a_size_that_cannot_be_made_is_one_line(folder, option, value, said):
    with pytest.raises(LoadError, match=said.replace("+", r"\+")):
        WanPolicy(str(folder), **{"height": 32, "width": 48, **OPTIONS, option: value}).load()


def test_two_networks_are_refused(folder, tmp_path):
    import shutil

    two = tmp_path / "two"
    shutil.copytree(folder, two)
    shutil.copytree(two / "transformer", two / "transformer_2")
    index = json.loads((two / "model_index.json").read_text())
    index["transformer_2"] = index["transformer"]
    (two / "model_index.json").write_text(json.dumps({**index, "boundary_ratio": 0.9}))
    with pytest.raises(LoadError, match="two networks, for early and late times. Only models with one are supported"):
        WanPolicy(str(two), height=32, width=48, **OPTIONS).load()
