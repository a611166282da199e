"""Two machines, as torchrun and SLURM start them: here two processes that believe it."""

import json
import os
import subprocess
import sys

import pytest
from helpers import free_port
from processes import end_with_parent

pytestmark = pytest.mark.slow
LIMIT_S = 240


def by_torchrun(port, node):
    nodes = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}", "--master-addr=127.0.0.1"]
    return [sys.executable, "-m", "torch.distributed.run", *nodes, f"--master-port={port}", "-m", "lit_vgrpo"], {}


def by_slurm(port, node):
    tasks = {"NTASKS": 2, "NTASKS_PER_NODE": 1, "NNODES": 2, "PROCID": node, "NODEID": node, "LOCALID": 0}
    job = {"JOB_NAME": "train", "JOB_ID": 17, "NODELIST": "127.0.0.1"}
    env = {f"SLURM_{name}": str(value) for name, value in {**tasks, **job}.items()}
    return [sys.executable, "-m", "lit_vgrpo"], {**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


@pytest.mark.parametrize("launcher", [by_torchrun, by_slurm])
def test_two_nodes_are_one_run_in_one_folder(tiny_recipe, launcher):
    words = ["run", str(tiny_recipe), "run_dir=together", "trainer.num_nodes=2", "trainer.strategy=ddp"]
    port, nodes = free_port(), []
    for node in range(2):
        command, env = launcher(port, node)
        env = {**os.environ, **env}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        nodes.append(subprocess.Popen([*command, *words], env=env, preexec_fn=end_with_parent, **pipes))
    try:
        said = [node.communicate(timeout=LIMIT_S)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said
    assert said[0].count("Held-out reward") == 1
    assert "Held-out reward" not in said[1]
    summary = json.loads((tiny_recipe.parent / "together" / "summary.json").read_text())
    assert (summary["world_size"], summary["images"], summary["iterations"]) == (2, 8, 2)
    assert [path.name for path in tiny_recipe.parent.iterdir() if path.is_dir()] == ["together"]
