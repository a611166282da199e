#!/usr/bin/env bash
# accelerate: a pass over a prepared loader that is left by break comes again, so that some rows are never trained on
#
# One would guess: a loader with shuffle=True draws a new order in each pass. With use_seedable_sampler=True the orders
# can be repeated from run to run, and are still different from pass to pass. So are those of a streamed, shuffled
# dataset, whose set_epoch() the prepared loader calls.
#
# What happens (accelerate 1.15.0, datasets 5.2.0, torch 2.13.0): the loader and the sampler count a pass when its last
# batch has been taken. A pass that ends before is not counted, and the next one has the same order. Six passes of four
# batches of 2 over 32 rows:
#                                              rows that were seen    first rows of the six passes
#   torch.utils.data.DataLoader                24 of 32               all different
#   prepared, default                          24 of 32               all different
#   prepared, use_seedable_sampler=True        8 of 32                all equal
#   the same with loader.set_epoch(number)     26 of 32               all different
#   prepared, streamed and shuffled            8 of 32                all equal
# Passes that are read to their end have different orders in all cases. Nothing is logged.
#
# Why it matters: "an epoch is 500 steps" and a time limit per epoch are written with break. The option is switched on
# to make a run reproducible, and then the run trains on the first rows of one order. Call set_epoch() in each pass.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 datasets==5.2.0 accelerate==1.15.0
cat > "$folder/check.py" <<'PY'
import accelerate
import datasets
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

print(f"accelerate {accelerate.__version__}, datasets {datasets.__version__}, torch {torch.__version__}")
ROWS, PASSES = 32, 6


def stored():
    return DataLoader(list(range(ROWS)), batch_size=2, shuffle=True)


def streamed():
    dataset = datasets.Dataset.from_dict({"row": list(range(ROWS))}).to_iterable_dataset(num_shards=4)
    return DataLoader(dataset.shuffle(seed=0, buffer_size=ROWS), batch_size=2)


def prepared(loader, **options):
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options)).prepare(loader)


def passes(loader, batches, set_epoch=False):
    """Return the rows of some passes, each of which is left after some batches."""
    torch.manual_seed(0)
    found = []
    for number in range(PASSES):
        if set_epoch:
            loader.set_epoch(number)
        rows = []
        for count, batch in enumerate(loader, start=1):
            rows += (batch["row"] if isinstance(batch, dict) else batch).tolist()
            if count == batches:
                break
        found.append(tuple(rows))
    return found


kinds = {
    "DataLoader": (lambda: stored(), False),
    "prepared": (lambda: prepared(stored()), False),
    "seedable": (lambda: prepared(stored(), use_seedable_sampler=True), False),
    "seedable, set_epoch": (lambda: prepared(stored(), use_seedable_sampler=True), True),
    "streamed": (lambda: prepared(streamed()), False),
}
for kind, (make, set_epoch) in kinds.items():
    left = passes(make(), batches=4, set_epoch=set_epoch)
    whole = passes(make(), batches=None, set_epoch=set_epoch)
    seen = len({row for rows in left for row in rows})
    print(f"{kind}: {seen} of {ROWS} rows seen, {len(set(left))} orders; whole passes: {len(set(whole))} orders")
    assert len(set(whole)) == PASSES and all(sorted(rows) == list(range(ROWS)) for rows in whole), f"changed: {kind}"
    if kind in ("seedable", "streamed"):
        assert seen == 8 and len(set(left)) == 1, f"changed: {kind}, passes that are left"
    else:
        assert seen > 20 and len(set(left)) == PASSES, f"changed: {kind}, passes that are left"
print("as described: a pass that is left by break comes again")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
