import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_vgrpo.core import gather
from lit_vgrpo.core.sizes import Sizes

small = st.integers(1, 40)


@pytest.mark.parametrize(
    ("sizes", "ranks", "error"),
    [
        (Sizes(48, 24), 5, "prompts_per_iteration=48 cannot be split over 5 ranks. Use a multiple of 5."),
        (Sizes(2, 6, 1, 8), 8, "prompts_per_iteration=2 cannot be split over 8 ranks. Use a multiple of 8."),
        (
            Sizes(8, 16, 1, 24),
            2,
            "micro_batch_size=24 cannot split the 64 images of a rank. Use a divisor of 64, such as 16.",
        ),
        (
            Sizes(8, 8, 1, 7),
            1,
            "micro_batch_size=7 cannot split the 64 images of a rank. Use a divisor of 64, such as 8.",
        ),
        (
            Sizes(3, 4),
            1,
            "micro_batch_size=8 (the default) cannot split the 12 images of a rank. Use a divisor of 12, such as 6.",
        ),
        (
            Sizes(8, 4, 5, 4, split_updates=True),
            1,
            "updates_per_iteration=5 cannot divide 32 images. Use a divisor of 32, or split_updates=false.",
        ),
        (
            Sizes(8, 4, 4, 3, split_updates=True),
            1,
            "micro_batch_size=3 cannot split the 8 images of one update on a rank. Use a divisor of 8, such as 2.",
        ),
        (
            Sizes(4, 4, 4, 1, split_updates=True),
            2,
            "updates_per_iteration=4 cannot divide the images equally on 2 ranks. "
            "Use split_updates=false, or another number of trainer.devices.",
        ),
    ],
)
def test_sizes_that_do_not_divide_name_what_would(sizes, ranks, error):
    assert sizes.errors(ranks) == [error]


def test_a_micro_batch_is_no_larger_than_what_a_rank_has():
    assert [Sizes(32, 4, 1, 32).plan(ranks).micro_batch_size for ranks in (1, 2, 8, 64)] == [32, 32, 16, 2]


def test_groups_are_cut_where_there_are_more_ranks_than_prompts():
    sizes = Sizes(2, 6, 1, 8)
    plan = sizes.plan(4)
    assert (plan.groups_per_rank, plan.ranks_per_group, plan.images_per_rank) == (1, 2, 3)
    assert "groups per rank           1/2" in plan.table().splitlines()
    shares = [sizes.rank_share(4, rank) for rank in range(4)]
    assert [(list(slots), list(members)) for slots, members in shares] == [
        ([0], [0, 1, 2]),
        ([0], [3, 4, 5]),
        ([1], [0, 1, 2]),
        ([1], [3, 4, 5]),
    ]


def test_split_updates_share_out_the_images():
    sizes = Sizes(8, 16, 4, 8, split_updates=True)
    plan = sizes.plan(2)
    assert (plan.images_per_update, plan.micro_batches_per_update) == (32, 2)
    assert (sizes.uses_per_image, Sizes(8, 16, 4, 8).uses_per_image) == (1, 4)
    assert "4 on 32 images each" in plan.table()


def test_the_table_is_aligned_and_counts_passes():
    lines = Sizes(48, 24, 2, 8).plan(2).table({"rollout": 40, "train": 4}).splitlines()
    assert "micro-batches per update  72 of 8 images" in lines
    assert "network passes, rollout   46080 (40 per image)" in lines
    assert {re.search(r"  +(?=\S)", line).end() for line in lines} == {26}


@settings(deadline=None)
@given(small, st.integers(2, 40), small, small, small)
def test_a_plan_uses_every_image_once_an_update_or_is_refused(prompts, group, updates, micro, world):
    sizes = Sizes(prompts, group, updates, micro)
    whole = prompts % world == 0
    cut = world % prompts == 0 and group % (world // prompts) == 0
    images = prompts * group // world
    fits = (whole or cut) and (images <= micro or images % micro == 0)
    assert (not sizes.errors(world)) == fits
    if fits:
        plan = sizes.plan(world)
        assert plan.images_per_rank * world == plan.images_per_iteration == prompts * group
        assert plan.micro_batches_per_update * plan.micro_batch_size == plan.images_per_rank
        assert plan.groups_per_rank * group == plan.images_per_rank * plan.ranks_per_group
        shares = [sizes.rank_share(world, rank) for rank in range(world)]
        assert [(s, m) for slots, members in shares for s in slots for m in members] == [
            (s, m) for s in range(prompts) for m in range(group)
        ]


def test_rows_of_ranks_with_other_sides_are_padded(monkeypatch):
    other = torch.full((1, 5), 2.0)

    def both_ranks(values):
        theirs = torch.tensor([[*other.shape]]) if values.dtype == torch.int64 else torch.zeros(values.shape)
        if values.dtype != torch.int64:
            theirs[: len(other)] = other
        return torch.cat([values, theirs])

    monkeypatch.setattr(gather, "all_gather", both_ranks)
    expected = [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [2, 2, 2, 2, 2]]
    assert gather.all_gather_rows(torch.ones(2, 3)).tolist() == expected
