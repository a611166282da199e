"""What a run reports of its machine: operations of the network, their share of the device's peak, memory by phase."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import make_module
from support.pretended_gpu import pretended_gpu
from torch.utils.flop_counter import FlopCounterMode

from lit_vgrpo import SD3Policy
from lit_vgrpo.callbacks import RewardLogger
from lit_vgrpo.policies.meta import flops_per_image
from lit_vgrpo.system.memory import PeakMemory, measured_memory


@pytest.mark.slow
def test_operations_are_those_of_a_real_pass_without_recomputation(tiny_sd3):
    policy = SD3Policy(str(tiny_sd3), lora_rank=2).load()
    given = torch.randn(1, *policy.latent_shape), torch.rand(1), policy.encode(["a"])
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        policy(*given)
    with FlopCounterMode(display=False) as both:
        policy(*given).sum().backward()
    counted = flops_per_image(SD3Policy(str(tiny_sd3), lora_rank=2, gradient_checkpointing=True))
    assert counted == (forward.get_total_flops(), both.get_total_flops())
    assert 2 < counted[1] / counted[0] < 3  # frozen weights get no gradient


def test_utilisation_is_of_this_iterations_passes(tiny_sd3):
    module, logger = make_module(tiny_sd3), RewardLogger()
    module.ledger.counts = {
        "rollout": {"with_grad": 0, "without_grad": 40},
        "update": {"with_grad": 20, "without_grad": 0},
        "evaluation": {"with_grad": 0, "without_grad": 1000},
    }
    module._trainer = SimpleNamespace(world_size=2)
    assert logger._utilisation(module, 2.0) == {}
    logger._flops, logger._peak_flops, logger._passes = (100, 300), 1000, (10, 10)
    assert logger._utilisation(module, 2.0) == {"cost/mfu": (30 * 100 + 10 * 300) / 2 / (2.0 * 1000)}


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is measured on Linux")
def test_each_phase_has_its_peak():
    memory = PeakMemory()
    memory.enter("update")
    with memory.during("large"):
        torch.ones(50_000_000)
    with memory.during("small"):
        pass
    memory.enter("")
    assert memory.by_phase["large"] - memory.by_phase["small"] > 150e6
    assert memory.most >= memory.by_phase["large"]
    assert set(memory.by_phase) == {"update", "large", "small"}


def test_a_phase_inside_a_measurement_does_not_reset_its_peak():
    memory, peaks = PeakMemory(), [0]
    allocator = {
        "memory_allocated": lambda *_: 10,
        "max_memory_allocated": lambda *_: peaks[-1],
        "max_memory_reserved": lambda *_: 100,
        "reset_peak_memory_stats": lambda *_: peaks.append(10),
    }
    with pretended_gpu(), mock.patch.multiple(torch.cuda, **allocator), measured_memory() as use:
        with memory.during("large"):
            peaks.append(70)
        with memory.during("small"):
            peaks.append(30)
    assert use.gpu == 60
    assert memory.by_phase == {"large": 70, "small": 30}
    if sys.platform != "linux":
        return
    with measured_memory() as use, memory.during("large"):
        torch.ones(50_000_000)
    assert use.resident > 150e6
