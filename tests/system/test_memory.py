import subprocess
import sys

import pytest

CODE = """
import torch
from lit_vgrpo.system.memory import measured_memory
held = [torch.ones(30, 2**20)]
with measured_memory() as first:
    held.append(torch.ones(20, 2**20))
    held.clear()
with measured_memory() as second:
    held.append(torch.ones(10, 2**20))
print(first.resident / 2**20, second.resident / 2**20)
"""


@pytest.mark.slow  # a separate process: memory of other tests may be freed meanwhile
def test_memory_is_the_peak_of_the_block():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=True)
    first, second = map(float, done.stdout.split()[-2:])
    assert 75 <= first <= 140
    assert 35 <= second <= 70  # without what the block before took
