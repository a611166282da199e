"""Shared code of the tests of methods on (image, time, noise) pairs: rollouts, and float64 arithmetic."""

import pytest
import torch

from lit_vgrpo.core.pictures import PICTURE
from lit_vgrpo.core.records import PassLedger
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.core.types import RolloutRequest
from lit_vgrpo.objectives.base import PrepareContext

PROMPTS = ["a red circle on the left", "a blue square on the right"]
GROUP = 3
ADVANTAGES = torch.tensor([1.0, -0.5, -0.5, 0.0, 2.0, -2.0])


def roll(policy, objective, slots=(0, 1), **options):
    prompts = [PROMPTS[k] for k in slots]
    pictures = policy.blank_references(len(prompts)) or [None] * len(prompts)
    rows = [{"prompt": prompt, PICTURE: picture} for prompt, picture in zip(prompts, pictures, strict=True)]
    return objective.roll_out(policy, RolloutRequest(prompts, rows, list(slots), GROUP, **options))


def prepare(policy, objective, advantages=ADVANTAGES, updates=1, micro_batch_size=6, ledger=None, slots=(0, 1)):
    """Roll out and prepare, with copies of the weights as they are if there are none yet."""
    if not objective.copies:
        objective.setup(policy)
    rollout = roll(policy, objective, slots)
    return objective.prepare(
        PrepareContext(policy, rollout, advantages, micro_batch_size, updates, ledger or PassLedger())
    )


def nudge(policy, seed=0, size=None):
    if size is None:  # an adapter's product of two small matrices needs more to be felt
        size = 0.02 if policy.lora_rank is None else 0.3
    with torch.no_grad():
        for index, parameter in enumerate(trainable_parameters(policy).values()):
            generator = torch.Generator().manual_seed(1000 * seed + index)
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def spread_copies(policy, objective):
    """Set the method up and give the policy and every copy weights of their own."""
    objective.setup(policy)
    for seed, copy in enumerate(objective.copies.values()):
        nudge(policy, seed)
        copy.move_towards(policy, 0.5)
    nudge(policy, len(objective.copies))


def weights(policy):
    return {name: p.detach().clone() for name, p in trainable_parameters(policy).items()}


class Pairs64:
    """An experience's pairs in float64: ``x``, ``eps``, ``t``, ``a``, ``b``, ``z``; ``(B, N, ...)``."""

    def __init__(self, policy, experience):
        self.policy, self.experience = policy, experience
        times, noise = experience.pairs.of_images()
        self.times = times
        self.x, self.eps = experience.latents[:, None].double(), noise.double()
        self.t = times.double()[..., None, None, None]
        if policy.path_kind == "flow":
            self.a, self.b, self.kind = 1 - self.t, self.t, "flow"
        else:
            abar = policy.pipeline.scheduler.alphas_cumprod.double()[(self.t * 1000).round().long() - 1]
            self.a, self.b = abar.sqrt(), (1 - abar).sqrt()
            self.kind = policy.pipeline.scheduler.config.prediction_type
        self.z = self.a * self.x + self.b * self.eps

    def x_of(self, prediction):
        if self.kind == "flow":
            return self.z - self.t * prediction
        return (
            (self.z - self.b * prediction) / self.a if self.kind == "epsilon" else self.a * self.z - self.b * prediction
        )

    @property
    def target(self):
        return {
            "flow": self.eps - self.x,
            "epsilon": self.eps,
            "v_prediction": self.a * self.eps - self.b * self.x,
        }[self.kind]

    def predict(self):
        """The network's predictions ``(B, N, ...)``, float32, with the weights as they are; carries grad."""
        cond = self.experience.conditioning.select(self.experience.rows.repeat_interleave(self.times.shape[1]))
        return self.policy(self.z.flatten(0, 1).float(), self.times.flatten(), cond).unflatten(0, self.times.shape)

    @torch.no_grad()
    def predict_with(self, copy):
        """The same with a copy's weights, in float64."""
        parameters, kept = trainable_parameters(self.policy), weights(self.policy)
        for name, p in parameters.items():
            p.copy_(copy.tensors[name])
        prediction = self.predict().double()
        for name, p in parameters.items():
            p.copy_(kept[name])
        return prediction

    def loss_and_gradient(self, function):
        """Loss and gradient of a float64 ``function`` of the predictions; float32 is only in the network itself."""
        prediction = self.predict()
        leaf = prediction.detach().double().requires_grad_()
        loss = function(leaf)
        loss.backward()
        parameters = list(trainable_parameters(self.policy).values())
        parts = torch.autograd.grad(prediction, parameters, leaf.grad.float(), allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, parts, strict=True)]
        return loss.item(), torch.cat([g.flatten() for g in flat])

    def assert_loss_is(self, objective, function, orders=(((0, 1), (2, 3), (4, 5)),), rel=1e-3):
        """A method's loss and gradient are those of a float64 ``function``, in one micro-batch and in several."""
        expected, direction = self.loss_and_gradient(function)
        loss, gradient = updated(self.policy, objective, [self.experience])
        assert loss == pytest.approx(expected, rel=rel, abs=1e-5)
        assert_same_gradient(gradient, direction)
        for order in orders:
            micros = [self.experience.select(torch.tensor(images)) for images in order]
            other, in_micros = updated(self.policy, objective, micros)
            assert other == pytest.approx(loss, rel=1e-4, abs=1e-6)
            assert_same_gradient(in_micros, gradient, rtol=1e-4)


def loss_and_gradient(policy, objective, micros):
    """Return the mean loss of an update's micro-batches, and the accumulated gradient."""
    policy.zero_grad()
    total = 0.0
    for micro in micros:
        loss = objective.loss(policy, micro)[0] / len(micros)
        loss.backward()
        total += loss.item()
    parameters = trainable_parameters(policy).values()
    return total, torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])


def updated(policy, objective, micros, ledger=None):
    """Return :func:`loss_and_gradient` after the passes that a method makes first."""
    objective.before_update(policy, micros, ledger)
    return loss_and_gradient(policy, objective, micros)


def assert_mixed(copy, share, start, now):
    """A copy holds this share of the starting weights, and the rest of those of now."""
    for name, tensor in copy.tensors.items():
        expected = share * start[name].double() + (1 - share) * now[name].double()
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-6)


def pixel_mean(values):
    return values.mean((2, 3, 4))


def assert_same_gradient(found, expected, rtol=1e-3):
    """Equal up to ``rtol`` of the gradient's length."""
    assert expected.norm() > 0
    assert (found - expected).norm() <= rtol * expected.norm()


def assert_state_comes_back(policy, objective, other):
    """``other``, set up anew, takes over the clock and every moving copy of ``objective``."""
    other.setup(policy)
    spread_copies(policy, objective)
    objective.num_updates = 7
    other.load_state_dict(objective.state_dict())
    assert other.num_updates == 7
    assert "reference" not in objective.state_dict()["copies"]  # it comes from the policy's own checkpoint
    for name, tensors in objective.state_dict()["copies"].items():
        assert all(torch.equal(tensor, other.copies[name].tensors[key]) for key, tensor in tensors.items())
