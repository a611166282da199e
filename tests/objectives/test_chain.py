"""Sampling with an SDE, and what all methods on the chain share."""

import re
from dataclasses import replace

import pytest
import torch
from chain_in_float64 import ADVANTAGES, flow_sde, gaussian, gradient, prepared
from pair_methods import GROUP, nudge, roll
from policy_copies import load_copy
from rollouts import roll_out, sample_chain

from lit_vgrpo.core.noise import image_generators
from lit_vgrpo.core.records import PassLedger
from lit_vgrpo.core.sampling import sample
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.solvers import FLOW_SDES
from lit_vgrpo.core.types import RolloutRequest, RolloutSpec
from lit_vgrpo.objectives import DDPO, DanceGRPO, FlowGRPO, MixGRPO
from lit_vgrpo.objectives.base import PrepareContext
from lit_vgrpo.policies import RectifiedFlow, SD3Policy, UNetPolicy
from lit_vgrpo.rollout.iteration import gathered

SIZES = Sizes(prompts_per_iteration=2, group_size=GROUP)
CHAIN = RolloutSpec("flow_sde", steps=4)


def walk(policy, spec, images=4, noise_seed=0, **options):
    conditioning, rows = policy.encode_each(["a red circle"] * images)
    start = policy.prior(image_generators(1, 0, 0, range(images)))
    generators = image_generators(6, noise_seed, 0, range(images))
    return sample_chain(policy, conditioning, rows, spec, start, generators, **options)


def walk_ode(policy, spec, images=4):
    conditioning, rows = policy.encode_each(["a red circle"] * images)
    return sample(policy, conditioning, rows, spec, policy.prior(image_generators(1, 0, 0, range(images))))


# --- sampling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", FLOW_SDES)
def test_without_noise_a_flow_chain_is_the_euler_sampler(policy, solver):
    latents, schedule, chain = walk(policy, RolloutSpec(solver, 5, guidance=3.0, noise_level=0.0))
    euler, times = walk_ode(policy, RolloutSpec("euler", 5, guidance=3.0))
    torch.testing.assert_close(latents, euler, rtol=1e-4, atol=1e-5)
    assert torch.equal(schedule, times)
    assert torch.equal(chain.log_probs, torch.zeros(4, 4)) or solver == "cps"


def test_trajectory_holds_the_steps_and_their_likelihood(policy):
    latents, schedule, chain = walk(policy, CHAIN, record_means=True)
    start = policy.prior(image_generators(1, 0, 0, range(4)))
    assert torch.equal(chain.states[:, 0], start)
    assert chain.states.shape == (4, 4, *start.shape[1:])
    assert chain.means.shape == (4, 3, *start.shape[1:])
    assert torch.equal(chain.times, schedule)
    assert chain.second_time == schedule[1].item()
    conditioning, rows = policy.encode_each(["a red circle"] * 4)
    times = [*schedule.double().tolist(), 0.0]
    for k in range(4):
        with torch.no_grad():
            v = policy(chain.states[:, k], schedule[k].expand(4), conditioning.select(rows)).double()
        z = chain.states[:, k].double()
        if k == 3:
            torch.testing.assert_close(latents.double(), z - times[3] * v, rtol=1e-4, atol=1e-5)
            continue
        for i in range(4):
            mean, std, _ = flow_sde(v[i], z[i], times[k], times[k + 1], times[1])
            end = chain.states[i, k + 1].double()
            assert ((end - mean) / std).std().item() == pytest.approx(1.0, abs=0.3)
            assert chain.log_probs[i, k].item() == pytest.approx(gaussian(end, mean, std).item(), abs=1e-4)
            torch.testing.assert_close(chain.means[i, k].double(), mean, rtol=1e-4, atol=1e-5)


def test_steps_outside_the_window_take_no_noise(policy):
    spec = RolloutSpec("flow_sde", 6, window=(2, 4))
    one, schedule, chain = walk(policy, spec)
    other, _, again = walk(policy, spec, noise_seed=1)
    assert chain.states.shape[1] == 3
    assert torch.equal(chain.times, schedule[2:5])
    assert torch.equal(chain.states[:, 0], again.states[:, 0])  # the same until the window starts
    assert not torch.equal(chain.states[:, 1], again.states[:, 1])
    assert not torch.equal(one, other)
    start = policy.prior(image_generators(1, 0, 0, range(4)))
    conditioning, rows = policy.encode_each(["a red circle"] * 4)

    @torch.no_grad()
    def euler(z, first, stop):
        for t, t_next in list(zip(schedule, [*schedule[1:], torch.tensor(0.0)], strict=True))[first:stop]:
            z = z - (t - t_next) * policy(z, t.expand(4), conditioning.select(rows))
        return z

    torch.testing.assert_close(chain.states[:, 0], euler(start, 0, 2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one, euler(chain.states[:, -1], 4, 6), rtol=1e-4, atol=1e-5)


def test_an_image_depends_on_no_other(policy):
    whole, _, chain = walk(policy, CHAIN)
    cut, _, parts = walk(policy, CHAIN, batch_size=3)
    torch.testing.assert_close(whole, cut, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(chain.log_probs, parts.log_probs, rtol=1e-4, atol=1e-5)
    alone, _, _ = walk(policy, CHAIN, images=1)
    torch.testing.assert_close(whole[:1], alone, rtol=1e-4, atol=1e-5)


def test_shared_initial_noise_is_one_a_group_and_the_chain_parts_its_images(policy):
    rollout = roll(policy, MixGRPO(RolloutSpec("flow_sde", 5, shared_noise=True)))
    starts = rollout.trajectory.states[:, 0]
    assert torch.equal(starts[0], starts[2])
    assert not torch.equal(starts[0], starts[3])
    assert not torch.equal(rollout.latents[0], rollout.latents[1])


@pytest.mark.parametrize("spec", [RolloutSpec(steps=2), RolloutSpec("flow_sde", 3, shared_noise=True)])
def test_noise_follows_the_numbers_of_groups_and_images(policy, spec):
    """A group has the same images on another rank."""
    prompts = ["a red circle", "a blue square"]
    whole = roll_out(policy, RolloutRequest(prompts, [{}] * 2, [0, 1], 4), spec)
    second = RolloutRequest(prompts[1:], [{}], [1], 4)
    assert torch.equal(roll_out(policy, second, spec).latents, whole.latents[4:])


@pytest.mark.parametrize(("steps", "window"), [(6, (0, 2)), (6, (2, 5)), (6, None), (3, (0, 3))])
def test_network_calls_are_what_is_paid(policy, steps, window):
    spec = RolloutSpec("flow_sde", steps, guidance=2.0, window=window, tail=0.4)
    ledger = PassLedger()
    ledger.attach(policy.network)
    _, schedule, _ = walk(policy, spec)
    assert ledger.counts["update"]["without_grad"] == 2 * 4 * spec.network_calls
    assert len(schedule) == spec.network_calls


class GaussianField(SD3Policy):
    """The velocity of Gaussian data N(mu, c^2): linear in z, so its ODE has a solution in closed form."""

    mu, c = 0.8, 0.3

    def predict(self, z, t, cond):
        a, b = (value.view(-1, 1, 1, 1) for value in self.path.coefficients(t))
        x_hat = self.mu + a * self.c**2 / (a**2 * self.c**2 + b**2) * (z - a * self.mu)
        return (z - x_hat) / b

    def exact(self, z, t):
        return self.mu + self.c * (z - (1 - t) * self.mu) / torch.sqrt((1 - t) ** 2 * self.c**2 + t**2)


def test_a_flash_tail_ends_at_zero_on_the_exact_solution(tiny_sd3):
    policy = GaussianField(str(tiny_sd3), max_sequence_length=1).load()
    assert isinstance(policy.path, RectifiedFlow)
    errors = {}
    for tail in (0.4, None):
        latents, schedule, chain = walk(policy, RolloutSpec("flow_sde", 25, window=(0, 4), tail=tail))
        exact = policy.exact(chain.states[:, -1], chain.times[-1])
        errors[tail] = (latents - exact).abs().max().item()
    assert len(schedule) == 25
    assert errors[0.4] < errors[None] / 2  # 9 steps of the second order beat 21 of the first
    fine, _, chain = walk(policy, RolloutSpec("flow_sde", 200, window=(0, 4), tail=1.0))
    torch.testing.assert_close(fine, policy.exact(chain.states[:, -1], chain.times[-1]), rtol=1e-3, atol=3e-3)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_a_tail_on_the_vp_path_is_diffusers_own_from_there_on(unet_folder, prediction):
    policy = load_copy(UNetPolicy, unet_folder(prediction))
    latents, schedule, chain = walk(policy, RolloutSpec("ddim_sde", 20, window=(0, 10), tail=1.0))
    scheduler = policy.scheduler("dpm++", 10)
    scheduler.set_timesteps(timesteps=policy.path.index(schedule[10:]).tolist())
    conditioning, rows = policy.encode_each(["a red circle"] * 4)
    z = chain.states[:, -1]
    with torch.no_grad():
        for timestep, t in zip(scheduler.timesteps, schedule[10:], strict=True):
            prediction_at = policy(z, t.expand(4), conditioning.select(rows))
            z = scheduler.step(prediction_at, timestep, z, return_dict=False)[0]
    torch.testing.assert_close(latents, z, rtol=1e-3, atol=1e-4)


# --- training ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("objective", [FlowGRPO(CHAIN, kl_weight=0.0, guard=True), MixGRPO(CHAIN, window_size=2)])
def test_old_likelihoods_may_be_computed_anew(policy, objective, updates):
    """Rounding that differs with the batch size, here made much larger, has no effect."""
    rollout = roll(policy, objective)
    rollout.trajectory.log_probs += 0.1
    ratios = {}
    for recompute in (False, True):
        objective.recompute_old = recompute
        ledger = PassLedger()
        ledger.attach(policy.network)
        given = {"micro_batch_size": 2, "updates": updates, "ledger": ledger}
        experience = objective.prepare(PrepareContext(policy, rollout, ADVANTAGES, **given))
        found = [objective.loss(policy, micro)[1]["ratio_deviation"] for micro in experience.micro_batches(2)]
        ratios[recompute] = torch.cat(found).max()
        planned = objective.prediction_passes(replace(SIZES, updates_per_iteration=updates)).get("old", 0)
        assert ledger.training_counts().get("old", {}).get("without_grad", 0) == planned * len(rollout)
        assert (planned > 0) == (recompute and updates > 1)
    assert ratios[False] > 0.05
    assert ratios[True] <= (0 if updates == 1 else 1e-6)


@pytest.mark.parametrize("guard", [False, True])
def test_the_first_update_has_the_loss_that_old_passes_would_give_it(policy, guard):
    objective = FlowGRPO(CHAIN, kl_weight=0.0, guard=guard, recompute_old=True, drop_zero_advantages=False)
    objective.setup(policy)
    rollout, order = roll(policy, objective), torch.tensor([1, 3, 4, 0, 2, 5])

    def shares(updates, off_policy):
        given = {"micro_batch_size": 1, "updates": updates, "off_policy": off_policy}
        return objective.prepare(PrepareContext(policy, rollout, ADVANTAGES, **given)).select(order)

    whole, split, alone = shares(2, None), shares(2, order[3:]), shares(1, None)
    for k in range(2):
        parts = [experience.select(slice(3 * k, 3 * k + 3)) for experience in (whole, split, alone)]
        found = [gradient(policy, sum(objective.loss(policy, m)[0] for m in e.micro_batches(1))) for e in parts]
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2]) == (k == 0)
        nudge(policy, size=0.05)


REUSING = [
    FlowGRPO(replace(CHAIN, guidance=2.0), clip=None, kl_weight=0.0, guard=True),
    FlowGRPO(replace(CHAIN, solver="cps"), clip=None, fast=True, kl_weight=0.0, fast_range=(1, 4)),
    MixGRPO(CHAIN, window_size=2, clip=None),
]


@pytest.mark.parametrize("objective", REUSING)
def test_the_rollouts_passes_have_the_gradient_of_later_ones(policy, objective):
    ledger, found = PassLedger(), {}
    ledger.attach(policy.network)
    for name, objective.reuse_rollout in {"later": False, "reused": True, "resumed": True}.items():
        with ledger.phase(f"{name}, rollout"):
            rollout = roll(policy, objective, iteration=1)
        experience = objective.prepare(PrepareContext(policy, rollout, ADVANTAGES, micro_batch_size=6))
        if name == "resumed":  # a checkpoint cannot hold a graph
            experience.kept = gathered(experience, rollout.image_ids)["kept"]
        with ledger.phase(f"{name}, update"):
            loss, metrics = objective.loss(policy, experience)
        assert metrics["ratio_deviation"].max() < 1e-6
        found[name] = gradient(policy, loss)
    objective.reuse_rollout = False
    assert torch.equal(found["resumed"], found["reused"])
    assert (found["reused"] - found["later"]).norm() < 1e-6 * found["later"].norm()
    counts, factor = ledger.counts, 6 * policy.guidance_factor(objective.spec.guidance)
    trained = factor * objective.num_trained_steps(rollout.spec)
    assert counts["later, rollout"]["with_grad"] == 0
    assert counts["later, update"] == counts["resumed, update"] == {"with_grad": trained, "without_grad": 0}
    assert counts["reused, rollout"] == {"with_grad": trained, "without_grad": factor * CHAIN.steps - trained}
    assert "reused, update" not in counts


@pytest.mark.parametrize(
    ("objective", "updates", "error"),
    [
        (FlowGRPO(CHAIN, kl_weight=0.0, reuse_rollout=True), 2, "updates_per_iteration=2, and the second update"),
        (FlowGRPO(CHAIN, kl_weight=0.1, reuse_rollout=True), 1, "the passes of the reference would swap weights"),
        (MixGRPO(CHAIN, 2, training_guidance=3.0, reuse_rollout=True), 1, "training_guidance=3 is not the rollout's"),
        (DanceGRPO(RolloutSpec("dance_sde", 6), reuse_rollout=True), 1, "only 3 of 5 steps with noise are trained"),
        (DDPO(RolloutSpec("ddim_sde", 4), reuse_rollout=True), 1, None),
    ],
)
def test_passes_that_are_not_the_rollouts_are_refused(objective, updates, error):
    found = objective.check(replace(SIZES, updates_per_iteration=updates))
    assert [line for line in found if error is None or error not in line or "reuse_rollout=false" not in line] == []
    assert len(found) == (error is not None)


def test_advantages_are_clamped_at_the_published_five(policy):
    wide = torch.tensor([9.0, -7.0, 1.0, 0.0, 4.9, -4.9])
    _, experience = prepared(policy, FlowGRPO(CHAIN, kl_weight=0.0), advantages=wide)
    assert experience.advantages.tolist() == pytest.approx([5.0, -5.0, 1.0, 0.0, 4.9, -4.9])
    _, experience = prepared(policy, FlowGRPO(CHAIN, kl_weight=0.0, advantage_clip=None), advantages=wide)
    assert experience.advantages.tolist() == pytest.approx(wide.tolist())


def test_without_kl_nothing_is_kept(policy):
    objective = FlowGRPO(CHAIN, kl_weight=0.0, drop_zero_advantages=False)
    _, experience = prepared(policy, objective)
    assert objective.copies == {}
    assert experience.kept.keys() == {"old"}  # of the rollout


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "line"),
    [
        (FlowGRPO(RolloutSpec("euler")), "solver=euler is an ODE.*FlowGRPO.*Use flow_sde or cps or dance_sde"),
        (DDPO(RolloutSpec("ddim")), "solver=ddim is an ODE.*DDPO.*Use ddim_sde"),
        (FlowGRPO(RolloutSpec("flow_sde", 1)), "FlowGRPO would train on the last of .*steps=1"),
        (FlowGRPO(RolloutSpec("flow_sde", noise_level=0.0)), "noise_level=0.0 gives flow_sde no likelihood"),
        (FlowGRPO(RolloutSpec("flow_sde", 5, window=(3, 5))), "would train on the last of .*at most 4 of them"),
        (FlowGRPO(RolloutSpec("flow_sde", 5, window=(0, 2)), fast=True), "rollout.window is set by FlowGRPO itself"),
        (FlowGRPO(RolloutSpec("cps", 5), guard=True), "guard=true needs a Gaussian"),
        (MixGRPO(RolloutSpec("flow_sde", 4)), "MixGRPO would train on the last .*at most 3 of them"),
        (FlowGRPO(kl_weight=0.0, reference_guidance=2.0), "reference_guidance=2.0 has no effect without a pull"),
    ],
)
def test_settings_that_cannot_train_are_one_line(objective, line):
    (error,) = objective.check(SIZES)
    assert re.search(line, error)
    objective.rollout_spec(0)  # the module asks for it before it reports the errors


PUBLISHED = {  # std and aggregate of the advantages, clip, KL weight, rollout
    FlowGRPO: ("global", "rewards", 1e-4, 0.04, RolloutSpec("flow_sde", 10, guidance=4.5)),
    MixGRPO: ("group", "advantages", 1e-4, 0.0, RolloutSpec("flow_sde", 25, shared_noise=True)),
    DanceGRPO: ("group", "rewards", 1e-4, 0.0, RolloutSpec("dance_sde", 16, shared_noise=True)),
    DDPO: ("group", "rewards", 1e-4, 0.0, RolloutSpec("ddim_sde", 50, guidance=5.0)),
}


@pytest.mark.parametrize("method", PUBLISHED)
def test_the_defaults_are_sound_and_as_published(method):
    one = method()
    found = one.advantage_std, one.advantage_aggregate, one.clip, one.kl_weight, one.rollout
    assert found == PUBLISHED[method]
    assert one.path_kinds == (("vp",) if method is DDPO else ("flow",))
    assert one.check(SIZES) == []
    assert MixGRPO().window_size == 4


def test_passes_follow_updates_guidance_and_reference():
    guided = RolloutSpec("flow_sde", 6, guidance=2.0)
    sizes = Sizes(2, 4, updates_per_iteration=3)
    assert FlowGRPO(guided).passes_per_image(sizes) == {"rollout": 12, "update": 30, "reference": 10}
    assert FlowGRPO(guided, reference_guidance=1.0).passes_per_image(sizes)["reference"] == 5
    split = Sizes(2, 4, updates_per_iteration=4, split_updates=True)
    assert FlowGRPO(guided, fast=True).passes_per_image(split) == {"rollout": 12, "update": 6}
    assert DanceGRPO(RolloutSpec("dance_sde", 11)).passes_per_image(split) == {"rollout": 11, "update": 6}
