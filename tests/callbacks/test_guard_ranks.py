"""The alarm, the stop and the best checkpoint on two ranks: all of them do the same."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from processes import run_ranks

WORKER = Path(__file__).with_name("guard_worker.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, tiny_sd3):
    """What each of two ranks found, and their folder."""
    out = tmp_path_factory.mktemp("ranks")
    spec = out / "spec.json"
    spec.write_text(json.dumps({"sd3": str(tiny_sd3), "out": str(out), "devices": 2, "strategy": "ddp"}))
    run_ranks(WORKER, spec, world=2, logs=out)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)], out


def test_both_stop_where_one_rank_says_so(ranks):
    found, out = ranks
    assert [rank["alarm"]["iterations"] for rank in found] == [2, 2]
    names = {path.name for path in (out / "alarm/checkpoints").iterdir()}
    assert names == {"last.ckpt", "previous.ckpt", "best.ckpt"}
    best = torch.load(out / "alarm/checkpoints/best.ckpt", weights_only=True)
    assert best["callbacks"]["RunCheckpoint"]["best"]["name"] == "heldout/reward"


def test_diversity_counts_a_prompt_once_that_two_ranks_share(ranks, tiny_sd3, tmp_path):
    """Five prompts of three images: rank 0 ends within a prompt."""
    found, _ = ranks
    assert found[0]["of_prompts"] == found[1]["of_prompts"]
    assert found[0]["alarm"]["heldout"] == found[1]["alarm"]["heldout"]
    spec = {"sd3": str(tiny_sd3), "out": str(tmp_path), "devices": 1}
    runpy.run_path(str(WORKER))["main"](spec)
    alone = json.loads((tmp_path / "0.json").read_text())
    assert len(alone["of_prompts"]) == 5
    assert alone["of_prompts"] == pytest.approx(found[0]["of_prompts"], rel=1e-3)


def test_weights_that_break_on_one_rank_stop_both_before_anything_is_saved(ranks):
    found, out = ranks
    errors = [rank["broken"]["error"] for rank in found]
    assert errors[0].startswith("Weights are not finite after update 1 of iteration 1; nothing was saved since.")
    assert "Best checkpoint: RUN/checkpoints/best.ckpt (heldout/reward 0." in errors[0]
    assert errors[0] == errors[1]
    for path in Path(out, "broken/checkpoints").iterdir():
        saved = torch.load(path, weights_only=True)
        assert saved["global_step"] == 1
        assert all(value.isfinite().all() for value in saved["state_dict"].values())
