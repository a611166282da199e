"""FID and KID on two ranks, fifty evaluations in a row: the same numbers as one rank's, and no hang.

    python benchmarks/fid_repeats.py                      # 50 evaluations, at most 20 minutes
    python benchmarks/fid_repeats.py --repeats 5 --out fid_repeats.json

Trains the tiny task for as many iterations, once on one CPU process and once on two, and measures after each. The 21
held-out images do not divide by two. Exits with 1 when the numbers differ or the time is up.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from PIL import Image

from lit_vgrpo import VGRPO, OptimizerConfig, PromptDataModule, RolloutSpec, SD3Policy, VGRPOModule
from lit_vgrpo.callbacks import EMA, FID
from lit_vgrpo.rewards import JPEGCompressibility

REAL_IMAGES = 40
TOLERANCE = 1e-6


class Seconds(L.Callback):
    """Results of each evaluation, and its time."""

    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []
        self.at: list[float] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.found.append({key: value for key, value in pl_module.heldout.items() if "@" in key})
        self.at.append(time.monotonic())


def train(folder: Path, devices: int, repeats: int) -> None:
    torch.set_num_threads(1)
    policy = SD3Policy("shipped:assets/tiny_sd3", max_sequence_length=1, decode_batch_size=1)
    # A learning rate that moves nothing: ranks then differ in no bit of the images, made one by one.
    optimizer = OptimizerConfig(lr=1e-30, weight_decay=0.0)
    objective = VGRPO(RolloutSpec(steps=2), num_mc_samples=1)
    module = VGRPOModule(policy, objective, JPEGCompressibility(), optimizer, rollout_batch_size=1)
    data = PromptDataModule(
        train="shipped:prompts/shapes_train.jsonl",
        heldout="shipped:prompts/shapes_heldout.jsonl",
        prompts_per_iteration=2,
        group_size=2,
        micro_batch_size=2,
        heldout_limit=7,
        heldout_images_per_prompt=3,
        eval_batch_size=4,
    )
    seconds = Seconds()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=repeats,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        callbacks=[EMA(0.9), FID(str(folder / "real"), str(folder / "network.pt"), kid=True), seconds],
    )
    trainer.fit(module, datamodule=data)
    result = {"found": seconds.found, "seconds": seconds.at[-1] - seconds.at[0]}
    (folder / f"{devices}-{trainer.global_rank}.json").write_text(json.dumps(result))


def prepare(folder: Path) -> None:
    """A feature network of 16 features, and noise for real images."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.AvgPool2d(23), torch.nn.Flatten(), torch.nn.Linear(507, 16), torch.nn.Tanh())
    network[2].weight.data /= 64  # pixels come in [0, 255]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.jit.save(torch.jit.script(network), str(folder / "network.pt"))
    (folder / "real").mkdir()
    random = np.random.default_rng(0)
    for index in range(REAL_IMAGES):
        coarse = Image.fromarray(random.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        coarse.resize((32, 32)).save(folder / "real" / f"{index}.png")


def run(command: list[str], timeout_s: float) -> None:
    """Run to the end; on a timeout the second rank is ended with the first."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            _, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise RuntimeError(errors[-2000:])


def compare(folder: Path, repeats: int, timeout_s: float) -> dict[str, Any]:
    """Run both, and find the largest difference relative to the one rank's numbers."""
    prepare(folder)
    for devices in (1, 2):
        command = [sys.executable, __file__, "--worker", str(folder), str(devices), "--repeats", str(repeats)]
        run(command, timeout_s)
    one, *two = (json.loads((folder / name).read_text()) for name in ("1-0.json", "2-0.json", "2-1.json"))
    differences = [
        abs(other[key] - value) / abs(value)
        for rank in two
        for expected, other in zip(one["found"], rank["found"], strict=True)
        for key, value in expected.items()
    ]
    return {
        "evaluations": len(two[0]["found"]),
        "metrics": two[0]["found"][-1],
        "largest_relative_difference": max(differences),
        "ranks_agree": two[0]["found"] == two[1]["found"],
        "seconds_one_rank": round(one["seconds"], 1),
        "seconds_two_ranks": round(two[0]["seconds"], 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--timeout_s", type=float, default=1200)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=2, metavar=("FOLDER", "DEVICES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train(Path(options.worker[0]), int(options.worker[1]), options.repeats)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = compare(Path(folder), options.repeats, options.timeout_s)
        except subprocess.TimeoutExpired:
            print(f"Hang: not done after {options.timeout_s:.0f} s.", file=sys.stderr)
            return 1
    for name, value in result.items():
        print(f"{name:28} {value}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["ranks_agree"] and result["largest_relative_difference"] <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
