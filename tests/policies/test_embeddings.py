"""The folder of embeddings: what goes in comes out, whatever else happens to the folder."""

import hashlib
import os
import resource
import stat
import threading
import warnings
from contextlib import contextmanager

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lit_vgrpo.policies.embeddings import FILES_BEFORE_MERGE, EmbeddingCache, narrowed

PLENTY = 10**9


def rows(texts, dtype=torch.bfloat16):
    """Tensors that tell by their values which text they are of."""
    numbers = torch.tensor([float(text.rpartition(" ")[2]) for text in texts])
    tokens = (numbers[:, None, None] + torch.arange(6.0).view(2, 3) / 8).to(dtype).float()
    return {"tokens": tokens, "pooled": numbers[:, None].repeat(1, 4)}


def texts(*numbers):
    return [f"prompt {number}" for number in numbers]


def cache(folder, max_bytes=PLENTY, encoder="an encoder"):
    return EmbeddingCache(folder, max_bytes, encoder)


def filled(folder, *numbers, **options):
    """A cache that has written a file of each of the numbers."""
    made = cache(folder, **options)
    for number in numbers:
        made.write(texts(number), rows(texts(number)))
    return made


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_holds(made, wanted, missing=()):
    found, kept = made.read(wanted)
    expected = [text for text in wanted if text not in missing]
    assert sorted(found) == [position for position, text in enumerate(wanted) if text in expected]
    for name, values in rows([wanted[position] for position in found]).items() if expected else ():
        assert torch.equal(kept[name].float(), values), name


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_rows_come_back_in_the_order_asked_for_from_several_files(tmp_path):
    made = filled(tmp_path, 3, 1)
    made.write(texts(7, 5, 9), rows(texts(7, 5, 9)))
    for reader in (made, cache(tmp_path)):
        assert_holds(reader, texts(5, 3, 8, 9, 1, 7), missing=texts(8))
        assert_holds(reader, texts(9, 7))
    assert cache(tmp_path).read(texts(8)) == ([], {})


def test_another_encoder_or_text_has_nothing_in_common(tmp_path):
    filled(tmp_path, 1)
    assert cache(tmp_path, encoder="another").read(texts(1)) == ([], {})
    assert cache(tmp_path).read(["prompt 1 "]) == ([], {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_kept_exactly_in_the_smallest_type_that_can(tmp_path, dtype):
    value = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype).float()
    value[0, :3] = torch.tensor([0.0, -0.0, float("inf")])
    cache(tmp_path).write(texts(1, 2, 3), {"tokens": value})
    _, kept = cache(tmp_path).read(texts(1, 2, 3))
    assert kept["tokens"].dtype == dtype
    assert torch.equal(kept["tokens"].float().view(torch.int32), value.view(torch.int32))


def test_files_of_different_types_are_read_together(tmp_path):
    made = cache(tmp_path)
    made.write(texts(1), {"tokens": torch.tensor([[0.5]])})
    made.write(texts(2), {"tokens": torch.tensor([[0.1]])})
    for wanted in (texts(2, 1), texts(1, 2)):
        found, kept = made.read(wanted)
        values = {"prompt 1": 0.5, "prompt 2": 0.1}
        assert torch.equal(kept["tokens"], torch.tensor([[values[wanted[position]]] for position in found]))


def test_narrowing_keeps_the_sign_of_zero_and_leaves_what_does_not_fit():
    assert narrowed(torch.tensor([-0.0])).signbit().all()
    assert narrowed(torch.tensor([1 + 2.0**-10])).dtype == torch.float16
    assert narrowed(torch.tensor([1 + 2.0**-20])).dtype == torch.float32


def test_files_may_be_read_by_whom_the_user_lets(tmp_path):
    before = os.umask(0o027)
    try:
        filled(tmp_path, 1)
    finally:
        os.umask(before)
    (name,) = files(tmp_path)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640


# --- how many files, and how large ------------------------------------------------------------------------------------


def test_many_small_files_become_one_and_no_row_is_lost(tmp_path):
    onlooker = filled(tmp_path, 0, 1)
    numbers = range(2, 4 * FILES_BEFORE_MERGE)
    filled(tmp_path, *numbers)
    assert len(files(tmp_path)) < FILES_BEFORE_MERGE
    assert_holds(onlooker, texts(1, 0))  # whose own files are gone
    assert_holds(onlooker, texts(*reversed(numbers)))
    assert_holds(cache(tmp_path), texts(0, 1, *numbers))


def test_what_two_have_written_is_kept_once_after_merging(tmp_path):
    writers = [filled(tmp_path, number) for number in range(FILES_BEFORE_MERGE - 3)]
    for writer in writers[:3]:
        writer.write(texts(99), rows(texts(99)))
    (name,) = files(tmp_path)
    size = (tmp_path / name).stat().st_size
    plain = cache(tmp_path / "other")
    plain.write(texts(99, *range(FILES_BEFORE_MERGE - 3)), rows(texts(99, *range(FILES_BEFORE_MERGE - 3))))
    assert size == next((tmp_path / "other").iterdir()).stat().st_size
    assert_holds(cache(tmp_path), texts(99, *range(FILES_BEFORE_MERGE - 3)))


def test_one_process_merges_at_a_time(tmp_path):
    lock = tmp_path / "embeddings-merging.lock"
    lock.touch()
    made = filled(tmp_path, *range(FILES_BEFORE_MERGE + 1))
    assert len(files(tmp_path)) == FILES_BEFORE_MERGE + 2
    os.utime(lock, (0, 0))  # whoever held it is no more
    made.write(texts(100), rows(texts(100)))
    assert len(files(tmp_path)) == 1
    assert_holds(made, texts(100, *range(FILES_BEFORE_MERGE + 1)))


def large(*numbers):
    """Rows of a good kilobyte each, beside which headers do not count."""
    return {"tokens": torch.tensor(numbers, dtype=torch.float32)[:, None].expand(-1, 5000)}


def test_what_was_unused_for_longest_goes_first(tmp_path):
    made = cache(tmp_path, max_bytes=40_000)
    for age, number in enumerate((1, 2, 3)):
        made.write(texts(number), large(number))
        for path in set(tmp_path.iterdir()):
            os.utime(path, (os.stat(path).st_atime, os.stat(path).st_mtime - 10 + age))
    made.read(texts(1))
    made.write(texts(4), large(4))
    found, kept = cache(tmp_path).read(texts(1, 2, 3, 4))
    assert sorted(found) == [0, 2, 3]
    assert kept["tokens"][:, 0].tolist() == [position + 1 for position in found]
    assert made.read(texts(2)) == ([], {})


def test_the_folder_stays_below_its_bound_with_all_encoders_together(tmp_path):
    for number in range(40):
        cache(tmp_path, max_bytes=50_000, encoder=f"encoder {number % 3}").write(texts(number), large(number))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 50_000
    assert len(files(tmp_path)) == 4


def test_a_batch_above_the_bound_is_not_kept_and_drives_nothing_out(tmp_path):
    made = filled(tmp_path, 1, max_bytes=5_000)
    with pytest.warns(UserWarning, match=r"embeddings of 2 prompts .* Set model.policy.embedding_cache_gb") as caught:
        made.write(texts(2, 3), large(2, 3))
        made.write(texts(4, 5), large(4, 5))
    assert len(caught) == 1
    assert_holds(made, texts(1, 2), missing=texts(2))


# --- damage and other mishaps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_truncated_file_is_removed_and_its_rows_are_missing(tmp_path, size):
    filled(tmp_path, 1)
    (torn,) = files(tmp_path)
    content = (tmp_path / torn).read_bytes()
    reader = filled(tmp_path, 2)
    reader.read(texts(1, 2))
    for made in (reader, cache(tmp_path)):
        (tmp_path / torn).write_bytes(content[:size])
        with pytest.warns(UserWarning, match="is damaged .* and was removed") as caught:
            assert_holds(made, texts(1, 2), missing=texts(1))
            assert_holds(made, texts(1, 2), missing=texts(1))
        assert len(caught) == 1
        assert torn not in files(tmp_path)


def written(path):
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def one_bit(tensors, name, row):
    flipped = tensors[name].clone()
    flipped[row : row + 1].view(torch.uint8).view(-1)[0] ^= 1
    return {**tensors, name: flipped}


def keys_swapped(tensors):
    return {**tensors, "_keys": tensors["_keys"].flip(0)}


ALTERATIONS = {
    "one_bit": (lambda tensors: one_bit(tensors, "tokens", 1), [2]),
    "one_bit_of_another_tensor": (lambda tensors: one_bit(tensors, "pooled", 0), [1]),
    "one_bit_of_a_checksum": (lambda tensors: one_bit(tensors, "_checksums", 2), [3]),
    "rows_swapped": (lambda tensors: {**tensors, "tokens": tensors["tokens"].flip(0)}, [1, 3]),
    "keys_swapped": (keys_swapped, [1, 3]),
    "another_type": (lambda tensors: {**tensors, "tokens": tensors["tokens"].view(torch.float16)}, [1, 2, 3]),
    "another_shape": (lambda tensors: {**tensors, "tokens": tensors["tokens"].reshape(3, 3, 2)}, [1, 2, 3]),
    "another_name": (
        lambda tensors: {key.replace("tok", "tak"): v for key, v in tensors.items()},
        [1, 2, 3],
    ),
    "fewer_rows": (lambda tensors: {**tensors, "tokens": tensors["tokens"][:2]}, [1, 2, 3]),
    "no_checksums": (lambda tensors: {key: v for key, v in tensors.items() if key != "_checksums"}, [1, 2, 3]),
}


@pytest.mark.parametrize("kind", ALTERATIONS)
def test_rows_that_were_altered_are_missing_and_encoded_again(tmp_path, kind):
    """Sound as a file, and not what was written: trained on, such rows cost a run its reward without a word."""
    alter, lost = ALTERATIONS[kind]
    for knows_the_file in (True, False):
        folder = tmp_path / str(knows_the_file)
        made = cache(folder)
        made.write(texts(1, 2, 3), rows(texts(1, 2, 3)))
        (name,) = files(folder)
        made.write(texts(4), rows(texts(4)))
        save_file(alter(written(folder / name)), folder / name)
        reader = made if knows_the_file else cache(folder)
        with pytest.warns(UserWarning, match="damaged.* encoded again") as caught:
            assert_holds(reader, texts(4, 3, 2, 1), missing=texts(*lost))
            assert_holds(reader, texts(1, 2, 3, 4), missing=texts(*lost))
        assert len(caught) == 1
        reader.write(texts(*lost), rows(texts(*lost)))
        assert_holds(reader, texts(1, 2, 3, 4))


def test_damaged_rows_of_many_files_are_all_told_from_sound_ones_and_lost_when_files_are_merged(tmp_path):
    filled(tmp_path, *range(FILES_BEFORE_MERGE - 2))
    damaged = files(tmp_path)[::2]
    lost = []
    for name in damaged:
        tensors = written(tmp_path / name)
        lost.append(int(tensors["pooled"][0, 0]))
        save_file(one_bit(tensors, "tokens", 0), tmp_path / name)
    everything = texts(*range(FILES_BEFORE_MERGE - 2))
    made = cache(tmp_path)
    with pytest.warns(UserWarning, match="1 of 1 rows of .* are damaged") as caught:
        assert_holds(made, everything, missing=texts(*lost))
        for number in lost:  # now many enough to be merged, twice
            made.write(texts(number), rows(texts(number)))
            made.write(texts(100 + number), rows(texts(100 + number)))
    assert len(caught) == 1
    assert_holds(cache(tmp_path), [*everything, *texts(*(100 + number for number in lost))])
    assert not set(damaged) & set(files(tmp_path))


def test_files_of_the_format_without_checksums_are_not_read_and_go_with_time(tmp_path):
    earlier = tmp_path / f"embeddings-{hashlib.sha256(b'an encoder').hexdigest()[:16]}-0.safetensors"
    keys = torch.frombuffer(bytearray(cache(tmp_path)._key("prompt 1")), dtype=torch.uint8).view(1, -1)
    save_file({**rows(texts(1)), "_keys": keys, "large": torch.zeros(1, 1000)}, earlier)
    made = cache(tmp_path, max_bytes=5000)
    assert_holds(made, texts(1), missing=texts(1))
    made.write(texts(1), rows(texts(1)))
    assert not earlier.exists()
    assert_holds(made, texts(1))


def test_a_file_without_keys_is_damaged_too(tmp_path):
    made = filled(tmp_path, 1)
    save_file({"tokens": torch.zeros(2)}, tmp_path / (made._prefix + "0.safetensors"))
    with pytest.warns(UserWarning, match="is damaged"):
        assert_holds(made, texts(1, 2), missing=texts(2))


def test_files_of_others_are_left_alone(tmp_path):
    (tmp_path / "embeddings.txt").write_text("mine")
    (tmp_path / "weights.safetensors").write_text("mine")
    filled(tmp_path, *range(2 * FILES_BEFORE_MERGE), max_bytes=3000)
    assert {"embeddings.txt", "weights.safetensors"} <= set(files(tmp_path))


def test_drafts_of_killed_processes_are_cleared_away_and_those_of_others_are_not(tmp_path):
    old, new = (tmp_path / f"writing-embeddings-{age}.safetensors" for age in ("old", "new"))
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (0, 0))
    filled(tmp_path, 1)
    assert not old.exists()
    assert new.exists()


@contextmanager
def no_room():
    """No file may become larger than a kilobyte: the kernel's error comes from the same call as a full disk's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_warning_and_leaves_no_draft(tmp_path):
    made = filled(tmp_path, 1)
    with pytest.warns(UserWarning, match="Cannot keep embeddings in .* The run goes on without") as caught, no_room():
        made.write(texts(2), large(2))
        made.write(texts(3), large(3))
    assert len(caught) == 1
    assert len(files(tmp_path)) == 1
    assert_holds(made, texts(1, 2), missing=texts(2))


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path):
    (tmp_path / "file").touch()
    made = cache(tmp_path / "file" / "folder")
    with pytest.warns(UserWarning, match="Cannot keep embeddings in ") as caught:
        for number in range(3):
            made.write(texts(number), rows(texts(number)))
            assert made.read(texts(number)) == ([], {})
    assert len(caught) == 1


def test_several_at_once_read_nothing_wrong_and_lose_nothing_but_what_was_driven_out(tmp_path):
    """Each writes, merges and drives out files that the others are about to read."""
    failures, bound = [], 40_000

    def work(seed):
        made, random = cache(tmp_path, max_bytes=bound), torch.Generator().manual_seed(seed)
        try:
            for _ in range(40):
                wanted = texts(*set(torch.randint(0, 150, (4,), generator=random).tolist()))
                found, kept = made.read(wanted)
                if found:
                    there = [wanted[position] for position in found]
                    assert all(torch.equal(kept[name].float(), value) for name, value in rows(there).items())
                new = [text for position, text in enumerate(wanted) if position not in found]
                if new:
                    made.write(new, rows(new))
        except BaseException as error:
            failures.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert files(tmp_path)
    assert not [name for name in files(tmp_path) if not name.startswith("embeddings-") or name.endswith("lock")]
