"""The chain methods' formulas in float64: only the network's outputs come from the policy."""

import math

import torch
from pair_methods import roll
from policy_copies import load_copy

from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.objectives.base import PrepareContext
from lit_vgrpo.policies import SD3Policy

ADVANTAGES = torch.tensor([1.0, -0.5, -0.5, 0.3, 2.0, -2.3])


def load_sd3(folder, **options):
    return load_copy(SD3Policy, folder, max_sequence_length=1, **options)


def prepared(policy, objective, advantages=ADVANTAGES, iteration=0):
    objective.setup(policy)
    rollout = roll(policy, objective, iteration=iteration)
    return rollout, objective.prepare(PrepareContext(policy, rollout, advantages, micro_batch_size=6, updates=2))


def gradient(policy, loss):
    parameters = list(trainable_parameters(policy).values())
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


def flow_sde(v, z, t, t_next, second_time, level=0.7):
    h = t - t_next
    sigma = level * math.sqrt(t / (1 - (second_time if t == 1 else t)))
    mean = z * (1 - sigma**2 * h / (2 * t)) - v * h * (1 + sigma**2 * (1 - t) / (2 * t))
    return mean, sigma * math.sqrt(h), sigma


def cps(v, z, t, t_next, second_time, level=0.7):
    s = t_next * math.sin(level * math.pi / 2)
    mean = (1 - t_next) * (z - t * v) + math.sqrt(t_next**2 - s**2) * (z + (1 - t) * v)
    return mean, s, s


def dance_sde(v, z, t, t_next, second_time, level=0.3):
    h = t - t_next
    score = -(z - (1 - t) * (z - t * v)) / t**2
    return z - h * v + level**2 * h * score / 2, level * math.sqrt(h), level


def gaussian(sample, mean, std):
    """log N(sample; mean, std^2), a mean over dimensions."""
    return (-((sample - mean) ** 2) / (2 * std**2) - math.log(std) - math.log(2 * math.pi) / 2).mean()


class Steps:
    """Some steps of a rollout, one network output each, and the loss in float64 as a function of those outputs."""

    def __init__(self, rollout, chosen=None, formula=flow_sde, level=0.7):
        chain = rollout.trajectory
        images, steps = chain.log_probs.shape
        chosen = [list(range(steps))] * images if chosen is None else chosen
        self.index = [(i, k) for i in range(images) for k in chosen[i]]
        self.rollout, self.chain, self.formula, self.level = rollout, chain, formula, level

    def outputs(self, policy, guidance):
        i, k = (torch.tensor(values) for values in zip(*self.index, strict=True))
        cond = self.rollout.conditioning.select(self.rollout.rows[i])
        return policy(self.chain.states[i, k], self.chain.times[k], cond, guidance)

    def distributions(self, outputs):
        times = self.chain.times.double().tolist()
        return [
            self.formula(
                v, self.chain.states[i, k].double(), times[k], times[k + 1], self.chain.second_time, self.level
            )
            for v, (i, k) in zip(outputs.double(), self.index, strict=True)
        ]

    def log_probs(self, outputs, density=gaussian):
        ends = [self.chain.states[i, k + 1].double() for i, k in self.index]
        each = zip(ends, self.distributions(outputs), strict=True)
        return torch.stack([density(end, mean, std) for end, (mean, std, _) in each])

    def ratio(self, outputs, old, density=gaussian, guard=False):
        log_ratio = self.log_probs(outputs, density) - self.log_probs(old, density).detach()
        if guard:
            new = self.distributions(outputs)
            pairs = zip(new, self.distributions(old), strict=True)
            bias = [((mean - before) ** 2).mean() / (2 * std**2) for (mean, std, _), (before, _, _) in pairs]
            std = torch.tensor([s for _, s, _ in new], dtype=torch.float64)
            log_ratio = (log_ratio + torch.stack(bias)) * std
        return log_ratio.exp()

    def weight(self, guard):
        times = self.chain.times.double()
        return torch.stack([1 / (times[k] - times[k + 1]) if guard else torch.ones(()) for _, k in self.index])

    def loss(self, outputs, old, clip, kl_weight=0.0, density=gaussian, guard=False):
        """``old``: the outputs at rollout, also those of the start."""
        a = ADVANTAGES.double()[[i for i, _ in self.index]]
        ratio = self.ratio(outputs, old, density, guard)
        gain = self.weight(guard) * torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
        loss = -gain.mean()
        if kl_weight:
            pairs = zip(self.distributions(outputs), self.distributions(old), strict=True)
            kl = [((mean - ref) ** 2).mean() / (2 * diffusion**2) for (mean, _, diffusion), (ref, _, _) in pairs]
            loss = loss + kl_weight * torch.stack(kl).mean()
        return loss, ratio.detach()


def expected_gradient(policy, outputs32, loss_of_outputs):
    """The loss in float64 and its gradient, sent through the network from its outputs."""
    outputs = outputs32.detach().double().requires_grad_()
    loss = loss_of_outputs(outputs)
    (upstream,) = torch.autograd.grad(loss, outputs)
    return loss.item(), gradient(policy, (outputs32 * upstream.float()).sum())


def between(ratio):
    """A clip that about half of the ratios are outside of."""
    return (ratio.detach() - 1).abs().quantile(0.5).item() * 1.001
