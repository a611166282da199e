import numpy as np
import pytest
import torch

from lit_vgrpo.core.noise import seeded_generator
from lit_vgrpo.core.surrogate import (
    ERROR_FLOOR,
    ContinuousTimes,
    coefficient_of_variation,
    denoising_error,
    draw_pairs,
    surrogate,
)


def generators(number, seed=0):
    return [seeded_generator(seed, index) for index in range(number)]


def test_seeded_generator_depends_on_every_part_of_its_key():
    keys = [(0, 1, 2), (0, 2, 1), (1, 1, 2), (0, 1), (0, 1, 3)]
    draws = {torch.rand(1, generator=seeded_generator(*key)).item() for key in keys}
    assert len(draws) == len(keys)
    assert torch.equal(torch.rand(4, generator=seeded_generator(5, 6)), torch.rand(4, generator=seeded_generator(5, 6)))


def test_rows_of_pairs_depend_on_their_own_generator_only():
    rows = torch.tensor([0, 0, 1, 1])
    both = draw_pairs(generators(2), rows, 3, (2, 4, 4), times=ContinuousTimes())
    second = draw_pairs(generators(2)[1:], torch.tensor([0, 0]), 3, (2, 4, 4), times=ContinuousTimes())
    assert torch.equal(both.noise[1], second.noise[0])
    assert torch.equal(both.times[1], second.times[0])


def test_error_and_surrogate_equal_the_formula_in_float64():
    error = torch.randn(3, 2, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    e = error.double().numpy().reshape(3, 2, -1)
    weighted = (e**2).mean(2) / np.abs(e).mean(2)
    np.testing.assert_allclose(denoising_error(error, True), weighted, rtol=1e-5)
    np.testing.assert_allclose(denoising_error(error, False), (e**2).mean(2), rtol=1e-5)
    np.testing.assert_allclose(surrogate(denoising_error(error, True)), weighted.mean(1), rtol=1e-5)


def test_the_weight_carries_no_gradient():
    error = torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    denoising_error(error, True).sum().backward()
    e = error.detach()
    torch.testing.assert_close(error.grad, 2 * e / 8 / e.abs().mean())


def test_an_exact_prediction_gives_zero_not_nan():
    error = torch.zeros(1, 1, 8, requires_grad=True)
    value = denoising_error(error, True)
    value.sum().backward()
    assert value.item() == 0
    assert torch.equal(error.grad, torch.zeros_like(error))
    assert ERROR_FLOOR > 0


def test_coefficient_of_variation_within_groups_ignores_what_differs_between_them():
    values = torch.tensor([1.0, 1.0, 9.0, 9.0])
    assert coefficient_of_variation(values) == pytest.approx(0.8)
    assert coefficient_of_variation(values, torch.tensor([0, 0, 1, 1])) == 0


def test_every_group_counts_once_whatever_its_size():
    values = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0])
    assert coefficient_of_variation(values, torch.tensor([4, 4, 7, 7, 7])) == pytest.approx(0.25)
