import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_vgrpo.core.noise import seeded_generator
from lit_vgrpo.core.surrogate import ContinuousTimes, SamplerTimes, TimeGrid, coefficient_of_variation, draw_levels


def test_seeded_generator_depends_on_every_part_of_its_key():
    keys = [(0, 1, 2), (0, 2, 1), (1, 1, 2), (0, 1), (0, 1, 3)]
    draws = {torch.rand(1, generator=seeded_generator(*key)).item() for key in keys}
    assert len(draws) == len(keys)
    assert torch.equal(torch.rand(4, generator=seeded_generator(5, 6)), torch.rand(4, generator=seeded_generator(5, 6)))


def test_coefficient_of_variation_within_groups_ignores_what_differs_between_them():
    values = torch.tensor([1.0, 1.0, 9.0, 9.0])
    assert coefficient_of_variation(values) == pytest.approx(0.8)
    assert coefficient_of_variation(values, torch.tensor([0, 0, 1, 1])) == 0


def test_every_group_counts_once_whatever_its_size():
    values = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0])
    assert coefficient_of_variation(values, torch.tensor([4, 4, 7, 7, 7])) == pytest.approx(0.25)


# --- times ---


def sampler(steps):
    return SamplerTimes(torch.linspace(1, 0.1, steps))


def drawn(pool, number, stratified, rows=4000):
    """Times of many draws, ``(rows, number)``."""
    return torch.stack([pool.draw(number, seeded_generator(0, row), stratified) for row in range(rows)])


@given(number=st.integers(1, 32), seed=st.integers(0, 2**32))
def test_one_level_in_each_stratum(number, seed):
    levels = draw_levels(number, torch.Generator().manual_seed(seed))
    assert (levels * number).long().tolist() == list(range(number))


def test_independent_levels_are_not_stratified():
    levels = draw_levels(4096, torch.Generator().manual_seed(0), False)
    assert sorted(set((levels * 4096).long().tolist())) != list(range(4096))
    assert levels.mean() == pytest.approx(0.5, abs=0.02)


@given(steps=st.integers(1, 60), number=st.integers(1, 16), seed=st.integers(0, 2**32))
def test_each_part_of_the_samplers_times_gives_one_whole_entry(steps, number, seed):
    pool = sampler(steps)
    times = pool.draw(number, torch.Generator().manual_seed(seed))
    if number <= steps:
        for part, time in zip(pool.times.tensor_split(number), times, strict=True):
            assert time in part
        assert len(set(times.tolist())) == number
    else:
        assert set(times.tolist()) <= set(pool.times.tolist())
    if number % steps == 0:
        assert set(times.tolist()) == set(pool.times.tolist())


def test_every_entry_of_a_part_is_drawn_equally_often():
    times = drawn(sampler(10), 4, True)
    for part, column in zip(sampler(10).times.tensor_split(4), times.T, strict=True):
        shares = [(column == entry).float().mean().item() for entry in part]
        assert shares == pytest.approx([1 / len(part)] * len(part), abs=0.03)


def test_a_grid_is_shifted():
    torch.testing.assert_close(TimeGrid(4, 3.0).times(), torch.tensor([1.0, 0.9, 0.75, 0.5]))


def test_shift_equals_the_formula():
    levels = draw_levels(3, torch.Generator().manual_seed(5), False)
    times = ContinuousTimes(3.0).draw(3, torch.Generator().manual_seed(5), False)
    u = 1 - levels.double()
    torch.testing.assert_close(times, (3 * u / (1 + 2 * u)).float())


@pytest.mark.parametrize(
    ("time_range", "noisiest", "progress", "expected"),
    [
        (None, 10, 0.0, 10),
        (None, 3, 0.0, 3),
        (None, 3, 1 / 7, 4),
        ((0.25, 0.95), 2, 1.0, 7),
        ((0.25, 0.95), 9, 0.5, 7),
    ],
)
def test_the_part_of_the_samplers_times(time_range, noisiest, progress, expected):
    part = sampler(10).within(time_range).noisiest(noisiest, progress)
    first = 0 if time_range is None else 1
    assert part.times.tolist() == sampler(10).times[first : first + expected].tolist()


def test_the_part_of_the_continuous_schedule():
    shift = 3.0
    pool = ContinuousTimes(shift).within((0.3, 0.8))
    times = drawn(pool, 4, True)
    assert times.min() == pytest.approx(0.3, abs=0.01)
    assert times.max() == pytest.approx(0.8, abs=0.01)
    narrow = drawn(ContinuousTimes(shift).noisiest(0.2), 4, True)
    wider = drawn(ContinuousTimes(shift).noisiest(0.2, 0.5), 4, True)
    last = [shift * u / (1 + (shift - 1) * u) for u in (0.8, 0.4)]
    assert [narrow.min().item(), wider.min().item()] == pytest.approx(last, abs=0.01)
    assert ContinuousTimes(shift).noisiest(0.2, 1.0) == ContinuousTimes(shift)


def test_a_range_without_times_is_refused():
    with pytest.raises(ValueError, match=r"time_range=\[0.0, 0.05\] contains none of the sampler's times.* 0.1 and 1"):
        sampler(10).within((0.0, 0.05))
    assert len(sampler(10).pick(10, torch.Generator()).unique()) == 10
    with pytest.raises(ValueError, match="needs 5 different times, but .* leave 4 of the sampler's"):
        sampler(10).noisiest(4).pick(5, torch.Generator())
