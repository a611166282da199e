"""RewardGradient against the papers' definitions in float64, its gradient by the reward, and what it refuses."""

import copy
from dataclasses import replace

import pytest
import torch
from helpers import Brightness, make_data, make_module, make_trainer, weights
from pair_methods import assert_same_gradient, loss_and_gradient

from lit_vgrpo import RewardGradient, RolloutSpec
from lit_vgrpo.core.noise import STREAM_RENOISED, STREAM_ROLLOUT, image_generators, seeded_generator
from lit_vgrpo.core.records import IterationRecord
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.types import Conditioning, RolloutRequest
from lit_vgrpo.objectives.base import PrepareContext
from lit_vgrpo.objectives.reward_gradient import active_steps, score_gradient
from lit_vgrpo.policies import SD3Policy, UNetPolicy
from lit_vgrpo.rewards import JPEGCompressibility, PythonReward, ShapesReward, SmoothShapesReward, Weighted
from lit_vgrpo.training.settings import gradient_note, module_errors

PROMPTS = ["a red circle on the left", "a blue square"]
GROUP, S, ITERATION, SEED = 3, 6, 2, 5
SIZES = Sizes(2, GROUP, 1, 3)


def closeness(images, prompts):
    """How near pictures are to a grey that depends on the prompt, more so on the right; (B,)."""
    grey = torch.tensor([len(prompt) / 50 for prompt in prompts], dtype=images.dtype)
    ramp = torch.linspace(0.5, 1.5, images.shape[3], dtype=images.dtype)
    return -((images - grey[:, None, None, None]).square() * ramp).mean((1, 2, 3))


REWARD = Weighted([PythonReward(closeness, differentiable=True)])


def make(**options):
    guidance = options.pop("guidance", 1.0)
    objective = RewardGradient(RolloutSpec("euler", S, guidance), **options)
    objective.connect(None, SEED)
    return objective


def context_of(policy, objective, micro_batch_size=3):
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    rollout = objective.roll_out(policy, RolloutRequest(PROMPTS, rows, [0, 1], GROUP, ITERATION, SEED))
    asked = [prompt for prompt in PROMPTS for _ in range(GROUP)]
    return PrepareContext(
        *(policy, rollout, torch.zeros(6), micro_batch_size), reward=REWARD, prompts=asked, data_rows=[{}] * 6
    )


class Wide:
    """A policy's network, VAE and rollout in float64, written out."""

    def __init__(self, policy, guidance):
        self.policy, self.guidance = copy.copy(policy), guidance
        self.network, self.vae = copy.deepcopy(policy.network).double(), copy.deepcopy(policy.pipeline.vae).double()
        encoded = policy.encode(PROMPTS).select(torch.arange(2).repeat_interleave(GROUP))
        self.cond, self.negative = (
            Conditioning({name: value.double() for name, value in one.tensors.items()})
            for one in (encoded, policy.negative().expand(6))
        )
        scheduler = policy.scheduler("euler", S)
        self.times = [*policy.scheduler_times(scheduler).double().tolist(), 0.0]
        x = policy.prior(image_generators(STREAM_ROLLOUT, SEED, ITERATION, range(6))).double()
        self.states, self.velocities = [x], []
        with torch.no_grad():
            for i in range(S):
                self.velocities.append(self.velocity(self.states[i], i))
                self.states.append(self.states[i] + self.step(i) * self.velocities[i])

    def step(self, i):
        return self.times[i + 1] - self.times[i]

    def velocity(self, x, i):
        t = torch.full((6,), self.times[i], dtype=torch.float64)
        with self.policy.using(self.network):
            prompted = self.policy.predict(x, t, self.cond)
            if self.guidance == 1:
                return prompted
            with torch.no_grad():
                plain = self.policy.predict(x, t, self.negative)
        return plain + self.guidance * (prompted - plain)

    def reward(self, latents):
        config = self.vae.config
        pixels = self.vae.decode(latents / config.scaling_factor + (config.shift_factor or 0)).sample
        return closeness((pixels / 2 + 0.5).clamp(0, 1), [prompt for prompt in PROMPTS for _ in range(GROUP)])

    def images(self, objective):
        """The images whose reward is maximised, a list of ``(6, C, h, w)``."""
        last, at = S - 1, objective.recorded_steps(ITERATION)
        if objective.variant == "refl":
            (k,) = at
            return [self.states[k] - self.times[k] * self.velocity(self.states[k], k)]
        if objective.variant == "draft_k":
            x = self.states[S - objective.steps]
            for i in range(S - objective.steps, S):
                x = x + self.step(i) * self.velocity(x, i)
            return [x]
        if objective.variant == "draft_lv":
            t = self.times[last]
            clean = self.states[last] - t * self.velocity(self.states[last], last)
            draws = image_generators(STREAM_RENOISED, SEED, ITERATION, range(6))
            shape = (objective.num_noises, *clean.shape[1:])
            noise = torch.stack([torch.randn(shape, generator=draw) for draw in draws]).double()
            noisy = [(1 - t) * clean.detach() + t * noise[:, n] for n in range(objective.num_noises)]
            return [clean, *(z - t * self.velocity(z, last) for z in noisy)]
        chosen = sum(self.step(k) for k in at)
        factor = 1 + objective.rescale * (sum(self.step(i) for i in range(S)) / chosen - 1)
        x = self.states[0]
        for i in range(S):
            v = self.velocities[i]
            if i in at:
                again = self.velocity(self.states[i].detach(), i)
                v = again.detach() + factor * (again - again.detach())
            x = x + self.step(i) * v
        return [x + (self.states[S] - x).detach()]

    def loss_and_gradient(self, objective):
        scores = torch.stack([self.reward(x) for x in self.images(objective)], dim=1)
        loss = (-scores if objective.target is None else (objective.target - scores).relu()).mean()
        named = [p for p in self.network.parameters() if p.requires_grad]
        parts = torch.autograd.grad(loss, named, allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(named, parts, strict=True)]
        return loss.item(), torch.cat([g.flatten() for g in flat])


CASES = {
    "flowbp": {},
    "flowbp, target": {"num_steps": 2, "target": -0.06, "late_bias": 0.0, "rescale": 1.0},
    "flowbp, guidance": {"num_steps": 3, "guidance": 2.0},
    "refl": {"variant": "refl", "num_steps": 4},
    "draft_k": {"variant": "draft_k", "num_steps": 3, "guidance": 2.0},
    "draft_lv": {"variant": "draft_lv", "target": -0.06},
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_the_definition(policy, name):
    objective = make(**CASES[name])
    objective.setup(policy)
    experience = objective.prepare(context_of(policy, objective))
    loss, gradient = loss_and_gradient(policy, objective, experience.micro_batches(3))
    expected, direction = Wide(policy, CASES[name].get("guidance", 1)).loss_and_gradient(objective)
    assert loss == pytest.approx(expected, abs=1e-6)
    assert_same_gradient(gradient, direction.float(), rtol=1e-4)


def test_a_crop_has_the_gradient_of_its_window_alone(policy):
    objective = make()
    context = context_of(policy, objective)
    latents, images = context.rollout.latents[:4], torch.tensor([0, 1, 4, 4])
    scores, gradient = score_gradient(context, latents, images, crop=0.5)
    side = latents.shape[-1]
    for z, image, score, found in zip(latents, images, scores, gradient, strict=True):
        rows, columns = (found.abs().amax(dims).nonzero().flatten() for dims in ((0, 2), (0, 1)))
        window = [slice(int(part[0]), int(part[0]) + side // 2) for part in (rows, columns)]
        assert len(rows) == len(columns) == side // 2
        leaf = z[None, :, window[0], window[1]].clone().requires_grad_()
        expected = REWARD.with_gradient(policy.decode_with_gradient(leaf), [context.prompts[image]], [{}])
        torch.testing.assert_close(score, expected[0].detach())
        torch.testing.assert_close(found[:, window[0], window[1]], torch.autograd.grad(expected[0], leaf)[0][0])
    assert gradient[2].abs().max() > 0  # the same image twice, with the same window
    assert torch.equal(gradient[2] != 0, gradient[3] != 0)
    assert (context.ledger.decoded, context.ledger.training_passes()) == (4, 0)


def test_windows_lie_elsewhere_in_every_image_and_iteration(policy):
    context, corners = context_of(policy, make()), []
    for context.rollout.iteration in (ITERATION, ITERATION + 1, ITERATION):
        gradient = score_gradient(context, context.rollout.latents, torch.arange(6), crop=0.5)[1]
        corners.append([tuple(part.abs().amax(0).nonzero()[0].tolist()) for part in gradient])
    assert len({*corners[0]}) > 2
    assert len({row for row, _ in corners[0]}) > 1 < len({column for _, column in corners[0]})
    assert corners[0] == corners[2] != corners[1]


def test_half_the_resolution_has_the_gradient_of_the_averaged_latents(policy):
    context = context_of(policy, make())
    found = make(decode_half=True).prepare(context).kept
    means = context.rollout.latents.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).mean((3, 5)).requires_grad_()
    pictures = policy.decode_with_gradient(means)
    assert pictures.shape[2:] == torch.Size([side // 2 for side in policy.decode(context.rollout.latents).shape[2:]])
    scores = REWARD.with_gradient(pictures, context.prompts, context.data_rows)
    torch.testing.assert_close(found["score"][:, 0], scores.detach())
    of_means = torch.autograd.grad(scores.sum(), means)[0]
    expected = of_means.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3) / 4
    torch.testing.assert_close(-found["gradient"][:, 0], expected)


def test_an_image_s_gradient_does_not_depend_on_the_others(policy):
    context = context_of(policy, make())
    whole = score_gradient(context, context.rollout.latents, torch.arange(6))
    alone = score_gradient(context, context.rollout.latents[4:], torch.tensor([4, 5]))
    assert all(torch.equal(of_all[4:], of_two) for of_all, of_two in zip(whole, alone, strict=True))


def test_the_vae_recomputes_its_blocks_and_decodes_the_same(policy):
    latents = torch.randn(2, *policy.latent_shape)
    before = policy.decode(latents)
    leaf = latents.clone().requires_grad_()
    policy.decode_with_gradient(leaf).sum().backward()
    assert policy.pipeline.vae.is_gradient_checkpointing
    assert leaf.grad.abs().min() > 0
    torch.testing.assert_close(policy.decode_with_gradient(leaf).detach(), before)
    torch.testing.assert_close(policy.decode(latents), before)


def test_an_image_at_the_target_is_not_trained_on(policy):
    objective = make(num_steps=2)
    scores = objective.prepare(context_of(policy, objective)).kept["score"]
    objective.target = float(scores.median())
    trained = objective.prepare(context_of(policy, objective)).kept["gradient"].flatten(1).any(dim=1)
    assert torch.equal(trained, scores[:, 0] < objective.target)
    assert (scores == objective.target).any()


def test_the_steps_are_drawn_anew_for_every_iteration_and_seed():
    for objective, expected in (
        (make(variant="refl", num_steps=3), {(3,), (4,), (5,)}),
        (make(variant="draft_k", num_steps=3), {(3,)}),
        (make(variant="draft_lv"), {(5,)}),
        (make(num_steps=5), {tuple(i for i in range(6) if i != left) for left in range(6)}),
    ):
        draws = [[tuple(objective.recorded_steps(i)) for i in range(80)] for objective.seed in (SEED, SEED + 1, SEED)]
        assert set(draws[0]) == expected
        assert draws[0] == draws[2]
        assert (draws[0] == draws[1]) == (len(expected) == 1)
    late = make(num_steps=1, late_bias=3.0)
    shares = torch.tensor([late.recorded_steps(i)[0] for i in range(900)]).bincount(minlength=6) / 900
    torch.testing.assert_close(shares, torch.arange(1.0, 7) ** 3 / 441, atol=0.05, rtol=0)
    drawn = [active_steps(4, 2, 1.0, seeded_generator(number)) for number in range(2000)]
    assert all(first < second for first, second in drawn)
    assert active_steps(4, 4, 1.0, seeded_generator(0)) == [0, 1, 2, 3]


def test_what_cannot_work_is_one_line():
    for objective, line in (
        (RewardGradient(RolloutSpec("dpm++", 6)), "rollout.solver=dpm++: RewardGradient differentiates Euler's steps"),
        (make(num_steps=7), "num_steps=7 exceeds rollout.steps=6. Use at most 6."),
        (make(variant="draft_lv", num_steps=2), "num_steps has no effect with variant=draft_lv"),
    ):
        (error,) = objective.check(SIZES)
        assert error.startswith(f"model.objective.{line}")
    assert make().check(SIZES) == make().policy_errors(SD3Policy("x")) == []
    assert "it is not defined on a variance-preserving path" in make().policy_errors(UNetPolicy("x"))[0]


def test_a_loop_without_a_reward_is_told_what_to_give(policy):
    objective = make()
    context = context_of(policy, objective)
    bare = PrepareContext(policy, context.rollout, context.advantages, 3)
    with pytest.raises(RuntimeError, match="Give PrepareContext reward, prompts and data_rows"):
        objective.prepare(bare)


def test_rewards_without_gradient_are_named_or_only_logged(tiny_sd3):
    blind = make_module(tiny_sd3, make(), Weighted([JPEGCompressibility(), ShapesReward("colour")]))
    (error,) = module_errors(blind, SIZES)
    assert error.startswith(
        "model.objective=RewardGradient trains on the reward's gradient, but model.reward (jpeg, colour) has none. Use "
    )
    assert gradient_note(blind) == gradient_note(make_module(tiny_sd3, make(), Brightness())) == []
    mixed = make_module(tiny_sd3, make(), Weighted([JPEGCompressibility(), Brightness(), SmoothShapesReward()]))
    assert module_errors(mixed, SIZES) == []
    assert gradient_note(mixed) == [
        "Trained on the gradient of brightness, smooth_shapes; jpeg has none and is only logged."
    ]


def level(images, prompts):
    """The same for every picture, but not its gradient."""
    brightness = images.mean((1, 2, 3))
    return brightness - brightness.detach() + 0.5


@pytest.mark.filterwarnings("error:The rewards of the first iteration")
def test_images_that_are_all_alike_are_trained_on(tiny_sd3, tmp_path):
    module = make_module(tiny_sd3, make(), PythonReward(level, differentiable=True))
    trainer = make_trainer(tmp_path, 1)
    trainer.fit(module, datamodule=make_data(heldout=None))
    assert trainer.callback_metrics["reward/no_spread"] == 1
    assert module.record.updates == module.objective.num_updates == 1
    assert trainer.callback_metrics["policy/trained_reward"] == pytest.approx(0.5)
    assert trainer.callback_metrics["cost/decoded_with_gradient"] == module.ledger.images == 8
    start = module.reference.state_dict()
    assert sum(not torch.equal(value, start[name]) for name, value in weights(module).items()) > 10


def without_squares(images, prompts):
    fails = torch.tensor(["square" in prompt for prompt in prompts])
    return closeness(images, prompts).masked_fill(fails, torch.nan)


def test_images_whose_reward_failed_are_left_out(policy):
    objective = make(num_steps=2)
    objective.setup(policy)
    context = context_of(policy, objective)
    whole = objective.prepare(context)
    failing = Weighted([PythonReward(without_squares, differentiable=True)])
    partly = objective.prepare(replace(context, reward=failing))
    assert torch.equal(partly.kept["gradient"][:3], whole.kept["gradient"][:3])
    assert partly.kept["gradient"][3:].abs().max() == partly.kept["loss"][3:].abs().max() == 0


@pytest.mark.parametrize("first", [0, 3])
def test_images_that_no_differentiable_reward_scores_are_left_out(policy, first):
    objective = make(num_steps=2)
    objective.setup(policy)
    context = context_of(policy, objective)
    whole = objective.prepare(context)
    rows = [{"rewards": ["jpeg"]} if image >= first else {"rewards": ["closeness"]} for image in range(6)]
    mixed = Weighted([PythonReward(closeness, differentiable=True), JPEGCompressibility()], [1.0, 1.0])
    partly = objective.prepare(replace(context, reward=mixed, data_rows=rows))
    assert torch.equal(partly.kept["gradient"][:first], whole.kept["gradient"][:first])
    assert partly.kept["gradient"][first:].abs().max() == partly.kept["loss"][first:].abs().max() == 0
    record = IterationRecord(0, torch.zeros(6), torch.zeros(6), {}, {}, torch.zeros(6), 6)
    record.add(*objective.loss(policy, partly), len(partly))
    assert record.means()["trained_reward"].isnan() == (first == 0)
