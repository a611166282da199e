import json
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import run_ranks

from lit_vgrpo.metrics import Reference, reference_statistics

pytestmark = pytest.mark.slow
WORKER = Path(__file__).parent / "gather_worker.py"


@pytest.fixture(scope="module")
def spec(tmp_path_factory, folders, script):
    """Two ranks ran with it; one of the three images of its torn folder is none."""
    out, torn = tmp_path_factory.mktemp("ranks"), tmp_path_factory.mktemp("torn")
    for index, file in enumerate(sorted(folders[0].glob("*.png"))[:3]):
        (torn / f"{index}.png").write_bytes(b"no picture" if index == 1 else file.read_bytes())
    features = torch.randn(11, 3, generator=torch.Generator().manual_seed(0)).tolist()
    values = {"out": out, "real": folders[1], "torn": torn, "script": script}
    spec = {"features": features, **{name: str(path) for name, path in values.items()}}
    (out / "spec.json").write_text(json.dumps(spec))
    run_ranks(WORKER, out / "spec.json", world=2, logs=out)
    return spec


@pytest.fixture(scope="module")
def found(spec):
    first, second = (json.loads(Path(spec["out"], f"{rank}.json").read_text()) for rank in range(2))
    assert {**first, "threads": []} == {**second, "threads": []}
    return first


def test_sums_of_unequal_shares(spec, found):
    assert found["count"] == 11
    np.testing.assert_allclose(found["mean"], np.mean(spec["features"], axis=0), rtol=1e-9)
    np.testing.assert_allclose(found["cov"], np.cov(np.array(spec["features"]), rowvar=False), rtol=1e-9)


def test_features_of_unequal_shares_in_the_images_order(spec, found):
    np.testing.assert_allclose(found["kept"], spec["features"][::-1], rtol=1e-6)
    assert found["one"] == [[[1, 1]], 1]


def test_looks_of_images_are_those_of_one_rank(found):
    alone, together = found["looks"]
    assert len(alone) == 5
    assert together == pytest.approx(alone)


def test_each_rank_has_the_whole_reference(spec, found, network):
    alone = reference_statistics(spec["real"], network, keep_features=True)
    for rank in range(2):
        read = Reference.load(Path(spec["out"], f"{rank}.npz"), network)
        torch.testing.assert_close(read.cov, alone.cov, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(read.features, alone.features, rtol=1e-5, atol=1e-5)


def test_what_fails_on_one_rank_is_raised_on_both(found):
    torn, other = found["errors"]
    assert torn.endswith("1.png is not a readable image. Leave it out, or save it again.")
    assert other == "KeyError 'rank 1'"


def test_the_groups_threads_end_with_it(found):
    """Threads that outlive their group abort the process as it exits, if the machine is busy."""
    assert not [name for name in found["threads"] if "gloo" in name]
