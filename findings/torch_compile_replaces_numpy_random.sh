#!/usr/bin/env bash
# torch, numpy: in a compiled function, numpy's random numbers ignore numpy's seed and move torch's random state
#
# One would guess: torch.compile changes the speed. np.random in the function follows np.random.seed, as it does in the
# same function without torch.compile, or stays outside of the graph, as Python's random and numpy's Generators do.
#
# What happens (torch 2.13.0, numpy 2.4.6): the call becomes part of the graph, as a call of torch's generator. Times of
# three images, drawn in a function with np.random.uniform:
#                                                        plain                     compiled
#   np.random.seed(0)                            [0.549, 0.715, 0.603]    [0.274, 0.862, 0.657]
#   np.random.seed(0), once more                 [0.549, 0.715, 0.603]    [0.810, 0.407, 0.651]
#   torch.manual_seed(0)                         follow numpy's seed      [0.970, 0.708, 0.459], at each repetition
#   torch.rand(1) after torch.manual_seed(0)          0.496                    0.490
#   np.random.rand() after np.random.seed(0)          0.545                    0.549
# np.random.RandomState(0), random.random() and np.random.default_rng(0) in a compiled function keep their numbers.
# Nothing is logged. torch._dynamo.config.use_numpy_random_stream = True gives numpy's numbers.
#
# Why it matters: times, crops, noise levels and prompt dropout are often drawn with numpy. Compiled, validation noise
# that is fixed by numpy's seed is new in each call, a resumed run that restores numpy's state does not repeat, and the
# noise that torch draws later is another one than without compilation. Pass drawn numbers in as arguments.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > "$folder/check.py" <<'PY'
import random

import numpy as np
import torch

print(f"torch {torch.__version__}, numpy {np.__version__}")


def by_numpy(images):
    return images * torch.from_numpy(np.random.uniform(size=3))


def by_state(images):
    return images * torch.from_numpy(np.random.RandomState(0).uniform(size=3))


def by_python(images):
    return images * random.random()


def by_generator(images):
    return images * torch.from_numpy(generator.uniform(size=3))


def compiled(function):
    return torch.compile(function, backend="eager")  # the same graph as with "inductor", without a C++ compiler


images = torch.ones(3, dtype=torch.float64)


def draw(function, seed=None):
    """Return the drawn numbers, and what torch and numpy draw next."""
    global generator
    generator = np.random.default_rng(0)
    np.random.seed(0)
    random.seed(0)
    if seed is not None:
        torch.manual_seed(seed)
    times = [round(time, 3) for time in function(images).tolist()]
    return times, round(torch.rand(1).item(), 3), round(np.random.rand(), 3)


plain, fast = by_numpy, compiled(by_numpy)
torch.manual_seed(7)
first, second = draw(plain)[0], draw(plain)[0]
print("plain:", first, second)
assert first == second
first, second = draw(fast)[0], draw(fast)[0]
print("compiled, both after np.random.seed(0):", first, second)
assert first != second, "changed: numpy's seed counts"
seeded, again, other = draw(fast, seed=0), draw(fast, seed=0), draw(fast, seed=1)
print("compiled, after torch.manual_seed:", seeded, again, other)
assert seeded == again and seeded[0] != other[0], "changed: torch's seed does not count"
reference = draw(plain, seed=0)
print("plain, after torch.manual_seed:", reference)
assert reference[1] != seeded[1], "changed: torch's state stays"
assert reference[2] != seeded[2], "changed: numpy's state moves"

for function in (by_state, by_python, by_generator):
    assert draw(function)[0] == draw(compiled(function))[0], function.__name__
    print(f"{function.__name__}: equal numbers")

torch._dynamo.reset()
torch._dynamo.config.use_numpy_random_stream = True
print("with use_numpy_random_stream:", draw(compiled(by_numpy))[0])
assert draw(compiled(by_numpy))[0] == reference[0]
print("as described: compiled code draws numpy's numbers from torch")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
