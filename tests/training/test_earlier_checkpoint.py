"""A run that an earlier version left, whose modules had other names, goes on."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from commands import run

EARLIER = Path(__file__).parent / "assets" / "run_of_an_earlier_layout"
"""One iteration of V-GRPO with an anchor on the tiny SD3, LoRA of rank 1; written at commit b830369."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EARLIER, tmp_path / "runs" / "before")
    return tmp_path / "runs" / "before"


def test_it_goes_on(folder, capfd):
    before = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    (first,) = csv.DictReader((folder / "metrics.csv").open())
    more = [str(folder / "config.yaml"), "--resume", "trainer.max_epochs=2"]
    assert run(more) == 2
    (advice,) = (line for line in capfd.readouterr().err.splitlines() if "no longer pulls to the anchor" in line)
    assert run([*more, *re.findall(r"[\w.]+=[\w.]+", advice)[1:]]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["outcome"], summary["iterations"], summary["optimizer_steps"], summary["images"]) == (
        "finished",
        2,
        2,
        8,
    )
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    assert len(rows) == 2
    assert first.items() <= rows[0].items()
    after = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert after["state_dict"].keys() == before["state_dict"].keys()
    assert after["lit_vgrpo"].keys() == before["lit_vgrpo"].keys()
    assert any(not value.equal(after["state_dict"][name]) for name, value in before["state_dict"].items())
    assert "Continuing from" in capfd.readouterr().out
