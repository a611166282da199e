"""Files and folders are written to a new name and put in place; no link is followed, and no file of a user removed."""

import os
from pathlib import Path

import pytest

from lit_vgrpo.errors import UserError
from lit_vgrpo.system.paths import (
    DRAFT_PREFIX,
    check_writable,
    copy_file,
    draft_of,
    new_file,
    read_regular,
    remove_drafts,
    resolve_path,
    started_here,
    write_atomically,
    write_new_folder,
)


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


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
    with write_new_folder(tmp_path / "folder", "", replace=True) as draft:
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


def test_drafts_of_a_killed_process_are_removed_and_a_failure_leaves_none(tmp_path):
    draft_of(tmp_path / "a").write_text("half")
    folder = draft_of(tmp_path / "folder")
    folder.mkdir()
    for name in (DRAFT_PREFIX, "half"):
        (folder / name).write_text("")
    with write_new_folder(tmp_path / "folder", "") as draft:
        (draft / "whole").write_text("")
    with pytest.raises(TypeError), new_file(tmp_path / "a") as file:
        file.write("text")
    with pytest.raises(TypeError), write_new_folder(tmp_path / "b", "") as draft:
        raise TypeError
    assert names(tmp_path) == ["folder", "folder/whole"]


@pytest.mark.parametrize("name", ["writing-a", "writing-folder", DRAFT_PREFIX, f"{DRAFT_PREFIX}a", None])
def test_nothing_of_a_user_is_removed(tmp_path, name):
    folder = draft_of(tmp_path / "a") if name is None else tmp_path / name  # even if it has the name of a draft
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "thesis.txt").write_text("mine")
    (tmp_path / "sub").mkdir()
    draft_of(tmp_path / "sub" / "a").write_text("in a folder that is not searched")
    before = names(tmp_path)
    remove_drafts(tmp_path)
    write_atomically(tmp_path / "a", "new")
    with write_new_folder(tmp_path / "folder", "") as draft:
        (draft / "b").write_text("new")
    assert names(tmp_path) == sorted([*before, "a", "folder", "folder/b"])


def test_two_at_once_do_not_break_each_other(tmp_path):
    with new_file(tmp_path / "a", "x") as first, write_new_folder(tmp_path / "b", "", replace=True) as draft:
        (draft / "c").write_text("first")
        with write_new_folder(tmp_path / "b", "", replace=True) as other:
            (other / "d").write_text("second")
        remove_drafts(tmp_path)
        write_atomically(tmp_path / "a", "second")
        first.write("first")
    assert names(tmp_path) == ["a", "b", "b/c", "b/d"]
    assert (tmp_path / "a").read_text() == "first"


def test_a_folder_is_merged_file_by_file(tmp_path):
    (tmp_path / "out" / "vae").mkdir(parents=True)
    for name in ("notes.txt", "vae/notes.txt", "vae/config.json"):
        (tmp_path / "out" / name).write_text("mine")
    with write_new_folder(tmp_path / "out", "", replace=True) as draft:
        (draft / "vae").mkdir()
        (draft / "vae" / "config.json").write_text("new")
    assert [(tmp_path / "out" / name).read_text() for name in ("vae/notes.txt", "vae/config.json")] == ["mine", "new"]
    with (
        pytest.raises(UserError, match="Cannot write .*out: Is a directory"),
        write_new_folder(tmp_path / "out", "", replace=True) as draft,
    ):
        (draft / "vae").write_text("a file")
    assert names(tmp_path) == ["out", "out/notes.txt", "out/vae", "out/vae/config.json", "out/vae/notes.txt"]


def test_a_result_that_cannot_be_written_is_known_before_it_exists(tmp_path):
    check_writable(tmp_path / "new" / "folder" / "eval.json")
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="Cannot write .*eval.json: Not a directory. Choose another folder with --out."):
        check_writable(tmp_path / "file" / "eval.json")


def test_a_typed_path_stays_where_it_was_typed(here):
    (here / "sub").mkdir()
    with started_here():
        os.chdir("sub")
        for typed in ("a/b.txt", "../b.txt", str(here / "b.txt")):
            path = resolve_path(typed)
            assert path == here / typed
            assert f"{path.parent / 'c'}" == str(Path(typed).parent / "c")  # what messages show
        write_atomically(Path("a.txt"), "new")
    assert (here / "a.txt").read_text() == "new"
    assert resolve_path("a.txt") == here / "sub" / "a.txt"  # without a command


def test_only_a_regular_file_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("pipe", "not a regular file"), (".", "not a regular file"), ("missing", "No such file")):
        with pytest.raises(OSError, match=why):
            read_regular(tmp_path / name)
