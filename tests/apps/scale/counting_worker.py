"""Recipes trained on some ranks, and the bytes that torch.distributed is given: ``counting_worker.py SPEC.json``.

A case is ``{name, words}``; rank 0 leaves ``NAME.json``: bytes of an iteration by kind, as counted and by arithmetic.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import lightning as L
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_vgrpo.apps.scale.report import ScaledRecipe
from lit_vgrpo.launch.build import build
from lit_vgrpo.launch.train import leave_together

KINDS = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allgather_": ("gather", 0),
    "c10d::_allgather_base_": ("gather", 0),
    "c10d::_reduce_scatter_base_": ("scatter", 1),
    "c10d::broadcast_": ("broadcast", 0),
}
"""The kind of a collective, and which of its arguments is the whole."""


class Collectives(TorchDispatchMode):
    """Counts, by kind and number of ranks, the bytes of all collectives, including those of DDP's reducer."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and func._schema.name != "c10d::barrier":
            kind, place = KINDS[func._schema.name]  # any other is an error
            boxed = next(v for v in args if isinstance(v, torch.ScriptObject) and "ProcessGroup" in v._type().str())
            whole = sum(tensor.numel() * tensor.element_size() for tensor in tree_leaves(args[place]))
            self.bytes[f"{kind} over {dist.ProcessGroup.unbox(boxed).size()}"] += whole
        return func(*args, **(kwargs or {}))


class CountLast(L.Callback):
    """Counts the last iteration: in the first, DDP also sends buffers, and ZeRO-3 keeps no weights."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == trainer.max_epochs - 1:
            self.mode = Collectives()
            self.mode.__enter__()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.current_epoch == trainer.max_epochs - 1:
            self.mode.__exit__(None, None, None)


def train(case, folder):
    cli = build([*case["words"], f"run_dir={folder / case['name']}"])
    recipe, count = ScaledRecipe(cli), CountLast()
    found = recipe.outlook(recipe.sizes, cli.trainer.world_size).exchanges
    cli.trainer.callbacks.append(count)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    expected = Counter()
    for one in found:
        expected[f"{one.kind} over {one.ranks}"] += round(one.size * one.times)
    if cli.trainer.is_global_zero:
        result = {"counted": count.mode.bytes, "expected": expected, "sent": sum(one.sent for one in found)}
        (folder / f"{case['name']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    spec = json.loads(Path(sys.argv[1]).read_text())
    for each in spec["cases"]:
        print(each, flush=True)
        train(each, Path(spec["folder"]))
    leave_together()
