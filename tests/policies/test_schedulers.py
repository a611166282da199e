"""The solvers of diffusers, as the policies set them up."""

from types import SimpleNamespace

import diffusers
import pytest
import torch
from policies.contract import HEIGHT, PROMPTS, WIDTH, inputs, same_image_as_the_pipeline

from lit_vgrpo.core.probability_paths import VariancePreserving
from lit_vgrpo.core.sampling import sample, schedule_of
from lit_vgrpo.core.solvers import transition
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.policies.flow import dynamic_mu, flow_scheduler, static_shift
from lit_vgrpo.policies.unet import PREDICTIONS, vp_scheduler

STEPS, TOKENS = 8, 1024


def base(dynamic=False, **config):
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=dynamic, **config)


@pytest.mark.parametrize("solver", ["euler", "dpm++", "unipc"])
def test_flow_solvers_integrate_a_linear_field_exactly(solver):
    """With v = eps - x for one known x, every solver must end at that x."""
    scheduler = flow_scheduler(solver, base(), STEPS, TOKENS)
    x, z = torch.full((1, 1, 2, 2), 0.7), torch.randn(1, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    for timestep, t in zip(scheduler.timesteps, scheduler.sigmas, strict=False):
        z = scheduler.step((z - x) / t, timestep, z, return_dict=False)[0]
    torch.testing.assert_close(z, x, rtol=1e-3, atol=1e-3)


def test_a_dynamic_shift_is_linear_in_the_tokens():
    scheduler = base(dynamic=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=4096)
    assert dynamic_mu(scheduler, 256) == pytest.approx(0.5)
    assert dynamic_mu(scheduler, 4096) == pytest.approx(1.15)
    assert dynamic_mu(scheduler, 2176) == pytest.approx(0.825)
    assert dynamic_mu(base(), 256) is None


@pytest.mark.parametrize("kind", ["exponential", "linear"])
@pytest.mark.parametrize("solver", ["dpm++", "unipc"])
def test_other_solvers_get_the_same_shift_as_the_pipelines_own(solver, kind):
    scheduler = base(dynamic=True, time_shift_type=kind)
    mu = dynamic_mu(scheduler, TOKENS)
    ours = flow_scheduler(solver, scheduler, STEPS, TOKENS)
    # their own grid of unshifted times, moved by the scheduler of the pipeline
    grid = flow_scheduler(solver, diffusers.FlowMatchEulerDiscreteScheduler(), STEPS, TOKENS).sigmas[:-1].double()
    expected = scheduler.time_shift(mu, 1.0, grid)
    torch.testing.assert_close(ours.sigmas[:-1].double(), expected, rtol=0, atol=1e-5)
    assert static_shift(scheduler, mu) != 3.0


def test_a_fixed_shift_reaches_every_solver():
    for solver in ("dpm++", "unipc"):
        assert flow_scheduler(solver, base(), STEPS, TOKENS).config.flow_shift == 3.0


@pytest.mark.parametrize("kind", ["use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"])
def test_another_grid_of_times_is_followed_or_refused(kind):
    of_pipeline = diffusers.DDIMScheduler(beta_schedule="scaled_linear")
    of_pipeline.register_to_config(**{kind: True})
    ours = vp_scheduler("dpm++", of_pipeline)
    theirs = diffusers.DPMSolverMultistepScheduler(beta_schedule="scaled_linear", **{kind: True})
    for scheduler in (ours, theirs):
        scheduler.set_timesteps(STEPS)
    torch.testing.assert_close(ours.sigmas, theirs.sigmas, rtol=0, atol=0)
    of_pipeline = base(**{kind: True})
    expected = diffusers.FlowMatchEulerDiscreteScheduler.from_config(of_pipeline.config)
    expected.set_timesteps(STEPS)
    found = flow_scheduler("euler", of_pipeline, STEPS, TOKENS)
    torch.testing.assert_close(found.sigmas, expected.sigmas, rtol=0, atol=0)
    for solver in ("dpm++", "unipc"):
        with pytest.raises(ValueError, match=f"cannot follow {kind} of the pipeline's scheduler. Use euler."):
            flow_scheduler(solver, of_pipeline, STEPS, TOKENS)


@pytest.mark.parametrize("steps", [7, 28, 100, 600])
@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
def test_ddim_steps_to_its_next_time(steps, kind):
    of_pipeline = diffusers.DDIMScheduler(beta_schedule="scaled_linear", prediction_type=kind)
    scheduler = vp_scheduler("ddim", of_pipeline, steps)
    path = VariancePreserving(of_pipeline.alphas_cumprod, PREDICTIONS[kind])
    z = ours = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    times = torch.cat([path.time(scheduler.timesteps), torch.zeros(1)])[:, None]
    for timestep, t, t_next in zip(scheduler.timesteps, times[:-1], times[1:], strict=True):
        z = scheduler.step(torch.sin(z), timestep, z, return_dict=False)[0]
        ours = transition("ddim_sde", path, torch.sin(ours), ours, t, t_next, noise_level=0.0).mean
    torch.testing.assert_close(z, ours, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_a_dynamic_shift_gives_the_pipelines_own_times(families, name):
    """The pipeline sets its scheduler by itself here, for a picture that is not square."""
    family = families(name)
    policy = family.load()
    config = {**policy.pipeline.scheduler.config, "use_dynamic_shifting": True}
    policy.pipeline.scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(config)
    policy.pipeline(
        PROMPTS[:1],
        num_inference_steps=4,
        latents=family.pack(inputs(policy, 1)[0]),
        output_type="latent",
        height=HEIGHT,
        width=WIDTH,
        max_sequence_length=8,
    )
    times = policy.scheduler_times(policy.scheduler("euler", 4))
    torch.testing.assert_close(policy.pipeline.scheduler.timesteps / 1000, times)
    assert times[0] == 1.0
    assert times[1] > {"sd3": 0.667, "flux": 0.75}[name] + 0.05  # where it is without a shift


STRETCHED = {"use_dynamic_shifting": True, "shift_terminal": 0.02}  # Qwen-Image's


def use_scheduler(policy, monkeypatch, **config):
    monkeypatch.setattr(policy.pipeline, "scheduler", diffusers.FlowMatchEulerDiscreteScheduler(**config))


@pytest.mark.parametrize(
    ("solver", "steps", "config"),
    [
        *[("unipc", 1000 // shift + 1, {"shift": float(shift)}) for shift in (3, 7, 12, 25)],  # the first repeats
        *[("dpm++", 1010 // shift + 3, {"shift": float(shift)}) for shift in (12, 25, 50)],
        *[("euler", 1, config) for config in (STRETCHED, {"shift": 3.0, "shift_terminal": 0.1})],
        *[(solver, steps, STRETCHED) for solver in ("euler", "dpm++", "unipc") for steps in (2, 60)],
    ],
)
def test_every_schedule_is_walked_to_its_end(families, monkeypatch, solver, steps, config):
    policy = families("flux").shared
    use_scheduler(policy, monkeypatch, **config)
    scheduler, times = schedule_of(policy, RolloutSpec(solver, steps))
    assert (scheduler.sigmas[:-1] - times).abs().max() < 1.1e-3  # whole timesteps
    x, z = torch.full((1, 1, 2, 2), 0.7), torch.randn(1, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    for timestep, sigma in zip(scheduler.timesteps, scheduler.sigmas, strict=False):
        z = scheduler.step((z - x) / sigma, timestep, z, return_dict=False)[0]
    torch.testing.assert_close(z, x, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["use_karras_sigmas", "use_beta_sigmas"])
def test_a_unets_repeated_timesteps_are_walked_to_their_end(families, monkeypatch, kind):
    policy = families("unet_v").shared
    of_pipeline = diffusers.DDIMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True)
    of_pipeline.register_to_config(**{kind: True})
    monkeypatch.setattr(policy.pipeline, "scheduler", of_pipeline)
    scheduler, times = schedule_of(policy, RolloutSpec("dpm++", 40))
    assert times[0] == times[1]
    z = torch.zeros(1, 1, 2, 2)
    for timestep in scheduler.timesteps:
        z = scheduler.step(z, timestep, z, return_dict=False)[0]
    assert scheduler.step_index == 40
    pipe = SimpleNamespace(scheduler=None)
    for line in policy.scheduler_lines(RolloutSpec("dpm++", 40)):  # of a model card
        exec(line, {"pipe": pipe, "diffusers": diffusers})
    pipe.scheduler.set_timesteps(40)
    for timestep in pipe.scheduler.timesteps:
        z = pipe.scheduler.step(z, timestep, z, return_dict=False)[0]
    assert pipe.scheduler.step_index == 40


@pytest.mark.parametrize("solver", ["dpm++", "unipc"])
def test_a_repeated_first_timestep_gives_the_pipelines_picture(families, monkeypatch, solver):
    family = families("flux")
    use_scheduler(family.shared, monkeypatch, shift=2000.0)
    _, times = schedule_of(family.shared, RolloutSpec(solver, 3))
    assert times[0] == times[1]
    same_image_as_the_pipeline(family, solver, guidance=1.0)


def test_a_single_step_of_a_stretched_schedule_starts_from_pure_noise(families, monkeypatch):
    policy = families("flux").shared
    use_scheduler(policy, monkeypatch, **STRETCHED)
    noise, _, cond = inputs(policy)
    latents, times = sample(policy, cond, torch.arange(2), RolloutSpec("euler", 1), noise)
    assert times.tolist() == [1.0]
    with torch.no_grad():
        torch.testing.assert_close(latents, noise - policy(noise, torch.ones(2), cond))


@pytest.mark.parametrize(
    ("solver", "steps", "config", "line"),
    [
        (
            "dpm++",
            1000,
            {"shift": 1.0},
            "solver=dpm.. with steps=1000 has 1000 times from 0.999 to 0, which must lie in",
        ),
        ("unipc", 600, {"shift": 0.2}, "solver=unipc with steps=600 has 600 times from 0.999 to 0, which must lie in"),
        ("euler", 3, {"shift": float("nan")}, "solver=euler with steps=3 has 3 times from nan to nan"),
    ],
)
def test_an_impossible_schedule_is_refused_before_the_first_pass(families, monkeypatch, solver, steps, config, line):
    policy = families("flux").shared
    use_scheduler(policy, monkeypatch, **config)
    monkeypatch.setattr(policy, "predict", None)
    noise, _, cond = inputs(policy)
    with pytest.raises(ValueError, match=line):
        sample(policy, cond, torch.arange(2), RolloutSpec(solver, steps), noise)
