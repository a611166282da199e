"""Ray Train places the ranks of a run and starts them again after a failure. Each rank is the command itself.

    pip install "lit-vgrpo[ray]"
    python deploy/ray_train.py sd3_pickscore strategy/zero2 run_dir=/shared/runs/job --workers 8

The words are those of ``lit-vgrpo run --resume``. The run folder must be on a disk that all machines share. After the
death of this driver, the same command continues the run. Run on CPUs: pytest -m slow tests/training/test_ray.py
"""

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchConfig, TorchTrainer


def train(config: dict[str, Any]) -> None:
    """Run one rank of the command, as torchrun would start it."""
    context = get_context()
    with socket.socket() as probe:
        probe.bind(("", 0))
        place = broadcast_from_rank_zero((ray.util.get_node_ip_address(), probe.getsockname()[1]))
    ranks, per_node = context.get_world_size(), context.get_local_world_size()
    variables = {
        "MASTER_ADDR": place[0],
        "MASTER_PORT": place[1],
        "WORLD_SIZE": ranks,
        "RANK": context.get_world_rank(),
        "LOCAL_WORLD_SIZE": per_node,
        "LOCAL_RANK": context.get_local_rank(),
        "GROUP_RANK": context.get_node_rank(),
        "TORCHELASTIC_RUN_ID": "ray",
    }
    sizes = [f"trainer.devices={per_node}", f"trainer.num_nodes={ranks // per_node}"]
    command = [sys.executable, "-m", "lit_vgrpo", "run", *config["words"], *sizes, "--resume"]
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    # the rank must not outlive Ray's worker, which the next attempt replaces
    end_with_worker = lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # noqa: E731
    status = subprocess.run(command, cwd=config["folder"], env=environment, preexec_fn=end_with_worker).returncode
    if status:
        raise RuntimeError(f"rank {variables['RANK']} ended with status {status}")


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="RECIPE_OR_KEY=VALUE")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--gpus-per-worker", type=int, choices=(0, 1), default=1)
    parser.add_argument("--max-failures", type=int, default=3, help="restarts; -1 for any number")
    options = parser.parse_args()
    if not any(word.startswith("run_dir=") for word in options.words):
        parser.error("no run_dir. Add run_dir=/a/shared/folder, in which a restarted run continues.")
    TorchTrainer(
        train,
        train_loop_config={"words": options.words, "folder": os.getcwd()},
        torch_config=TorchConfig(backend="gloo"),  # of Ray's workers, which only wait
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpus_per_worker > 0),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=options.max_failures)),
    ).fit()


if __name__ == "__main__":
    main()
