"""``benchmarks/gpu.py`` on a CPU, with tiny sizes: every step of a part ends with figures.

The race is ``lightning compare``, which apps/compare/test_compare.py runs.
"""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def gpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import gpu

        yield gpu
        for name in ("gpu", "as_typed", "overhead", "policy_speed", "real_architectures"):
            sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [
        "speed",
        "iteration",
        "runs",
        "memory",
        "answers",
        "peaks",
        pytest.param("as_typed", marks=pytest.mark.timeout(900)),
    ],
)
def test_every_step_has_figures(gpu, part, here):
    words = ("cpu", str(here), "48", ",".join(gpu.Place.recipes), str(BENCHMARKS.parent), "540")
    gpu.measured(part, *words, here / "rows.json")
    rows = json.loads((here / "rows.json").read_text())
    assert [row for row in rows if "error" in row or not row["found"]] == []
    text = gpu.table(rows)
    for row in rows:
        assert f"{row['part']:<10} {row['what']}: " in text
    if part == "answers":
        same = {row["what"]: row["found"] for row in rows}
        assert set(same["float32, largest difference to the CPU"].values()) == {0.0}
        assert same["two runs of one recipe"]["largest difference"] == 0.0
    if part == "as_typed":
        failed = [row["name"] for row in json.loads(rows[0]["found"]["rows"]) if "error" in row]
        assert failed in ([], ["attention: cuDNN"])  # which a CPU lacks
        found = (here / "as_typed.md").read_text()
        for name in ("before", "now", "compile: auto", "VAE compiled", "Defaults to move"):
            assert name in found


def test_a_default_moves_if_its_switch_saves_three_percent_and_breaks_nothing(gpu):
    import as_typed

    phases = {"rollout": 6.0, "decode": 2.0, "reward": 1.0, "update": 1.0}
    halved = {name: value / 2 for name, value in phases.items()}
    decode = {"part": "switch", "phase": "decode", "times": 1.25, "levels": 0.4}
    rows = [
        {"part": "run", "name": "before", "phases": {**phases, "rollout": 16.0}, "recompiled": 0, "wall": 9.0},
        {"part": "run", "name": "now", "phases": phases, "recompiled": 0, "wall": 9.0},
        {"part": "run", "name": "compile: true", "phases": halved, "recompiled": 3, "wall": 9.0},
        {"part": "run", "name": "compile: auto", "phases": halved, "recompiled": 0, "wall": 9.0},
        {**decode, "name": "small"},
        {**decode, "name": "coarse", "levels": 0.5},
        {**decode, "name": "slow", "times": 1.17},
        {"part": "switch", "name": "ranks", "phase": "reward", "times": 2.0, "rank correlation": 0.9989},
        {"part": "failed", "name": "absent", "error": "RuntimeError: none"},
    ]
    text = as_typed.report(rows, "a card")
    assert "0.500 times as long as before" in text
    assert "| absent | | | | failed: RuntimeError: none |" in text
    assert text.split("or more:\n\n")[1].splitlines() == [
        "- compile: true: 50.0%, but not: 3 graphs compiled after the first iteration.",
        "- compile: auto: 50.0%.",
        "- small: 4.0%.",
        "- coarse: 4.0%, but not: 0.50 grey levels.",
        "- ranks: 5.0%, but not: rank correlation 0.9989.",
    ]


def test_ranks_are_compared_whatever_the_values(gpu):
    import as_typed
    import torch

    one = torch.tensor([3.0, 1.0, 2.0, 4.0])
    assert as_typed.rank_correlation(one, one.exp()) == pytest.approx(1)
    assert as_typed.rank_correlation(one, -one) == pytest.approx(-1)
    assert as_typed.rank_correlation(one, torch.tensor([3.0, 2.0, 1.0, 4.0])) == pytest.approx(0.8)
