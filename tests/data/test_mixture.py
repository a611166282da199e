import math
from collections import Counter
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.data.datasets import IterationDataset
from lit_vgrpo.data.prompt_sets import PromptMixture, place_in_mixture, prompt_index

WEIGHTS = st.lists(st.integers(1, 50), min_size=1, max_size=7)
quick = settings(max_examples=100, deadline=None)


@quick
@given(WEIGHTS, st.integers(1, 200))
def test_every_source_gets_its_share_at_every_place(weights, places):
    counts = Counter()
    bound = Fraction(math.ceil(math.log2(len(weights))), 2) if len(weights) > 1 else 0
    for position in range(places):
        source, before = place_in_mixture(position, weights)
        assert before == counts[source]  # nothing is taken twice and nothing left out
        counts[source] += 1
        for number, weight in enumerate(weights):
            assert abs(counts[number] - Fraction((position + 1) * weight, sum(weights))) <= bound


@quick
@given(WEIGHTS, st.integers(0, 10**15))
def test_a_whole_round_has_exactly_the_weights_however_far_the_run_is(weights, rounds):
    start, length = rounds * sum(weights), sum(weights)
    counts = Counter(place_in_mixture(position, weights)[0] for position in range(start, start + length))
    assert [counts[number] for number in range(len(weights))] == weights


def test_one_source_has_the_order_that_it_always_had():
    rows = [{"prompt": str(i)} for i in range(7)]
    (mixed,) = {tuple(row["prompt"] for row in PromptMixture([rows]).rows(5, range(20)))}
    alone = [str(prompt_index(5, position, 7)) for position in range(20)]
    assert list(mixed) == alone


def test_every_source_is_walked_through_in_passes_of_its_own():
    sources = [[{"prompt": f"{name}{i}"} for i in range(size)] for name, size in (("a", 4), ("b", 4))]
    drawn = [row["prompt"] for row in PromptMixture(sources, [3.0, 1.0]).rows(0, range(64))]
    for name, number in (("a", 48), ("b", 16)):
        own = [prompt for prompt in drawn if prompt[0] == name]
        assert len(own) == number
        assert all(len(set(own[start : start + 4])) == 4 for start in range(0, number, 4))
    orders = [[prompt[1] for prompt in drawn if prompt[0] == name][:16] for name in "ab"]
    assert orders[0] != orders[1]


@quick
@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 20), WEIGHTS)
def test_a_mixture_does_not_depend_on_ranks_or_on_what_was_drawn_before(world, iteration, weights):
    sources = [[{"prompt": f"{number} {i}"} for i in range(3 + number)] for number in range(len(weights))]
    mixture, sizes = PromptMixture(sources, weights), Sizes(8, 2, 1, 2)

    def drawn(world, rank, iteration):
        dataset = IterationDataset(mixture, sizes, world, rank, seed=1)
        return dataset[iteration * len(dataset)].prompts

    alone = drawn(1, 0, iteration)
    assert [prompt for rank in range(world) for prompt in drawn(world, rank, iteration)] == alone
    stream = [row["prompt"] for row in mixture.rows(1, range((iteration + 1) * 8))]
    assert stream[-8:] == alone
