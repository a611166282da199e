"""NormGuard in every method on pairs: the penalty and its gradient in float64, and the passes it costs."""

from types import SimpleNamespace

import pytest
import torch
from pair_methods import Pairs64, assert_same_gradient, loss_and_gradient, nudge, pixel_mean, prepare, spread_copies

from lit_vgrpo.core.records import PassLedger
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.surrogate import denoising_error, mean_over_pixels
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import AWM, DGPO, VGRPO, DiffusionNFT
from lit_vgrpo.objectives.awm import log_likelihood
from lit_vgrpo.objectives.chain import step_kl
from lit_vgrpo.objectives.epg import exact_policy_gradient
from lit_vgrpo.objectives.nft import contrastive_error
from lit_vgrpo.objectives.pairs import norm_excess, normalised_distance
from lit_vgrpo.objectives.ram import velocity_matching

SIZES = Sizes(2, 3, micro_batch_size=6)
METHODS = {
    "V-GRPO": (VGRPO, {"num_mc_samples": 2}),
    "V-GRPO, pure noise": (VGRPO, {"num_mc_samples": 2, "share_passes": "pure_noise"}),
    "AWM, no KL": (AWM, {"num_times": 2, "kl_weight": 0.0}),
    "DiffusionNFT": (DiffusionNFT, {"num_times": 2}),
    "DGPO": (DGPO, {"num_times": 2, "noisiest": 4}),
    "DGPO, moving, no KL": (DGPO, {"num_times": 2, "noisiest": 4, "reference": "moving", "kl_weight": 0.0}),
}


def make(name, **options):
    cls, given = METHODS[name]
    return cls(RolloutSpec(steps=5), **given, **options)


def test_the_excess_is_that_of_the_root_mean_square():
    v, start = torch.tensor([[[3.0, 4.0]], [[1.0, 1.0]]]), torch.tensor([[[1.0, 7.0]], [[1.0, 0.0]]])
    found = norm_excess(v, start)
    assert found.tolist() == [[0.0], [pytest.approx(1 - 0.5**0.5)]]


SHARE, TIMES = torch.tensor([0.2, 1.0]), torch.tensor([[1.0, 0.3], [0.7, 0.01]])
NOTHING = torch.zeros(2, 2, 1, 3, 3)
OF_ZEROS = {
    "norm_excess": lambda v: norm_excess(v, NOTHING),
    "norm_excess, start": lambda v: norm_excess(v, NOTHING + 1),
    "normalised_distance": lambda v: normalised_distance(SimpleNamespace(prediction=v, error=v, scale=1.0), NOTHING),
    "denoising_error": lambda v: denoising_error(v, self_normalised=True),
    "contrastive_error": lambda v: contrastive_error(v, NOTHING, SHARE, 0.5),
    "exact_policy_gradient": lambda v: exact_policy_gradient(-denoising_error(v, True), TIMES * 0, SHARE, True),
    "log_likelihood": lambda v: log_likelihood(mean_over_pixels(v.square(), 2), TIMES),
    "log_likelihood, huber": lambda v: log_likelihood(mean_over_pixels(v.square(), 2), TIMES, "huber"),
    "step_kl": lambda v: step_kl(v, NOTHING, NOTHING[..., :1, :1, :1] + 0.1),
    "velocity_matching": lambda v: velocity_matching(v, NOTHING),
}


@pytest.mark.parametrize("name", OF_ZEROS)
def test_an_all_zero_prediction_or_error_has_a_finite_gradient(name):
    v = NOTHING.clone().requires_grad_()
    value = OF_ZEROS[name](v)
    (gradient,) = torch.autograd.grad(value.sum(), v)
    assert value.isfinite().all()
    assert not gradient.any()


def test_a_network_that_predicts_nothing_is_trained(policy):
    objective = make("V-GRPO", norm_weight=7.0)
    with torch.no_grad():
        policy.network.proj_out.weight.zero_()
        policy.network.proj_out.bias.zero_()
    objective.setup(policy)
    _, gradient = loss_and_gradient(policy, objective, [prepare(policy, objective)])
    assert gradient.isfinite().all()
    assert gradient.any()


@pytest.mark.parametrize("name", METHODS)
def test_the_penalty_and_its_passes_in_float64(policy, name):
    guarded, plain, ledger = make(name, norm_weight=7.0), make(name), PassLedger()
    spread_copies(policy, guarded)
    nudge(policy, seed=9)
    ledger.attach(policy.network)
    experience = prepare(policy, guarded, ledger=ledger)
    planned = guarded.prediction_passes(SIZES)
    assert planned["reference"] == planned["update"]
    assert ledger.counts["reference"] == {"with_grad": 0, "without_grad": 6 * planned["reference"]}
    guarded.before_update(policy, [experience])
    pairs = Pairs64(policy, experience)
    start = pairs.predict_with(guarded.copies["reference"])

    def penalty(v):
        excess = pixel_mean(v**2).sqrt() - pixel_mean(start**2).sqrt()
        assert (excess > 0).any()
        return 7 * excess.clamp(min=0).square().mean()

    expected, direction = pairs.loss_and_gradient(penalty)
    (loss, gradient), (less, rest) = (loss_and_gradient(policy, one, [experience]) for one in (guarded, plain))
    assert loss - less == pytest.approx(expected, rel=5e-3)
    assert_same_gradient(gradient - rest, direction, rtol=5e-3)
    metrics = guarded.loss(policy, experience)[1]
    assert metrics["norm_excess"].shape == (6,)
    assert "norm_excess" not in plain.loss(policy, experience)[1]
