"""The alarm, the stop, the best checkpoint, the images kept for the report, and FID on two ranks."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from processes import run_ranks

from lit_vgrpo.metrics.looks import LOOKS
from lit_vgrpo.report.run_data import read_scores

WORKER = Path(__file__).with_name("rank_worker.py")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def spec(tmp_path_factory, tiny_sd3, script, real):
    return {"sd3": str(tiny_sd3), "out": str(tmp_path_factory.mktemp("ranks")), "script": script, "real": real}


@pytest.fixture(scope="module")
def ranks(spec):
    """Results of two ranks, and their folder."""
    out = Path(spec["out"])
    parts = {"guard": {**spec, "devices": 2, "strategy": "ddp"}, "fid": {**spec, "strategy": "zero3"}}
    (out / "spec.json").write_text(json.dumps(parts))
    run_ranks(WORKER, out / "spec.json", world=2, logs=out)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)], out


def test_both_stop_where_one_rank_says_so(ranks):
    found, out = ranks
    assert [rank["alarm"]["iterations"] for rank in found] == [2, 2]
    names = {path.name for path in (out / "alarm/checkpoints").iterdir()}
    assert names == {"last.ckpt", "previous.ckpt", "best.ckpt"}
    best = torch.load(out / "alarm/checkpoints/best.ckpt", weights_only=True)
    assert best["callbacks"]["RunCheckpoint"]["best"]["name"] == "heldout/reward"


@pytest.fixture(scope="module")
def alone(tmp_path_factory, tiny_sd3):
    """What one process found that did the same, and its folder."""
    out = tmp_path_factory.mktemp("alone")
    runpy.run_path(str(WORKER))["guard"]({"sd3": str(tiny_sd3), "out": str(out), "devices": 1})
    return json.loads((out / "0.json").read_text()), out


def test_diversity_counts_a_prompt_once_that_two_ranks_share(ranks, alone):
    """Five prompts of three images: rank 0 ends within a prompt."""
    found, alone = ranks[0], alone[0]
    assert found[0]["alarm"]["heldout"] == found[1]["alarm"]["heldout"]
    assert len({one["alarm"]["fingerprint"] for one in (alone, *found)}) == 1
    for name in LOOKS:
        of_one, of_two = (one["alarm"]["heldout"][f"heldout/{name}"] for one in (alone, found[0]))
        assert of_one == pytest.approx(of_two, rel=1e-2), name


def test_the_images_kept_for_the_report_are_those_of_one_process(ranks, alone):
    """Images of both ranks are among them, each once, with its own prompt and scores."""
    folders = [out / "alarm" / "report" for _, out in (ranks, alone)]
    tables = [json.loads((folder / "images.json").read_text()) for folder in folders]
    assert [table["of"] for table in tables] == [15, 15]
    entries = [{entry["image"]: entry for entry in table["images"]} for table in tables]
    assert entries[0].keys() == entries[1].keys()
    assert min(entries[0]) < 8 <= max(entries[0])  # the first eight are rank 0's
    for image, entry in entries[0].items():
        other = entries[1][image]
        assert (entry["prompt"], entry["reason"]) == (other["prompt"], other["reason"])
        assert entry["scores"] == pytest.approx(other["scores"], rel=1e-2)
        pixels = [
            np.asarray(Image.open(folder / one["file"])) for folder, one in zip(folders, (entry, other), strict=True)
        ]
        assert np.abs(pixels[0].astype(int) - pixels[1]).max() <= 2
    of_prompts = [list(read_scores(out / "alarm").values()) for _, out in (ranks, alone)]
    assert len(of_prompts[0]) == len(of_prompts[1]) == 3
    for two, one in zip(*of_prompts, strict=True):
        assert [count for _, count in two["reward"]] == [3] * 5
        assert [total for total, _ in two["reward"]] == pytest.approx([total for total, _ in one["reward"]], rel=1e-3)


def test_weights_that_break_on_one_rank_stop_both_before_anything_is_saved(ranks):
    found, out = ranks
    errors = [rank["broken"]["error"] for rank in found]
    assert errors[0].startswith("Weights are not finite after update 1 of iteration 2. Nothing was saved after it.")
    assert "Best checkpoint: RUN/checkpoints/best.ckpt (heldout/reward -0." in errors[0]
    assert errors[0] == errors[1]
    for path in Path(out, "broken/checkpoints").iterdir():
        saved = torch.load(path, weights_only=True)
        assert saved["global_step"] == 1
        assert all(value.isfinite().all() for value in saved["state_dict"].values())


def test_fid_of_two_ranks_is_that_of_one(spec, ranks):
    """21 held-out images do not divide by two; KID's subsets are of the same images."""
    _, out = ranks
    runpy.run_path(str(WORKER))["fid"]({**spec, "strategy": None})
    one = json.loads((out / "None-0.json").read_text())
    keys = ["heldout/fid@21", "heldout/kid@21"]
    first, second = (json.loads((out / f"zero3-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert len(one) == len(first) == 2
    for expected, found, tolerance in zip(one, first, (1e-4, 1e-3), strict=True):  # trained weights are rounded
        assert expected.keys() == found.keys()
        assert [found[key] for key in keys] == pytest.approx([expected[key] for key in keys], rel=tolerance)
