"""Shared and antithetic pairs, and what the KL pulls to: the draws, the formulas, the passes and what is refused."""

import pytest
import torch
from pair_methods import (
    ADVANTAGES,
    Pairs64,
    assert_same_gradient,
    loss_and_gradient,
    nudge,
    pixel_mean,
    prepare,
    roll,
    spread_copies,
    updated,
    weights,
)

from lit_vgrpo.core.records import PassLedger
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import AWM, CRD, DGPO, EPG, RAM, VGRPO, DiffusionNFT
from lit_vgrpo.objectives.base import PrepareContext

EIGHT = RolloutSpec(steps=8)


@pytest.mark.parametrize(
    ("sharing", "rows"),
    [("none", [0, 1, 2, 3, 4, 5]), ("group", [0, 0, 0, 1, 1, 1]), ("iteration", [0] * 6)],
)
def test_who_shares_pairs(policy, sharing, rows):
    objective = VGRPO(EIGHT, 2, share_pairs=sharing)
    pairs = prepare(policy, objective).pairs
    assert pairs.rows.tolist() == rows
    assert len(pairs.noise) == max(rows) + 1 == len({float(noise.flatten()[0]) for noise in pairs.noise})
    times, noise = pairs.of_images()
    alone = prepare(policy, objective, advantages=ADVANTAGES[3:], slots=(1,)).pairs.of_images()  # on another rank
    assert torch.equal(alone[0], times[3:])
    assert torch.equal(alone[1], noise[3:])


@pytest.mark.parametrize("method", [VGRPO, AWM])
def test_antithetic_pairs_are_every_noise_and_its_negative_at_one_time(policy, method):
    objective = method(EIGHT, 4, antithetic=True)
    pairs = prepare(policy, objective, updates=2).pairs
    times, noise = pairs.of_images()
    schedule = torch.linspace(1, 0, 9)[:8].tolist()
    assert times.shape == (6, 4)
    assert torch.equal(times[:, ::2], times[:, 1::2])
    assert torch.equal(noise[:, ::2], -noise[:, 1::2])
    assert not torch.equal(noise[:, 0], noise[:, 2])
    for row in times[:, ::2].tolist():  # two strata, not four
        assert [min(range(8), key=lambda k, t=t: abs(schedule[k] - t)) // 4 for t in row] == [0, 1]
    assert len({tuple(row) for row in times.tolist()}) > 1 or method is AWM
    experience = prepare(policy, objective, updates=2)
    assert objective.loss(policy, experience)[1]["ratio_deviation"].max() == 0


@pytest.mark.parametrize("times", ["sampler", "uniform"])
@pytest.mark.parametrize("method", [DiffusionNFT, DGPO])
def test_antithetic_pairs_at_distinct_times(policy, method, times):
    objective = method(EIGHT, num_times=6, times=times, antithetic=True, time_range=(0.3, 1.0), noisiest=None)
    drawn, noise = prepare(policy, objective).pairs.of_images()
    assert drawn.shape == (6, 6)
    assert torch.equal(drawn[:, ::2], drawn[:, 1::2])
    assert torch.equal(noise[:, ::2], -noise[:, 1::2])
    assert all(len(set(row)) == 3 and min(row) >= 0.3 for row in drawn.tolist())
    assert (len(set(map(tuple, drawn.tolist()))) == 1) == (method is DGPO)


@pytest.mark.parametrize(("method", "name"), [(VGRPO, "num_mc_samples"), (AWM, "num_times")])
def test_an_odd_number_of_antithetic_pairs_is_refused(method, name):
    with pytest.raises(ValueError, match=f"model.objective.{name}=3 is odd"):
        method(EIGHT, 3, antithetic=True)


def test_the_kl_to_the_reference_in_float64(policy):
    objective = VGRPO(RolloutSpec(steps=4), 2, kl_weight=0.6, kl_to="reference")
    spread_copies(policy, objective)
    before = weights(policy)
    experience = prepare(policy, objective)
    assert experience.kept.keys() == {"reference"}
    assert all(torch.equal(p, before[name]) for name, p in weights(policy).items())
    pairs = Pairs64(policy, experience)
    start = pairs.x_of(pairs.predict_with(objective.copies["reference"]))

    def paper(v):
        error = pairs.x_of(v) - pairs.x
        absolute = pixel_mean(error.detach().abs())
        loss = (pixel_mean(error**2) / absolute).mean(1)
        kl = (pixel_mean((pairs.x_of(v) - start) ** 2) / absolute).mean(1)
        return (0.6 * kl - (loss.detach() - loss).exp() * ADVANTAGES.double()).mean()

    pairs.assert_loss_is(objective, paper)


FOUR, FREE = RolloutSpec(steps=4), {"kl_weight": 0.0}
EQUAL = {
    # a method, the one that has its gradient while no copy differs from the policy, by which factor
    "DiffusionNFT": (DiffusionNFT(FOUR, beta=1.0, **FREE), VGRPO(FOUR, 3, share_pairs=False), 1.0),
    "EPG": (EPG(FOUR, advantage_scale=5.0, **FREE), VGRPO(FOUR, 3, share_pairs=False), 5.0),
    "PEPG": (EPG(FOUR, proximal=True, advantage_scale=5.0, **FREE), VGRPO(FOUR, 3, share_pairs=False), 5.0),
    "CRD": (
        CRD(EIGHT, 3, self_normalise=False, beta=2.0, **FREE),
        AWM(EIGHT, 3, weighting="uniform", clip=None, ema_weight=0.0, **FREE),
        1.0,
    ),
    "RVM": (  # away from the start
        RAM(FOUR, 3, reward_weight=0.2, kl_weight=0.4, old_decay=0.0, time_power=0.0),
        AWM(FOUR, 3, weighting="uniform", clip=None, kl_weight=0.4, ema_weight=0.0),
        2.0,
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_on_policy_its_gradient_is_that_of_another_method(policy, name):
    objective, other, factor = EQUAL[name]
    if name == "RVM":
        objective.setup(policy)
        nudge(policy)
    experience = prepare(policy, objective)
    _, gradient = updated(policy, objective, [experience])
    experience.kept = {key: value for key, value in experience.kept.items() if key == "reference"}
    experience.advantages = ADVANTAGES / 5 if name == "RVM" else ADVANTAGES
    _, expected = loss_and_gradient(policy, other, [experience])
    assert_same_gradient(factor * gradient, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("objective", "names"),
    [
        (VGRPO(EIGHT, 2, clip=0.9, kl_weight=0.5), {"elbo", "behaviour"}),
        (AWM(EIGHT, 2, kl_weight=0.0, ema_weight=0.0), {"old"}),
    ],
    ids=["V-GRPO", "AWM"],
)
def test_the_first_share_of_split_updates_needs_no_old_passes(policy, objective, names):
    objective.setup(policy)
    rollout, ledger, order = roll(policy, objective), PassLedger(), torch.tensor([1, 3, 4, 0, 2, 5])
    ledger.attach(policy.network)

    def shares(off_policy):
        context = PrepareContext(policy, rollout, ADVANTAGES, 1, updates=2, ledger=ledger, off_policy=off_policy)
        experience = objective.prepare(context).select(order)
        assert experience.kept.keys() == names
        return [experience.select(slice(0, 3)), experience.select(slice(3, 6))]

    whole = shares(None)
    assert ledger.counts["old"]["without_grad"] == 12
    split = shares(order[3:])
    assert ledger.counts["old"]["without_grad"] == 12 + 6
    for k in range(2):
        found, expected = (loss_and_gradient(policy, objective, share[k].micro_batches(1)) for share in (split, whole))
        assert found[0] == expected[0]
        assert torch.equal(found[1], expected[1])
        assert found[1].abs().max() > 0
        assert (objective.loss(policy, split[k])[1]["ratio_deviation"].max() < 1e-5) == (k == 0)
        nudge(policy)
