"""RAM and RVM against arithmetic in float64, on small real pipelines."""

import pytest
from pair_methods import ADVANTAGES, Pairs64, pixel_mean, prepare, spread_copies

from lit_vgrpo.core.surrogate import TimeGrid
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import RAM

STEPS = RolloutSpec(steps=4)
ON_POLICY = {"old_decay": 0.0, "time_power": 0.0}
SETTINGS = {
    "RAM": {"reward_weight": 20.0},
    "RAM, clamped": {"reward_weight": 20.0, "advantage_clip": 0.7, "kl_weight": 3.0, "times": "sampler"},
    "RAM, pure noise": {"share_pairs": "group", "share_passes": "pure_noise", "times": TimeGrid(8)},
    "RVM": {"reward_weight": 0.1, "kl_weight": 0.3, **ON_POLICY},
    "RVM, no anchor": {"reward_weight": 0.1, "kl_weight": 0.0, **ON_POLICY},
}
CASES = [*(("flow", name) for name in SETTINGS), ("flow-lora", "RAM")]


@pytest.mark.parametrize(("network", "name"), CASES, indirect=["network"])
def test_loss_and_gradient_equal_the_papers_in_float64(network, name):
    objective = RAM(STEPS, 3, **SETTINGS[name])
    spread_copies(network, objective)
    experience = prepare(network, objective)
    pairs = Pairs64(network, experience)
    start, old = (
        pairs.predict_with(objective.copies[key]) if key in objective.copies else None for key in ("reference", "old")
    )
    bound = objective.advantage_clip or 9.0
    a = objective.reward_weight * ADVANTAGES.double().clamp(-bound, bound)[:, None, None, None, None]
    density = 2 * pairs.times.double() if objective.time_power else 1.0

    def paper(v):
        if name.startswith("RAM"):  # the target is sg(v_start + w A (u - v_old)), at its weight lambda
            step = objective.kl_weight * (v - start) - a * (pairs.target - old)
        else:
            step = a * (v - pairs.target) + (0 if start is None else 0.3 * (v - start))
        target = (v - step).detach()
        return (density * pixel_mean((v - target) ** 2)).mean() / 2

    pairs.assert_loss_is(objective, paper)


def test_the_times_are_weighted_to_a_density_of_2t(policy):
    objective = RAM(STEPS, 200)
    times = prepare(policy, objective).pairs.times
    assert float((2 * times).mean()) == pytest.approx(1, abs=1e-3)
    assert float((2 * times * times).mean()) == pytest.approx(2 / 3, abs=2e-3)
    assert len({tuple(row) for row in times.tolist()}) == 6


def test_what_is_refused():
    with pytest.raises(ValueError, match="share_passes='pure_noise' has no effect with share_pairs=none"):
        RAM(share_passes="pure_noise")


def test_published_settings():
    objective = RAM()
    assert (objective.num_times, objective.reward_weight, objective.kl_weight) == (8, 100.0, 1.0)
    assert (objective.spec.solver, objective.spec.steps, objective.old_decay(9000)) == ("euler", 20, 0.9)
