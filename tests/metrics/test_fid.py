import math

import numpy as np
import pytest
import scipy.linalg
import torch
from cleanfid import fid as clean_fid
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_vgrpo.metrics import FeatureMoments, frechet_distance, reference_statistics


def moments_of(features):
    moments = FeatureMoments(features.shape[1])
    moments.update(features)
    return moments.mean_and_cov()


def distance(generated, real):
    return frechet_distance(*moments_of(generated), *moments_of(real))


def root_rounding(a, b):
    """Bound of what a distance of singular covariances is rounded by.

    FID takes the roots of the eigenvalues of the product of both covariances. An eigenvalue that ought to be 0
    is a rounding error of the largest, and there is one for each of the dimensions.
    """
    product = torch.cov(a.T) @ torch.cov(b.T)
    return 2 * a.shape[1] * (torch.finfo(torch.float64).eps * torch.linalg.matrix_norm(product, 2).item()) ** 0.5


def test_equals_clean_fid_on_the_same_folders(folders, network, torch_network, monkeypatch):
    root = scipy.linalg.sqrtm  # clean-fid passes disp, which SciPy 1.18 no longer has
    monkeypatch.setattr("scipy.linalg.sqrtm", lambda product, disp: (root(product), None))
    expected = clean_fid.compute_fid(
        *map(str, folders),
        custom_feat_extractor=torch_network,
        num_workers=0,
        batch_size=5,
        device=torch.device("cpu"),
        verbose=False,
    )
    generated, real = (reference_statistics(folder, network, keep_features=True) for folder in folders)
    assert expected > 0.1
    found = frechet_distance(*moments_of(generated.features), real.mean, real.cov)
    assert found == pytest.approx(expected, abs=1e-3, rel=1e-5)


def test_closed_form_of_two_gaussians():
    """In two dimensions tr sqrt(A B) is sqrt(tr(A B) + 2 sqrt(det(A B)))."""
    means = torch.tensor([[0.0, 2.0], [1.0, 0.0]], dtype=torch.float64)
    a, b = torch.tensor([[[2.0, 1.0], [1.0, 3.0]], [[1.0, -0.4], [-0.4, 0.5]]], dtype=torch.float64)
    overlap = ((a @ b).trace() + 2 * (a @ b).det().sqrt()).sqrt()
    expected = float(1 + 4 + a.trace() + b.trace() - 2 * overlap)
    assert frechet_distance(means[0], a, means[1], b) == pytest.approx(expected, abs=1e-10)


def test_fewer_images_than_dimensions():
    """Singular covariances: equal sets are at distance 0, and the root's trace is that of the small Gram matrix."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 200, generator=generator, dtype=torch.float64)
    y = torch.randn(12, 200, generator=generator, dtype=torch.float64)
    assert 0 <= distance(x, x) <= root_rounding(x, x)
    centred = [(v - v.mean(0)) / (len(v) - 1) ** 0.5 for v in (x, y)]
    overlap = torch.linalg.svdvals(centred[0] @ centred[1].T).sum()
    expected = (x.mean(0) - y.mean(0)).square().sum() + sum(v.square().sum() for v in centred) - 2 * overlap
    assert root_rounding(x, y) < 2e-4
    assert distance(x, y) == pytest.approx(expected.item(), abs=root_rounding(x, y))


def test_mean_and_covariance_are_numpys():
    features = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) * 3 + 100
    mean, cov = moments_of(features)
    np.testing.assert_allclose(mean, features.double().mean(0), rtol=1e-14)
    np.testing.assert_allclose(cov, np.cov(features.double().numpy(), rowvar=False), rtol=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 1), st.integers(0, 2**32))
def test_any_split_gives_the_whole(sizes, seed):
    features = torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(seed)) * 2 + 1
    split = FeatureMoments(3)
    for part in features.split(sizes):
        split.update(part)
    assert split.count == sum(sizes)
    torch.testing.assert_close(split.mean_and_cov(), moments_of(features), rtol=1e-9, atol=1e-9, equal_nan=True)


def test_images_that_have_no_distance():
    real = torch.randn(5, 3)
    assert math.isnan(distance(torch.ones(1, 3), real))
    assert math.isnan(distance(torch.ones(0, 3), real))
    assert math.isnan(distance(real, torch.ones(1, 3)))
    assert math.isnan(distance(torch.cat([real, torch.full((1, 3), math.nan)]), real))
