"""``trainer.validate`` runs rewards in inference mode, whose tensors know less than others."""

import pytest
import torch
from fault_server import FaultServer
from stand_ins import StandIns, judge
from torchvision.transforms.functional import to_pil_image

from lit_vgrpo import rewards
from lit_vgrpo.rewards import Reward, Weighted, as_weighted

PROMPTS = ["a red circle on the left", "a blue square on the right"]
EDITS = ["make it red", "make it blue"]
ROW = {"text": "so", "tag": "single_object", "include": [{"class": "cup", "count": 1}]}
ALL = sorted(
    name
    for name in rewards.__all__
    if isinstance(getattr(rewards, name), type)
    and issubclass(getattr(rewards, name), Reward)
    and not getattr(rewards, name).takes_videos
    and name not in ("Reward", "VoteReward", "PackagedJudge")  # people, and packages of another environment
)


def brightness(images, prompts, rows):
    return images.mean(dim=(1, 2, 3))


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Every reward that is shipped, on its small stand-in."""
    with judge() as server, FaultServer() as scorer:
        stand_ins = StandIns(tmp_path_factory.mktemp("stand_ins"), server)
        special = {
            "HTTPReward": lambda: rewards.HTTPReward(scorer.url),
            "PythonReward": lambda: rewards.PythonReward(f"{__name__}:brightness"),
            "QuestionScore": lambda: rewards.QuestionScore(f"{server.address}/v1", "judge", "Is it {prompt}?"),
            "VLMJudge": lambda: rewards.VLMJudge(f"{server.address}/v1", "judge"),
            "Weighted": lambda: Weighted([rewards.ShapesReward(), rewards.JPEGCompressibility()]),
        }
        yield lambda name: special.get(name, lambda: getattr(rewards, name)(**stand_ins.reward(name)))()


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_every_reward_scores_the_same_in_inference_mode(build, name, tmp_path):
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    to_pil_image(images[0]).save(tmp_path / "picture.png")
    row = ROW | {"image": str(tmp_path / "picture.png")}
    prompts = EDITS if name == "RecolourReward" else PROMPTS

    def score(reward):
        scores = as_weighted(reward).score(images.clone(), prompts, [row, row])
        assert scores.errors == {}
        return scores.total

    reward = build(name)
    with torch.inference_mode():
        first = score(reward)
    # What it loaded there serves on.
    with torch.no_grad():
        again = score(reward)
    expected = score(build(name))
    assert expected.isfinite().all()
    for found in (first, again):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
