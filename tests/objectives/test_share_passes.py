"""One network pass per group: the same gradient at t = 1, and one image's noisy latent at lower times."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from all_methods import ANCHOR
from pair_methods import ADVANTAGES, GROUP, assert_same_gradient, loss_and_gradient, prepare, roll, spread_copies
from policies.families import make_family

from lit_vgrpo.core.probability_paths import RectifiedFlow
from lit_vgrpo.core.records import PassLedger
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.surrogate import Pairs
from lit_vgrpo.core.types import Rollout, RolloutSpec
from lit_vgrpo.objectives import DGPO, VGRPO
from lit_vgrpo.objectives.base import PrepareContext
from lit_vgrpo.objectives.pairs import share_noisy_latents
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
    plain = Pairs(pairs.times, pairs.noise, pairs.rows)
    return replace(experience, pairs=plain, kept={name: experience.kept_values(name) for name in experience.kept})


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


def test_a_shared_pass_is_that_of_each_image_with_the_noise_that_leads_there(request):
    """On any path, also one that keeps some of the image at its noisiest time."""
    folders = ("sd3_folder", "unet_folder", "sdxl_folder", "flux_folder", "large_folder")
    policy = make_family("unet_eps", *map(request.getfixturevalue, folders)).load()
    objective = VGRPO(RolloutSpec("ddim", 3), 2, share_passes="group", scale_cap=None, **ANCHOR)
    spread_copies(policy, objective)
    shared = prepare(policy, objective)
    times, noisy = shared.pairs.of_images()
    a, b = (value.reshape(*times.shape, 1, 1, 1) for value in policy.path.coefficients(times.flatten()))
    assert shared.pairs.shared == 2
    assert 0.01 < a.min() < 0.2  # it keeps some
    noise = (noisy - a * shared.latents[:, None]) / b
    alone = replace(unshared(shared), pairs=Pairs(times, noise, torch.arange(len(times))))
    for experience in (shared, alone):
        objective.before_update(policy, [experience])
    loss, gradient = loss_and_gradient(policy, objective, [shared])
    expected_loss, expected = loss_and_gradient(policy, objective, [alone])
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    assert_same_gradient(gradient, expected, 1e-4)


def test_it_saves_the_passes_that_the_plan_says(policy):
    for sharing in ("pure_noise", "group"):
        objective = VGRPO(RolloutSpec(steps=2), 3, share_passes=sharing, **ANCHOR)
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


def test_a_shared_noisy_latent_starts_from_one_image_of_the_group():
    points, t, draws = torch.tensor([-1.0, 0.2, 1.5]), 0.6, 10_000
    noise = torch.randn(1, draws, 1, 1, 1, generator=torch.Generator().manual_seed(0))
    pairs = Pairs(torch.full((1, draws), t), noise, torch.zeros(3, dtype=torch.int64))
    one_group, flow = torch.zeros(3, dtype=torch.int64), SimpleNamespace(path=RectifiedFlow())
    ids = {"group_ids": one_group, "image_ids": torch.arange(3), "rows": one_group}
    rollout = Rollout(points.view(3, 1, 1, 1), **ids, conditioning=None, schedule=t, iteration=0, seed=0, group_size=3)
    pairs = share_noisy_latents(PrepareContext(flow, rollout, points, 3), pairs, lambda values: values)
    assert pairs.shared == draws
    bases = (pairs.noise - t * noise).flatten() / (1 - t)
    distances = (bases[:, None] - points).abs()
    assert distances.amin(dim=1).max() < 1e-5
    assert (distances.argmin(dim=1).bincount() / draws).tolist() == pytest.approx([1 / 3] * 3, abs=0.02)


def test_only_the_first_shared_pair_is_pure_noise(policy):
    objective = VGRPO(RolloutSpec(steps=2), 2, share_passes="group")
    pairs = prepare(policy, objective).pairs
    assert pairs.shared == 2
    assert pairs.times[:, 0].tolist() == [1.0, 1.0]
    assert pairs.times[:, 1].max() < 1


@pytest.mark.parametrize(
    ("options", "sizes", "line"),
    [
        ({"share_pairs": "none"}, SIZES, "share_passes=group needs share_pairs=group"),
        ({"time_range": (0.0, 0.9)}, SIZES, "needs t = 1, but time_range=[0.0, 0.9] excludes it"),
        ({}, Sizes(3, 4, 2, split_updates=True), "updates_per_iteration=2 splits the 3 groups"),
        ({"rollout": RolloutSpec(steps=1)}, SIZES, "trains each image at 1 of 0 times below 1"),
    ],
)
def test_what_cannot_share_is_refused(options, sizes, line):
    (error,) = VGRPO(share_passes="group", **options).check(sizes)
    assert line in error


def test_a_range_without_a_time_below_one_is_refused(policy):
    few = {"time_range": (0.9, 1.0), "share_passes": "group"}
    prepare(policy, VGRPO(RolloutSpec(steps=4), 1, **few))
    with pytest.raises(ValueError, match="share_passes leaves no time below 1 to train at. Use more rollout.steps"):
        prepare(policy, VGRPO(RolloutSpec(steps=4), 2, **few))


def test_a_path_that_does_not_end_in_noise_is_refused():
    (error,) = VGRPO(share_passes="pure_noise").policy_errors(UNetPolicy("x"))
    assert "needs a path that ends in pure noise, but that of UNetPolicy keeps some of the image" in error


@pytest.mark.parametrize("options", [{}, {"share_passes": "group"}], ids=["", "shared"])
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
        assert torch.equal(found.kept_values("anchor"), expected.kept_values("anchor"))
        assert all(torch.equal(*each) for each in zip(found.pairs.of_images(), expected.pairs.of_images(), strict=True))
        assert found.kept.keys() == expected.kept.keys()
        assert all(torch.equal(values, expected.kept[name]) for name, values in found.kept.items())
        prompts = [one.conditioning.select(one.rows).tensors for one in (found, expected)]
        assert all(torch.equal(values, prompts[1][name]) for name, values in prompts[0].items())
