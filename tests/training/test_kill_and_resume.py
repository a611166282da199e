"""``kill -9`` and ``--resume`` through the command; benchmarks/kill_and_resume.py does it twenty times."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill_and_resume.py"
WORDS = [
    "trainer.max_epochs=8",
    "trainer.callbacks=[EMA,{class_path: RunCheckpoint, init_args: {every_n_iterations: 1}}]",
    "data.updates_per_iteration=2",
    "data.micro_batch_size=2",
]


@pytest.mark.slow
def test_a_run_that_is_killed_ends_like_one_undisturbed(tiny_recipe):
    options = ["--recipe", tiny_recipe, "--kills", "1", "--seed", "0", "--out", "out"]
    command = [sys.executable, SCRIPT, *options, *WORDS]
    done = subprocess.run(command, text=True, timeout=280, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(Path("out/kill_and_resume.json").read_text())
    assert result["differences"] == []
    assert result["while"] == {"starting": 0, "loading": 0, "training": 1}
