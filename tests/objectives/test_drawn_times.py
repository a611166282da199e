"""The times that pair methods train at: who shares them, a range, the noisiest, and more with every iteration."""

from dataclasses import replace

import pytest
import torch
from pair_methods import GROUP, PROMPTS, prepare

from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.types import RolloutRequest, RolloutSpec
from lit_vgrpo.objectives import AWM, DGPO, VGRPO, DiffusionNFT
from lit_vgrpo.objectives import pairs as pairs_module
from lit_vgrpo.objectives.base import PrepareContext

TEN, SIZES = RolloutSpec(steps=10), Sizes(4, 4)
METHODS = {
    "V-GRPO": lambda **options: VGRPO(TEN, 2, **options),
    "AWM": lambda **options: AWM(TEN, 2, **options, kl_weight=0.0, ema_weight=0.0),
    "DiffusionNFT": lambda **options: DiffusionNFT(TEN, num_times=2, kl_weight=0.0, **options),
    "DGPO": lambda **options: DGPO(TEN, 2, reference="moving", **{"noisiest": None, **options}),
}


def rolled(policy, objective, slots=range(8)):
    objective.setup(policy)
    prompts = [PROMPTS[0]] * len(slots)
    return objective.roll_out(policy, RolloutRequest(prompts, [{}] * len(slots), list(slots), GROUP, seed=0))


def pairs_at(policy, objective, rollout, iteration=0):
    """Every image's times in an iteration, ``(B, N)``, and their noise."""
    context = PrepareContext(
        policy, replace(rollout, iteration=iteration), torch.zeros(len(rollout)), micro_batch_size=GROUP
    )
    return objective.prepare(context).pairs.of_images()


SHARED = {
    # a published method, the first image with the times of each, and the different noises of two groups of three
    "V-GRPO": (VGRPO(TEN, 2), [0, 0, 0, 3, 3, 3], 2 * 2),
    "AWM": (AWM(RolloutSpec(steps=14), noisiest=12), [0, 0, 0, 3, 3, 3], 6 * 6),  # those of a block
    "DiffusionNFT": (DiffusionNFT(TEN), [0, 1, 2, 3, 4, 5], 6 * 9),
    "DGPO": (DGPO(TEN), [0] * 6, 2 * 4),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("micro_batch_size", [1, 6])
def test_who_shares_times_and_noise(policy, name, micro_batch_size, monkeypatch):
    monkeypatch.setattr(pairs_module, "BLOCK", 3)
    objective, first, noises = SHARED[name]
    schedule = rolled(policy, objective).schedule.tolist()
    pairs = prepare(policy, objective, micro_batch_size=micro_batch_size).pairs
    rows = pairs.of_images()[0].tolist()
    assert [rows.index(row) for row in rows] == first
    assert len({float(noise.flatten()[0]) for noise in pairs.noise.flatten(0, 1)}) == noises
    for row in rows:
        assert set(row) <= set(schedule[: objective.noisiest])
        assert len(set(row)) == objective.num_pairs
        if name == "AWM":  # the published ``discrete``: one from each two of 14 steps' noisiest 0.9
            assert [schedule.index(t) // 2 for t in row] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", METHODS)
def test_the_noisiest_times_widen_with_the_iterations(policy, name, monkeypatch):
    monkeypatch.setattr(pairs_module, "BLOCK", GROUP)
    objective, fixed = METHODS[name](noisiest=3, widen_over=14), METHODS[name](noisiest=3)
    fixed.setup(policy)
    rollout = rolled(policy, objective)
    schedule = rollout.schedule.tolist()
    for iteration, kept in ((0, 3), (1, 3), (2, 4), (7, 6), (14, 10), (99, 10)):
        found = [schedule.index(t) for t in pairs_at(policy, objective, rollout, iteration)[0].flatten().tolist()]
        assert max(found) < kept
        assert max(found) >= kept - 2 or name == "DGPO"  # whose images all have the same two times
    assert set(pairs_at(policy, fixed, rollout, 50)[0].flatten().tolist()) <= set(schedule[:3])


@pytest.mark.parametrize("name", METHODS)
def test_times_stay_in_their_range(policy, name):
    objective = METHODS[name](time_range=(0.35, 0.85))
    rollout = rolled(policy, objective)
    inside = {t for t in rollout.schedule.tolist() if 0.35 <= t <= 0.85}
    assert 2 < len(inside) < 10
    assert set(pairs_at(policy, objective, rollout)[0].flatten().tolist()) <= inside


@pytest.mark.parametrize("name", METHODS)
def test_another_rank_draws_the_same_pairs(policy, name):
    objective = METHODS[name](noisiest=4, widen_over=6)
    both, second = (pairs_at(policy, objective, rolled(policy, objective, slots), 3) for slots in ((0, 1), (1,)))
    assert all(torch.equal(whole[GROUP:], part) for whole, part in zip(both, second, strict=True))


def test_a_range_of_times_is_from_low_to_high():
    with pytest.raises(ValueError, match=r"time_range=\[0.9, 0.1\] is empty"):
        VGRPO(TEN, time_range=(0.9, 0.1))
    assert DiffusionNFT(TEN, noisiest=5).prediction_passes(SIZES)["update"] == 4
