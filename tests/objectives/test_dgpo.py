"""DGPO against arithmetic in float64, on small real pipelines."""

import math

import pytest
import torch
from pair_methods import (
    ADVANTAGES,
    Pairs64,
    nudge,
    pixel_mean,
    prepare,
    roll,
    spread_copies,
    weights,
)

from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import DGPO
from lit_vgrpo.objectives.base import PrepareContext


def small(**options):
    return DGPO(RolloutSpec("dpm++", steps=4), num_times=2, noisiest=3, **options)


CASES = [(name, "frozen") for name in ("flow", "flow-lora", "epsilon", "v_prediction")]


@pytest.mark.parametrize(("network", "reference"), [*CASES, ("flow", "moving")], indirect=["network"])
def test_loss_and_gradient_equal_the_paper_in_float64(network, reference):
    objective = small(beta=20.0, kl_weight=0.5, clip=1e-4, reference=reference)
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
            z = 20.0 / 3 * sum(a[i] * (losses[i] - ref_losses[i]) for i in group).detach()
            for i in group:
                stops = []
                for j in range(2):  # every time by itself, as in the authors' code
                    q = math.exp((old_losses[i, j] - losses[i, j]).item())
                    stops.append(q > 1 + 1e-4 if a[i] > 0 else q < 1 - 1e-4)
                    l_it = losses[i, j].detach() if stops[j] else losses[i, j]
                    terms.append(torch.sigmoid(z[j]) * a[i] * l_it)
                stopped.append(sum(stops) / 2)
        return torch.stack(terms).mean() + 0.5 * pixel_mean((v - start) ** 2).mean()  # the KL's never moves

    pairs.assert_loss_is(objective, paper, ([[3, 4, 5], [0, 1, 2]], [[5, 0], [3, 2], [1, 4]]))
    objective.before_update(network, [experience])
    clipped = objective.loss(network, experience)[1]["clip_fraction"]
    assert clipped.tolist() == stopped
    assert 0 < clipped.sum() < 6


def test_the_weights_are_put_back_when_a_pass_fails(policy):
    objective = small(behaviour_from_step=0)
    experience, rollout = prepare(policy, objective), roll(policy, objective)
    nudge(policy)
    before = weights(policy)
    for broken in (experience, rollout):
        broken.conditioning.tensors["tokens"] = broken.conditioning.tensors["tokens"][..., :-1]
    with pytest.raises(RuntimeError):
        objective.before_update(policy, [experience])
    with pytest.raises(RuntimeError):
        objective.prepare(PrepareContext(policy, rollout, ADVANTAGES, micro_batch_size=6))
    with pytest.raises(RuntimeError, match="stop"), objective.acting(policy):
        raise RuntimeError("stop")
    assert all(torch.equal(p, before[name]) for name, p in weights(policy).items())


def test_the_published_cost():
    sizes = Sizes(4, 4, micro_batch_size=8)
    assert DGPO().passes_per_image(sizes) == {"rollout": 10, "update": 4, "old": 4, "reference": 4}
    free = DGPO(reference="moving", kl_weight=0.0).passes_per_image(sizes)
    assert free == {"rollout": 10, "update": 4, "old": 4}
    assert "trains each image at 4 of 3 times" in DGPO(noisiest=3).check(sizes)[0]


def test_a_group_must_be_whole_in_every_update(policy):
    (error,) = DGPO().check(Sizes(6, 4, updates_per_iteration=4, micro_batch_size=2, split_updates=True))
    assert "updates_per_iteration=4 splits the 6 groups of 4" in error
    assert DGPO().check(Sizes(6, 4, updates_per_iteration=3, micro_batch_size=2, split_updates=True)) == []
    assert DGPO().check(Sizes(6, 4, updates_per_iteration=4, micro_batch_size=2)) == []
    objective = small()
    experience = prepare(policy, objective)
    objective.before_update(policy, [experience.select(slice(0, 3))])
    with pytest.raises(ValueError, match="An update splits a group"):
        objective.before_update(policy, experience.micro_batches(5)[:1])
