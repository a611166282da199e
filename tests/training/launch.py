"""Starts worker.py as one process or two, as torchrun would, and ends all of them when one fails or hangs."""

import json
from pathlib import Path

from processes import run_ranks

WORKER = Path(__file__).with_name("worker.py")


def launch(folder, sd3, runs, world, timeout_s=600):
    spec = folder / f"{runs[0]['name']}.json"
    spec.write_text(json.dumps({"folder": str(folder), "sd3": str(sd3), "runs": runs}))
    run_ranks(WORKER, spec, world=world, logs=folder, timeout_s=timeout_s)
