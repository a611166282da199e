"""Noise is what torch draws from each row's own generator, on any number of threads."""

import pytest
import torch

from lit_vgrpo.core.noise import STREAM_PAIRS, WORTH_A_THREAD, image_generators, unit_noise


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("shape", [(3,), (4, 4, 8, 8), (WORTH_A_THREAD // 4,)])
@pytest.mark.parametrize("inference", [False, True])
def test_each_row_is_its_own_generators(threads, shape, inference, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generators = image_generators(STREAM_PAIRS, 7, 3, range(6))
    [torch.rand(2, generator=generator) for generator in generators]  # as times are drawn before
    again = image_generators(STREAM_PAIRS, 7, 3, range(6))
    with torch.inference_mode(inference), torch.device("meta"):
        noise = unit_noise(generators, shape)
    assert noise.shape == (6, *shape)
    for row, generator in zip(noise, again, strict=True):
        torch.rand(2, generator=generator)
        assert torch.equal(row, torch.randn(shape, generator=generator))
        assert torch.equal(generator.get_state(), generators.pop(0).get_state())
