"""The anchor and NormGuard: the pull and its gradient in float64, the passes, and what is refused."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from chain_in_float64 import Steps, cps, dance_sde, expected_gradient, flow_sde
from pair_methods import (
    ADVANTAGES,
    Pairs64,
    assert_same_gradient,
    assert_state_comes_back,
    loss_and_gradient,
    nudge,
    pixel_mean,
    prepare,
    roll,
    spread_copies,
)

from lit_vgrpo.core.records import PassLedger
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.surrogate import denoising_error, mean_over_pixels
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import AWM, CRD, DGPO, EPG, RAM, VGRPO, DanceGRPO, DiffusionNFT, FlowGRPO
from lit_vgrpo.objectives.awm import log_likelihood
from lit_vgrpo.objectives.base import Copy, PrepareContext
from lit_vgrpo.objectives.chain import step_kl
from lit_vgrpo.objectives.epg import exact_policy_gradient
from lit_vgrpo.objectives.nft import contrastive_error
from lit_vgrpo.objectives.pairs import norm_excess, normalised_distance, prediction
from lit_vgrpo.objectives.ram import velocity_matching

SIZES = Sizes(2, 3, micro_batch_size=6)
ANCHOR = {"anchor_weight": 3.0, "anchor_decay": 0.3}
PAIRS = {
    "V-GRPO": (VGRPO, {"num_mc_samples": 2}, "x"),
    "AWM": (AWM, {"num_times": 2}, "own"),
    "DiffusionNFT": (DiffusionNFT, {"num_times": 2}, "x"),
    "EPG": (EPG, {"num_times": 2}, "x"),
    "DGPO": (DGPO, {"num_times": 2, "noisiest": 4}, "own"),
    "CRD": (CRD, {"num_times": 2}, "own"),
    "RAM": (RAM, {"num_times": 2, "reward_weight": 0.1}, "own"),
}
ALL_IMAGES = {"drop_zero_advantages": False}  # one of ADVANTAGES is 0
CHAINS = {
    "Flow-GRPO": (FlowGRPO, {"rollout": RolloutSpec("flow_sde", 4), **ALL_IMAGES}, flow_sde),
    "Flow-GRPO, cps": (FlowGRPO, {"rollout": RolloutSpec("cps", 4), "kl_weight": 0.0, **ALL_IMAGES}, cps),
    "DanceGRPO": (DanceGRPO, {"rollout": RolloutSpec("dance_sde", 6)}, dance_sde),
}
METHODS = PAIRS | CHAINS


def make(name, **options):
    cls, given, _ = METHODS[name]
    return cls(**{"rollout": RolloutSpec(steps=5), **given, **options})


def assert_the_pull_is(policy, pulled, plain, experience, ledger, expected, direction):
    """Check what a pull adds to the loss, its gradient and the passes; without one nothing is added."""
    copy, metric = ("reference", "norm_excess") if getattr(pulled, "norm_weight", 0) else ("anchor", "anchor_distance")
    planned = pulled.prediction_passes(SIZES)
    assert planned[copy] == planned["update"]
    assert ledger.counts[copy] == {"with_grad": 0, "without_grad": 6 * planned[copy]}
    assert "anchor" not in plain.prediction_passes(SIZES)
    pulled.before_update(policy, [experience])
    (loss, gradient), (less, rest) = (loss_and_gradient(policy, one, [experience]) for one in (pulled, plain))
    assert loss - less == pytest.approx(expected, rel=5e-3 if copy == "reference" else 2e-3)
    assert_same_gradient(gradient - rest, direction, rtol=5e-3)
    metrics = pulled.loss(policy, experience)[1]
    assert metrics[metric].shape == (6,)
    assert metric not in plain.loss(policy, experience)[1]
    if copy == "anchor":
        assert 3 * float(metrics[metric].mean()) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", PAIRS)
def test_the_pull_on_pairs_in_float64(policy, name):
    objective, ledger = make(name, **ANCHOR), PassLedger()
    ledger.attach(policy.network)
    spread_copies(policy, objective)
    experience = prepare(policy, objective, ledger=ledger)
    pairs, in_x = Pairs64(policy, experience), METHODS[name][2] == "x"
    anchor = pairs.predict_with(objective.copies["anchor"])

    def formula(v):
        moved, error = (pairs.t * (v - anchor), pairs.x_of(v) - pairs.x) if in_x else (v - anchor, v - pairs.target)
        return 3 * (pixel_mean(moved**2) / pixel_mean(error.detach().abs())).mean()

    assert_the_pull_is(policy, objective, make(name), experience, ledger, *pairs.loss_and_gradient(formula))


@pytest.mark.parametrize("name", CHAINS)
def test_the_pull_on_a_chain_in_float64(policy, name):
    objective, ledger = make(name, **ANCHOR), PassLedger()
    ledger.attach(policy.network)
    spread_copies(policy, objective)
    rollout = roll(policy, objective)
    experience = objective.prepare(PrepareContext(policy, rollout, ADVANTAGES, micro_batch_size=6, ledger=ledger))
    chosen, formula = objective.choose_steps(rollout), METHODS[name][2]
    level = {dance_sde: 0.3, cps: 0.8}.get(formula, 0.7)
    steps = Steps(rollout, None if chosen is None else chosen.tolist(), formula, level)
    with objective.copies["anchor"].swapped_into(policy):
        anchor = [mean for mean, _, _ in steps.distributions(steps.outputs(policy, 1.0))]

    def distance(outputs):
        each = zip(steps.distributions(outputs), anchor, strict=True)
        return 3 * torch.stack([((m - other) ** 2).mean() / (2 * s**2) for (m, _, s), other in each]).mean()

    expected = expected_gradient(policy, steps.outputs(policy, 1.0), distance)
    assert_the_pull_is(policy, objective, make(name), experience, ledger, *expected)


@pytest.mark.parametrize("name", ["V-GRPO", "AWM", "DiffusionNFT", "CRD", "Flow-GRPO"])
def test_the_anchor_comes_back(policy, name):
    objective, plain = make(name, **ANCHOR), make(name)
    assert_state_comes_back(policy, objective, make(name, **ANCHOR))
    plain.setup(policy)
    assert "anchor" not in plain.copies
    with pytest.raises(RuntimeError, match=r"copies of the weights \(.*anchor.*\) that differ"):
        plain.load_state_dict(objective.state_dict())


def test_the_anchor_has_the_guidance_of_training(policy):
    objective = FlowGRPO(RolloutSpec("flow_sde", 3, guidance=2.0), reference_guidance=1.0, **ANCHOR)
    experience = prepare(policy, objective)
    assert objective.loss(policy, experience)[1]["anchor_distance"].max() < 1e-9  # the policy's own means
    assert objective.loss(policy, experience)[1]["kl"].min() > 1e-6


@pytest.mark.parametrize("name", ["V-GRPO", "Flow-GRPO"])
@pytest.mark.parametrize("half", [{"anchor_weight": 2.0}, {"anchor_decay": 0.3}])
def test_half_an_anchor_is_refused(name, half):
    assert make(name, **ANCHOR).check(SIZES) == make(name).check(SIZES) == []
    (line,) = make(name, **half).check(SIZES)
    assert "must be set together. Use values" in line


@dataclass(eq=False)
class OwnAnchor(VGRPO):
    """A method whose own copy has the name of the base's."""

    def copies_needed(self):
        return super().copies_needed() | {"anchor": Copy({"own": prediction}, decay=0.3)}


@pytest.mark.parametrize("options", [{}, ANCHOR])
def test_a_copy_of_a_method_does_not_replace_the_anchor(options):
    (line,) = OwnAnchor(RolloutSpec(steps=5), **options).check(SIZES)
    assert line == "OwnAnchor defines a copy named anchor, the name of anchor_weight's. Rename it."


# --- NormGuard -----------------------------------------------------------------------------------------------------

GUARDED = {
    "V-GRPO": {},
    "V-GRPO, pure noise": {"share_passes": "pure_noise"},
    "AWM, no KL": {"kl_weight": 0.0},
    "DiffusionNFT": {},
    "DGPO": {},
    "DGPO, moving, no KL": {"reference": "moving", "kl_weight": 0.0},
}


@pytest.mark.parametrize("name", GUARDED)
def test_the_penalty_in_float64(policy, name):
    (method, *_), options, ledger = name.split(","), GUARDED[name], PassLedger()
    guarded = make(method, norm_weight=7.0, **options)
    spread_copies(policy, guarded)
    nudge(policy, seed=9)
    ledger.attach(policy.network)
    experience = prepare(policy, guarded, ledger=ledger)
    pairs = Pairs64(policy, experience)
    start = pairs.predict_with(guarded.copies["reference"])

    def penalty(v):
        excess = pixel_mean(v**2).sqrt() - pixel_mean(start**2).sqrt()
        assert (excess > 0).any()
        return 7 * excess.clamp(min=0).square().mean()

    plain = make(method, **options)
    assert_the_pull_is(policy, guarded, plain, experience, ledger, *pairs.loss_and_gradient(penalty))


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
    "log_likelihood, huber": lambda v: log_likelihood(mean_over_pixels(v.square(), 2), TIMES, "huber"),
    "log_likelihood": lambda v: log_likelihood(mean_over_pixels(v.square(), 2), TIMES),
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
