"""1,000 requests to a served reward, 5 % of them disturbed: nothing lost, nothing scored 0, and all of it counted.

    python benchmarks/remote_faults.py                    # 1,000 requests of 4 images
    python benchmarks/remote_faults.py --run              # also as the reward of a training run, against its log
    python benchmarks/remote_faults.py --requests 200 --share 0.2 --seed 3

A real ``lightning serve-reward JPEGCompressibility`` stands behind a proxy that hangs, resets the connection, answers
500 or garbage, as the seed has it, and counts what it did. Prints a table and writes
``benchmarks/results/remote_faults.json``. The status is 0 when every score equals the local one bit for bit and the
reward, or the run's metrics.csv, counts exactly what the proxy did.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
import fault_server

from lit_vgrpo.rewards import Connection, HTTPReward, JPEGCompressibility

RESULTS = Path(__file__).parent / "results" / "remote_faults.json"
FAULTS = {
    "hang": (fault_server.hang, "timeout"),
    "reset": (fault_server.reset, "unreachable"),
    "500": (fault_server.answering(b"injected", 500), "status_500"),
    "garbage": (fault_server.answering(b'{"version": 1, "scores": [0, 0, 0, '), "invalid"),
}
"""Faults with the cause that each is counted under."""
TIMEOUT_S = 5.0  # far more than an answer takes, so that nothing but a fault is counted
SIDE = 64
IMAGES_PER_REQUEST = 4
REQUESTS_PER_CALL = 25
RUN_OVERRIDES = [
    "data.prompts_per_iteration=4",
    "data.group_size=10",
    "data.micro_batch_size=40",
    "data.updates_per_iteration=1",
    "data.heldout=null",
    "trainer.callbacks=[]",
]
RUN_IMAGES = 40


class Proxy(fault_server.FaultServer):
    """Forwards posts to a server, except for a share of them.

    Args:
        target: address of the server.
        share: share of the requests that are disturbed.
        seed: seed of their choice, in order of arrival.
    """

    def __init__(self, target: str, share: float, seed: int) -> None:
        super().__init__(then=self.forward_or_disturb)
        self.target = target
        self.share = share
        self.dice = random.Random(seed)
        self.injected: Counter[str] = Counter()
        self.onward = httpx.Client(timeout=60)

    def forward_or_disturb(self, handler: Any) -> None:
        with self.lock:
            self.requests.clear()
            fault = self.dice.choice(sorted(FAULTS)) if self.dice.random() < self.share else None
            if fault is not None:
                self.injected[fault] += 1
        if fault is not None:
            FAULTS[fault][0](handler)
            return
        headers = {"Content-Type": handler.headers["Content-Type"]}
        answer = self.onward.post(self.target, content=handler.body, headers=headers)
        handler.answer(answer.content, answer.status_code)

    def expected_counts(self) -> dict[str, int]:
        """Return what the reward has to count."""
        counts = {FAULTS[fault][1]: count for fault, count in self.injected.items()}
        return dict(sorted({**counts, "retried": sum(counts.values())}.items())) if counts else {}


def images_of(call: int) -> torch.Tensor:
    """Smooth pictures with some noise, all different, shape ``(B, 3, H, W)`` in [0, 1]."""
    generator = torch.Generator().manual_seed(call)
    count = REQUESTS_PER_CALL * IMAGES_PER_REQUEST
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=SIDE, mode="bilinear")
    noise = torch.rand(count, 1, 1, 1, generator=generator) * torch.rand(count, 3, SIDE, SIDE, generator=generator)
    return (smooth * 0.7 + noise * 0.3).clamp(0, 1).mul(255).round() / 255


def direct(url: str, requests: int, proxy: Proxy | None) -> dict[str, Any]:
    """Score through ``url`` and locally, and compare."""
    connection = Connection(timeout_s=TIMEOUT_S, backoff_s=0.05, retries=6, max_connections=8)
    remote = HTTPReward(url, batch_size=IMAGES_PER_REQUEST, connection=connection)
    remote.load()
    local = JPEGCompressibility()
    lost = different = zero = images = 0
    counts: Counter[str] = Counter()
    seconds = 0.0
    for call in range(requests // REQUESTS_PER_CALL):
        batch = images_of(call)
        prompts, rows = [f"{call}"] * len(batch), [{"prompt": f"{call}"}] * len(batch)
        start = time.perf_counter()
        scores = remote(batch, prompts, rows)
        seconds += time.perf_counter() - start
        expected = local(batch, prompts, rows)
        images += len(batch)
        lost += int(scores.isnan().sum())
        zero += int((scores == 0).sum())
        different += int((scores != expected).sum())
        counts.update(remote.take_counts())
    remote.close()
    return {
        "requests": requests // REQUESTS_PER_CALL * REQUESTS_PER_CALL,
        "images": images,
        "lost": lost,
        "scored_0": zero,
        "unlike_the_local_score": different,
        "counted": dict(sorted(counts.items())),
        "injected": proxy.expected_counts() if proxy is not None else {},
        "images_per_second": round(images / seconds, 1),
    }


def in_a_run(proxy: Proxy, requests: int) -> dict[str, Any]:
    """Train with the proxied server as the reward, its local twin beside it, and read the run's metrics.csv."""
    iterations = -(-requests // RUN_IMAGES)
    connection = f"{{timeout_s: {TIMEOUT_S}, backoff_s: 0.05, retries: 6, max_connections: 8}}"
    remote = f"{{class_path: lit_vgrpo.rewards.http.HTTPReward, init_args: {{url: '{proxy.url}', batch_size: 1, "
    reward = f"rewards: [{remote}connection: {connection}}}}}, {{class_path: JPEGCompressibility}}], weights: [1, 0]"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lit_vgrpo", "run", "tiny_shapes", *RUN_OVERRIDES]
        command += [f"trainer.max_epochs={iterations}", f"run_dir={folder}/run"]
        command += [f"model.reward={{class_path: Weighted, init_args: {{{reward}}}}}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with open(f"{folder}/run/metrics.csv", newline="") as file:
            table = [row for row in csv.DictReader(file) if row.get("reward/http")]
    prefix = "reward/http/"
    counted: Counter[str] = Counter()
    for row in table:
        for key in (*(cause for _, cause in FAULTS.values()), "retried", "gave_up", "skipped"):
            counted[key] += int(float(row.get(prefix + key) or 0))
    return {
        "iterations": len(table),
        "requests": len(table) * RUN_IMAGES,
        "lost": int(sum(float(row["reward/failed"]) for row in table)),
        "unlike_the_local_score": sum(row["reward/http"] != row["reward/jpeg"] for row in table),
        "counted": {key: count for key, count in sorted(counted.items()) if count},
        "injected": proxy.expected_counts(),
    }


def is_exact(result: dict[str, Any]) -> bool:
    wrong = result["lost"] + result.get("scored_0", 0) + result["unlike_the_local_score"]
    return wrong == 0 and result["counted"] == result["injected"]


def served() -> tuple[subprocess.Popen[str], str]:
    """The server as it is typed, and its address."""
    command = [sys.executable, "-m", "lit_vgrpo", "serve-reward", "JPEGCompressibility", "--port", "0"]
    # torch's threads on a few busy cores wait for each other longer than they work
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    found = re.search(r"http\S+/score", process.stdout.readline())
    if found is None:
        raise SystemExit("The server did not start.")
    return process, found.group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    process, url = served()
    results: dict[str, Any] = {"share": options.share, "seed": options.seed}
    try:
        results["undisturbed"] = direct(url, options.requests, None)
        for name, measure in {"direct": direct, "run": in_a_run}.items():
            if name == "run" and not options.run:
                continue
            with Proxy(url, options.share, options.seed) as proxy:
                asked = (proxy.url, options.requests, proxy) if name == "direct" else (proxy, options.requests)
                results[name] = measure(*asked)  # type: ignore[operator]
    finally:
        process.terminate()
        process.wait()
    exact = [is_exact(result) for result in results.values() if isinstance(result, dict)]
    print_table(results)
    RESULTS.write_text(json.dumps({**results, "exact": all(exact)}, indent=2) + "\n")
    return 0 if all(exact) else 1


def print_table(results: dict[str, Any]) -> None:
    for name, result in results.items():
        if not isinstance(result, dict):
            continue
        numbers = {key: value for key, value in result.items() if not isinstance(value, dict)}
        print(f"{name}: " + ", ".join(f"{value} {key.replace('_', ' ')}" for key, value in numbers.items()))
        for cause in sorted({*result["injected"], *result["counted"]}):
            injected, counted = result["injected"].get(cause, 0), result["counted"].get(cause, 0)
            print(f"  {cause:<12} {injected:>5} injected {counted:>5} counted {'' if injected == counted else '  !'}")


if __name__ == "__main__":
    sys.exit(main())
