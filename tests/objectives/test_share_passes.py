"""One network pass per group: the same gradient at t = 1, and no bias at lower times."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from all_methods import ANCHOR
from pair_methods import ADVANTAGES, GROUP, assert_same_gradient, loss_and_gradient, prepare, roll, spread_copies
from policies.families import make_family

from lit_vgrpo.core.importance import balance_weights, effective_sample_size, negative_log_densities, temperature_for
from lit_vgrpo.core.probability_paths import RectifiedFlow
from lit_vgrpo.core.records import PassLedger
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.surrogate import Pairs, TimeGrid
from lit_vgrpo.core.types import Rollout, RolloutSpec
from lit_vgrpo.objectives import DGPO, VGRPO
from lit_vgrpo.objectives.base import PrepareContext
from lit_vgrpo.objectives.pairs import share_noisy_latents, stored
from lit_vgrpo.policies import UNetPolicy

SIZES = Sizes(2, GROUP, micro_batch_size=6)
OPTIONS = {
    "one update": {},
    "clip, KL": {"clip": 0.05, "kl_weight": 0.3, **ANCHOR},
    "antithetic, KL to the start": {"antithetic": True, "kl_weight": 0.3, "kl_to": "reference"},
}


def unshared(experience):
    """The same pairs with a pass for each image, and what was stored of them."""
    pairs = experience.pairs
    of_images = {name: values[pairs.rows] for name, values in pairs.predictions.items()}
    joined = {name: torch.cat([values, experience.extras[name]], dim=1) for name, values in of_images.items()}
    plain = Pairs(pairs.times, pairs.noise, pairs.rows)
    return replace(experience, pairs=plain, extras={**experience.extras, **joined})


def assert_exact(policy, objective, updates):
    spread_copies(policy, objective)
    experience = prepare(policy, objective, updates=updates)
    assert experience.pairs.shared in (1, 2)
    assert set(experience.pairs.times[:, : experience.pairs.shared].flatten().tolist()) == {1.0}
    objective.before_update(policy, [experience])
    micros = experience.micro_batches(3)
    loss, gradient = loss_and_gradient(policy, objective, micros)
    expected_loss, expected = loss_and_gradient(policy, objective, unshared(experience).micro_batches(3))
    assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)
    assert_same_gradient(gradient, expected, 1e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_pure_noise_gives_the_gradient_of_a_pass_per_image(policy, name):
    updates = 2 if "clip" in OPTIONS[name] else 1
    assert_exact(policy, VGRPO(RolloutSpec(steps=3), 4, share_passes="pure_noise", **OPTIONS[name]), updates)


def test_pure_noise_in_dgpo(policy):
    assert_exact(policy, DGPO(RolloutSpec("dpm++", 4), 3, share_passes="pure_noise", noisiest=None, **ANCHOR), 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux", "kontext", "z_image", "wan"])
def test_pure_noise_on_other_families(name, request):
    folders = ("sd3_folder", "unet_folder", "sdxl_folder", "flux_folder", "large_folder")
    family = make_family(name, *map(request.getfixturevalue, folders))
    assert_exact(family.load(), VGRPO(RolloutSpec(steps=2), 2, share_passes="pure_noise", **ANCHOR), 1)


def test_it_saves_the_passes_that_the_plan_says(policy):
    for sharing, options in [("pure_noise", {}), ("group", {"importance_temperature": 0.1})]:
        objective = VGRPO(RolloutSpec(steps=2), 3, share_passes=sharing, **options, **ANCHOR)
        objective.setup(policy)
        for micro in (6, 3, 1):
            ledger = PassLedger()
            policy.network._forward_pre_hooks.clear()
            ledger.attach(policy.network)
            with ledger.phase("rollout"):
                experience = prepare(policy, objective, micro_batch_size=micro, ledger=ledger)
            for part in experience.micro_batches(micro):
                objective.loss(policy, part)
            planned = objective.passes_per_image(replace(SIZES, micro_batch_size=micro))
            counted = {name: sum(count.values()) / 6 for name, count in ledger.counts.items()}
            assert counted == pytest.approx(planned), (sharing, micro)


def group_of(points, iteration):
    """A context with one group of images that are single numbers, and a pair at a random time."""
    size = len(points)
    rollout = Rollout(
        latents=points.reshape(size, 1, 1, 1),
        group_ids=torch.zeros(size, dtype=torch.int64),
        image_ids=torch.arange(size),
        conditioning=None,
        rows=torch.zeros(size, dtype=torch.int64),
        schedule=torch.ones(1),
        iteration=iteration,
        seed=0,
        group_size=size,
    )
    return PrepareContext(SimpleNamespace(path=RectifiedFlow()), rollout, torch.zeros(size), size)


def test_the_balance_heuristic_is_unbiased_and_equal_weights_are_not():
    """The weighted mean over shared latents equals each image's expectation of a function of its noisy latents."""
    points, t, draws = torch.tensor([-1.0, 0.2, 1.5]), 0.6, 10_000
    generator = torch.Generator().manual_seed(0)

    def function(noisy):  # differs by image, and is not linear
        return torch.tanh(2 * noisy) + (noisy - points).square()

    own = function((1 - t) * points + t * torch.randn(200_000, 1, generator=generator)).mean()
    times = torch.full((1, draws), t)
    found = {}
    for temperature in (None, 0.0):
        pairs = Pairs(times, torch.randn(1, draws, 1, 1, 1, generator=generator), torch.zeros(3, dtype=torch.int64))
        pairs, weights, sizes = share_noisy_latents(group_of(points, 0), pairs, lambda values: values, temperature)
        assert pairs.shared == draws
        torch.testing.assert_close(weights.mean(dim=0), torch.ones(draws))
        assert sizes.min() >= 1
        values = (weights.T * function(pairs.noise.reshape(draws, 1))).mean(dim=1)
        found[temperature] = ((values.mean() - own) / (values.std() / draws**0.5)).item()
    assert abs(found[None]) < 4  # standard errors
    assert abs(found[0.0]) > 20


def test_temperature_reaches_the_sample_size():
    latents = torch.randn(8, 4, 5, 5, generator=torch.Generator().manual_seed(1))
    noisy = (0.1 * latents[:1] + 0.9 * latents[1:2].flip(1)).expand(8, 1, -1, -1, -1)
    coefficients = torch.full((8, 1), 0.1), torch.full((8, 1), 0.9)
    densities = negative_log_densities(noisy, latents, *coefficients).T
    temperature = temperature_for(densities, 6.0)
    assert 0 < temperature < 1
    assert effective_sample_size(balance_weights(densities, temperature)).item() == pytest.approx(6.0)
    assert temperature_for(densities, 1.0) == 1


def test_at_pure_noise_all_images_count_alike(policy):
    objective = VGRPO(RolloutSpec(steps=2), 2, share_passes="group", effective_samples=2.5)
    objective.setup(policy)
    experience = prepare(policy, objective)
    weights = experience.extras["importance"].unflatten(0, (2, GROUP))
    torch.testing.assert_close(weights[..., 0], torch.ones(2, GROUP))
    assert effective_sample_size(weights[..., 1] / GROUP).tolist() == pytest.approx([2.5, 2.5], rel=1e-4)
    assert experience.pairs.times[:, 1].max() < 1


def test_large_latents_need_a_choice(policy):
    objective = VGRPO(RolloutSpec(steps=4), 2, share_passes="group", times=TimeGrid(8, shift=0.5))
    objective.setup(policy)
    with pytest.raises(ValueError, match=r"effective sample size below t = 1 is 1\.\d+ of 3 images"):
        prepare(policy, objective, advantages=ADVANTAGES)


@pytest.mark.parametrize(
    ("options", "sizes", "line"),
    [
        ({"share_pairs": "none"}, SIZES, "share_passes=group needs share_pairs=group"),
        ({"time_range": (0.0, 0.9)}, SIZES, "needs t = 1, but time_range=[0.0, 0.9] excludes it"),
        ({}, Sizes(3, 4, 2, split_updates=True), "updates_per_iteration=2 splits the 3 groups"),
        ({"effective_samples": 5.0}, SIZES, "effective_samples=5.0 exceeds the 3 images"),
        ({"effective_samples": 2.0, "importance_temperature": 0.5}, SIZES, "Use only one"),
    ],
)
def test_what_cannot_share_is_refused(options, sizes, line):
    (error,) = VGRPO(share_passes="group", **options).check(sizes)
    assert line in error


def test_a_path_that_does_not_end_in_noise_is_refused():
    (error,) = VGRPO(share_passes="pure_noise").policy_errors(UNetPolicy)
    assert "needs a path that ends in pure noise, but that of UNetPolicy keeps some of the image" in error


@pytest.mark.parametrize("options", [{}, {"share_passes": "group", "importance_temperature": 0.05}], ids=["", "shared"])
def test_replayed_images_are_prepared_as_if_alone(policy, options):
    objective = VGRPO(RolloutSpec(steps=3), 2, **options, **ANCHOR)
    spread_copies(policy, objective)
    new = roll(policy, objective)
    again = replace(new, latents=new.latents + 1, group_ids=new.group_ids + 2, image_ids=new.image_ids + len(new))
    again.conditioning = new.conditioning.select(torch.tensor([1, 0]))
    alone = [objective.prepare(PrepareContext(policy, images, ADVANTAGES, 3)) for images in (new, again)]
    both = objective.prepare(PrepareContext(policy, new.followed_by(again), ADVANTAGES.repeat(2), 3))
    for number, expected in enumerate(alone):
        found = both.select(slice(number * len(new), (number + 1) * len(new)))
        assert torch.equal(found.latents, expected.latents)
        assert torch.equal(stored(found, "anchor_prediction"), stored(expected, "anchor_prediction"))
        assert all(torch.equal(*each) for each in zip(found.pairs.of_images(), expected.pairs.of_images(), strict=True))
        assert found.extras.keys() == expected.extras.keys()
        assert all(torch.equal(values, expected.extras[name]) for name, values in found.extras.items())
        prompts = [one.conditioning.select(one.rows).tensors for one in (found, expected)]
        assert all(torch.equal(values, prompts[1][name]) for name, values in prompts[0].items())
