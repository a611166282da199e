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
        for name in ("gpu", "overhead", "policy_speed", "real_architectures"):
            sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["speed", "iteration", "runs", "memory", "answers"])
def test_every_step_has_figures(gpu, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gpu.measured(part, "cpu", str(tmp_path), "48", ",".join(gpu.Place.recipes), tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row for row in rows if "error" in row or not row["found"]] == []
    text = gpu.table(rows)
    for row in rows:
        assert f"{row['part']:<10} {row['what']}: " in text
    if part == "answers":
        same = {row["what"]: row["found"] for row in rows}
        assert set(same["float32, largest difference to the CPU"].values()) == {0.0}
        assert same["two runs of one recipe"]["largest difference"] == 0.0
