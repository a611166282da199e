"""Run the tests under other CPU kernels and other numbers of threads.

    python benchmarks/cpu_settings.py                               # all of `make test`, once for each setting
    python benchmarks/cpu_settings.py tests/training/test_ranks.py  # or what pytest is given

Prints a table, and ends with status 1 where a test failed. A setting that this machine does not know changes nothing:
``ATEN_CPU_CAPABILITY=avx512`` on a CPU without, say.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

SETTINGS: list[dict[str, str]] = [
    {},
    # torch packs bfloat16 by what oneDNN finds, which must not be more than its own kernels then know
    {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"MKL_CBWR": "COMPATIBLE"},
    {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"},  # threads that wait would spin on the cores of the others
]
PYTEST = ["-m", "pytest", "-q", "--dist", "worksteal", "-m", "not slow"]
THREADS = 2
"""Of all workers together; what tests start comes on top."""
ROOT = Path(__file__).parents[1]


def main(words: list[str]) -> int:
    print("| setting | passed | failed | skipped | minutes |\n|---|--:|--:|--:|--:|", flush=True)
    failed = [name for setting in SETTINGS for name in run(setting, words)]
    return int(bool(failed))


def run(setting: dict[str, str], words: list[str]) -> list[str]:
    """Print a row of the table, and what failed in full to stderr; the names of those tests."""
    start, label = time.monotonic(), " ".join(f"{name}={value}" for name, value in setting.items()) or "as it is"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **setting}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        workers = str(THREADS // int(environment["OMP_NUM_THREADS"]))
        command = [sys.executable, *PYTEST, "-n", workers, f"--junitxml={report}", *words]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    found = {kind: [case for case in cases if case.find(kind) is not None] for kind in ("failure", "error", "skipped")}
    failed = {f"{case.get('classname')}::{case.get('name')}": case for case in found["failure"] + found["error"]}
    broken = list(failed)
    if done.returncode and not broken:
        broken = [f"pytest ended with status {done.returncode}\n{done.stdout[-5000:]}\n{done.stderr[-2000:]}"]
    passed = len(cases) - sum(map(len, found.values()))
    counts = f"{passed} | {len(broken)} | {len(found['skipped'])}"
    print(f"| `{label}` | {counts} | {(time.monotonic() - start) / 60:.1f} |", flush=True)
    if broken:
        texts = [f"--- {name}\n{''.join(case.itertext())[-3000:]}" for name, case in failed.items()]
        print("\n".join([f"--- {label}", *broken, *texts]), file=sys.stderr, flush=True)
    return broken


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
