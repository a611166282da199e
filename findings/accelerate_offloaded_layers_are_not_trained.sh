#!/usr/bin/env bash
# accelerate: layers that cpu_offload() or dispatch_model() offloads are not trained, while the loss falls by the others
#
# One would guess: offloaded weights are fetched for each pass, and training either works on them or raises an error, as
# weights on the meta device cannot take a step.
#
# What happens (accelerate 1.15.0, torch 2.13.0): each pass puts the fetched weights into the layer as new parameters,
# and takes them out again. Backward works, and gives right gradients to the input and to the layers that stay in
# memory. The gradients of the fetched weights go to parameters that are thrown away. Those in model.parameters() keep
# none, and optimizers leave them out. 100 steps of AdamW on 3 layers:
#                                           loss                weights with a gradient   weights that changed
#   all layers in memory                    1.27 to 0.21        6 of 6                    6 of 6
#   dispatch_model, middle layer on disk    1.27 to 0.40        4 of 6                    4 of 6
#   cpu_offload                             1.27 to 1.27        0 of 6                    0 of 6
#   the second, given to prepare()          1.27 to 0.40        4 of 6                    4 of 6
# dispatch_model logs that some parameters are on the meta device, and cpu_offload logs nothing.
#
# Why it matters: device_map="auto" offloads what does not fit, so that it depends on the free memory which layers of a
# reward model or a text encoder are trained. The norm for clipping lacks them too. Assert that no parameter is_meta.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 accelerate==1.15.0
cat > "$folder/check.py" <<'PY'
import tempfile

import accelerate
import torch
from accelerate import Accelerator, cpu_offload, dispatch_model
from accelerate.utils.modeling import get_state_dict_offloaded_model

print(f"accelerate {accelerate.__version__}, torch {torch.__version__}")
folder = tempfile.TemporaryDirectory()
torch.manual_seed(0)
inputs, targets = torch.randn(16, 4), torch.randn(16, 2)


def in_memory():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.ReLU(),
                               torch.nn.Linear(8, 2))


def dispatched():
    places = {"0": "cpu", "1": "cpu", "2": "disk", "3": "cpu", "4": "cpu"}
    return dispatch_model(in_memory(), places, main_device="cpu", offload_dir=folder.name, force_hooks=True)


def offloaded():
    return cpu_offload(in_memory(), execution_device=torch.device("cpu"))


def prepared():
    return Accelerator(cpu=True).prepare(dispatched())


def loss_of(network, data=inputs):
    return (network(data) - targets).square().mean()


def train(network):
    """Return the first and last loss, how many weights had a gradient, and how many changed."""
    before = {name: weight.clone() for name, weight in in_memory().state_dict().items()}
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = loss_of(network)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    after = get_state_dict_offloaded_model(network)
    with_gradient = sum(weight.grad is not None for weight in network.parameters())
    return losses[0], losses[-1], with_gradient, sum(not torch.equal(before[name], after[name]) for name in before)


def input_gradient(network):
    data = inputs.clone().requires_grad_()
    loss_of(network, data).backward()
    return data.grad


expected = {in_memory: 6, dispatched: 4, offloaded: 0, prepared: 4}
found = {}
for make, count in expected.items():
    assert torch.allclose(input_gradient(make()), input_gradient(in_memory())), "changed: the input's gradient"
    found[make] = first, last, with_gradient, changed = train(make())
    print(f"{make.__name__}: loss {first:.2f} to {last:.2f}, {with_gradient} of 6 weights with a gradient, "
          f"{changed} of 6 changed")
    assert with_gradient == changed == count, f"changed: weights that are trained, {make.__name__}"
assert found[in_memory][1] < found[dispatched][1] < 0.7 * found[dispatched][0], "changed: the loss falls by the others"
assert found[offloaded][0] == found[offloaded][1], "changed: cpu_offload"
print("as described: offloaded layers are not trained")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
