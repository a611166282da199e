import subprocess
import sys

import pytest
import torch

from lit_vgrpo.core.pixels import to_uint8
from lit_vgrpo.rewards import Reward


class Brightness(Reward):
    name = "brightness"

    def __call__(self, images, prompts, rows):
        return images.mean((1, 2, 3))


def test_a_small_reward_needs_only_a_name_and_a_call():
    reward = Brightness()
    assert reward.check() == []
    assert reward.load() is None
    assert reward(torch.ones(2, 3, 4, 4), ["a", "b"], [{}, {}]).tolist() == [1, 1]


def test_a_reward_without_a_call_cannot_be_built():
    with pytest.raises(TypeError, match="__call__"):
        type("Nothing", (Reward,), {"name": "nothing"})()


def test_rounding_to_uint8():
    values = torch.tensor([-0.5, 0.0, 0.49 / 255, 0.51 / 255, 254.4 / 255, 1.0, 7.0])
    assert to_uint8(values).tolist() == [0, 0, 0, 1, 254, 255, 255]
    assert to_uint8(values.half()).dtype == torch.uint8


def test_rewards_import_no_lightning():
    code = (
        "import sys, lit_vgrpo.rewards; "
        "print([name for name in sys.modules if name.split('.')[0] in ('lightning', 'lightning_fabric', 'diffusers')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
