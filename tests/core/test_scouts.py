"""Which scouts are redrawn, and how well their order foretells that of the images."""

import math

import pytest
import torch

from lit_vgrpo.core.advantages import extremes, rank_correlation
from lit_vgrpo.core.types import RolloutRequest

NAN = math.nan


@pytest.mark.parametrize(
    ("rewards", "keep", "chosen"),
    [
        ([0.3, 0.9, 0.1, 0.5, 0.7, 0.2], 4, [1, 2, 4, 5]),  # the best two, the worst two
        ([0.3, 0.9, 0.1, 0.5, 0.7, 0.2], 3, [1, 2, 5]),  # an odd group: one more of the worst
        ([0.3, 0.9, 0.1], 3, [0, 1, 2]),
        ([0.5, 0.5, 0.5, 0.5], 2, [0, 3]),  # equal scouts in order
        ([0.0, 1.0, 1.0, 0.0, 1.0], 2, [1, 3]),
        ([NAN, 0.2, NAN, 0.8, 0.5], 2, [1, 3]),  # a failed scout is not the worst one
        ([-3.0, -1.0, NAN, -2.0], 2, [0, 1]),  # nor better than all others
        ([NAN, 0.2, NAN, NAN, NAN, NAN], 4, [0, 1, 2, 3]),  # too few others: failed ones in order
        ([NAN, NAN, NAN], 2, [0, 1]),
    ],
)
def test_the_best_and_the_worst_of_a_group_are_chosen(rewards, keep, chosen):
    assert extremes(torch.tensor([rewards]), keep).tolist() == [chosen]


def test_every_group_chooses_for_itself():
    rewards = torch.tensor([[0.3, 0.9, 0.1, 0.5], [9.0, NAN, 7.0, 8.0]])
    assert extremes(rewards, 2).tolist() == [[1, 2], [0, 2]]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([[1.0, 2.0, 3.0, 4.0]], [[10.0, 20.0, 21.0, 90.0]], 1.0),
        ([[1.0, 2.0, 3.0]], [[3.0, 2.0, 1.0]], -1.0),
        ([[1.0, 2.0, 3.0, 4.0, 5.0]], [[2.0, 1.0, 4.0, 3.0, 5.0]], 0.8),  # 1 - 6 * 4 / (5 * 24)
        ([[1.0, 1.0, 2.0]], [[1.0, 2.0, 3.0]], math.sqrt(3) / 2),  # ties share their mean rank
        ([[0.0, 1.0], [5.0, 6.0]], [[1.0, 0.0], [6.0, 5.0]], -1.0),  # what differs between groups does not count
        ([[0.0, 1.0], [5.0, 5.0]], [[0.0, 1.0], [0.0, 9.0]], math.sqrt(0.5)),
        ([[0.0, 1.0, NAN, 3.0]], [[0.0, 1.0, -9.0, 3.0]], 1.0),
        ([[0.0, 0.0]], [[1.0, 2.0]], None),
        ([[NAN, NAN]], [[1.0, 2.0]], None),
    ],
)
def test_the_rank_correlation_is_that_within_groups(first, second, expected):
    found = rank_correlation(torch.tensor(first), torch.tensor(second))
    assert found is None if expected is None else found == pytest.approx(expected)


def test_the_scouts_of_cut_groups_are_those_of_the_whole():
    def ids(slots, members):
        return RolloutRequest(["a"] * len(slots), [{}] * len(slots), slots, 4, members=members).of_scouts(3).layout()[1]

    whole = ids([0, 1], None)
    assert whole.tolist() == list(range(24))
    parts = torch.cat([ids([slot], members) for slot in (0, 1) for members in ([0, 1], [2, 3])])
    assert torch.equal(parts, whole)
