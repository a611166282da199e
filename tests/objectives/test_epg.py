"""EPG and PEPG against arithmetic in float64, on small real pipelines."""

import pytest
from pair_methods import (
    ADVANTAGES,
    Pairs64,
    assert_same_gradient,
    loss_and_gradient,
    pixel_mean,
    prepare,
    spread_copies,
)

from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import EPG


def elbo(pairs, prediction, shrink=1.0):
    error = shrink * (pairs.x_of(prediction) - pairs.x)
    return -pixel_mean(error**2) / pixel_mean(error.detach().abs())


@pytest.mark.parametrize("network", ["flow", "flow-lora", "epsilon", "v_prediction"], indirect=True)
@pytest.mark.parametrize("proximal", [False, True], ids=["epg", "pepg"])
def test_loss_and_gradient_equal_the_public_code_in_float64(network, proximal):
    solver = "euler" if network.path_kind == "flow" else "ddim"
    objective = EPG(RolloutSpec(solver, steps=4), proximal=proximal, advantage_scale=4.0, kl_weight=0.01, scale_cap=2.0)
    spread_copies(network, objective)
    experience = prepare(network, objective)
    pairs = Pairs64(network, experience)
    old, reference = (pairs.predict_with(objective.copies[name]) for name in ("old", "reference"))
    shrink = (2.0 * pairs.a / pairs.b).clamp(max=1) if pairs.kind == "epsilon" else 1.0
    a = ADVANTAGES.double()[:, None] / 4

    def loss_of(v):
        log_p = elbo(pairs, v, shrink)
        log_ratio = log_p.detach() - elbo(pairs, old, shrink)
        gain = a - log_ratio if proximal else a
        policy_loss = -(log_ratio.exp() * gain * log_p).mean()
        return policy_loss + 0.01 * pixel_mean((v - reference) ** 2).mean()

    pairs.assert_loss_is(objective, loss_of, rel=2e-3)


def test_the_public_codes_par_has_the_gradient_of_pepg(policy):
    """PAR regresses the log-ratio on the advantage: ``sg(rho) (A - log rho)^2 / 2``."""
    objective = EPG(RolloutSpec(steps=4), proximal=True, kl_weight=0.0, advantage_scale=1.0)
    spread_copies(policy, objective)
    experience = prepare(policy, objective)
    pairs = Pairs64(policy, experience)
    old = elbo(pairs, pairs.predict_with(objective.copies["old"]))

    def par(v):
        log_ratio = elbo(pairs, v) - old
        return (log_ratio.detach().exp() * (ADVANTAGES.double()[:, None] - log_ratio) ** 2).mean() / 2

    _, expected = pairs.loss_and_gradient(par)
    _, gradient = loss_and_gradient(policy, objective, [experience])
    assert_same_gradient(gradient, expected, rtol=1e-4)


def test_published_settings():
    objective = EPG()
    assert (objective.advantage_std, objective.advantage_scale, objective.kl_weight) == ("none", 10.0, 1e-4)
    assert (objective.old_decay(100), objective.old_decay(900)) == (0.1, 0.5)
    assert (objective.num_times, objective.spec.steps) == (None, 10)
