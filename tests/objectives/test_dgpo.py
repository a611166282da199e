"""DGPO against arithmetic in float64, on small real pipelines."""

import dataclasses
import itertools
import math

import pytest
import torch
from helpers import repeating
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
    weights,
)

from lit_vgrpo.core.advantages import group_advantages
from lit_vgrpo.core.records import PassLedger
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import DGPO
from lit_vgrpo.objectives.dgpo import has_left_trust_region


def small(**options):
    return DGPO(RolloutSpec("dpm++", steps=4), num_times=2, noisiest=3, **options)


def updated(policy, objective, micros, ledger=None):
    objective.before_update(policy, micros, ledger)
    return loss_and_gradient(policy, objective, micros)


def rows_of(experience, order):
    """Some images of an experience, in any order."""
    index = torch.tensor(order)
    return dataclasses.replace(
        experience,
        latents=experience.latents[index],
        advantages=experience.advantages[index],
        rows=experience.rows[index],
        pairs=experience.pairs.select(index),
        extras={name: value[index] for name, value in experience.extras.items()},
    )


NETWORKS = ["flow", "flow-lora", "epsilon", "v_prediction", "epsilon-lora"]


@pytest.mark.parametrize(
    ("network", "reference"),
    repeating(itertools.product(NETWORKS, ["frozen", "moving"]), slow=[(name, "moving") for name in NETWORKS[2:]]),
    indirect=["network"],
)
def test_loss_and_gradient_equal_the_paper_in_float64(network, reference):
    objective = small(beta=3.0, kl_weight=0.5, clip=1e-4, reference=reference)
    spread_copies(network, objective)
    experience = prepare(network, objective)
    pairs = Pairs64(network, experience)
    old = pairs.predict_with(objective.copies["old"])
    start = pairs.predict_with(objective.copies["reference"])
    ref = start if reference == "frozen" else old
    a = ADVANTAGES.double()
    stopped = []

    def error(v):
        return pixel_mean((pairs.target - v) ** 2)

    def paper(v):
        terms = []
        losses, old_losses, ref_losses = error(v), error(old), error(ref)
        for group in ([0, 1, 2], [3, 4, 5]):
            z = 3.0 / 3 * sum(a[i] * (losses[i] - ref_losses[i]) for i in group).detach()
            for i in group:
                stops = []
                for j in range(2):  # every time by itself, as in the authors' code
                    q = math.exp((old_losses[i, j] - losses[i, j]).item())
                    stops.append(q > 1 + 1e-4 if a[i] > 0 else q < 1 - 1e-4)
                    l_it = losses[i, j].detach() if stops[j] else losses[i, j]
                    terms.append(torch.sigmoid(z[j]) * a[i] * l_it)
                stopped.append(sum(stops) / 2)
        return torch.stack(terms).mean() + 0.5 * pixel_mean((v - start) ** 2).mean()  # the KL's never moves

    expected, expected_gradient = pairs.loss_and_gradient(paper)
    loss, gradient = updated(network, objective, [experience])
    assert loss == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert_same_gradient(gradient, expected_gradient)
    clipped = objective.loss(network, experience)[1]["clip_fraction"]
    assert clipped.tolist() == stopped
    assert 0 < clipped.sum() < 6


def test_the_gradient_is_that_of_the_preference_over_beta(policy):
    objective = small(beta=50.0, kl_weight=0.0, clip=0.9)
    spread_copies(policy, objective)
    experience = prepare(policy, objective)
    pairs = Pairs64(policy, experience)
    ref = pairs.predict_with(objective.copies["reference"])
    a = ADVANTAGES.double()

    def preference(v):
        gain = a[:, None] * (pixel_mean((pairs.target - v) ** 2) - pixel_mean((pairs.target - ref) ** 2))
        z = torch.stack([50.0 * gain[:3].mean(0), 50.0 * gain[3:].mean(0)])
        assert (torch.sigmoid(z.detach()) - 0.5).abs().max() > 0.01
        return -torch.nn.functional.logsigmoid(-z).mean()

    _, expected = pairs.loss_and_gradient(preference)
    _, gradient = updated(policy, objective, [experience])
    assert_same_gradient(50.0 * gradient, expected)


@pytest.mark.slow
def test_moving_images_of_a_group_between_micro_batches_changes_nothing(policy):
    objective = small(beta=20.0)
    spread_copies(policy, objective)
    experience = prepare(policy, objective)
    layouts = [
        [[0, 1, 2, 3, 4, 5]],
        [[3, 4, 5], [0, 1, 2]],  # whole groups: no passes of their own
        [[0, 1], [2, 3], [4, 5]],
        [[5, 0], [3, 2], [1, 4]],
        [[k] for k in range(6)],
    ]
    results = []
    for layout in layouts:
        ledger = PassLedger()
        handle = len(policy.network._forward_pre_hooks)
        ledger.attach(policy.network)
        results.append(updated(policy, objective, [rows_of(experience, order) for order in layout], ledger))
        assert len(policy.network._forward_pre_hooks) == handle + 1
        whole = all(len(order) % 3 == 0 for order in layout)
        assert ("group" in ledger.counts) != whole
    for loss, gradient in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-4, abs=1e-6)
        assert_same_gradient(gradient, results[0][1], rtol=1e-4)


def test_advantages_are_clamped(policy):
    advantages = torch.tensor([7.0, -6.0, -1.0, 4.0, 0.0, -4.0])
    for clip, expected in ((5.0, [5, -5, -1, 4, 0, -4]), (None, [7, -6, -1, 4, 0, -4])):
        objective = small(advantage_clip=clip, reference="moving")
        objective.setup(policy)
        assert prepare(policy, objective, advantages).advantages.tolist() == expected


def test_an_image_that_has_has_left_trust_region_has_no_gradient(policy):
    old, new = torch.full((6,), 1.0), torch.tensor([0.95, 1.05, 0.95, 1.05, 1.05, 0.995])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0, 1.0])
    assert has_left_trust_region(new, old, advantages, 0.01).tolist() == [True, False, False, True, True, False]
    objective = small(kl_weight=0.0)
    objective.setup(policy)
    experience = prepare(policy, objective)
    objective.before_update(policy, [experience])
    experience.extras["old_losses"] = experience.extras["old_losses"] + 0.1 * ADVANTAGES.sign()[:, None]
    assert loss_and_gradient(policy, objective, [experience])[1].abs().max() == 0


def test_groups_without_spread_and_failed_images_give_nothing(policy):
    objective = small(kl_weight=0.0)
    spread_copies(policy, objective)
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    flat = prepare(policy, objective, group_advantages(torch.tensor([2.0, 2.0, 2.0, 5.0, 5.0, math.nan]), groups))
    loss, gradient = updated(policy, objective, [flat])
    assert loss == 0
    assert gradient.abs().max() == 0
    one = prepare(policy, objective, group_advantages(torch.tensor([2.0, math.nan, 2.0, 5.0, 1.0, math.nan]), groups))
    objective.before_update(policy, [one])
    for row, contributes in ((1, False), (3, True), (5, False)):
        bent = rows_of(one, range(6))
        bent.latents[row] += 1
        moved = loss_and_gradient(policy, objective, [bent])[0] - loss_and_gradient(policy, objective, [one])[0]
        assert (abs(moved) > 1e-6) == contributes


def test_times_are_noisy_distinct_and_everywhere_the_same(policy):
    objective = DGPO()
    objective.setup(policy)
    pairs = prepare(policy, objective).pairs
    schedule = roll(policy, objective).schedule.tolist()
    assert pairs.times.shape == (2, 4)
    first, second = pairs.times.tolist()
    assert first == second
    assert len(set(first)) == 4
    assert set(first) <= set(schedule[:7])
    assert pairs.rows.tolist() == [0, 0, 0, 1, 1, 1]
    assert len({float(noise.flatten()[0]) for noise in pairs.noise.flatten(0, 1)}) == 8
    alone = prepare(policy, objective, ADVANTAGES[3:], slots=(1,)).pairs  # another rank has the second group only
    assert torch.equal(alone.times, pairs.times[1:])
    assert torch.equal(alone.noise, pairs.noise[1:])


def test_old_follows_every_step_and_rolls_out_late(policy):
    objective = small(behaviour_from_step=201)
    objective.setup(policy)
    before = roll(policy, objective).latents
    objective.num_updates = 199
    start = weights(policy)
    nudge(policy)
    moved = weights(policy)
    assert not torch.allclose(roll(policy, objective).latents, before)  # the policy itself still rolls out
    objective.after_update(policy)
    for name, tensor in objective.copies["old"].tensors.items():
        expected = 0.2 * start[name].double() + 0.8 * moved[name].double()
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(objective.copies["reference"].tensors[name], start[name])
    assert objective.num_updates == 200
    objective.copies["old"].load_state_dict(start)
    assert not torch.allclose(roll(policy, objective).latents, before)
    objective.num_updates = 201
    assert torch.equal(roll(policy, objective).latents, before)
    objective.num_updates = 5000
    objective.after_update(policy)
    for name, tensor in objective.copies["old"].tensors.items():
        expected = 0.3 * start[name].double() + 0.7 * moved[name].double()
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_published_cost():
    passes = DGPO().passes_per_image(Sizes(4, 4, micro_batch_size=8))
    assert passes == {"rollout": 10, "update": 4, "old": 4, "reference": 4}
    assert DGPO(reference="moving").passes_per_image(Sizes(4, 4, micro_batch_size=8)) == passes  # for the KL
    free = DGPO(reference="moving", kl_weight=0.0).passes_per_image(Sizes(4, 4, micro_batch_size=8))
    assert free == {"rollout": 10, "update": 4, "old": 4}


def test_a_group_must_be_whole_in_every_update(policy):
    errors = DGPO().check(Sizes(6, 4, updates_per_iteration=4, micro_batch_size=2, split_updates=True))
    assert len(errors) == 1
    assert "updates_per_iteration=4 splits the 6 groups of 4" in errors[0]
    assert DGPO().check(Sizes(6, 4, updates_per_iteration=3, micro_batch_size=2, split_updates=True)) == []
    assert DGPO().check(Sizes(6, 4, updates_per_iteration=4, micro_batch_size=2)) == []
    objective = small()
    objective.setup(policy)
    experience = prepare(policy, objective)
    objective.before_update(policy, [rows_of(experience, [0, 1, 2])])
    with pytest.raises(ValueError, match="An update splits a group"):
        objective.before_update(policy, experience.micro_batches(5)[:1])


def test_settings_that_cannot_work_together_are_errors():
    sizes = Sizes(4, 4)
    assert DGPO().check(sizes) == []
    assert "is an SDE, but DGPO" in DGPO(RolloutSpec("flow_sde")).check(sizes)[0]
    assert "trains each image at 4 of 3 times" in DGPO(noisiest=3).check(sizes)[0]
