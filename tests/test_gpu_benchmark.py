"""``benchmarks/gpu.py`` on a CPU, with tiny sizes: every step of every part ends with figures."""

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
        for name in ("gpu", "overhead", "policy_speed"):
            sys.modules.pop(name, None)


SLOW = [pytest.param(part, marks=pytest.mark.slow) for part in ("runs", "memory", "answers", "race")]


@pytest.mark.parametrize("part", ["speed", "iteration", *SLOW])
def test_every_step_has_figures(gpu, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = gpu.measured(part, "cpu")
    assert [row for row in rows if "error" in row or not row["found"]] == []
    text = gpu.table(rows)
    for row in rows:
        assert f"{row['part']:<10} {row['what']}: " in text
    if part == "answers":
        same = {row["what"]: row["found"] for row in rows}
        assert set(same["float32, largest difference to the CPU"].values()) == {0.0}
        assert same["two runs of one recipe"]["largest difference"] == 0.0


def test_a_step_that_fails_is_a_row_and_the_next_goes_on(gpu, tmp_path, monkeypatch, capsys):
    def steps(place):
        yield "broken", lambda: 1 / 0
        yield "sound", lambda: {"seconds": 1.5}

    monkeypatch.setitem(gpu.PARTS, "runs", steps)
    rows = gpu.measured("runs", "cpu")
    assert gpu.table(rows) == (
        "runs       broken: FAILED, ZeroDivisionError: division by zero\nruns       sound: seconds 1.5"
    )


def test_parts_are_kept_and_failures_show_in_the_status(gpu, tmp_path, monkeypatch):
    ran = {
        "speed": [{"part": "speed", "what": "x", "found": {"s": 1.0}}],
        "race": [{"part": "race", "what": "y", "error": "no"}],
    }
    monkeypatch.setattr(gpu, "_in_its_own_process", lambda part, device: ran[part])
    out = tmp_path / "gpu.json"
    assert gpu.main(["--device", "cpu", "--parts", "speed", "--out", str(out)]) == 0
    assert gpu.main(["--device", "cpu", "--parts", "race", "--out", str(out)]) == 1
    kept = json.loads(out.read_text())
    assert [row["part"] for row in kept["rows"]] == ["speed", "race"]
    assert kept["device"].startswith("CPU (")
