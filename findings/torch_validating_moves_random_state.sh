#!/usr/bin/env bash
# torch: reading a DataLoader that draws nothing advances torch's random numbers, so that validating changes training
#
# One would guess: a validation loader without shuffling, workers or random transforms leaves torch's random state as it
# was, so that a run with validation trains as one without.
#
# What happens (torch 2.13.0): each iter() of a DataLoader draws a seed for workers from torch's global generator, also
# with num_workers=0 and shuffle=False. What the next torch.rand(1) gives after torch.manual_seed(0):
#   nothing read                                       0.4963
#   a DataLoader read, or only its first batch         0.0885
#   a DataLoader with a generator of its own read      0.4963
#   the sampler or the dataset read                    0.4963
# Training of a flow-matching loss in two epochs, whose noise and times are drawn in the step: with a validation loop
# in between, the second epoch has other losses. Nothing is logged.
#
# Why it matters: how often a run validates changes its noise, so runs that differ only in this, or a peek at the first
# batch, cannot be compared step by step, and a resumed run is not the uninterrupted one if it validates at another
# time. Give each loader that is not for training generator=torch.Generator().
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0
cat > "$folder/check.py" <<'PY'
import torch
from torch.utils.data import DataLoader

print(f"torch {torch.__version__}")
plain = DataLoader(torch.arange(4.0))
own = DataLoader(torch.arange(4.0), generator=torch.Generator())
readings = {
    "nothing": lambda: None,
    "a DataLoader": lambda: list(plain),
    "its first batch": lambda: next(iter(plain)),
    "with its own generator": lambda: list(own),
    "the sampler": lambda: list(plain.sampler),
    "the dataset": lambda: list(plain.dataset),
}
after = {}
for name, read in readings.items():
    torch.manual_seed(0)
    read()
    after[name] = round(torch.rand(1).item(), 4)
    print(f"{name:25}", after[name])
moved = {name for name, number in after.items() if number != after["nothing"]}
assert moved == {"a DataLoader", "its first batch"}, "changed: which readings draw"


def train(validation):
    torch.manual_seed(0)
    network = torch.nn.Linear(2, 1)
    optimizer, losses = torch.optim.SGD(network.parameters(), lr=0.1), []
    data = DataLoader(torch.ones(3, 1))
    for _ in range(2):
        for clean in data:
            noise, time = torch.randn_like(clean), torch.rand_like(clean)
            noisy = (1 - time) * clean + time * noise
            loss = (network(torch.cat([noisy, time], 1)) - (noise - clean)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(round(loss.item(), 3))
        with torch.no_grad():
            for clean in validation:
                network(torch.cat([clean, clean], 1))
    print("losses:", losses)
    return losses


without, validated, separate = train([]), train(DataLoader(torch.ones(2, 1))), train(
    DataLoader(torch.ones(2, 1), generator=torch.Generator()))
assert without[:3] == validated[:3] and without[3:] != validated[3:], "changed: validating leaves training as it is"
assert separate == without, "changed: a generator of its own"
print("as described: validating changes training")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
