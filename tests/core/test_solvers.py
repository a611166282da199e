"""SDE steps against diffusers and the exact solution of a Gaussian's field; in float64 they are in test_flow_grpo."""

import math
from itertools import pairwise

import diffusers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_vgrpo.core.solvers import FLOW_SDES, VP_SDES, Transition, log_prob, regrid, transition
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.policies import RectifiedFlow, VariancePreserving

SECOND = 0.9


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_first_time_that_is_rounded_below_one_has_the_noise_of_one():
    z = draw(2, 1, 2, 2)
    first, rounded = (
        transition("flow_sde", RectifiedFlow(), z, z, torch.full((2,), t), torch.full((2,), SECOND), 0.7, SECOND)
        for t in (1.0, 0.9999997)
    )
    torch.testing.assert_close(rounded.std, first.std)
    torch.testing.assert_close(rounded.mean, first.mean)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("eta", [1.0, 0.5, 0.0])
def test_ddim_step_is_diffusers_own(prediction, eta):
    scheduler = diffusers.DDIMScheduler(
        prediction_type=prediction, clip_sample=False, set_alpha_to_one=True, timestep_spacing="trailing"
    )
    scheduler.set_timesteps(10)
    path = VariancePreserving(scheduler.alphas_cumprod, "eps" if prediction == "epsilon" else "v")
    z, out = draw(1, 2, 3, 3), draw(1, 2, 3, 3, seed=1)
    for timestep in scheduler.timesteps:
        before = timestep - 100
        mean = scheduler.step(out, timestep, z, eta=eta, variance_noise=torch.zeros_like(z)).prev_sample
        times = (path.time(torch.tensor([k])) for k in (timestep, max(before, -1)))
        step = transition("ddim_sde", path, out, z, *times, eta)
        torch.testing.assert_close(step.mean, mean, rtol=1e-4, atol=1e-5)
        variance = eta**2 * scheduler._get_variance(timestep, before)
        assert step.std.square().item() == pytest.approx(float(variance), rel=2e-3, abs=1e-7)


@pytest.mark.parametrize("solver", ["flow_sde", "dance_sde"])
def test_the_sdes_keep_the_marginals_of_the_flow(solver):
    """On the field of Gaussian data N(mu, c^2), fine steps must end at that mean and spread, noise or not."""
    mu, c, steps = 0.8, 0.3, 400
    z, generator = draw(1, 20000), torch.Generator().manual_seed(3)
    grid = torch.linspace(0.999, 0, steps + 1)
    for t, t_next in pairwise(grid):
        total = (1 - t) ** 2 * c**2 + t**2
        x_hat = mu + (1 - t) * c**2 / total * (z - (1 - t) * mu)
        step = transition(solver, RectifiedFlow(), (z - x_hat) / t, z, t[None], t_next[None], 0.7, 0.99)
        z = step.mean + step.std * torch.randn(z.shape, generator=generator)
    assert z.mean().item() == pytest.approx(mu, abs=0.01)
    assert z.std().item() == pytest.approx(c, abs=0.02)


def final_spread(solver, level, steps=800, c=0.6):
    """Return the spread at the end of a chain on the field of data N(0, c^2), by the steps' exact mean and variance."""
    variance, one = 1.0, torch.ones(1, 1, dtype=torch.float64)
    grid = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    for t, t_next in pairwise(grid):
        velocity = one * (t - (1 - t) * c**2) / ((1 - t) ** 2 * c**2 + t**2)
        noise = level if t_next > 0 else 0.0
        step = transition(solver, RectifiedFlow(), velocity, one, t[None], t_next[None], noise, grid[1])
        variance = step.mean.item() ** 2 * variance + step.std.item() ** 2
    return math.sqrt(variance)


def test_cps_ends_with_less_spread_than_the_data_even_with_many_steps():  # the numbers of docs/method_options.md
    assert [round(final_spread("cps", level), 2) for level in (0.0, 0.7, 0.8)] == [0.60, 0.51, 0.48]
    assert round(final_spread("flow_sde", 0.7), 2) == 0.60
    assert [round(final_spread("cps", level, steps=10), 2) for level in (0.0, 0.8)] == [0.52, 0.43]


@pytest.mark.parametrize("solver", [*FLOW_SDES, *VP_SDES])
def test_a_step_without_noise_divides_by_nothing(solver):
    mean = torch.zeros(2, 3, requires_grad=True)
    std = torch.tensor([[0.0], [1.0]])
    value = log_prob(solver, torch.ones(2, 3), Transition(mean, std, std))
    assert value.isfinite().all()
    (grad,) = torch.autograd.grad(value.sum(), mean)
    assert grad.isfinite().all()


@given(remaining=st.integers(1, 40), data=st.data())
def test_regrid_goes_the_same_way_in_fewer_steps(remaining, data):
    steps = data.draw(st.integers(1, remaining))
    times = torch.linspace(0.9, 0, remaining + 1) ** 2
    grid = regrid(times, steps)
    assert grid.shape == (steps + 1,)
    assert grid[0] == times[0]
    assert grid[-1] == 0
    assert (grid[:-1] > grid[1:]).all()
    if steps == remaining:
        torch.testing.assert_close(grid, times)


def test_regrid_keeps_the_spacing():
    times = torch.tensor([1.0, 0.9, 0.7, 0.3, 0.0])
    torch.testing.assert_close(regrid(times, 2), torch.tensor([1.0, 0.7, 0.0]))
    torch.testing.assert_close(regrid(times, 3), torch.tensor([1.0, 0.9 - 0.2 / 3, 0.7 - 0.4 * 2 / 3, 0.0]))


def test_the_last_step_never_has_noise():
    assert [list(RolloutSpec("flow_sde", steps).sde_steps) for steps in (1, 2, 3)] == [[], [0], [0, 1]]
