"""Files and folders are written to a new name and put in place, and no link is followed."""

import pytest

from lit_vgrpo.errors import UserError
from lit_vgrpo.system.paths import DRAFT_PREFIX, copy_file, new_file, write_atomically, write_folder_atomically


@pytest.fixture
def victim(tmp_path):
    file = tmp_path / "victim"
    file.write_text("mine")
    for name in ("a.txt", f"{DRAFT_PREFIX}a.txt", f"{DRAFT_PREFIX}folder"):
        (tmp_path / name).symlink_to(file)
    return file


def test_a_file_is_written_next_to_a_link_and_not_through_it(victim, tmp_path):
    write_atomically(tmp_path / "a.txt", "new")
    assert (victim.read_text(), (tmp_path / "a.txt").read_text()) == ("mine", "new")
    assert not (tmp_path / "a.txt").is_symlink()


def test_a_folder_replaces_entries_that_are_links(victim, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").symlink_to(victim)
    (tmp_path / "folder" / "b").symlink_to(tmp_path)
    with write_folder_atomically(tmp_path / "folder", replace=True) as draft:
        (draft / "a").write_text("new")
        (draft / "b").mkdir()
    assert (victim.read_text(), (tmp_path / "folder" / "a").read_text()) == ("mine", "new")
    assert victim.parent == tmp_path
    assert list((tmp_path / "folder" / "b").iterdir()) == []


def test_a_link_is_not_published(victim, tmp_path):
    with pytest.raises(UserError, match="is a link"):
        copy_file(tmp_path / "a.txt", tmp_path / "copy")
    copy_file(victim, tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "mine"


def test_drafts_of_a_killed_process_are_replaced_and_a_failure_leaves_none(tmp_path):
    (tmp_path / f"{DRAFT_PREFIX}folder").mkdir()
    (tmp_path / f"{DRAFT_PREFIX}folder" / "half").write_text("")
    with write_folder_atomically(tmp_path / "folder") as draft:
        (draft / "whole").write_text("")
    with pytest.raises(TypeError), new_file(tmp_path / "a") as file:
        file.write("text")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["folder", "folder/whole"]
