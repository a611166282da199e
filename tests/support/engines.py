"""Clusters on this machine, and runs on them: a recipe that can be held up, and the comparison of two results."""

import contextlib
import csv
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import tiny_recipe_of
from helpers import free_port
from processes import end_with_parent

SLOW_REWARD = """
import time
from pathlib import Path

def score(images, prompts):
    end, hold = time.monotonic() + 5.0, Path(__file__).parent / "hold"
    while hold.exists() and time.monotonic() < end:
        time.sleep(0.1)
    return -images.mean((1, 2, 3)) - images[:, 0].std((1, 2))
"""
ITERATIONS = 20
WORDS = [
    f"trainer.max_epochs={ITERATIONS}",
    "trainer.callbacks=[{class_path: RunCheckpoint, init_args: {every_n_iterations: 1}}]",
    "model.reward={python: 'slow:score'}",
    "data.micro_batch_size=2",
]
"""A run of 20 iterations, each of which takes up to five seconds longer while the file ``hold`` is in its folder."""


def prepared(folder, checkpoint):
    """Write the recipe and the reward of a run into a folder, with the file that holds it; return the folder."""
    (folder / "tiny.yaml").write_text(tiny_recipe_of(checkpoint))
    (folder / "slow.py").write_text(SLOW_REWARD)
    (folder / "hold").touch()
    return folder


def wait_for(condition, seconds=240, what="it"):
    """Return the first true value of a function; fail after so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.5)
    pytest.fail(f"{what} did not happen within {seconds} s")


def wait_for_iterations(run, count=3):
    return wait_for(lambda: (done := len(iterations(run))) >= count and done, 300, f"iteration {count}")


def iterations(run):
    """The iterations in a run's metrics.csv, twice where two processes wrote it."""
    file = Path(run) / "metrics.csv"
    rows = list(csv.DictReader(file.read_text().splitlines())) if file.exists() else []
    return [row["epoch"] for row in rows if row.get("epoch") and row.get("policy/updates")]


def world_size(run):
    """The number of processes of a finished run."""
    return json.loads((Path(run) / "summary.json").read_text())["world_size"]


def largest_difference(one, other):
    """The largest difference of the tensors in two runs' last checkpoints, which must have the same ones."""
    first, second = (
        dict(_tensors(torch.load(Path(run) / "checkpoints" / "last.ckpt", weights_only=True))) for run in (one, other)
    )
    assert first.keys() == second.keys()
    assert len(first) > 20
    return max(float((first[key].double() - second[key].double()).abs().max()) for key in first if first[key].numel())


def _tensors(tree, place=""):
    if isinstance(tree, torch.Tensor):
        if tree.is_floating_point():
            yield place, tree
    elif isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _tensors(value, f"{place}/{key}")


class Slurm:
    """A cluster of three nodes with eight pretended GPUs each, in a folder."""

    PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")

    def __init__(self, folder):
        self.folder, self.environment = folder, {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        # the nodes' names resolve on a real cluster
        self.environment |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}

    @classmethod
    @contextlib.contextmanager
    def started(cls, folder):
        if missing := [name for name in cls.PROGRAMS if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")]:
            pytest.skip(f"{missing} are missing. Run: apt-get install slurm-wlm munge")
        if os.getuid():
            pytest.skip("slurmd starts jobs as root")
        slurm = cls(folder)
        with contextlib.ExitStack() as stack:
            slurm._start(stack)
            stack.callback(wait_for, lambda: not slurm.ask("squeue", "-h"), 60, "the end of all jobs")
            stack.callback(slurm.ask, "scancel", "--user=root")
            yield slurm

    def _start(self, stack):
        def start(*words):
            with (self.folder / f"{words[0]}.log").open("ab") as log:
                process = subprocess.Popen(words, stdout=log, stderr=log, env=env, preexec_fn=end_with_parent)
            stack.callback(process.wait)
            stack.callback(process.terminate)

        folder, ports = self.folder, [free_port() for _ in range(4)]
        env = {**self.environment, "PATH": f"{os.environ['PATH']}:/usr/sbin"}
        for number in range(8):
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        host = socket.gethostname()
        nodes = "".join(
            f"NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[n]} CPUs=8 Gres=gpu:8\n"
            for n in (1, 2, 3)
        )
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, host=host, port=ports[0]) + nodes)
        (folder / "state").mkdir()
        files = [
            f"--{name}={folder}/munge.{name.split('-')[0]}"
            for name in ("key-file", "pid-file", "log-file", "seed-file")
        ]
        start("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        wait_for((folder / "munge.socket").exists, 20)
        start("slurmctld", "-D")
        for number in (1, 2, 3):
            start("slurmd", "-D", "-N", f"n{number}")
        wait_for(lambda: self.ask("sinfo", "-h", "-o", "%D %t").strip() == "3 idle", 60, "the start of SLURM")

    def ask(self, *words, **variables):
        """Run a command of SLURM and return its output."""
        done = subprocess.run(words, env={**self.environment, **variables}, text=True, capture_output=True, check=False)
        return done.stdout + done.stderr

    def submit(self, folder, *words, options=(), **variables):
        """Submit deploy/slurm.sh from a folder, with one CPU process per node; return the job's number."""
        sizes = ["--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1", f"--chdir={folder}"]
        script = Path(__file__).parents[2] / "deploy" / "slurm.sh"
        command = ["sbatch", "--parsable", *sizes, *options, str(script), *words]
        done = subprocess.run(
            command, cwd=folder, env={**self.environment, **variables}, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job):
        return self.ask("squeue", "-h", "-o", "%T", "-t", "all", "-j", job).strip()

    def hasten(self, job):
        """Start a requeued job, for which SLURM waits two minutes, as soon as it has left its nodes; lift its limit."""
        wait_for(lambda: self.state(job) == "PENDING", what="the requeue")
        time.sleep(3)  # SLURM refuses a start in the second of the requeue
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now", "TimeLimit=60")
        wait_for(lambda: self.state(job) == "RUNNING", 60, "the second start")

    def finish(self, job):
        """Wait for the end of a job and its tasks; return their last states."""
        living = {"RUNNING", "PENDING", "COMPLETING"}
        return wait_for(lambda: living.isdisjoint((s := self.state(job)).split()) and s, what=f"the end of {job}")


CONF = """ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
KillWait=20
PartitionName=all Nodes=ALL Default=YES
"""


class Network:
    """Two network namespaces joined by a cable: machines with their own addresses."""

    def __init__(self, number):
        self.names = [f"lv{os.getpid()}{end}{number}" for end in "ab"]
        self.addresses = ["10.213.0.1", "10.213.0.2"]

    @classmethod
    @contextlib.contextmanager
    def joined(cls, number):
        """Yield one of several networks, which know nothing of each other."""
        network = cls(number)
        if not shutil.which("ip") or not network._ip("netns", "add", network.names[0]):
            pytest.skip("network namespaces cannot be made: they need ip (iproute2) and root")
        try:
            network._ip("netns", "add", network.names[1])
            network._ip("link", "add", network.names[0], "type", "veth", "peer", "name", network.names[1])
            for name, address in zip(network.names, network.addresses, strict=True):
                network._ip("link", "set", name, "netns", name)
                network._ip("-n", name, "addr", "add", f"{address}/30", "dev", name)
                assert network._ip("-n", name, "link", "set", name, "up")
                assert network._ip("-n", name, "link", "set", "lo", "up")
            yield network
        finally:
            for name in network.names:
                network._ip("netns", "del", name)

    def cut(self, seconds):
        """Pull the cable for a number of seconds."""
        assert self._ip("-n", self.names[0], "link", "set", self.names[0], "down")
        time.sleep(seconds)
        assert self._ip("-n", self.names[0], "link", "set", self.names[0], "up")

    def delay(self):
        """Delay the packets and lose some, by a slow line with a short queue where the kernel has no netem."""
        for rule in ("netem delay 50ms 20ms loss 1%", "tbf rate 4mbit burst 16kb limit 16kb"):
            added = [
                self._ip("netns", "exec", n, "tc", "qdisc", "add", "dev", n, "root", *rule.split()) for n in self.names
            ]
            if all(added):
                return rule
        raise AssertionError("the kernel has neither netem nor tbf")

    def lost(self):
        """The packets that delay() has lost."""
        show = ["ip", "netns", "exec", self.names[0], "tc", "-s", "qdisc", "show", "dev", self.names[0]]
        return int(re.search(r"dropped (\d+)", subprocess.run(show, capture_output=True, text=True).stdout)[1])

    def start(self, number, folder, restarts, *words):
        """Start torchrun with the command on one machine, in a folder, with its output in ``log``."""
        name, address = self.names[number], self.addresses[number]
        torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--local-addr={address}"]
        torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint={self.addresses[0]}:29500", f"--max-restarts={restarts}"]
        torchrun += [f"--rdzv-conf=join_timeout=90,is_host={int(number == 0)}"]
        command = ["ip", "netns", "exec", name, sys.executable, *torchrun, "-m", "lit_vgrpo", "run", *words]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": name, "OMP_NUM_THREADS": "1"}
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else ranks find the addresses of the last start
        with (folder / "log").open("ab") as log:
            streams = {"stdout": log, "stderr": log}
            return subprocess.Popen(command, cwd=folder, env=environment, preexec_fn=end_with_parent, **streams)

    @staticmethod
    def _ip(*words):
        return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0


def ranks(folder):
    """The processes of the command in a folder, without their launchers."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            is_rank = b"lit_vgrpo" in words and b"torch.distributed.run" not in words
            if is_rank and (place / "cwd").readlink() == folder:
                found.append(int(place.name))
        except OSError:
            continue
    return found
