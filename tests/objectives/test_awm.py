"""AWM against arithmetic in float64, on a small real pipeline."""

import pytest
import torch
from pair_methods import ADVANTAGES, Pairs64, nudge, pixel_mean, prepare, roll, spread_copies

from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import AWM


def small(**options):
    return AWM(RolloutSpec(steps=4), **{"num_times": 3, **options})


def log_q(error, t, weighting, p=0.25):
    return {
        "huber": lambda: -t * ((error + 1e-10).sqrt() - 1e-5),
        "power": lambda: -t * ((error + 1e-10) ** p - 1e-10**p) / p,
        "uniform": lambda: -error,
    }[weighting]()


WEIGHTINGS = ["power", "huber", "uniform"]


@pytest.mark.parametrize(
    ("network", "weighting"), [*(("flow", one) for one in WEIGHTINGS), ("flow-lora", "power")], indirect=["network"]
)
def test_loss_and_gradient_equal_the_paper_in_float64(network, weighting):
    objective = small(weighting=weighting, clip=0.003, kl_weight=0.1, ema_weight=0.7)
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
        return log_q(pixel_mean((v - (pairs.eps - pairs.x)) ** 2), t, weighting)

    def paper(v):
        ratio = (likelihood(v) - likelihood(old)).exp()
        outside.append((ratio - 1).abs() > 0.003)
        gain = torch.minimum(ratio * a, ratio.clamp(0.997, 1.003) * a)
        pulls = 0.1 * pixel_mean((v - reference) ** 2) + 0.7 * pixel_mean((v - ema) ** 2)
        return (pulls - gain).mean()

    pairs.assert_loss_is(objective, paper)
    metrics = objective.loss(network, experience)[1]
    torch.testing.assert_close(metrics["clip_fraction"], outside[0].float().mean(1))
    assert outside[0].any()


def test_advantages_are_clamped_before_they_are_divided(policy):
    advantages = torch.tensor([7.0, -6.0, -1.0, 4.0, 0.0, -4.0])
    options = {"kl_weight": 0.0, "ema_weight": 0.0}
    assert prepare(policy, small(**options), advantages).advantages.tolist() == pytest.approx(
        [1, -1, -0.2, 0.8, 0, -0.8]
    )
    free = prepare(policy, small(advantage_clip=None, **options), advantages)
    assert free.advantages.tolist() == pytest.approx([1.4, -1.2, -0.2, 0.8, 0, -0.8])


def test_the_published_cost():
    assert AWM().passes_per_image(Sizes(4, 4)) == {"rollout": 14, "update": 6, "reference": 6, "ema": 6}


def test_the_first_time_can_be_left_out(policy):
    objective = AWM(noisiest=11, time_range=(0.0, 0.99))  # the published ``discrete_wo_init``
    rollout = roll(policy, objective)
    assert torch.equal(objective.time_pool(rollout).times, rollout.schedule[1:12])
