"""Runs of modular pipelines: resumed like undisturbed ones, and drawn by plain diffusers with the printed lines."""

from contextlib import chdir
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
import zoo
from commands import run
from saved_runs import assert_resumed_alike, draw_exports

from lit_vgrpo.data import read_prompts

NAMES = ("Flux3ModularPipeline", "StableDiffusion3ModularPipeline", "ErnieImageModularPipeline")
"""One without a scheduler in its index, one that needs a negative prompt, and one without a loader of adapters."""
CASES = [(name, option) for name in NAMES for option in ("", "--merge")]
RECIPE = """
seed_everything: 7
trainer: {accelerator: cpu, devices: 1, callbacks: [{class_path: EMA, init_args: {decay: 0.5}}]}
model:
  objective: {class_path: VGRPO, init_args: {num_mc_samples: 1, kl_weight: 0.5, rollout: {steps: 2, guidance: 2.0}}}
  reward: JPEGCompressibility
  optimizer: {lr: 0.1, warmup_steps: 0}
data:
  train: shipped:prompts/shapes_train.jsonl
  prompts_per_iteration: 2
  group_size: 4
  updates_per_iteration: 2
  micro_batch_size: 4
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """``runs(name)``: a folder with a run ``whole``, and a run ``half`` that was resumed after one iteration."""

    @cache
    def made(name):
        folder = tmp_path_factory.mktemp(name)
        zoo.save(name, folder / "draft")
        checkpoint = (folder / "draft").rename(folder / "pipeline")  # its index names the draft
        recipe = yaml.safe_load(RECIPE)
        options = {"lora_rank": 2, "height": 32, "width": 32, "call": dict(zoo.ZOO[name].options)}
        recipe["model"]["policy"] = {"checkpoint": str(checkpoint), **options}
        with chdir(folder):
            Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
            assert run(["recipe.yaml", "run_dir=whole", "trainer.max_epochs=2"]) == 0
            assert run(["recipe.yaml", "run_dir=half", "trainer.max_epochs=1"]) == 0
            assert run(["half/config.yaml", "--resume", "trainer.max_epochs=2"]) == 0
        return folder

    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_ends_like_one_undisturbed(runs, name):
    assert_resumed_alike(runs(name))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "option"), CASES)
def test_plain_diffusers_draws_what_a_run_trained(runs, name, option, tmp_path):
    row = read_prompts("shipped:prompts/shapes_train.jsonl")[0]
    ((theirs, ours, start),) = draw_exports(
        [(runs(name), "whole", "EMA", [option] if option else [], row, {"solver": "euler"})], tmp_path
    )
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=2e-4)
    assert (ours - start).abs().max() > 0.02  # what was trained shows
