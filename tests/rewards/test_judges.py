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
from lit_vgrpo.config.parts import part_of_words
from lit_vgrpo.rewards import HTTPReward, Reward, Weighted
from lit_vgrpo.rewards.http import score_request
from lit_vgrpo.rewards.judges import PACKAGES
from lit_vgrpo.system.paths import shipped

ASPECTS = "Alignment Score (1-5): {}\nCoherence Score (1-5): {}\nStyle Score (1-5): {}\n"
SECTIONS = ("1. Text Faithfulness", "2. Physical and Visual Quality", "3. Text Rendering")
JUSTIFIED = "{}:\n## Justification: A score of 4 would be too high.\n## Score: {{}}\n"
RATIONALE = "# Detailed Judgement\n" + "".join(map(JUSTIFIED.format, SECTIONS))
INFERENCER = """
class Inferencer:
    def __init__(self, device, **options): pass
    def reward(self, image_paths, prompts, image_src=None):
        red = [image.getpixel((0, 0))[0] for image in [*image_paths, *(image_src or [])]]
        return [[red[i] - sum(red[i + len(prompts) :][:1]), 1.0] for i in range(len(prompts))]
HPSv3RewardInferencer = EditRewardInferencer = Inferencer
"""


def batch(count=1):
    shades = torch.arange(count).view(-1, 1, 1, 1) * 10 / 255
    return shades.expand(-1, 3, 4, 4), ["a red cube"] * count, [{"prompt": "a red cube"}] * count


def built(name, *words):
    return part_of_words([f"judge:{name}", *words], "reward", Reward)


def scored(name, answer):
    with FaultServer(then=answer) as server:
        reward = built(name, f"url={server.address}/v1", "connection.retries=0")
        found = reward(*batch()).item()
        asked = json.loads(server.requests[0][1])["messages"][0]["content"]
    return found, reward.take_counts(), reward.failure, asked[-1]["text"]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("UnifiedReward2", ASPECTS.format(2.694700002670288, 2.371500015258789, 2.802500009536743), 2.6229),
        ("UnifiedReward2", "**Alignment Score:** 5\n**Coherence Score (1 to 5)**: 4\nStyle Score (1-5): 3", 4.0),
        ("UnifiedReward2", "Alignment Score (1-5): 4\nCoherence Score (1-5): 3\n", None),
        ("UnifiedReward2", ASPECTS.format(4, 7, 3), None),
        ("UnifiedReward2", ASPECTS.format(4, "nan", 3), None),
        ("RationalRewards", RATIONALE.format(3.5, 2.5, "N/A"), 3.0),
        ("RationalRewards", RATIONALE.format("**4**", 2, "1.5 (poor)"), 2.5),
        ("RationalRewards", RATIONALE.format(4, 5, "N/A"), None),
        ("RationalRewards", RATIONALE.format("N/A", "N/A", "N/A"), None),
        ("RationalRewards", RATIONALE.format(4, "", "N/A").partition("3. Text")[0], None),
    ],
)
def test_an_answer_gives_the_mean_of_its_scores_or_is_quoted_once(name, text, expected):
    found, counts, failure, question = scored(name, saying(text))
    assert "a red cube" in question
    if expected is not None:
        assert (found, counts, failure) == (pytest.approx(expected, abs=1e-4), {}, None)
        return
    assert (math.isnan(found), counts) == (True, {"unparsable": 1})
    assert failure.count(" ".join(text.split())[-50:]) == 1


def test_vqascore_is_the_probability_of_yes():
    question = 'Does this figure show "a red cube"? Please answer Yes or No.'
    assert scored("VQAScore", choosing(Yes=0.7, No=0.3)) == (pytest.approx(0.7), {}, None, question)
    found, counts, *_ = scored("VQAScore", saying("Yes"))
    assert (math.isnan(found), counts) == (True, {"gave_up": 1, "invalid": 1})


@pytest.fixture
def packages(tmp_path):
    """Stand-ins for the packages of a judge's environment."""
    for name in PACKAGES.values():
        (tmp_path / f"{name}.py").write_text(INFERENCER)
    (tmp_path / "transformers.dist-info").mkdir()
    (tmp_path / "transformers.dist-info/METADATA").write_text("Name: transformers\nVersion: 4.45.2\n")
    return tmp_path


def test_judges_score_with_their_packages(packages, monkeypatch):
    model = types.SimpleNamespace(score=lambda images: torch.tensor([image.getpixel((0, 0))[0] for image in images]))
    loader = types.SimpleNamespace(from_pretrained=lambda name, **options: model)
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(AutoModelForCausalLM=loader))
    hps, deqa, edit = (built(name, f"checkpoint={packages}") for name in ("HPSv3", "DeQA", "EditReward"))
    assert [judge.check() for judge in (hps, deqa, edit)] == [[], [], []]
    images, prompts, rows = batch(3)
    assert hps(images, prompts, rows).tolist() == deqa(images, prompts, rows).tolist() == [0.0, 10.0, 20.0]
    worker = Worker(Weighted([edit]), 2, torch.device("cpu"))
    client = TestClient(make_app(worker, "edit_reward", None, 10_000, 8, 64, False))
    pixels = (images * 255).round().byte()
    for pictures, expected in ((pixels.flip(0), [-20.0, 0.0, 20.0]), ((), [None] * 3)):
        answer = client.post("/score", json=json.loads(score_request(pixels, prompts, rows, pictures))).json()
        assert answer["scores"] == expected
    worker.close()
    assert "Set send_pictures" in answer["errors"][0]
    for sends, counts in ((False, [0, 0]), (True, [1, 2])):
        with FaultServer() as server:
            reward = HTTPReward(server.url, batch_size=2, send_pictures=sends)
            assert reward.takes_references is sends
            reward(images, prompts, rows, images if sends else None)
        assert sorted(len(json.loads(body).get("pictures", [])) for _, body in server.requests) == counts


def test_a_judge_without_its_packages_names_the_command(capsys):
    for words, said in {
        **{name: f"Run: lightning serve-reward {name} --print-setup\n" for name in PACKAGES},
        "HPSv4": "Did you mean HPSv3? Judges: DeQA, EditReward, HPSv3, RationalRewards, UnifiedReward2, VQAScore.\n",
        "VLMJudge url=http://x/v1 model=m compare=pairs": "which requests split. Use it as model.reward.\n",
        "PickScore --print-setup": "Use one of: DeQA, EditReward, HPSv3, RationalRewards, UnifiedReward2, VQAScore.\n",
    }.items():
        assert main(["serve-reward", *words.split(), "--port", "0"]) == 2
        assert capsys.readouterr().err.endswith(said)


@pytest.mark.slow
def test_a_judge_is_served_without_our_large_packages(packages):
    absent = ["lightning", "torchmetrics", "diffusers", "transformers", "peft", "matplotlib", "scipy", "torchvision"]
    (packages / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({absent}))\n")
    words = ("serve-reward", "HPSv3", "device=cpu", "--device", "cpu", "--port", "0")
    with started(*words, env={**os.environ, "PYTHONPATH": str(packages)}) as process:
        reward = HTTPReward(re.search(r"http\S+/score", process.stdout.readline()).group())
        assert reward(*batch(3)).tolist() == [0.0, 10.0, 20.0], reward.failure


@pytest.mark.slow
def test_the_printed_setup_is_a_script_with_the_lines_of_the_recipe(capsys):
    for name in shipped("judges"):
        assert main(["serve-reward", name, "--print-setup"]) == 0
        script = capsys.readouterr().out
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
        recipe = yaml.safe_load(re.findall("#   reward: (.+)", script)[0])
        is_chat = recipe == {"judge": name, "url": "http://127.0.0.1:8000/v1"}
        assert is_chat is (name not in PACKAGES)
        model = built(name, "url=http://x/v1").model if is_chat else None
        assert (f"vllm serve {model} " if is_chat else f"lightning serve-reward {name} --port 8001\n") in script
