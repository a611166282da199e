"""AWM against arithmetic in float64, on a small real pipeline."""

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

from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import AWM


def small(**options):
    return AWM(RolloutSpec(steps=4), **{"num_times": 3, **options})


def log_q(error, t, weighting, p):
    return {
        "huber": lambda: -t * ((error + 1e-10).sqrt() - 1e-5),
        "power": lambda: -t * ((error + 1e-10) ** p - 1e-10**p) / p,
        "uniform": lambda: -error,
        "time": lambda: -t * error,
        "time_squared": lambda: -(t**2) * error,
    }[weighting]()


WEIGHTINGS = ["power", "huber", "uniform", "time", "time_squared"]


@pytest.mark.parametrize(
    ("network", "weighting"), [*(("flow", one) for one in WEIGHTINGS), ("flow-lora", "power")], indirect=["network"]
)
def test_loss_and_gradient_equal_the_paper_in_float64(network, weighting):
    power = {"power": 0.5} if weighting == "power" else {}  # the others do not use it
    objective = small(weighting=weighting, clip=0.003, kl_weight=0.1, ema_weight=0.7, **power)
    spread_copies(network, objective)
    experience = prepare(network, objective, updates=2)
    pairs = Pairs64(network, experience)
    with torch.no_grad():
        old = pairs.predict().double()
    nudge(network, seed=9)
    reference, ema = (pairs.predict_with(objective.copies[name]) for name in ("reference", "ema"))
    a, t = ADVANTAGES.double()[:, None] / 5, pairs.t[..., 0, 0, 0]
    outside = []

    def likelihood(v):
        return log_q(pixel_mean((v - (pairs.eps - pairs.x)) ** 2), t, weighting, 0.5)

    def paper(v):
        ratio = (likelihood(v) - likelihood(old)).exp()
        outside.append((ratio - 1).abs() > 0.003)
        gain = torch.minimum(ratio * a, ratio.clamp(0.997, 1.003) * a)
        pulls = 0.1 * pixel_mean((v - reference) ** 2) + 0.7 * pixel_mean((v - ema) ** 2)
        return (pulls - gain).mean()

    expected, expected_gradient = pairs.loss_and_gradient(paper)
    loss, gradient = loss_and_gradient(network, objective, [experience])
    assert loss == pytest.approx(expected, rel=1e-3)
    assert_same_gradient(gradient, expected_gradient)
    metrics = objective.loss(network, experience)[1]
    torch.testing.assert_close(metrics["clip_fraction"], outside[0].float().mean(1))
    assert outside[0].any()
    _, in_micros = loss_and_gradient(network, objective, experience.micro_batches(2))
    assert_same_gradient(in_micros, gradient)


def test_advantages_are_clamped_before_they_are_divided(policy):
    advantages = torch.tensor([7.0, -6.0, -1.0, 4.0, 0.0, -4.0])
    options = {"kl_weight": 0.0, "ema_weight": 0.0}
    assert prepare(policy, small(**options), advantages).advantages.tolist() == pytest.approx(
        [1, -1, -0.2, 0.8, 0, -0.8]
    )
    free = prepare(policy, small(advantage_clip=None, **options), advantages)
    assert free.advantages.tolist() == pytest.approx([1.4, -1.2, -0.2, 0.8, 0, -0.8])


def test_times_are_stratified_and_shared_in_a_micro_batch_and_noise_is_not(policy):
    objective = AWM(noisiest=12)  # the published ``discrete``: of 14 steps' noisiest 0.9, one from each two
    objective.setup(policy)
    pairs = prepare(policy, objective, micro_batch_size=3).pairs
    schedule = roll(policy, objective).schedule.tolist()
    assert pairs.times.shape == (6, 6)
    rows = pairs.times.tolist()
    assert rows[0] == rows[1] == rows[2] != rows[3] == rows[4] == rows[5]
    for row in rows:
        assert [schedule.index(t) // 2 for t in row] == [0, 1, 2, 3, 4, 5]
    assert len({float(noise.flatten()[0]) for noise in pairs.noise.flatten(0, 1)}) == 36


def test_the_moving_copy_follows_once_an_iteration(policy):
    objective = small()
    objective.setup(policy)
    start = weights(policy)
    nudge(policy)
    moved = weights(policy)
    objective.num_updates = 99
    objective.after_update(policy)
    assert all(torch.equal(tensor, start[name]) for name, tensor in objective.copies["ema"].tensors.items())
    for updates, d in ((100, 0.1), (5000, 0.3)):
        objective.copies["ema"].load_state_dict(start)
        objective.num_updates = updates
        objective.after_iteration(policy)
        for name, tensor in objective.copies["ema"].tensors.items():
            expected = d * start[name].double() + (1 - d) * moved[name].double()
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-6)
            assert torch.equal(objective.copies["reference"].tensors[name], start[name])


def test_the_published_cost():
    assert AWM().passes_per_image(Sizes(4, 4)) == {"rollout": 14, "update": 6, "reference": 6, "ema": 6}


def test_the_first_time_can_be_left_out(policy):
    objective = AWM(noisiest=11, time_range=(0.0, 0.99))  # the published ``discrete_wo_init``
    rollout = roll(policy, objective)
    assert torch.equal(objective.time_pool(rollout).times, rollout.schedule[1:12])
