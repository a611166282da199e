#!/usr/bin/env bash
# torch: .item() of a sharded tensor's sum, norm, mean or maximum is the number of one rank's shard
#
# One would guess: weight.norm().item() of an FSDP2 parameter is the norm of the parameter, as for any tensor, or an
# error; each rank gets the same number.
#
# What happens (torch 2.13.0, 2 processes on CPU): a reduction of a DTensor is pending ("partial"), and .item(), float()
# and bool() read the part of this rank without adding up. An operation in between that is not linear adds up first, so
# some expressions are right. For the numbers 1 to 8 in two shards:
#                            rank 0    rank 1    whole
#   x.sum().item()            10        26        36
#   x.mean().item()            2.5       6.5       4.5
#   x.norm().item()            5.48     13.19     14.28
#   x.max().item()             4         8         8
#   (x > 3).sum().item()       1         4         5
#   x.square().sum().item()   30       174       204
#   (x.norm() ** 2).item()   204       204       204
#   x.std().item()             2.45      2.45      2.45
# The gradients of fully_shard act alike; clip_grad_norm_ returns the whole norm. Nothing is logged.
#
# Why it matters: norms of weights, gradients and updates, and counts of changed weights, are logged from rank 0 and are
# too small by an amount that depends on the number of ranks. A branch on such a number (skip the step, stop the run)
# can go one way on rank 0 and the other on rank 1. Call .full_tensor() before .item().
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.3.5
cat > "$folder/check.py" <<'PY'
import json
import os
import sys

import torch
import torch.distributed
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

EXPRESSIONS = {
    "x.sum()": lambda x: x.sum(),
    "x.mean()": lambda x: x.mean(),
    "x.norm()": lambda x: x.norm(),
    "x.max()": lambda x: x.max(),
    "(x > 3).sum()": lambda x: (x > 3).sum(),
    "x.square().sum()": lambda x: x.square().sum(),
    "x.norm() ** 2": lambda x: x.norm() ** 2,
    "x.std()": lambda x: x.std(),
}


def work(rank, folder):
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(1.0, 9.0)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    rows = {name: [f(sharded).item(), f(sharded).full_tensor().item(), f(whole).item()]
            for name, f in EXPRESSIONS.items()}
    torch.manual_seed(0)
    layer, inputs = torch.nn.Linear(8, 8, bias=False), torch.randn(4, 8)
    layer(inputs).square().sum().backward()
    true = layer.weight.grad.norm().item()
    layer.weight.grad = None
    fully_shard(layer, mesh=mesh)
    layer(inputs).square().sum().backward()
    gradient = layer.weight.grad
    rows["gradient of fully_shard, norm"] = [gradient.norm().item(), gradient.norm().full_tensor().item(), true]
    clipped = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e9)
    rows["clip_grad_norm_"] = [clipped.item(), clipped.full_tensor().item(), true]
    with open(os.path.join(folder, f"rows{rank}.json"), "w") as file:
        json.dump(rows, file)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def read(folder, rank):
    with open(os.path.join(folder, f"rows{rank}.json")) as file:
        return json.load(file)


if __name__ == "__main__":
    print(f"torch {torch.__version__}")
    torch.multiprocessing.start_processes(work, (sys.argv[1],), nprocs=2, start_method="spawn")
    first, second = read(sys.argv[1], 0), read(sys.argv[1], 1)
    right = {"x.norm() ** 2", "x.std()", "clip_grad_norm_"}
    for name, (item, full, whole) in first.items():
        items = torch.tensor([item, second[name][0]], dtype=torch.float64)
        print(f"{name}: rank 0 {items[0]:.2f}, rank 1 {items[1]:.2f}, whole {whole:.2f}")
        expected = torch.full_like(items, whole)
        assert abs(full - whole) < 1e-3 * whole, f"full_tensor() of {name}"
        assert torch.allclose(items, expected, rtol=1e-3) == (name in right), f"changed: {name}"
    print("as described: .item() reads one shard")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
