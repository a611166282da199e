"""The conversions of docs/coming_from.md, on small files in the formats of flow_grpo, Flow-Factory and TRL's DDPO."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lit_vgrpo.cli.commands import app
from lit_vgrpo.core.pixels import encode_png
from lit_vgrpo.data.prompts import read_prompts
from lit_vgrpo.rewards import GenEval, PythonReward

PAGE = Path(__file__).parents[1].joinpath("docs", "coming_from.md").read_text(encoding="utf-8")
PICTURES, PROMPTS, ADAPTERS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
RECIPE = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)[-1])

THEIRS = {
    "my_ddpo.py": """
import itertools

turn = itertools.cycle([("cat", {}), ("dog", {"bonus": 2})])

def prompt_fn():
    return next(turn)

def reward_fn(images, prompts, metadata):
    return images.mean((1, 2, 3)) + sum("bonus" in one for one in metadata), {"unused": 0}
""",
    "flow_grpo/rewards.py": """
import numpy as np

def jpeg_compressibility():
    def _fn(images, prompts, metadata):
        arrays = (images * 255).round().to(dtype=images.dtype).cpu().numpy().transpose(0, 2, 3, 1)
        return np.array([array.mean() for array in arrays]), {}
    return _fn
""",
    "my_reward.py": """
from dataclasses import dataclass

import torch

@dataclass
class RewardModelOutput:
    rewards: torch.Tensor

class MyReward:
    required_fields = ("prompt", "image")

    def __init__(self, config, accelerator):
        self.device = accelerator.device if config.device == torch.device("cuda") else config.device
        self.dtype, self.batch_size = config.dtype, config.batch_size

    def __call__(self, prompt, image=None, **kwargs):
        values = [float(one.getpixel((0, 0))[0]) for one, _ in zip(image, prompt, strict=True)]
        return RewardModelOutput(rewards=torch.tensor(values, device=self.device))
""",
    "adapters.py": ADAPTERS,
}
IMAGES = torch.tensor([0.0, 1.0, 0.2]).view(3, 1, 1, 1).expand(3, 3, 4, 4).contiguous()


@pytest.fixture(autouse=True)
def theirs(here, monkeypatch):
    """Write a user's modules into the current folder; forget them afterwards."""
    for name, text in THEIRS.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(text)
    monkeypatch.syspath_prepend(here)
    yield
    for name in THEIRS:
        sys.modules.pop(name.removesuffix(".py").replace("/", "."), None)
    sys.modules.pop("flow_grpo", None)


@pytest.mark.parametrize(
    ("function", "options", "scores"),
    [
        ("from_trl", {}, [1.0, 2.0, 1.2]),
        ("from_flow_grpo", {}, [0.0, 255.0, 51.0]),
        ("from_flow_factory", {"images": "pil"}, [0.0, 255.0, 51.0]),
    ],
)
def test_an_adapter_returns_the_scores_of_their_reward(function, options, scores):
    reward = PythonReward(f"adapters:{function}", **options)
    assert reward.check() == []
    assert reward(IMAGES, ["a", "b", "c"], [{}, {"bonus": 2}, {}]).tolist() == pytest.approx(scores)


def test_flow_grpos_metadata_are_rows_of_geneval():
    row = {"tag": "counting", "include": [{"class": "cat", "count": 2}], "exclude": [{"class": "cat", "count": 3}]}
    Path("train_metadata.jsonl").write_text(json.dumps({**row, "prompt": "a photo of two cats"}) + "\n")
    (read,) = read_prompts("train_metadata.jsonl")
    assert read == {**row, "prompt": "a photo of two cats"}
    assert GenEval().prompt_error(read["prompt"], read) is None


def test_flow_factorys_pictures_are_found(monkeypatch):
    Path("images").mkdir()
    for name in ("a.png", "b.png"):
        Path("images", name).write_bytes(encode_png(torch.zeros(3, 8, 8, dtype=torch.uint8)))
    rows = [{"prompt": "make it red", "image": "a.png", "clue": 30}, {"prompt": "join", "images": ["a.png", "b.png"]}]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(sys, "argv", ["convert_pictures.py", "train.jsonl"])
    exec(PICTURES, {})
    first, second = read_prompts("train_pictures.jsonl")
    assert (Path(first["image"]).name, first["clue"]) == ("a.png", 30)
    assert [Path(file).name for file in second["image"]] == ["a.png", "b.png"]


def test_trls_prompts_and_settings_train(unet_folder):
    exec(PROMPTS, {})
    assert read_prompts("prompts.jsonl") == [{"prompt": "cat"}, {"prompt": "dog", "bonus": 2}]
    RECIPE["model"]["policy"]["init_args"] |= {"checkpoint": str(unet_folder("epsilon")), "dtype": "float32"}
    Path("mine.yaml").write_text(yaml.safe_dump(RECIPE))
    small = ["data.heldout=prompts.jsonl", "data.heldout_fraction=null", "data.prompts_per_iteration=2"]
    small += ["data.updates_per_iteration=2", "data.micro_batch_size=4", "trainer.accelerator=cpu"]
    small += ["model.objective.rollout.steps=3", "trainer.max_epochs=1", "run_dir=out"]
    assert app(["run", "mine.yaml", *small], standalone_mode=False) == 0
    changed = ["model.objective=VGRPO", "model.objective.rollout.solver=ddim"]
    assert app(["check", "mine.yaml", *small, *changed], standalone_mode=False) == 0
