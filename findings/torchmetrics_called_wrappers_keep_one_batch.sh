#!/usr/bin/env bash
# torchmetrics: MinMaxMetric and BootStrapper that are called with each batch give the value of the last batch alone
#
# One would guess: metric(preds, target) returns the value of this batch and adds the batch to the metric, as it does
# for every metric and for wrappers such as MetricTracker. compute() then gives the value of all batches.
#
# What happens (torchmetrics 1.9.0, torch 2.13.0): to get the value of one batch, the call resets the metric and then
# puts the metric's own states back. The states of these two wrappers are in the metrics that they wrap: those are reset
# too, and nothing puts them back. compute() after four batches whose mean values are 0, 1, 2 and 3:
#                                                  update()           called
#   MeanMetric                                     1.5                1.5
#   MetricTracker(MeanMetric)                      1.5                1.5
#   MinMaxMetric(MeanMetric): raw, min, max        1.5, 1.5, 1.5      3.0, 0.0, 3.0
#   BootStrapper(MeanMetric): mean, std            1.5, 0.15          3.0, 0.0
# min and max are then those of batches. They also outlive reset(), which says that it resets them, and are not in the
# state_dict of a metric that is persistent, so that a resumed run starts its record anew. Nothing is logged.
#
# Why it matters: training loops call the metric to log a value per step, and log the metric itself for the epoch. The
# reward of an evaluation, and its error bars, are then those of the last prompts. Use update() and compute().
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 torchmetrics==1.9.0
cat > "$folder/check.py" <<'PY'
import torch
import torchmetrics
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.wrappers import BootStrapper, MetricTracker, MinMaxMetric

print(f"torchmetrics {torchmetrics.__version__}, torch {torch.__version__}")
batches = [torch.full((16,), float(value)) for value in range(4)]
kinds = {
    "MeanMetric": MeanMetric,
    "MetricTracker": lambda: MetricTracker(MeanMetric(), maximize=True),
    "MinMaxMetric": lambda: MinMaxMetric(MeanMetric()),
    "MinMaxMetric in a MetricCollection": lambda: MetricCollection({"reward": MinMaxMetric(MeanMetric())}),
    "BootStrapper": lambda: BootStrapper(MeanMetric(), num_bootstraps=200),
}


def values(metric):
    value = metric.compute()
    return {key: v.item() for key, v in value.items()} if isinstance(value, dict) else {"mean": value.item()}


found = {}
for kind, make in kinds.items():
    torch.manual_seed(0)
    updated, called = make(), make()
    if kind == "MetricTracker":
        updated.increment()
        called.increment()
    for batch in batches:
        updated.update(batch)
    steps = [called(batch) for batch in batches]
    found[kind] = values(updated), values(called)
    for how, one in zip(("update()", "called"), found[kind]):
        print(f"{kind}, {how}:", ", ".join(f"{key} {value:.2f}" for key, value in one.items()))
    if kind == "MinMaxMetric":
        assert [step["raw"].item() for step in steps] == [0, 1, 2, 3]

for kind in ("MeanMetric", "MetricTracker"):
    assert all(abs(value - 1.5) < 1e-6 for one in found[kind] for value in one.values()), f"changed: {kind}"
for kind in ("MinMaxMetric", "MinMaxMetric in a MetricCollection"):
    updated, called = (list(one.values()) for one in found[kind])
    assert updated == [1.5, 1.5, 1.5] and sorted(called) == [0.0, 3.0, 3.0], f"changed: {kind}"
updated, called = found["BootStrapper"]
assert abs(updated["mean"] - 1.5) < 0.1 and updated["std"] > 0.05, "changed: BootStrapper with update()"
assert called["mean"] == 3.0 and called["std"] == 0.0, "changed: BootStrapper that is called"

record = MinMaxMetric(MeanMetric())
record.persistent(True)
record.update(torch.tensor(5.0))
record.compute()
saved = record.state_dict()
record.reset()
record.update(torch.tensor(1.0))
after = {key: value.item() for key, value in record.compute().items()}
print("after reset():", after, "state_dict:", dict(saved))
assert after == {"raw": 1.0, "max": 5.0, "min": 1.0}, "changed: reset()"
assert not any("min_val" in key or "max_val" in key for key in saved), "changed: state_dict"
print("as described: a called wrapper keeps the last batch")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
