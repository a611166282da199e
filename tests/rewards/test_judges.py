"""The judges' presets, on recorded answers of their documented form; no real weights."""

import json
import math
import os
import re
import subprocess
import sys
import types

import pytest
import torch
import yaml
from fastapi.testclient import TestClient
from fault_server import FaultServer, choosing, saying
from processes import started

from lit_vgrpo.apps.serve.app import Worker, make_app
from lit_vgrpo.cli.main import main
from lit_vgrpo.config.parts import built_part
from lit_vgrpo.config.tree import expanded, judge_names
from lit_vgrpo.rewards import HTTPReward, Reward, Weighted
from lit_vgrpo.rewards.http import score_request
from lit_vgrpo.rewards.judges import PACKAGES as PACKAGES_OF

ASPECTS = "Alignment Score (1-5): {}\nCoherence Score (1-5): {}\nStyle Score (1-5): {}\n"
RATIONALE = """# User Request Analysis
The score: of a red cube.
# Detailed Judgement
1. Text Faithfulness:
## Justification: The cube is red. A score of 4 would be too high.
## Score: {}
2. Physical and Visual Quality:
## Justification: Its shadow is missing.
## Score: {}
3. Text Rendering:
## Justification: No text was asked for.
## Score: {}
"""


def batch(count=1):
    shades = torch.arange(count).view(-1, 1, 1, 1) * 10 / 255
    return shades.expand(-1, 3, 4, 4), ["a red cube"] * count, [{"prompt": "a red cube"}] * count


def built(name, **options):
    return built_part({"reward": expanded({"judge": name, **options})}, "reward", Reward)


def scored(name, answer):
    with FaultServer(then=answer) as server:
        reward = built(name, url=f"{server.address}/v1", connection={"retries": 0})
        found = reward(*batch()).item()
        asked = json.loads(server.requests[0][1])
    return found, reward, asked


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("UnifiedReward2", ASPECTS.format(2.694700002670288, 2.371500015258789, 2.802500009536743), 2.6229),
        ("UnifiedReward2", "**Alignment Score:** 5\n**Coherence Score (1 to 5)**: 4\nStyle Score (1-5): 3", 4.0),
        ("RationalRewards", RATIONALE.format(3.5, 2.5, "N/A"), 3.0),
        ("RationalRewards", RATIONALE.format("**4**", 2, "1.5 (poor)"), 2.5),
    ],
)
def test_a_recorded_answer_gives_the_mean_of_its_scores(name, text, expected):
    found, reward, asked = scored(name, saying(text))
    assert found == pytest.approx(expected, abs=1e-4)
    assert (reward.take_counts(), reward.failure) == ({}, None)
    assert "a red cube" in asked["messages"][0]["content"][-1]["text"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("UnifiedReward2", "Alignment Score (1-5): 4\nCoherence Score (1-5): 3\n"),
        ("UnifiedReward2", ASPECTS.format(4, 7, 3)),
        ("UnifiedReward2", ASPECTS.format(4, "nan", 3)),
        ("UnifiedReward2", "Final Score: 4"),
        ("RationalRewards", RATIONALE.format(4, 5, "N/A")),
        ("RationalRewards", RATIONALE.format("N/A", "N/A", "N/A")),
        ("RationalRewards", RATIONALE.format(4, "", "N/A").partition("3. Text")[0]),
        ("RationalRewards", "The image is good.\nIt is red."),
    ],
)
def test_a_malformed_answer_is_nan_counted_and_quoted_once(name, text):
    found, reward, _ = scored(name, saying(text))
    assert math.isnan(found)
    assert reward.take_counts() == {"unparsable": 1}
    assert reward.failure.count(" ".join(text.split())[-50:]) == 1


def test_vqascore_is_the_probability_of_yes():
    found, _, asked = scored("VQAScore", choosing(Yes=0.7, No=0.3))
    assert found == pytest.approx(0.7)
    text = asked["messages"][0]["content"][-1]["text"]
    assert text == 'Does this figure show "a red cube"? Please answer Yes or No.'
    found, reward, _ = scored("VQAScore", saying("Yes"))
    assert math.isnan(found)
    assert reward.take_counts() == {"gave_up": 1, "invalid": 1}


# --- judges with packages of their own, on stand-ins for these --------------------------------------------------------

PACKAGES = {
    "hpsv3/__init__.py": """
class HPSv3RewardInferencer:
    def __init__(self, device): pass
    def reward(self, image_paths, prompts):
        return [[image.getpixel((0, 0))[0] / 10, 1.0] for image, _ in zip(image_paths, prompts, strict=True)]
""",
    "EditReward/__init__.py": """
class EditRewardInferencer:
    def __init__(self, config_path, checkpoint_path, device, reward_dim, rm_head_type): pass
    def reward(self, prompts, image_src, image_paths):
        red = [[image.getpixel((0, 0))[0] for image in images] for images in (image_src, image_paths)]
        return [[after - before, 1.0] for before, after, _ in zip(*red, prompts, strict=True)]
""",
    "accelerate/__init__.py": "",
    "transformers-4.45.2.dist-info/METADATA": "Name: transformers\nVersion: 4.45.2\n",
}


class AutoModelForCausalLM:
    @classmethod
    def from_pretrained(cls, name, **options):
        return types.SimpleNamespace(score=lambda images: torch.tensor([image.getpixel((0, 0))[0] for image in images]))


@pytest.fixture
def packages(tmp_path):
    """A folder with the packages of an environment of a judge."""
    for name, text in PACKAGES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_judge_without_its_packages_names_the_command(capsys):
    for name in PACKAGES_OF:
        assert main(["serve-reward", name, "--port", "0"]) == 2
        assert capsys.readouterr().err.endswith(f"Run: lightning serve-reward {name} --print-setup\n")
    assert main(["serve-reward", "HPSv4", "--port", "0"]) == 2
    assert "Did you mean HPSv3? Judges: DeQA, EditReward, HPSv3, Rat" in capsys.readouterr().err
    assert main(["serve-reward", "VLMJudge", "url=http://x/v1", "model=m", "compare=pairs", "--port", "0"]) == 2
    assert "needs whole groups, which requests split" in capsys.readouterr().err


def test_judges_score_with_their_packages(packages, monkeypatch):
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(AutoModelForCausalLM=AutoModelForCausalLM))
    judges = {name: built(name, device="cpu") for name in PACKAGES_OF}
    assert [judge.check() for judge in judges.values()] == [[], [], []]
    images, prompts, rows = batch(3)
    assert judges["HPSv3"](images, prompts, rows).tolist() == [0.0, 1.0, 2.0]
    assert judges["DeQA"](images, prompts, rows).tolist() == [0.0, 10.0, 20.0]
    worker = Worker(Weighted([built("EditReward", checkpoint=str(packages))]), 2, torch.device("cpu"))
    app = make_app(worker, "edit_reward", None, 10_000, 8, 64, False)
    client = TestClient(app, headers={"Content-Type": "application/json"})
    pixels = (images * 255).round().byte()
    for pictures, expected in ((pixels.flip(0), [-20.0, 0.0, 20.0]), ((), [None] * 3)):
        answer = client.post("/score", content=score_request(pixels, prompts, rows, pictures)).json()
        assert answer["scores"] == expected
    worker.close()
    assert "Set send_pictures" in answer["errors"][0]
    refused = client.post(
        "/score", content=score_request(pixels, prompts, rows, pixels).replace(b'"pictures":[', b'"pictures":["",')
    )
    assert "4 pictures for 3 images" in refused.text


def test_pictures_are_sent_only_if_asked_for():
    images, prompts, rows = batch(3)
    for sends in (False, True):
        with FaultServer() as server:
            reward = HTTPReward(server.url, batch_size=2, send_pictures=sends)
            assert reward.takes_references is sends
            reward(images, prompts, rows, images if sends else None)
            bodies = sorted(len(json.loads(body).get("pictures", [])) for _, body in server.requests if body)
        assert bodies == ([1, 2] if sends else [0, 0])


@pytest.mark.slow
def test_a_judge_is_served_without_our_large_packages(packages):
    absent = ["lightning", "torchmetrics", "diffusers", "transformers", "peft", "matplotlib", "scipy", "torchvision"]
    (packages / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({absent}))\n")
    words = ("serve-reward", "HPSv3", "device=cpu", "--device", "cpu", "--port", "0")
    with started(*words, env={**os.environ, "PYTHONPATH": str(packages)}) as process:
        address = re.search(r"http\S+/score", process.stdout.readline()).group()
        reward = HTTPReward(address)
        assert reward(*batch(3)).tolist() == [0.0, 1.0, 2.0], reward.failure


@pytest.mark.slow
def test_the_printed_setup_is_a_script_of_each_judge(capsys):
    for name in judge_names():
        assert main(["serve-reward", name, "--print-setup"]) == 0
        script = capsys.readouterr().out
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
        if name in PACKAGES_OF:
            assert f"lightning serve-reward {name} --port 8001\n" in script
            recipe = {"class_path": "HTTPReward"}
        else:
            recipe = {"judge": name, "url": "http://127.0.0.1:8000/v1"}
            assert f"vllm serve {built(name, url=recipe['url']).model} " in script
        (shown, *_) = re.findall("#   reward: (.+)", script)
        assert recipe.items() <= yaml.safe_load(shown).items()
        assert built_part({"reward": expanded(yaml.safe_load(shown))}, "reward", Reward).name
    assert len(judge_names()) == 6
    assert main(["serve-reward", "PickScore", "--print-setup"]) == 2
    assert "PickScore is not a judge with a preset. Use one of: DeQA, EditReward, HPSv3" in capsys.readouterr().err
