"""``benchmarks/race.py``: the costs of finished races in one file."""

import importlib.util
import json
from pathlib import Path

import pandas as pd
import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
COLUMNS = ["task", "settings", "method", "seed", "target", "iterations", "equivalents", "cpu_seconds"]


@pytest.fixture
def race(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("race", BENCHMARKS / "race.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def test_a_race_replaces_its_rows_leaves_empty_what_was_not_reached_and_skips_killed_runs(race, tmp_path):
    costs = ("iteration", "cpu_seconds", "train_seconds", "passes", "forward_equivalents", "images")
    evaluations = [dict.fromkeys(costs, 10.0 * n) | {"reward": 0.5 + 0.2 * n} for n in range(2)]
    run = {"method": "nft", "settings": "published", "seed": 3, "evaluations": evaluations, "error": ""}
    killed = run | {"seed": 4, "evaluations": evaluations[:1], "error": "killed"}
    (tmp_path / "runs").mkdir()
    content = {"command": "lightning compare tiny_shapes --methods nft", "runs": [run, killed]}
    (tmp_path / "runs" / "compare.json").write_text(json.dumps(content))
    for _ in range(2):
        race.add(tmp_path / "runs", "mine", [0.6, 0.8])
    lines = (tmp_path / "race.csv").read_text().splitlines()
    assert lines[1:] == ["tiny_shapes,mine,nft,3,0.6,5.0,5.0,5.0", "tiny_shapes,mine,nft,3,0.8,,,"]


def test_the_committed_races_have_a_row_per_run_and_target():
    table = pd.read_csv(BENCHMARKS / "results" / "race.csv")
    assert list(table.columns) == COLUMNS
    assert not table.duplicated(COLUMNS[:5]).any()
    assert (table["iterations"].isna() == table["cpu_seconds"].isna()).all()
