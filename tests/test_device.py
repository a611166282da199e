"""Messages about the device, with torch's answers in place of a GPU's."""

from types import SimpleNamespace

import pytest
import torch

from lit_vgrpo.core.records import Stopwatch, timed
from lit_vgrpo.core.sharding import write
from lit_vgrpo.launch.build import build
from lit_vgrpo.system.memory import idle_gpu
from lit_vgrpo.training.settings import crowding_warning


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is there, with nothing to compute on it; the calls that wait for it."""
    waited = []
    properties = SimpleNamespace(total_memory=80 * 2**30)
    answers = {"is_available": True, "is_initialized": True, "get_device_name": "NVIDIA Test"}
    for name, answer in {**answers, "get_device_properties": properties}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: waited.append(args))
    return waited


def test_a_gpu_that_is_not_used_is_named(tiny_recipe, gpu):
    lines = build([str(tiny_recipe)], make_folder=False).opening()
    assert "WARNING: NVIDIA Test is not used. To train on it: trainer.accelerator=gpu" in lines
    assert idle_gpu(torch.device("cuda", 0)) is None


@pytest.mark.parametrize("devices", [1, 2])
def test_processes_that_share_a_core_are_named(tiny_recipe, monkeypatch, devices):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    run = build([str(tiny_recipe), f"trainer.devices={devices}"], make_folder=False)
    said = "2 processes share 1 CPU core. Lower trainer.devices."
    assert crowding_warning(run.trainer) == (said if devices == 2 else None)
    *_, sizes, device, folder = lines = run.opening()
    assert sizes == f"Each iteration: 4 images, 2 for each of 2 prompts{', on 2 ranks' * (devices == 2)}."
    assert (device[:8], folder, len(lines)) == ("Device: ", "Run folder: runs/tiny", 4)


def test_a_phase_ends_when_the_gpu_is_done(gpu):
    """Its work is only queued when a call returns, and would be booked on the next phase."""
    seconds = {}
    with timed(seconds, "decode"):
        assert len(gpu) == 1
    assert len(gpu) == 2
    with Stopwatch().running():
        assert len(gpu) == 3
    assert len(gpu) == 4


def test_written_shards_are_there_before_they_are_gathered(monkeypatch):
    """DeepSpeed gathers on a stream of its own."""
    from deepspeed.accelerator import get_accelerator

    done = []
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda *args: done.append("waited"), raising=False)
    partition = torch.zeros(4)
    parameter = SimpleNamespace(ds_tensor=partition, forget_gathered=lambda: done.append(partition.tolist()))
    write({"w": parameter}, {"w": torch.ones(4)})
    assert done == ["waited", [1.0] * 4]
