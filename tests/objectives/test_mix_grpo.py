"""MixGRPO: its window over the iterations, and Flash."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import MixGRPO

STRATEGIES = ("progressive", "random", "decay", "frozen")


def starts(objective, iterations):
    return [objective.rollout_spec(iteration).window[0] for iteration in range(iterations)]


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(
    steps=st.integers(2, 60),
    size=st.integers(1, 59),
    stride=st.integers(1, 9),
    interval=st.integers(1, 400),
    strategy=st.sampled_from(STRATEGIES),
    flash=st.booleans(),
)
def test_the_window_is_never_short_over_2000_iterations(steps, size, stride, interval, strategy, flash):
    size = min(size, steps - 1)
    moves = {} if strategy in ("frozen", "random") else {"window_stride": stride, "window_interval": interval}
    objective = MixGRPO(RolloutSpec("flow_sde", steps), size, strategy, flash=flash, **moves)
    seen = set()
    for iteration in range(2000):
        if objective.window_start(iteration) in seen:  # the same rollout again
            continue
        spec = objective.rollout_spec(iteration)
        first, stop = spec.window
        assert first == objective.window_start(iteration)
        assert len(spec.sde_steps) == stop - first == size
        assert first >= 0
        assert stop <= steps - 1
        seen.add(first)
    assert objective.rollout_spec(0).window[0] == 0 or strategy == "random"
    if strategy == "progressive" and interval == 1:
        assert seen == set(range(0, steps - size, stride))


def test_progressive_moves_by_one_every_interval_and_starts_over():
    objective = MixGRPO()
    expected = [(iteration // 25) % 21 for iteration in range(1200)]  # places 0 .. 25 - 1 - 4
    assert starts(objective, 1200) == expected


def test_stride_and_interval():
    objective = MixGRPO(RolloutSpec("flow_sde", 10), 3, window_stride=4, window_interval=2)
    assert starts(objective, 8) == [0, 0, 4, 4, 0, 0, 4, 4]


def test_decay_stays_shorter_at_later_places():
    objective = MixGRPO(window_strategy="decay", window_interval=20)
    visits = starts(objective, 2000)
    one_way = visits[: next(i for i in range(1, 2000) if visits[i - 1] == 20 and visits[i] == 0)]
    stays = [one_way.count(place) for place in range(21)]
    assert one_way == sorted(one_way)
    assert stays == [math.ceil(20 * math.exp(-0.1 * max(0, place - 13))) for place in range(21)]
    assert stays[:14] == [20] * 14
    assert stays[20] == 10


def test_random_visits_every_place_and_frozen_one():
    assert set(starts(MixGRPO(window_strategy="random"), 400)) == set(range(21))
    assert set(starts(MixGRPO(window_strategy="frozen"), 400)) == {0}


def test_flash_regrids_what_follows_the_window():
    objective = MixGRPO(flash=True)
    assert [objective.rollout_spec(i).network_calls for i in (0, 25, 500)] == [4 + 9, 5 + 8, 24 + 1]
    assert MixGRPO().rollout_spec(0).network_calls == 25
