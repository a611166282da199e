"""CRD against arithmetic in float64, on small real pipelines."""

from functools import partial

import pytest
import torch
from pair_methods import ADVANTAGES, Pairs64, nudge, pixel_mean, prepare, spread_copies, updated

from lit_vgrpo.core.records import PassLedger
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import CRD, DGPO

SIZES = Sizes(2, 3, micro_batch_size=6)
STEPS = RolloutSpec("dpm++", steps=5)
SETTINGS = {
    "published": {},
    "temperature": {"temperature": 0.1},
    "plain errors": {"self_normalise": False, "beta": 3.0, "advantage_clip": 1.5},
    "pure noise": {"share_passes": "pure_noise", "kl_weight": 0.0},
}
CASES = [(name, "published") for name in ("flow-lora", "epsilon", "v_prediction")]


@pytest.mark.parametrize(("network", "name"), [*(("flow", name) for name in SETTINGS), *CASES], indirect=["network"])
def test_loss_and_gradient_equal_the_third_partys_in_float64(network, name):
    spec = STEPS if network.path_kind == "flow" else RolloutSpec("ddim", steps=5)
    objective = CRD(spec, 3, **SETTINGS[name])
    spread_copies(network, objective)
    experience = prepare(network, objective)
    pairs, clip, beta = Pairs64(network, experience), objective.advantage_clip, objective.beta
    old = pairs.predict_with(objective.copies["old"])
    start = pairs.predict_with(objective.copies["reference"]) if objective.kl_weight else None
    a = ADVANTAGES.double().clamp(-clip, clip)
    share = (a / clip) / 2 + 0.5

    def log_p(v):
        error = v - pairs.target
        scale = pixel_mean(error.detach().abs()) if objective.self_normalise else 1.0
        return -pixel_mean(error**2) / scale

    def published(v):
        r, total = log_p(v) - log_p(old), 0.0
        temperatures = [torch.inf] if objective.temperature is None else [objective.temperature, -objective.temperature]
        for group in (slice(0, 3), slice(3, 6)):
            for temperature in temperatures:
                weight = torch.softmax(share[group] / temperature, 0)
                centre = (weight[:, None] * r[group].detach()).sum(0)
                target = share[group] - (weight * share[group]).sum()
                total = total + ((beta * (r[group] - centre) - target[:, None]) ** 2).sum() / len(temperatures)
        loss = total / r.numel() * clip / beta
        if start is not None:
            loss = loss + 0.1 * pixel_mean((v - start) ** 2).mean()
        return loss

    orders = [[0, 1], [2, 3], [4, 5]], [[5, 0], [3, 2], [1, 4]], [[3, 4, 5], [0, 1, 2]]
    pairs.assert_loss_is(objective, published, orders, rel=2e-3)


@pytest.mark.parametrize("failed", [2, 3])
@pytest.mark.parametrize("micro_batch_size", [6, 2])
def test_an_image_that_was_not_scored_changes_nothing(policy, micro_batch_size, failed):
    objective, losses = CRD(STEPS, 3, temperature=0.1), []
    spread_copies(policy, objective)
    experience = prepare(policy, objective, micro_batch_size=micro_batch_size)
    experience.weights = torch.full((6,), 1.2).index_fill(0, torch.tensor(failed), 0.0)
    for shift in (0.0, 3.0):
        experience.latents[failed] += shift
        micros = experience.micro_batches(micro_batch_size)
        objective.before_update(policy, micros)
        losses.append(sum(objective.loss(policy, micro)[0] for micro in micros).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("method", [partial(CRD, kl_weight=0.0), partial(DGPO, reference="moving", kl_weight=0.0)])
def test_a_copy_that_equals_the_policy_needs_no_whole_groups(policy, method):
    objective, losses = method(STEPS, old_decay=0.0, num_times=3, noisiest=4), []
    nudge(policy)
    experience = prepare(policy, objective)
    for size in (6, 2):
        micros = experience.micro_batches(size)
        objective.before_update(policy, micros)
        losses.append(sum(objective.loss(policy, micro)[0].item() for micro in micros) / len(micros))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_passes_and_what_is_refused(policy):
    objective, ledger = CRD(STEPS, 3, sampler_decay=0.0, kl_weight=0.0), PassLedger()
    objective.setup(policy)
    assert objective.copies.keys() == {"old"}
    experience = prepare(policy, objective)
    ledger.attach(policy.network)
    updated(policy, objective, experience.micro_batches(2), ledger)
    assert objective.prediction_passes(SIZES) == {"update": 3, "old": 3}
    assert ledger.counts["group"] == {"with_grad": 0, "without_grad": 18}
    assert CRD(STEPS, 3).prediction_passes(Sizes(2, 3, micro_batch_size=2)) == dict.fromkeys(
        ("update", "old", "group", "reference"), 3
    )
