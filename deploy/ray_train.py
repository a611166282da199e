"""Ray places the ranks of a run and starts them again after a failure. Each rank is the command itself.

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
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


class Rank:
    """A process on the machine where Ray has placed a rank.

    Ray Train would start a controller and workers, which import torch one after the other before the command does.
    """

    def place(self) -> tuple[str, str, int, Sequence[int | str]]:
        """Return the machine's ID and address, a free port, and the GPUs that Ray has reserved for the rank."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port, ray.get_gpu_ids()

    def run(self, words: list[str], folder: str, variables: dict[str, str]) -> int:
        """Run the command to its end, as torchrun would start it, and return its exit status."""
        command = [sys.executable, "-m", "lit_vgrpo", "run", *words, "--resume"]
        # the rank must not outlive this process, which Ray ends with the driver and before the next attempt
        end_with_parent = lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # noqa: E731
        environment = os.environ | variables
        return subprocess.run(command, cwd=folder, env=environment, preexec_fn=end_with_parent).returncode


def attempt(words: list[str], workers: int, gpus: int) -> str | None:
    """Run all ranks to their end and return ``None``; as soon as one fails, end the others and return the reason."""
    resources = {"CPU": 1, **({"GPU": gpus} if gpus else {})}
    group = placement_group([resources] * workers)
    try:
        if not group.wait(30):
            print(f"Waiting for {workers} times {resources}; Ray has {ray.cluster_resources()} in all.", flush=True)
        strategy = PlacementGroupSchedulingStrategy(group)
        start: Any = ray.remote(num_cpus=1, num_gpus=gpus, scheduling_strategy=strategy)(Rank)
        ranks = [start.remote() for _ in range(workers)]
        machines: dict[str, list[Any]] = {}  # consecutive ranks are on the same machine
        for rank, (machine, *place) in zip(ranks, ray.get([rank.place.remote() for rank in ranks]), strict=True):
            machines.setdefault(machine, []).append((rank, *place))
        _, address, port, _ = next(iter(machines.values()))[0]
        running: dict[Any, int] = {}
        for node, of_machine in enumerate(machines.values()):
            variables = {"MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": workers}
            variables |= {"LOCAL_WORLD_SIZE": len(of_machine), "GROUP_RANK": node, "TORCHELASTIC_RUN_ID": "ray"}
            if gpus:  # those of all ranks on the machine
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(sorted(str(gpu) for *_, own in of_machine for gpu in own))
            sizes = [f"trainer.devices={len(of_machine)}", f"trainer.num_nodes={len(machines)}"]
            for local_rank, (rank, *_) in enumerate(of_machine):
                own = {**variables, "RANK": len(running), "LOCAL_RANK": local_rank}
                started = rank.run.remote([*words, *sizes], os.getcwd(), {name: f"{own[name]}" for name in own})
                running[started] = own["RANK"]
        while running:
            (ended,), _ = ray.wait(list(running))
            if status := ray.get(ended):
                return f"Rank {running[ended]} ended with status {status}."
            del running[ended]
    except RayError as error:
        return f"{error}"
    finally:
        remove_placement_group(group)  # ends its processes
    return None


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
    failures = 0
    while reason := attempt(options.words, options.workers, options.gpus_per_worker):
        if failures == options.max_failures:
            sys.exit(f"{reason} No restart is left. Raise --max-failures={failures}.")
        failures += 1
        print(f"{reason} Restart {failures} of all ranks.", flush=True)


if __name__ == "__main__":
    main()
