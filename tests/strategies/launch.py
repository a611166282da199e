"""Starts worker.py as one process or two, as torchrun would, and ends all of them when one fails or hangs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from helpers import free_port

WORKER = Path(__file__).with_name("worker.py")


def launch(folder, sd3, runs, world, timeout_s=600):
    spec = folder / f"{runs[0]['name']}.json"
    spec.write_text(json.dumps({"folder": str(folder), "sd3": str(sd3), "runs": runs}))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "tests"}
    processes, logs = [], []
    for rank in range(world):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
        extra = {**address, **{key: str(value) for key, value in place.items()}} if world > 1 else {}
        logs.append(folder / f"{runs[0]['name']}.{rank}.log")
        with logs[-1].open("w") as log:
            command = [sys.executable, str(WORKER), str(spec)]
            processes.append(
                subprocess.Popen(command, env={**os.environ, **extra}, stdout=log, stderr=subprocess.STDOUT)
            )
    end = time.monotonic() + timeout_s
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            if any(process.poll() for process in processes):
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    for process, log in zip(processes, logs, strict=True):
        assert process.returncode == 0, f"exit status {process.returncode}\n{log.read_text()[-4000:]}"
