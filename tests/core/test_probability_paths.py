import pytest
import torch

from lit_vgrpo.core.probability_paths import RectifiedFlow, VariancePreserving, expand


def betas(steps=1000):
    return torch.linspace(0.00085**0.5, 0.012**0.5, steps) ** 2


def abar():
    return torch.cumprod(1 - betas(), 0)


PATHS = {
    "flow": RectifiedFlow(),
    "eps": VariancePreserving(abar(), "eps"),
    "v": VariancePreserving(abar(), "v"),
}


@pytest.fixture(params=PATHS)
def path(request):
    return PATHS[request.param]


@pytest.fixture
def inputs(path):
    generator = torch.Generator().manual_seed(0)
    x, eps = (torch.randn(5, 2, 3, 3, generator=generator) for _ in range(2))
    return x, eps, path.snap(torch.tensor([0.01, 0.2, 0.5, 0.8, 1.0]))


def test_a_perfect_prediction_gives_back_x_eps_and_v(path, inputs):
    x, eps, t = inputs
    z, perfect = path.interpolate(x, eps, t), path.target(x, eps, t)
    close = {"rtol": 1e-4, "atol": 2e-4}
    torch.testing.assert_close(path.to_x(perfect, z, t), x, **close)
    torch.testing.assert_close(path.to_eps(perfect, z, t), eps, **close)
    if isinstance(path, RectifiedFlow):
        v = eps - x
    else:
        a, b = (expand(c, x) for c in path.coefficients(t))
        v = a * eps - b * x
    torch.testing.assert_close(path.to_v(perfect, z, t), v, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("space", ["x", "eps", "v"])
def test_error_scale_is_the_ratio_of_the_converted_error(path, inputs, space):
    x, eps, t = (value.double() for value in inputs)
    t = inputs[2]
    a, b = (expand(c.double(), x) for c in path.coefficients(t))
    z = a * x + b * eps
    target = path.target(x, eps, t).double()
    prediction = target + 0.37
    convert = {"x": path.to_x, "eps": path.to_eps, "v": path.to_v}[space]
    converted = (convert(prediction, z, t) - convert(target, z, t)).abs()
    expected = expand(path.error_scale(space, t).double(), x) * 0.37
    torch.testing.assert_close(converted, expected.expand_as(converted), rtol=1e-4, atol=1e-6)


def test_cap_bounds_the_scale_of_an_eps_network():
    path, t = PATHS["eps"], torch.tensor([1.0])
    assert path.error_scale("x", t) == pytest.approx(14.58, abs=0.05)  # the figure of SD's schedule
    assert path.error_scale("x", t, cap=5.0) == 5.0


@pytest.mark.parametrize("scale", [1, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_network_that_rounds_times_sees_the_nearest_unchanged(dtype, scale):
    path, t = RectifiedFlow(dtype, scale), torch.linspace(1e-4, 1, 5000)
    snapped = path.snap(t)
    assert torch.equal(path.snap(snapped), snapped)
    assert torch.equal((snapped.to(dtype) * scale).float() / scale, snapped)
    assert (snapped - t).abs().max() < (0.0041 if dtype == torch.bfloat16 else 0.0006)
    assert snapped[-1] == 1
    assert torch.equal(RectifiedFlow().snap(t), t)


def test_vp_times_round_trip_every_timestep():
    path, k = PATHS["eps"], torch.arange(-1, 1000)
    assert torch.equal(path.index(path.time(k)), k)
    a, b = path.coefficients(path.time(k[1:]))
    torch.testing.assert_close(a, abar().sqrt())
    torch.testing.assert_close(b, (1 - abar()).sqrt())


def test_vp_snap_never_lands_on_the_clean_latent():
    assert PATHS["eps"].snap(torch.tensor([0.0, 1e-5])).tolist() == pytest.approx([1e-3, 1e-3])


def test_unknown_prediction_is_refused():
    with pytest.raises(ValueError, match="Use eps or v"):
        VariancePreserving(abar(), "sample")
