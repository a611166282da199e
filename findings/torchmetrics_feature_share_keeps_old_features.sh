#!/usr/bin/env bash
# torchmetrics: with FeatureShare, images written into a buffer get the features of the buffer's first images, and FID 0
#
# One would guess: FeatureShare spares FID, KID and others the second pass of the same network over the same images, and
# changes no value.
#
# What happens (torchmetrics 1.9.0, torch 2.13.0): it keeps the features of the last batches by the tensor object, not
# by what is in it. Images that are written into the same tensor are not looked at. Four batches of 16 pictures, the
# real ones twice as bright as the generated ones:
#                                               FID       KID
#   MetricCollection, new tensors or buffers    0.326     0.078
#   FeatureShare, new tensors                   0.326     0.078
#   FeatureShare, one buffer for all            0.000     -0.010
#   FeatureShare, one for real, one for drawn   0.656     0.089
# With one buffer all features are those of the first real batch. The same happens after an in-place change, such as
# mul_, of a batch that was scored before. Nothing is logged.
#
# Why it matters: images come in buffers from CUDA graphs, shared memory and decoders that write in place. An FID of 0
# is noticed; with a buffer for each kind, the score is that of two single batches, whatever was trained. Pass a clone.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 torchmetrics==1.9.0 scipy==1.17.1
cat > "$folder/check.py" <<'PY'
import torch
import torchmetrics
from torchmetrics import MetricCollection
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import KernelInceptionDistance
from torchmetrics.wrappers import FeatureShare

print(f"torchmetrics {torchmetrics.__version__}, torch {torch.__version__}")
generator = torch.Generator().manual_seed(0)
real = torch.rand(4, 16, 3, 4, 4, generator=generator)
drawn = torch.rand(4, 16, 3, 4, 4, generator=generator) / 2


class Network(torch.nn.Module):
    num_features = 8

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(48, 8)
        self.seen = []

    def forward(self, images):
        self.seen.append(images.mean().item())
        return self.layer(images.flatten(1))


def scores(kind, buffers):
    """Return FID and KID; buffers is None for new tensors, or one buffer for real and one for drawn images."""
    metrics = kind({"fid": FrechetInceptionDistance(feature=Network()),
                    "kid": KernelInceptionDistance(feature=Network(), subset_size=10)})
    torch.manual_seed(1)
    for pair in zip(real, drawn):
        for i, images in enumerate(pair):
            metrics.update(images.clone() if buffers is None else buffers[i].copy_(images), real=i == 0)
    values = metrics.compute()
    return [values["fid"].item(), values["kid"][0].item()]


def build(metrics):
    return MetricCollection(metrics, compute_groups=False)


one, two = torch.empty(16, 3, 4, 4), torch.empty(16, 3, 4, 4)
found = {}
for kind in (build, FeatureShare):
    for name, buffers in {"new tensors": None, "one buffer": (one, one), "a buffer each": (one, two)}.items():
        kind_name = "FeatureShare" if kind is FeatureShare else "MetricCollection"
        found[kind_name, name] = scores(kind, buffers)
        print(f"{kind_name:16} {name:13} FID {found[kind_name, name][0]:.3f}, KID {found[kind_name, name][1]:.3f}")
right = found["MetricCollection", "new tensors"]
for key, values in found.items():
    if key[0] == "MetricCollection" or key[1] == "new tensors":
        assert torch.allclose(torch.tensor(values), torch.tensor(right), atol=1e-5), key
assert right[0] > 0.3 and abs(found["FeatureShare", "one buffer"][0]) < 1e-4, "changed: one buffer"
assert abs(found["FeatureShare", "a buffer each"][0] - right[0]) > 0.01, "changed: a buffer each"

shared = FeatureShare({"fid": FrechetInceptionDistance(feature=Network())})
images = real[0].clone()
shared.update(images, real=True)
before = shared["fid"].real_features_sum.clone()
shared.update(images.mul_(0.1), real=True)
assert torch.equal(shared["fid"].real_features_sum, 2 * before), "changed: in-place changes are seen"
print("as described: features belong to the tensor's first contents")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
