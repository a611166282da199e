"""Run folders: never an old one, never the same twice."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from lit_vgrpo.errors import UserError
from lit_vgrpo.system.process import is_first_process
from lit_vgrpo.training.folder import release, reserve


def test_the_next_free_number(tmp_path):
    base = tmp_path / "runs" / "demo"
    assert [reserve(base).name for _ in range(3)] == ["demo", "demo-2", "demo-3"]


def test_an_old_file_of_that_name_is_left_alone(tmp_path):
    (tmp_path / "demo").write_text("mine")
    assert reserve(tmp_path / "demo").name == "demo-2"
    assert (tmp_path / "demo").read_text() == "mine"


def test_many_at_once_get_different_folders(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        folders = list(pool.map(lambda _: reserve(tmp_path / "demo"), range(64)))
    assert len(set(folders)) == 64


def test_a_parent_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(UserError, match=r"Cannot create the run folder .* Set run_dir="):
        reserve(tmp_path / "runs" / "demo")


def test_release_takes_only_an_empty_folder(tmp_path):
    empty, full = reserve(tmp_path / "empty"), reserve(tmp_path / "full")
    (full / "file").write_text("")
    release(empty)
    release(full)
    assert not empty.exists()
    assert full.exists()


@pytest.mark.parametrize(
    ("variables", "first"),
    [
        ({}, True),
        ({"LOCAL_RANK": "0"}, True),
        ({"LOCAL_RANK": "1"}, False),
        ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, False),
    ],
)
def test_is_first_process(monkeypatch, variables, first):
    for key in ("RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(key, raising=False)
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    assert is_first_process() is first
