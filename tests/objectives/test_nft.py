"""DiffusionNFT against arithmetic in float64, on small real pipelines."""

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
    weights,
)

from lit_vgrpo.core.records import PassLedger
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.snapshots import Decay
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import VGRPO, DiffusionNFT
from lit_vgrpo.objectives.nft import optimality


def spec_for(policy, steps=4):
    return RolloutSpec("euler" if policy.path_kind == "flow" else "ddim", steps=steps)


@pytest.mark.parametrize("network", ["flow", "flow-lora", "epsilon", "v_prediction"], indirect=True)
def test_loss_and_gradient_equal_the_paper_in_float64(network):
    beta, advantages = 0.1, torch.tensor([1.0, -0.5, -7.0, 0.0, 6.0, -2.0])
    objective = DiffusionNFT(spec_for(network), beta=beta, kl_weight=0.01, scale_cap=2.0)
    spread_copies(network, objective)
    experience = prepare(network, objective, advantages)
    pairs = Pairs64(network, experience)
    old, reference = (pairs.predict_with(objective.copies[name]) for name in ("old", "reference"))
    shrink = (2.0 * pairs.a / pairs.b).clamp(max=1) if pairs.kind == "epsilon" else 1.0
    r = torch.tensor([0.6, 0.45, 0.0, 0.5, 1.0, 0.3], dtype=torch.float64)[:, None]

    def side(prediction):
        error = shrink * (pairs.x_of(prediction) - pairs.x)
        return pixel_mean(error**2) / pixel_mean(error.detach().abs()).clamp(min=1e-5)

    def paper(v):
        plus, minus = beta * v + (1 - beta) * old, (1 + beta) * old - beta * v
        contrast = (r * side(plus) + (1 - r) * side(minus)) / beta
        return 5 * contrast.mean() + 0.01 * pixel_mean((v - reference) ** 2).mean()

    expected, expected_gradient = pairs.loss_and_gradient(paper)
    loss, gradient = loss_and_gradient(network, objective, [experience])
    assert loss == pytest.approx(expected, rel=1e-3)
    assert_same_gradient(gradient, expected_gradient)
    assert (shrink != 1).any() if pairs.kind == "epsilon" else True
    _, in_micros = loss_and_gradient(network, objective, experience.micro_batches(2))
    assert_same_gradient(in_micros, gradient)


def test_on_policy_its_gradient_is_that_of_vgrpo(policy):
    objective = DiffusionNFT(RolloutSpec(steps=4), beta=1.0, kl_weight=0.0)
    objective.setup(policy)
    experience = prepare(policy, objective)
    _, gradient = loss_and_gradient(policy, objective, [experience])
    other = VGRPO(RolloutSpec(steps=4), num_mc_samples=3, share_pairs=False)
    same_pairs = prepare(policy, other)
    same_pairs.pairs = experience.pairs
    same_pairs.advantages = 2 * optimality(ADVANTAGES) - 1
    _, expected = loss_and_gradient(policy, other, [same_pairs])
    assert_same_gradient(gradient, 5 * expected, rtol=1e-5)
    torch.testing.assert_close(5 * same_pairs.advantages, ADVANTAGES)


def test_the_decay_types():
    first, second = DiffusionNFT().old_decay, Decay(rate=0.0075, max=0.999, after=75)
    assert [first(n) for n in (0, 1, 499, 500, 9000)] == pytest.approx([0, 0.001, 0.499, 0.5, 0.5])
    assert [second(n) for n in (0, 74, 75, 76, 100, 208, 209, 9000)] == pytest.approx(
        [0, 0, 0, 0.0075, 0.1875, 0.9975, 0.999, 0.999]
    )


def test_old_rolls_out_and_follows_once_an_iteration_by_the_clock_of_gradient_steps(policy):
    objective = DiffusionNFT(RolloutSpec(steps=2))
    objective.setup(policy)
    objective.num_updates = 298
    before, start = roll(policy, objective).latents, weights(policy)
    nudge(policy)
    moved = weights(policy)
    objective.after_update(policy)
    objective.after_update(policy)
    assert torch.equal(roll(policy, objective).latents, before)  # it does not move with updates
    objective.after_iteration(policy)
    for name, tensor in objective.copies["old"].tensors.items():
        expected = 0.3 * start[name].double() + 0.7 * moved[name].double()
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(objective.copies["reference"].tensors[name], start[name])
    assert not torch.allclose(roll(policy, objective).latents, before)


def test_every_image_has_all_times_but_one_in_its_own_order_and_noise_of_its_own(policy):
    objective = DiffusionNFT(RolloutSpec(steps=10))
    objective.setup(policy)
    pairs = prepare(policy, objective).pairs
    schedule = roll(policy, objective).schedule.tolist()
    assert pairs.times.shape == (6, 9)
    for row in pairs.times.tolist():
        assert len(set(row)) == 9
        assert set(row) < set(schedule)
    assert len({tuple(row) for row in pairs.times.tolist()}) == 6
    assert len({float(noise.flatten()[0]) for noise in pairs.noise.flatten(0, 1)}) == 54


@pytest.mark.parametrize("network", ["flow", "flow-lora", "epsilon"], indirect=True)
def test_on_policy_the_old_passes_change_no_bit_and_are_left_out(network):
    objective, ledger = DiffusionNFT(spec_for(network), beta=0.1, old_decay=0.0), PassLedger()
    ledger.attach(network.network)
    objective.setup(network)
    nudge(network)
    objective.after_iteration(network)  # the copy takes the trained weights over
    short = prepare(network, objective, updates=1, micro_batch_size=2, ledger=ledger)
    assert "old" not in ledger.counts
    full = prepare(network, objective, updates=2, micro_batch_size=2, ledger=ledger)
    assert ledger.counts["old"] == {"with_grad": 0, "without_grad": 18}
    found, expected = (
        loss_and_gradient(network, objective, experience.micro_batches(2)) for experience in (short, full)
    )
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])
    assert found[1].abs().max() > 0


def test_settings_that_cannot_work_together_are_errors():
    sizes = Sizes(4, 4)
    assert DiffusionNFT().passes_per_image(sizes) == {"rollout": 10, "update": 9, "old": 9, "reference": 9}
    assert "is an SDE, but DiffusionNFT" in DiffusionNFT(RolloutSpec("flow_sde")).check(sizes)[0]
    assert "at 0 of 1 times" in DiffusionNFT(RolloutSpec(steps=1)).check(sizes)[0]
    assert "at 11 of 10 times" in DiffusionNFT(num_times=11).check(sizes)[0]
