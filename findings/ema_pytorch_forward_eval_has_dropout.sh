#!/usr/bin/env bash
# ema-pytorch: forward_eval runs the averaged network in training mode, with dropout, and changes its statistics
#
# One would guess: EMA.forward_eval(x), described in its source as a call with "no grad + eval", gives the output of
# the averaged network in evaluation mode and changes nothing.
#
# What happens (ema-pytorch 0.8.3, torch 2.13.0): it never calls eval(). The averaged network has the mode that the
# trained one had when it was copied, which is the training mode for a new network. A network with batch norm and
# dropout, batch of 64 pictures' features, all weights equal:
#                                              eval() before       forward_eval
#   largest difference between two calls            0.00                3.39
#   change of the averaged running mean             0.00                0.76  after 2 calls
#   mode afterwards                                 eval                train
# The plain call, EMA(...)(x), does the same; model.eval() of the trained network does not reach the average. If one
# part of the average had been put into eval mode, forward_eval puts it back into training mode. EMA.eval() before
# each pass helps. Nothing is logged.
#
# Why it matters: the average is kept for validation, and for a frozen reference or teacher. Its rewards, losses and KL
# terms get dropout noise, and validation pictures leak into its batch norm statistics, which are then saved.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6 ema-pytorch==0.8.3
cat > "$folder/check.py" <<'PY'
from importlib.metadata import version

import torch
from ema_pytorch import EMA
from torch import nn

print(f"ema-pytorch {version('ema-pytorch')}, torch {torch.__version__}")
features = 3 * torch.randn(64, 16, generator=torch.Generator().manual_seed(1)) + 3


def averaged():
    torch.manual_seed(0)
    network = nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 16))
    average = EMA(network, update_after_step=0, update_every=1)
    for _ in range(3):
        average.update()
    network.eval()  # as before validation; it reaches the trained network only
    return average


def measure(call, before=None):
    """Return the difference between two calls, the change of the running mean and the mode at the end."""
    average = averaged()
    if before is not None:
        before(average)
    mean = average.ema_model[0].running_mean.clone()
    first, second = (call(average) for _ in range(2))
    result = ((first - second).abs().max().item(), (average.ema_model[0].running_mean - mean).abs().max().item(),
              average.ema_model.training)
    print("difference {:.2f}, change of the running mean {:.2f}, training mode {}".format(*result))
    return result


def forward_eval(average):
    return average.forward_eval(features)


def plain(average):
    with torch.no_grad():
        return average(features)


print("eval() before:")
assert measure(plain, EMA.eval) == (0.0, 0.0, False)
assert measure(forward_eval, EMA.eval) == (0.0, 0.0, False)
print("forward_eval and a plain call:")
for call in (forward_eval, plain):
    difference, change, training = measure(call)
    assert difference > 1 and change > 0.1 and training, "changed: evaluation mode"

average = averaged()
average.ema_model[0].eval()
average.forward_eval(features)
print("a part in eval mode is afterwards in training mode:", average.ema_model[0].training)
assert average.ema_model[0].training, "changed: the modes of parts are kept"
print("as described: forward_eval is a pass in training mode")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
