"""Gather over two ranks: ``ranks_worker.py SPEC.json``; each rank writes its result."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

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
    features = torch.tensor(spec["features"], dtype=torch.float64)
    numbers = list(range(len(features)))
    share = numbers[:4] if rank == 0 else numbers[4:]
    sums, kept = FeatureMoments(features.shape[1]), KeptFeatures(features.shape[1])
    sums.update(features[share])
    kept.add(features[share], [len(features) - number for number in share])
    sums.add_up_ranks()
    mean, cov = sums.mean_and_cov()
    found = {"count": sums.count, "mean": mean.tolist(), "cov": cov.tolist(), "kept": kept.gathered().tolist()}
    found["looks"] = [alone, looks(2, rank)]
    # a rank without any image takes part like the others
    some, none = KeptFeatures(2), FeatureMoments(2)
    if rank == 0:
        some.add(torch.ones(1, 2), [0])
        none.update(torch.ones(1, 2))
    none.add_up_ranks()
    found["one"] = [some.gathered().tolist(), none.count]
    network = feature_network(spec["script"])
    reference = reference_statistics(spec["real"], network, keep_features=True)
    reference.save(Path(spec["out"], f"{rank}.npz"))
    found["errors"] = []
    attempts = (
        lambda: reference_statistics(spec["torn"], network),
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
