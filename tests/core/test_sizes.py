import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_vgrpo.core.sizes import Sizes

small = st.integers(1, 40)


def test_the_paper_sizes_on_eight_ranks():
    plan = Sizes(48, 24, 1, 8).plan(8)
    assert plan.images_per_iteration == 1152
    assert plan.groups_per_rank == 6
    assert plan.images_per_rank == 144
    assert plan.micro_batches_per_update == 18
    assert plan.steps_per_iteration == 18


def test_prompts_that_cannot_be_split_name_what_would_work():
    assert Sizes(48, 24).errors(5) == [
        "prompts_per_iteration=48 cannot be split over 5 ranks. "
        "Use a multiple of 5, or trainer.devices 1, 2, 3, 4, 6 or 8."
    ]


def test_a_group_of_one_is_refused():
    assert Sizes(8, 1).errors(1) == ["group_size=1 has no group to compare with. Use 2 to 10,000."]


@pytest.mark.parametrize("name", ["prompts_per_iteration", "updates_per_iteration", "micro_batch_size"])
@pytest.mark.parametrize("value", [0, -3])
def test_numbers_below_one_are_refused(name, value):
    sizes = Sizes(**{"prompts_per_iteration": 8, "group_size": 4, name: value})
    assert sizes.errors(1)[0].startswith(f"{name}={value} is too small. Use 1 to 1,000,000")


@pytest.mark.parametrize("value", [2.5, True, "8", None])
def test_what_is_no_integer_is_refused(value):
    (error,) = Sizes(8, 4, 1, value).errors(1)
    assert error.startswith(f"micro_batch_size={value} is not a whole number.")


def test_an_uneven_micro_batch_names_its_neighbours():
    assert Sizes(8, 16, 1, 24).errors(2) == ["micro_batch_size=24 cannot split the 64 images of a rank. Use 16 or 32."]
    assert Sizes(8, 16, 1, 15).errors(2)[0].endswith("Use 8 or 16.")
    assert Sizes(2, 4, 1, 5).errors(1)[0].endswith("Use 4 or 8.")


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
    assert sizes.errors(8) == [
        "prompts_per_iteration=2 cannot be split over 8 ranks. Use a multiple of 8, or trainer.devices 1, 2, 4 or 6."
    ]


def test_split_updates_share_out_the_images():
    sizes = Sizes(8, 16, 4, 8, split_updates=True)
    plan = sizes.plan(2)
    assert (plan.images_per_update, plan.micro_batches_per_update, plan.steps_per_iteration) == (32, 2, 8)
    assert (sizes.uses_per_image, Sizes(8, 16, 4, 8).uses_per_image) == (1, 4)
    assert "4 on 32 images each" in plan.table()


def test_split_updates_that_do_not_divide_name_what_would():
    assert Sizes(8, 4, 5, 4, split_updates=True).errors(1) == [
        "updates_per_iteration=5 cannot divide 32 images. Use 4 or 8, or split_updates=false."
    ]
    assert Sizes(8, 4, 4, 3, split_updates=True).errors(1) == [
        "micro_batch_size=3 cannot split the 8 images of one update on a rank. Use 2 or 4."
    ]


def test_split_updates_that_other_ranks_would_cut_otherwise_are_refused():
    assert Sizes(4, 4, 4, 1, split_updates=True).errors(2) == [
        "updates_per_iteration=4 cannot divide the images equally on 2 ranks. "
        "Use split_updates=false, or trainer.devices 1."
    ]
    assert Sizes(3, 4, 2, 1, split_updates=True).errors(12)[0].endswith("or trainer.devices 1, 3 or 6.")


def test_every_error_of_the_values_is_told():
    assert len(Sizes(0, 1, 0, 0).errors(0)) == 5


def test_the_table_is_aligned_and_counts_passes():
    lines = Sizes(48, 24, 2, 8).plan(2).table({"rollout": 40, "train": 4}).splitlines()
    assert "steps per iteration       144" in lines
    assert "network passes, rollout   46080 (40 per image)" in lines
    assert {re.search(r"  +(?=\S)", line).end() for line in lines} == {26}


@settings(deadline=None)
@given(small, small, small, small, small)
def test_a_plan_uses_every_image_once_an_update_or_is_refused(prompts, group, updates, micro, world):
    sizes = Sizes(prompts, group, updates, micro)
    whole = prompts % world == 0
    cut = world % prompts == 0 and group % (world // prompts) == 0
    images = prompts * group // world
    fits = group >= 2 and (whole or cut) and (images <= micro or images % micro == 0)
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
        assert plan.micro_batches_per_update * updates == plan.steps_per_iteration


@settings(deadline=None)
@given(small, st.integers(2, 40), small, small, small)
def test_following_the_advice_gets_to_sizes_that_fit(prompts, group, updates, micro, world):
    values = [prompts, group, updates, micro]
    for _ in range(4):
        errors = Sizes(*values).errors(world)
        if not errors:
            return
        name = errors[0].split("=")[0]
        advised = int(errors[0].rstrip(".").split()[-1])
        if name == "prompts_per_iteration":
            world = advised
        else:
            assert name == "micro_batch_size"
            values[3] = advised
    pytest.fail(f"still wrong: {errors}")
