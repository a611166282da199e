"""Gather over two ranks: ``gather_worker.py SPEC.json``; each rank writes its result."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from lit_vgrpo.core import gather
from lit_vgrpo.core.gather import raise_together
from lit_vgrpo.data.datasets import HeldOutDataset
from lit_vgrpo.metrics import FeatureMoments, KeptFeatures, feature_network, reference_statistics
from lit_vgrpo.training.evaluation import Looks


def looks(world_size, rank):
    """Return the measures of nine images of three prompts, this rank's share of them in batches of two."""
    images = torch.rand(9, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    dataset = HeldOutDataset([{"prompt": name} for name in "abc"], 3, 2, world_size, rank)
    found = Looks()
    found.start = torch.zeros(9, 768).half()
    for number in range(len(dataset)):
        found.update(images[dataset[number].slots], dataset[number])
    return found.compute(None)


def main(spec, rank):
    alone = looks(1, 0)
    rendezvous = f"file://{spec['out']}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    found = {"looks": [alone, looks(2, rank)], "errors": []}
    gather.AT_ONCE = 64  # two of these rows
    own = [torch.arange(15.0).reshape(3, 5) + rank, torch.ones(2 + rank, 3 - rank) * (rank + 1)]
    whole = [gather.all_gather(own[0]), gather.all_gather_rows(own[1])]
    first = [gather.gather_to_first(own[0]), gather.all_gather_rows(own[1], gather.gather_to_first)]
    found["first"] = [torch.equal(a, b) if rank == 0 else len(a) == 0 for a, b in zip(first, whole, strict=True)]
    numbers, kept = [2] if rank == 0 else [1, 0], KeptFeatures(1)
    kept.add(torch.tensor(numbers)[:, None], numbers)
    found["kept"] = kept.gathered().tolist()
    # a rank without any image takes part like the others
    some, none = KeptFeatures(2), FeatureMoments(2)
    if rank == 0:
        some.add(torch.ones(1, 2), [0])
        none.update(torch.ones(1, 2))
    none.add_up_ranks()
    found["one"] = [some.gathered().tolist(), none.count]
    attempts = (
        lambda: reference_statistics(spec["torn"], feature_network(spec["script"])),
        lambda: raise_together(KeyError("rank 1") if rank == 1 else None),
    )
    for attempt in attempts:
        try:
            attempt()
        except (ValueError, KeyError) as error:
            found["errors"].append(f"{type(error).__name__} {error}")
    dist.destroy_process_group()
    found["threads"] = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    Path(spec["out"], f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), int(os.environ["RANK"]))
