"""Two machines, as torchrun starts them: here two processes that believe it."""

import json
import subprocess
import sys

import pytest
from helpers import free_port
from processes import end_with_parent


@pytest.mark.slow
def test_two_nodes_are_one_run_in_one_folder(tiny_recipe):
    words = ["run", str(tiny_recipe), "run_dir=together", "trainer.num_nodes=2", "trainer.strategy=ddp"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    nodes = []
    for node in range(2):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [*torchrun, f"--node-rank={node}", "-m", "lit_vgrpo", *words]
        nodes.append(subprocess.Popen(command, preexec_fn=end_with_parent, **pipes))
    try:
        said = [node.communicate(timeout=240)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said
    assert said[0].count("Held-out reward") == 1
    assert "Held-out reward" not in said[1]
    summary = json.loads((tiny_recipe.parent / "together" / "summary.json").read_text())
    assert (summary["world_size"], summary["images"], summary["iterations"]) == (2, 8, 2)
    assert [path.name for path in tiny_recipe.parent.iterdir() if path.is_dir()] == ["together"]
