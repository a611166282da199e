import json
from pathlib import Path

import pytest
from processes import run_ranks

pytestmark = pytest.mark.slow
WORKER = Path(__file__).parent / "gather_worker.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory, folders, script):
    """Results of two ranks; one of the three images in the torn folder is invalid."""
    out, torn = tmp_path_factory.mktemp("ranks"), tmp_path_factory.mktemp("torn")
    for index, file in enumerate(sorted(folders[0].glob("*.png"))[:3]):
        (torn / f"{index}.png").write_bytes(b"no picture" if index == 1 else file.read_bytes())
    (out / "spec.json").write_text(json.dumps({"out": str(out), "torn": str(torn), "script": script}))
    run_ranks(WORKER, out / "spec.json", world=2, logs=out)
    first, second = (json.loads((out / f"{rank}.json").read_text()) for rank in range(2))
    assert {**first, "threads": []} == {**second, "threads": []}
    return first


def test_features_of_unequal_shares_come_in_the_images_order(found):
    assert found["kept"] == [[0], [1], [2]]
    assert found["one"] == [[[1, 1]], 1]


def test_what_only_the_first_rank_needs_is_the_same_there_and_empty_elsewhere(found):
    assert found["first"] == [True, True]


def test_looks_of_images_are_those_of_one_rank(found):
    alone, together = found["looks"]
    assert len(alone) == 4
    assert together == pytest.approx(alone)


def test_what_fails_on_one_rank_is_raised_on_both(found):
    torn, other = found["errors"]
    assert torn.endswith("1.png is not a readable image. Leave it out, or save it again.")
    assert other == "KeyError 'rank 1'"


def test_the_groups_threads_end_with_it(found):
    """Threads that outlive their group abort the process as it exits, if the machine is busy."""
    assert not [name for name in found["threads"] if "gloo" in name]
