#!/usr/bin/env bash
# Lightning Fabric: sampler.set_epoch() has no effect, and a resumed run reads its data in the first epochs' order again
#
# One would guess: loader.sampler.set_epoch(3) before an epoch gives the order of epoch 3, as torch documents it for
# DistributedSampler. Then a run that resumes at epoch 3 goes on where it ended.
#
# What happens (lightning 2.6.6, torch 2.13.0): a loader of setup_dataloaders calls set_epoch itself when it is read,
# with the number of times that it was read in this process. It overrules the caller, and no checkpoint has that
# number. Epoch whose order is read, with set_epoch(e) called before each one:
#                                                torch          Fabric
#   one process, epochs 0 to 4                   0 1 2 3 4      0 1 2 3 4
#   resumed at epoch 3, epochs 3 and 4           3 4            0 1
#   five jobs of one epoch each                  0 1 2 3 4      0 0 0 0 0
#   one batch looked at before each epoch        0 1 2 3 4      1 3 5 7 9
# Nothing is logged. A comment in Fabric's code says that it calls set_epoch in place of the user.
#
# Why it matters: long training runs on several GPUs are made of jobs that resume. Each job gives a rank the same images
# in the same order, so that the first ones of an epoch are trained on more often than the last ones if jobs end within
# an epoch. Pass use_distributed_sampler=False and read through a sampler of your own, whose order needs no set_epoch,
# or draw the order from a seed that has the epoch in it.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 lightning==2.6.6
cat > "$folder/check.py" <<'PY'
import lightning
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, DistributedSampler

print(f"lightning {lightning.__version__}, torch {torch.__version__}")
DATA = list(range(64))


def sampler():
    return DistributedSampler(DATA, num_replicas=2, rank=0, shuffle=True, seed=0)


def order(epoch):
    drawn = sampler()
    drawn.set_epoch(epoch)
    return list(drawn)


ORDERS = [order(epoch) for epoch in range(20)]


def read(epochs, with_fabric, looks=False):
    """Return the epochs whose orders a new process reads, with set_epoch called before each one."""
    loader = DataLoader(DATA, batch_size=8, sampler=sampler())
    if with_fabric:
        # False: the loader has a distributed sampler already, here that of the first of two ranks
        loader = Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader, use_distributed_sampler=False)
    found = []
    for epoch in epochs:
        loader.sampler.set_epoch(epoch)
        if looks:
            next(iter(loader))
        found.append(ORDERS.index(torch.cat(list(loader)).tolist()))
    return found


for name, run, expected in (
    ("one process", lambda fabric: read(range(5), fabric), [0, 1, 2, 3, 4]),
    ("resumed at epoch 3", lambda fabric: read([3, 4], fabric), [0, 1]),
    ("five jobs of one epoch", lambda fabric: [read([epoch], fabric)[0] for epoch in range(5)], [0, 0, 0, 0, 0]),
    ("a look at one batch first", lambda fabric: read(range(5), fabric, looks=True), [1, 3, 5, 7, 9]),
):
    torchs, fabrics = run(False), run(True)
    print(f"{name:26} torch {torchs}, Fabric {fabrics}")
    assert torchs == ([3, 4] if "resumed" in name else [0, 1, 2, 3, 4]), "torch reads another order"
    assert fabrics == expected, f"changed: {name}"
print("as described: Fabric overrules set_epoch")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
