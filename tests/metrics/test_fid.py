import numpy as np
import pytest
import torch
from cleanfid import fid as clean_fid
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_vgrpo.metrics import FeatureSums, frechet_distance, reference_statistics


def sums_of(features):
    sums = FeatureSums(features.shape[1])
    sums.add(features)
    return sums


class Normal:
    def __init__(self, mean, cov):
        self.mean = torch.tensor(mean, dtype=torch.float64)
        self.cov = torch.tensor(cov, dtype=torch.float64)


def test_equals_clean_fid_on_the_same_folders(folders, network, torch_network):
    expected = clean_fid.compute_fid(
        *map(str, folders),
        custom_feat_extractor=torch_network,
        num_workers=0,
        batch_size=5,
        device=torch.device("cpu"),
        verbose=False,
    )
    ours = frechet_distance(*(reference_statistics(folder, network) for folder in folders))
    assert expected > 0.1
    assert ours == pytest.approx(expected, abs=1e-3, rel=1e-5)


def test_closed_form_of_two_gaussians():
    """Commuting covariances: the squared difference of means and of standard deviations."""
    a, b = Normal([0.0, 1.0, 2.0], np.diag([1.0, 4.0, 0.0])), Normal([1.0, 1.0, 0.0], np.diag([9.0, 4.0, 1.0]))
    assert frechet_distance(a, b) == pytest.approx(1 + 4 + (1 - 3) ** 2 + 0 + 1, abs=1e-10)


def test_closed_form_without_commuting_covariances():
    """In two dimensions tr sqrt(A B) is sqrt(tr(A B) + 2 sqrt(det(A B)))."""
    a, b = np.array([[2.0, 1.0], [1.0, 3.0]]), np.array([[1.0, -0.4], [-0.4, 0.5]])
    overlap = np.sqrt(np.trace(a @ b) + 2 * np.sqrt(np.linalg.det(a @ b)))
    expected = np.trace(a) + np.trace(b) - 2 * overlap
    assert frechet_distance(Normal([0.0, 0.0], a), Normal([0.0, 0.0], b)) == pytest.approx(expected, abs=1e-10)


def test_fewer_images_than_dimensions():
    """Singular covariances: equal sets are at distance 0, and the root's trace is that of the small Gram matrix."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 200, generator=generator, dtype=torch.float64)
    y = torch.randn(12, 200, generator=generator, dtype=torch.float64)
    assert frechet_distance(sums_of(x), sums_of(x)) == pytest.approx(0, abs=1e-8)
    centred = [(v - v.mean(0)) / (len(v) - 1) ** 0.5 for v in (x, y)]
    overlap = torch.linalg.svdvals(centred[0] @ centred[1].T).sum()
    expected = (x.mean(0) - y.mean(0)).square().sum() + sum(v.square().sum() for v in centred) - 2 * overlap
    assert frechet_distance(sums_of(x), sums_of(y)) == pytest.approx(expected.item(), rel=1e-9)


def test_mean_and_covariance_are_numpys():
    features = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) * 3 + 100
    sums = sums_of(features)
    np.testing.assert_allclose(sums.mean, features.double().mean(0), rtol=1e-14)
    np.testing.assert_allclose(sums.cov, np.cov(features.double().numpy(), rowvar=False), rtol=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.integers(0, 2**32))
def test_any_split_merges_to_the_whole(sizes, seed):
    features = torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(seed)) * 2 + 1
    merged = FeatureSums(3)
    for part in features.split(sizes):
        merged = merged.merged(sums_of(part))
    whole = sums_of(features)
    assert merged.count == whole.count == sum(sizes)
    torch.testing.assert_close(merged.sum, whole.sum, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(merged.outer, whole.outer, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(merged.cov, whole.cov, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_reduced_once():
    """Three ranks' sums, as their all-reduce would give them: a single call, and the others' images count."""
    features, calls = torch.arange(12.0).reshape(4, 3), []

    def of_three_ranks(packed):
        calls.append(len(packed))
        return 3 * packed

    total = sums_of(features).reduced(of_three_ranks)
    assert calls == [1 + 3 + 9]
    assert total.count == 12
    torch.testing.assert_close(total.cov, sums_of(features.repeat(3, 1)).cov)


def test_too_few_images_have_no_distance():
    one = sums_of(torch.ones(1, 3))
    assert np.isnan(frechet_distance(one, sums_of(torch.randn(5, 3))))
    assert np.isnan(frechet_distance(FeatureSums(3), sums_of(torch.randn(5, 3))))
    with pytest.raises(ValueError, match="Features of 3 and of 4 dimensions have no distance"):
        frechet_distance(one, FeatureSums(4))
