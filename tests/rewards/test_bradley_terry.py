"""Scores from choices against closed forms and a general optimiser."""

import math

import pytest
import torch
from scipy.optimize import minimize

from lit_vgrpo.rewards.vote_groups import choice_scores


def negative_log_posterior(scores, choices, prior_std):
    """The definition, in plain Python."""
    total = sum(score**2 for score in scores) / (2 * prior_std**2)
    for chosen, shown in choices:
        total -= scores[chosen] - math.log(sum(math.exp(scores[item]) for item in shown))
    return total


def test_one_pair_has_the_known_answer():
    # The gradient at (s, -s): 1 / (1 + e^2s) = s / sigma^2, which s = 1 solves for this sigma.
    prior_std = math.sqrt(1 + math.e**2)
    scores = choice_scores([(0, [0, 1])], 2, prior_std)
    assert scores.tolist() == pytest.approx([1, -1], abs=1e-9)


def test_odds_are_those_of_the_votes_where_there_are_many():
    # Without a prior, the odds of two items are those of their wins: log(3).
    scores = choice_scores([(0, [0, 1])] * 3000 + [(1, [1, 0])] * 1000, 2, prior_std=100)
    assert float(scores[0] - scores[1]) == pytest.approx(math.log(3), abs=1e-5)


@pytest.mark.parametrize(
    "choices",
    [
        [(0, [0, 1, 2, 3])],
        [(2, [0, 1, 2, 3]), (1, [1, 2]), (1, [0, 1]), (3, [0, 3])],
        [(0, [0, 1])] * 50 + [(2, [2, 1])] * 50,  # items that always win have no finite maximum without the prior
    ],
)
@pytest.mark.parametrize("prior_std", [0.5, 1.5, 20.0])
def test_the_fit_is_the_maximum(choices, prior_std):
    scores = choice_scores(choices, 4, prior_std)
    best = minimize(negative_log_posterior, [0.0] * 4, (choices, prior_std), method="BFGS", options={"gtol": 1e-7})
    assert scores.isfinite().all()
    assert scores.tolist() == pytest.approx(list(best.x), abs=2e-4 * prior_std)
    assert float(scores.sum()) == pytest.approx(0, abs=1e-7)


def test_no_choices_give_equal_scores():
    assert torch.equal(choice_scores([], 3), torch.zeros(3, dtype=torch.float64))
