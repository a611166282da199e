#!/usr/bin/env bash
# torch: a distributed checkpoint keeps one rank's random state and loader position, and all ranks load it
#
# One would guess: torch.distributed.checkpoint saves what each rank passes, since each rank calls save and load; or it
# raises where ranks give different values under one name.
#
# What happens (torch 2.13.0): values that are not sharded tensors are taken for copies, and one rank's is written. The
# rank is chosen for each value, by the amount of work. Two ranks save and load:
#                                       saved             loaded
#   rank                                0       1         0       1
#   torch.get_rng_state()               r0      r1        r0      r0
#   a tensor                            1       2         2       2
#   an int                              10      20        20      20
#   a Stateful loader's position        5       6         6       6
#   a sharded tensor                    0 1     2 3       0 1     2 3
# Names that only one rank has are kept. Nothing is logged, neither at saving nor at loading.
#
# Why it matters: after a resume all ranks draw the same noise and the same times, so that a batch on 8 devices holds
# 1/8 as many samples; loaders of different lengths repeat or leave out rows; running means of rewards are those of
# another rank. One checkpoint can hold rank 0's random state and rank 1's position. Put the rank into the names.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > "$folder/check.py" <<'PY'
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)  # as in training: each rank has its own noise


class Loader:
    """The least that save and load take for Stateful."""

    def __init__(self, position):
        self.position = position

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def run_state(is_new):
    """Return what one rank saves, or a state of the same form to load into."""
    weight = distribute_tensor(torch.arange(4.0) * (not is_new), init_device_mesh("cpu", (2,)), [Shard(0)])
    if is_new:
        return {"noise": torch.zeros_like(torch.get_rng_state()), "mean": torch.zeros(1), "seen": 0, "weight": weight,
                "loader": Loader(0), f"of rank {rank}": 0}
    return {"noise": torch.get_rng_state(), "mean": torch.tensor([1.0 + rank]), "seen": 10 * (1 + rank),
            "weight": weight, "loader": Loader(5 + rank), f"of rank {rank}": 7 + rank}


def shown(state):
    """Return a state as plain values; the random state as the number that is drawn next."""
    torch.set_rng_state(state["noise"])
    return {"noise": round(torch.randn(()).item(), 3), "mean": state["mean"].item(), "seen": state["seen"],
            "loader": state["loader"].position, "weight": state["weight"].to_local().tolist(),
            "own name": state[f"of rank {rank}"]}


state, loaded = run_state(False), run_state(True)
dcp.save(state, checkpoint_id=f"{sys.argv[1]}/checkpoint")
dcp.load(loaded, checkpoint_id=f"{sys.argv[1]}/checkpoint")
rows = [None, None]
dist.all_gather_object(rows, (shown(state), shown(loaded)))
if rank == 0:
    print(f"torch {torch.__version__}")
    chosen = {}
    for name in rows[0][0]:
        before, after = [row[0][name] for row in rows], [row[1][name] for row in rows]
        print(f"{name:10} saved {before}, loaded {after}")
        if name in ("weight", "own name"):
            assert before == after
        else:
            assert before[0] != before[1] and after[0] == after[1], f"changed: {name} differs between ranks"
            chosen[name] = before.index(after[0])
    print("the rank whose value was written:", chosen)
    assert set(chosen.values()) == {0, 1}, "changed: all values come from one rank"
    print("as described: all ranks load one rank's values")
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/check.py" "$folder"
