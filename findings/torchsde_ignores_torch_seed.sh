#!/usr/bin/env bash
# torchsde: the noise of sdeint ignores torch.manual_seed and follows numpy's global seed
#
# One would guess: torch.manual_seed(0) before sdeint makes a sample of a stochastic differential equation repeatable,
# and another seed gives another sample.
#
# What happens (torchsde 0.2.6, torch 2.13.0): without bm, sdeint makes a BrownianInterval whose seed it draws with
# numpy.random.randint, and torch's generator is neither read nor advanced. Samples of the same start, two calls:
#   before each call                                            samples
#   torch.manual_seed(0)                                        differ
#   numpy.random.seed(0)                                        are equal
#   numpy.random.seed(0), torch.manual_seed(0 or 1)             are equal
#   BrownianInterval(entropy=0) given as bm                     are equal
#   torch.manual_seed(0), for steps by hand with torch.randn    are equal
# Nothing is logged.
#
# Why it matters: samplers and rollouts that are seeded with torch alone, such as accelerate's or a pipeline's generator
# per rank, are not repeatable. Where all ranks seed numpy alike and torch by rank, all ranks draw the same noise.
# Give bm with an entropy of your own.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 torchsde==0.2.6
cat > "$folder/check.py" <<'PY'
from importlib.metadata import version

import numpy
import torch
from torchsde import BrownianInterval, sdeint

print(f"torchsde {version('torchsde')}, torch {torch.__version__}")
start, times, size = torch.zeros(4, 2), torch.tensor([0.0, 1.0]), 0.1


class Process(torch.nn.Module):
    noise_type, sde_type = "diagonal", "ito"

    def f(self, time, state):
        return -state

    def g(self, time, state):
        return torch.ones_like(state)


def solve(bm=None):
    return sdeint(Process(), start, times, dt=size, bm=bm)[-1]


def by_hand():
    state = start
    for _ in range(10):
        state = state - size * state + size**0.5 * torch.randn(state.shape)
    return state


def check(name, expected, seed, sample=solve):
    samples = []
    for call in range(2):
        seed(call)
        samples.append(sample())
    equal = torch.equal(*samples)
    print(f"{name:50} {'equal' if equal else 'differ'}")
    assert equal == expected, f"changed: {name}"


def seed_both(call):
    numpy.random.seed(0)
    torch.manual_seed(call)


check("torch.manual_seed(0)", False, lambda call: torch.manual_seed(0))
check("numpy.random.seed(0)", True, lambda call: numpy.random.seed(0))
check("numpy.random.seed(0), torch.manual_seed(0 or 1)", True, seed_both)
check("BrownianInterval with entropy=0", True, torch.manual_seed,
      lambda: solve(BrownianInterval(0.0, 1.0, start.shape, entropy=0, levy_area_approximation="space-time")))
check("torch.manual_seed(0), by hand", True, lambda call: torch.manual_seed(0), by_hand)
state = torch.get_rng_state()
solve()
assert torch.equal(state, torch.get_rng_state()), "changed: sdeint draws from torch's generator"
print("as described: sdeint follows numpy's seed")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
