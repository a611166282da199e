"""``lightning eval``: the run's own numbers, the same on any number of ranks, with intervals that can be trusted."""

import hashlib
import json
import math
import os
import shutil
from contextlib import chdir
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from commands import evaluate, evaluate_options
from helpers import grey_level, read_csv
from PIL import Image
from processes import run_command
from saved_runs import assert_one_line, folder_with, train

from lit_vgrpo.cli.eval import results, table, write
from lit_vgrpo.cli.eval_scores import ImageScores
from lit_vgrpo.cli.saved_policy import ChosenRun
from lit_vgrpo.metrics.looks import LOOKS
from lit_vgrpo.training.folder import CONFIG_NAME

pytestmark = pytest.mark.slow

VARIANTS = ["EMA", "reference"]
EDITS = "data.heldout=shipped:prompts/edit_heldout.jsonl"
SAME = 4 * grey_level()  # a grey level in one of the quarters whose means are the features
IMAGES = 9  # an odd number, so that two ranks have unequal shares
RECIPE = """
seed_everything: 7
trainer:
  {max_epochs: 2, accelerator: cpu, devices: 1, callbacks: [{class_path: EMA, init_args: {decay: 0.5}},
  {class_path: FID, init_args: {reference: real, features: net.pt, kid: true}}]}
model:
  policy: {class_path: SD3Policy, init_args: {checkpoint: CHECKPOINT, max_sequence_length: 1}}
  objective:
    class_path: VGRPO
    init_args: {num_mc_samples: 2, anchor_weight: 1.0, anchor_decay: 0.3, rollout: {steps: 2}}
  reward:
    class_path: Weighted
    init_args:
      rewards: [helpers.Brightness, JPEGCompressibility, {class_path: ShapesReward, init_args: {check: colour}}]
      weights: [1, 0, 0]
  optimizer: {lr: 1.0e-2}
data:
  {train: train.txt, heldout: heldout.txt, heldout_images_per_prompt: 3, eval_batch_size: 3,
  prompts_per_iteration: 2, group_size: 2, micro_batch_size: 4}
"""


class Pools(torch.nn.Module):
    """A small feature network: colours of a 2 x 2 grid."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(pixels / 255, 2).flatten(1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_sd3):
    """A folder with a finished run of two iterations, runs/tiny, and the same one without callbacks, runs/plain."""
    place = tmp_path_factory.mktemp("evaluate")
    with folder_with(place, RECIPE, tiny_sd3, ["a red circle on the left", "a blue square at the top"]):
        # no colour in the last prompt: its images have no score for that
        heldout = ["a green circle on the right", "a red square at the bottom", "something else"]
        Path("heldout.txt").write_text("\n".join(heldout))
        Path("real").mkdir()
        for number, picture in enumerate(np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)):
            Image.fromarray(picture).save(f"real/{number}.png")
        torch.jit.script(Pools()).save("net.pt")
        train()
        train("name=plain", "trainer.callbacks=[]")
    return place


@pytest.fixture
def inside(trained, monkeypatch):
    """The same folder as the working directory; what an evaluation wrote is removed afterwards."""
    monkeypatch.chdir(trained)
    yield trained
    for path in trained.glob("runs/*/eval*"):
        path.unlink()


@pytest.fixture(scope="module")
def evaluated(trained):
    """The report and the rows of one evaluation of the average and the reference."""
    with chdir(trained):
        assert evaluate(["runs/tiny", "--reference", "--out=whole.json"]) == 0
    return json.loads((trained / "whole.json").read_text()), read_csv(trained / "whole.csv")


def means(report, variant):
    return {name: found["mean"] for name, found in report["variants"][variant]["means"].items()}


def summary(name):
    return json.loads(Path(f"runs/{name}/summary.json").read_text())


def files(folder):
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_the_numbers_are_those_of_the_run(inside, evaluated):
    report, _ = evaluated
    end = summary("tiny")
    assert list(report["variants"]) == VARIANTS
    assert means(report, "EMA")["reward"] == pytest.approx(end["heldout_reward_end"], abs=SAME)
    assert means(report, "reference")["reward"] == pytest.approx(end["heldout_reward_start"], abs=SAME)
    assert evaluate(["runs/tiny", "--no-ema"]) == 0
    raw = json.loads(Path("runs/tiny/eval.json").read_text())
    assert list(raw["variants"]) == ["trained"]
    assert means(raw, "trained")["reward"] == pytest.approx(summary("plain")["heldout_reward_end"], abs=SAME)
    rewards = {means(found, variant)["reward"] for found in (report, raw) for variant in found["variants"]}
    assert len(rewards) == 3
    found = {**means(report, "EMA"), **report["variants"]["EMA"]["distances"]}
    assert end["heldout_metrics_end"].keys() == end["heldout_metrics_start"].keys()
    assert end["heldout_metrics_end"].pop("failed") == 3  # the last prompt names no colour
    for name in LOOKS:  # how the images changed in training
        end["heldout_metrics_end"].pop(name, None)
    for name, value in {**end["reward_parts_end"], **end["heldout_metrics_end"]}.items():
        assert found[name] == pytest.approx(value, abs=SAME), name
    assert list(end["reward_parts_end"]) == list(report["rewards"])
    assert end["heldout_metrics_end"].keys() - report["rewards"].keys() == {"reward", f"fid@{IMAGES}", f"kid@{IMAGES}"}
    # The JSON says what was evaluated.
    assert report["checkpoint"] == {"file": "runs/tiny/checkpoints/last.ckpt", "iteration": 2, "optimizer_steps": 2}
    assert report["prompts"] == {
        "file": "heldout.txt",
        "sha256": hashlib.sha256(Path("heldout.txt").read_bytes()).hexdigest(),
        "count": 3,
        "images_per_prompt": 3,
        "images": IMAGES,
    }
    assert report["seed"] == 7
    untrained = {name: about["untrained"] for name, about in report["rewards"].items()}
    assert untrained == {"brightness": False, "jpeg": True, "colour": True}
    assert "jpeg (untrained) " in table(report)
    assert "brightness" not in table(report)  # the only trained one: the reward's line has its numbers


def test_the_csv_has_a_line_for_every_image_and_failed_ones_are_counted_and_left_out(evaluated):
    report, scores = evaluated
    colour = report["variants"]["EMA"]["means"]["colour"]
    assert (colour["count"], colour["failed"]) == (6, 3)
    assert report["variants"]["EMA"]["means"]["reward"]["failed"] == 0
    assert [row["colour"] for row in scores if row["prompt"] == "something else"] == [""] * 6
    assert any(line.split() == ["failed:", "colour", "3", "3"] for line in table(report).splitlines())

    assert list(scores[0]) == ["prompt", "image", "variant", "reward", "brightness", "jpeg", "colour"]
    for variant in VARIANTS:
        own = [row for row in scores if row["variant"] == variant]
        assert [int(row["image"]) for row in own] == list(range(IMAGES))
        assert np.mean([float(row["jpeg"]) for row in own]) == pytest.approx(means(report, variant)["jpeg"], abs=SAME)
    start = {row["image"]: float(row["reward"]) for row in scores if row["variant"] == "reference"}
    pairs = [float(row["reward"]) - start[row["image"]] for row in scores if row["variant"] == "EMA"]
    assert report["difference_to_reference"]["EMA"]["reward"]["mean"] == pytest.approx(np.mean(pairs), abs=SAME)


def test_two_ranks_find_the_same(inside, evaluated):
    """Under ZeRO-3, which shards the weights too."""
    report, scores = evaluated
    words = ["runs/tiny", "--reference", "--out=two.json", "trainer.devices=2", "trainer.strategy=zero3"]
    support = str(Path(__file__).parents[1] / "support")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([support, os.environ.get("PYTHONPATH", "")])}
    try:
        done = run_command("eval", *words, env=env)
        assert done.returncode == 0, done.stderr[-3000:]
        two = json.loads(Path("two.json").read_text())
        assert two["world_size"] == 2
        assert sorted(path.name for path in inside.glob("two*")) == ["two.csv", "two.json"]
        for variant in VARIANTS:
            assert means(two, variant) == pytest.approx(means(report, variant), abs=SAME)
            for name, value in report["variants"][variant]["distances"].items():
                assert two["variants"][variant]["distances"][name] == pytest.approx(value, abs=SAME)
        for ours, theirs in zip(scores, read_csv("two.csv"), strict=True):
            for name, text in ours.items():
                if name in ("prompt", "variant", "image") or text == "":
                    assert theirs[name] == text
                else:
                    assert float(theirs[name]) == pytest.approx(float(text), abs=SAME)
    finally:
        for path in inside.glob("two*"):
            path.unlink()


def scored(total, features=None):
    images = pd.DataFrame({"prompt": "p", "image": range(len(total)), "reward": total})
    return ImageScores(images.assign(part=2 * images["reward"]), features=features)


def test_differences_are_taken_image_by_image():
    start, end = scored([0.0, 1.0, 5.0, math.nan]), scored([1.0, 2.0, math.nan, 3.0])
    found = results({"trained": end, "reference": start}, ["a", "b", "b", "b"])
    difference = found["difference_to_reference"]
    assert list(difference) == ["trained"]
    # pairs: 1 and 1; the other two images failed on one side each
    assert difference["trained"]["reward"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "count": 2, "failed": 2}
    assert difference["trained"]["part"]["mean"] == 2.0
    assert found["variants"]["trained"]["means"]["reward"]["mean"] == 2.0


def test_an_interval_resamples_prompts_and_diversity_is_the_distance_within_a_prompt():
    # within a prompt all images are alike, so that sixteen images of four rows say no more than two prompts do
    found = results({"trained": scored(([0.0] * 4 + [1.0] * 4) * 2)}, ([*"aaaabbbb"]) * 2)["variants"]["trained"][
        "means"
    ]
    assert (found["reward"]["low"], found["reward"]["mean"], found["reward"]["high"]) == (0.0, 0.5, 1.0)
    across, up, unsound = [1.0, 0.0], [0.0, 1.0], [math.nan, 0.0]
    features = torch.tensor([across, up, unsound, across, across, across, unsound, up, unsound])
    found = results({"trained": scored([1.0] * 9, features)}, [*"aaabbbccc"])["variants"]["trained"]["means"]
    # distances 1 and 0; the third prompt has one sound image
    assert found["diversity"] == {"mean": 0.5, "low": 0.0, "high": 1.0, "count": 2, "failed": 1}


def test_shares_of_ranks_are_put_in_order():
    first, second = scored([0.0, 1.0], torch.tensor([[0.0], [1.0]])), scored([2.0, 3.0], torch.tensor([[2.0], [3.0]]))
    first.images["image"], second.images["image"] = [3, 1], [0, 2]
    joined = ImageScores.joined([first, second])
    assert joined.images["image"].tolist() == [0, 1, 2, 3]
    assert joined.images["reward"].tolist() == joined.features[:, 0].tolist() == [2.0, 1.0, 3.0, 0.0]
    assert joined.images["part"].tolist() == [4.0, 2.0, 6.0, 0.0]


def test_nothing_of_the_run_changes_and_no_evaluation_is_overwritten(inside, capsys):
    before = files("runs/tiny")
    assert evaluate(["runs/tiny"]) == 0
    assert list(json.loads(Path("runs/tiny/eval.json").read_text())["variants"]) == ["EMA"]
    first = files("runs/tiny")
    assert first.keys() - before.keys() == {"runs/tiny/eval.json", "runs/tiny/eval.csv"}
    Path("train.txt").rename("away.txt")  # the training prompts are not needed
    try:
        assert evaluate(["runs/tiny/config.yaml", "data.heldout_images_per_prompt=1"]) == 0
    finally:
        Path("away.txt").rename("train.txt")
    second = files("runs/tiny")
    assert second.keys() - first.keys() == {"runs/tiny/eval-2.json", "runs/tiny/eval-2.csv"}
    assert {path: second[path] for path in first} == first
    assert "Written: runs/tiny/eval-2.json and runs/tiny/eval-2.csv" in capsys.readouterr().out
    report = json.loads(Path("runs/tiny/eval-2.json").read_text())
    assert report["overrides"] == ["data.heldout_images_per_prompt=1"]
    assert "diversity" not in means(report, "EMA")  # of a single image per prompt
    assert sorted(path.name for path in inside.iterdir() if path.name.startswith("runs")) == ["runs"]


@pytest.mark.parametrize("name", ["eval.csv", "eval.json"])
def test_a_file_that_is_there_is_kept(tmp_path, name):
    (tmp_path / name).write_text("mine")
    written = write({}, {"trained": scored([1.0])}, tmp_path / "eval.json")
    assert [path.name for path in written] == ["eval-2.json", "eval-2.csv"]
    assert (tmp_path / name).read_text() == "mine"


def test_fid_and_diversity_that_the_recipe_does_not_have(inside, evaluated):
    report, _ = evaluated
    base = ["runs/plain", "--reference", "--out=runs/plain/eval-x.json"]
    assert evaluate([*base, "--fid-reference", "real", "--features", "net.pt"]) == 0
    found = json.loads(Path("runs/plain/eval-x.json").read_text())["variants"]
    assert list(found) == ["trained", "reference"]  # the run has no average
    distances = report["variants"]["reference"]["distances"]
    assert found["reference"]["distances"] == pytest.approx(distances, abs=SAME)
    diversity = found["reference"]["means"]["diversity"]["mean"]
    assert diversity == pytest.approx(means(report, "reference")["diversity"], abs=SAME)


def test_a_clip_network_measures_the_similarity_of_image_and_prompt(inside, tiny_clip):
    reward = f"{{class_path: CLIPScore, init_args: {{checkpoint: {tiny_clip}}}}}"
    found = []
    for words in (["--features", str(tiny_clip)], [f"model.untrained_reward={reward}"]):
        assert evaluate(["runs/plain", "--out=runs/plain/eval-clip.json", *words]) == 0
        path = max(Path("runs/plain").glob("eval-clip*.json"), key=lambda file: file.stat().st_mtime_ns)
        report = json.loads(path.read_text())
        assert report["rewards"]["clipscore"] == {"weight": 0.0, "untrained": True}
        found.append(report["variants"]["trained"]["means"]["clipscore"])
    assert found[0] == found[1]
    assert (found[0]["count"], found[0]["failed"]) == (IMAGES, 0)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["runs/tny"], "runs/tny is not a run. Did you mean runs/tiny?"),
        (["tiny_shapes"], "tiny_shapes is not a run. If it is a recipe, train it first: lightning run tiny_shapes"),
        (["runs/tiny", "--out=x.csv"], "--out x.csv is not a JSON file. Use --out x.json."),
        (["runs/tiny", "--out=train.txt/x.json"], "Cannot write train.txt/x.json: Not a directory. Choose another"),
        (["runs/tiny", "--checkpoint=lst.ckpt"], "--checkpoint lst.ckpt does not exist. Did you mean last.ckpt?"),
        (["runs/tiny", "model.optimizer.lr=1"], "model.optimizer.lr has no effect on an evaluation."),
        (["runs/tiny", "ckpt_path=x"], "ckpt_path has no effect on an evaluation. Use --checkpoint FILE."),
        (["runs/tiny", "data.heldout=shapes"], "data.heldout: shapes does not exist."),
        (["runs/tiny", EDITS], "data.heldout: SD3Policy cannot edit pictures, but row 1 of the held-out prompts"),
        (["runs/tiny", "data.heldout=null"], "The run's recipe has no held-out prompts. Set data.heldout=prompts.txt."),
        (["runs/tiny", "--features=none.pt"], "none.pt does not exist."),
        (["runs/tiny", "--fid-reference=none"], "reference=none is neither a folder nor"),
        (["runs/tiny", "trainer.precision=bf16-true"], "trainer.precision=bf16-true would cast the trained weights."),
        (["runs/tiny", "model.policy.lora_rank=2"], "is a checkpoint of a different policy: "),
    ],
)
def test_mistakes_are_one_line(inside, capsys, words, line):
    assert_one_line(evaluate, words, capsys, line)
    assert not list(Path("runs").glob("*/eval*"))


def test_a_checkpoint_names_its_run_and_a_run_without_one_is_refused(inside, tmp_path, capsys):
    shutil.copy(f"runs/tiny/{CONFIG_NAME}", tmp_path)
    assert_one_line(evaluate, [str(tmp_path)], capsys, f"{tmp_path} has no checkpoint yet. Train it: ")
    path = Path("runs/tiny/checkpoints/last.ckpt")
    found = ChosenRun.of(evaluate_options([str(path), "strategy/zero2", "data.eval_batch_size=4"]))
    assert (f"{found.folder}", f"{found.checkpoint}") == ("runs/tiny", str(path))
    assert found.words == ["strategy/zero2", "data.eval_batch_size=4"]
    assert f"{ChosenRun.of(evaluate_options(['runs/tiny', '--checkpoint', 'last.ckpt'])).checkpoint}" == str(path)
