#!/usr/bin/env bash
# torchmetrics: metrics of one MetricCollection that agree on the first batch are one metric from then on
#
# One would guess: MetricCollection({"a": metric_a, "b": metric_b}) returns what metric_a and metric_b return alone;
# its compute groups join metrics of the same states only, such as precision and recall.
#
# What happens (torchmetrics 1.9.0, torch 2.13.0): the groups are made once, from the values of the states after the
# first update. Two metrics with other settings whose states happen to be equal then are joined, and all later batches
# update the first of them only:
#   accuracy at thresholds 0.3 and 0.7, first batch without scores between them
#     alone 0.833 and 0.500, in a collection 0.500 and 0.500
#   SSIM with sigma 0.5 and 3, first batch compared with itself, second with noise
#     alone 0.515 and 0.501, in a collection 0.501 and 0.501
# Nothing is logged. MetricCollection(..., compute_groups=False) is right.
#
# Why it matters: a first batch of equal images is common (step 0 of a LoRA against its base network, a first round of
# editing or compression, a sanity check), and so is a first batch in which every preference is clear. The curves of
# two settings then lie on one another, and which of them is shown depends on their names.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 torchmetrics==1.9.0
cat > "$folder/check.py" <<'PY'
import torch
import torchmetrics
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy
from torchmetrics.image import StructuralSimilarityIndexMeasure

print(f"torchmetrics {torchmetrics.__version__}, torch {torch.__version__}")


def results(make, batches):
    alone, joined, ungrouped = make(), MetricCollection(make()), MetricCollection(make(), compute_groups=False)
    for batch in batches:
        for metric in (joined, ungrouped, *alone.values()):
            metric.update(*batch)
    found = [{name: metric.compute() for name, metric in alone.items()}, joined.compute(), ungrouped.compute()]
    return [[round(values[name].item(), 3) for name in alone] for values in found]


SIGMAS = {"fine": 0.5, "coarse": 3.0}


def accuracies():
    return {"low": BinaryAccuracy(threshold=0.3), "high": BinaryAccuracy(threshold=0.7)}


def similarities():
    return {name: StructuralSimilarityIndexMeasure(data_range=1.0, sigma=sigma) for name, sigma in SIGMAS.items()}


torch.manual_seed(0)
images, others = torch.rand(2, 3, 32, 32), torch.rand(2, 3, 32, 32)
clear, unclear = torch.tensor([0.1, 0.9]), torch.tensor([0.5, 0.5])
cases = {
    "accuracy at 0.3 and 0.7": (accuracies, [(clear, torch.tensor([0, 1])), (unclear, torch.tensor([0, 1])),
                                             (unclear, torch.tensor([1, 1]))]),
    "SSIM with sigma 0.5 and 3": (similarities, [(images, images), (images, others)]),
}
for name, case in cases.items():
    alone, joined, ungrouped = results(*case)
    print(f"{name}: alone {alone}, in a collection {joined}, with compute_groups=False {ungrouped}")
    assert alone == ungrouped and alone[0] != alone[1], name
    assert joined[0] == joined[1], "changed: the collection keeps the metrics apart"
    alone, joined, _ = results(case[0], case[1][::-1])
    assert alone == joined, "with another first batch the collection is right"
print("as described: equal after the first batch, equal for good")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
