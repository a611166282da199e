"""A checkpoint is whole or not there, whoever asks for it to be written."""

import errno
import os
import zipfile

import pytest
import torch

from lit_vgrpo.errors import UserError
from lit_vgrpo.training import checkpoint_file
from lit_vgrpo.training.checkpoint_file import CheckpointDamage, FileCheckpointIO, put_in_place, read, read_sound
from lit_vgrpo.training.resume import last_good_checkpoint, last_words

CONTENT = {"state_dict": {"w": torch.arange(1000.0)}, "loops": {}, "global_step": 1, "optimizer_states": []}
WHOLE = {**CONTENT, "lit_vgrpo": {}}


def test_damage_is_found_and_a_file_that_stays_as_it_was_is_compared_once(tmp_path, monkeypatch):
    path, compared = tmp_path / "a.ckpt", []
    moment = torch.rand(100)
    content = {**WHOLE, "state_dict": {"empty": torch.zeros(0), "b": torch.ones(100)}, "lit_vgrpo": {"moment": moment}}
    checkpoint_file.write(content, path)
    testzip = zipfile.ZipFile.testzip
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda archive: compared.append(path) or testzip(archive))
    read_sound(path)
    read_sound(path)
    assert len(compared) == 1
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(moment.numpy().tobytes())] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CheckpointDamage, match="is damaged: archive/data/.* does not match its checksum"):
        read_sound(path)


def test_a_disk_that_fills_up_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "new" / "a.ckpt"
    FileCheckpointIO().save_checkpoint(WHOLE, str(path))
    assert torch.equal(read_sound(path)["state_dict"]["w"], WHOLE["state_dict"]["w"])
    before = path.read_bytes()

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint_file.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        FileCheckpointIO().save_checkpoint({**WHOLE, "global_step": 2}, path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["a.ckpt"]


def test_a_torn_file_does_not_replace_a_good_previous_one(tmp_path):
    path, previous, draft = (tmp_path / name for name in ("last.ckpt", "previous.ckpt", "draft"))
    for file, step in ((previous, 1), (path, 2), (draft, 3)):
        checkpoint_file.write({**WHOLE, "global_step": step}, file)
    path.write_bytes(path.read_bytes()[:-100])
    put_in_place(draft, path, previous)
    assert [read(file)["global_step"] for file in (previous, path)] == [1, 3]


@pytest.mark.parametrize("has_links", [True, False])
def test_the_last_checkpoint_is_never_absent(tmp_path, monkeypatch, has_links):
    """Commands read that of a run that still trains."""
    path, previous, draft = (tmp_path / name for name in ("last.ckpt", "previous.ckpt", "draft"))
    replace, absent = os.replace, []

    def watched(old, new):
        existed = path.is_file()
        replace(old, new)
        absent.append(existed and not path.is_file())

    def refused(old, new):
        raise PermissionError

    monkeypatch.setattr(os, "replace", watched)
    if not has_links:
        monkeypatch.setattr(os, "link", refused)
    for step in (1, 2, 3):
        checkpoint_file.write({**WHOLE, "global_step": step}, draft)
        put_in_place(draft, path, previous)
    assert any(absent) == (not has_links)
    assert [read(file)["global_step"] for file in (previous, path)] == [2, 3]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"PK", "is truncated or not a checkpoint"),
        (CONTENT, "has no lit_vgrpo"),
        ({**WHOLE, "lit_vgrpo": pytest.approx}, "is truncated or not a checkpoint"),  # weights_only rejects it
    ],
)
def test_what_is_no_checkpoint_of_ours(tmp_path, content, why):
    path = tmp_path / "a.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(CheckpointDamage, match=why):
        read(path)


def test_of_equal_progress_the_checkpoint_that_a_stopped_run_named_wins(tmp_path):
    names = ["interrupted.ckpt", "last.ckpt", "best.ckpt", "epoch=0.ckpt"]
    progress = {"current": {"processed": 3, "ready": 3}}
    loop = {"epoch_progress": progress, "epoch_loop.batch_progress": {"is_last_batch": True}}
    content = {**WHOLE, "loops": {"fit_loop": loop}, "lit_vgrpo": {"ledger": {"images": 8}}}
    (tmp_path / "checkpoints").mkdir()
    for name in names:  # the last evaluation may save best.ckpt after the others
        checkpoint_file.write(content, tmp_path / "checkpoints" / name)
    for name in names:
        assert last_good_checkpoint(tmp_path, print).checkpoint == tmp_path / "checkpoints" / name
        assert f"The last checkpoint is {tmp_path / 'checkpoints' / name} (3 iterations" in last_words(tmp_path)
        (tmp_path / "checkpoints" / name).unlink()


def test_only_a_regular_file_is_a_checkpoint(tmp_path):
    """Opening a FIFO would block, here as at the end of a run that finds one in its way."""
    (tmp_path / "checkpoints" / "folder.ckpt").mkdir(parents=True)
    path, draft, said = tmp_path / "checkpoints" / "last.ckpt", tmp_path / "draft", []
    os.mkfifo(path)
    with pytest.raises(UserError, match="None of the 2 checkpoints"):
        last_good_checkpoint(tmp_path, said.append)
    assert [line.rpartition(": ")[2] for line in said] == ["it is not a regular file."] * 2
    checkpoint_file.write(WHOLE, draft)
    put_in_place(draft, path, tmp_path / "previous.ckpt")
    assert read(path)["global_step"] == 1
