"""DiffusionNFT against arithmetic in float64, on small real pipelines."""

import pytest
import torch
from pair_methods import Pairs64, pixel_mean, prepare, spread_copies

from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.snapshots import Decay
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import DiffusionNFT


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

    pairs.assert_loss_is(objective, paper)
    assert (shrink != 1).any() if pairs.kind == "epsilon" else True


def test_the_decay_types():
    first, second = DiffusionNFT().old_decay, Decay(rate=0.0075, max=0.999, after=75)
    assert [first(n) for n in (0, 1, 499, 500, 9000)] == pytest.approx([0, 0.001, 0.499, 0.5, 0.5])
    assert [second(n) for n in (0, 74, 75, 76, 100, 208, 209, 9000)] == pytest.approx(
        [0, 0, 0, 0.0075, 0.1875, 0.9975, 0.999, 0.999]
    )


def test_settings_that_cannot_work_together_are_errors():
    sizes = Sizes(4, 4)
    assert DiffusionNFT().passes_per_image(sizes) == {"rollout": 10, "update": 9, "old": 9, "reference": 9}
    assert "is an SDE, but DiffusionNFT" in DiffusionNFT(RolloutSpec("flow_sde")).check(sizes)[0]
    assert "at 0 of 1 times" in DiffusionNFT(RolloutSpec(steps=1)).check(sizes)[0]
    assert "at 11 of 10 times" in DiffusionNFT(num_times=11).check(sizes)[0]
