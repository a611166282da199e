"""The folder of embeddings: what goes in comes out, whatever else happens to the folder."""

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

from lit_vgrpo.policies.embeddings import EmbeddingCache, narrowed

PLENTY = 10**9


def rows(texts, dtype=torch.bfloat16):
    """Rows that tell by their values which text they are of."""
    numbers = [float(text.rpartition(" ")[2]) for text in texts]
    tokens = torch.arange(6.0).view(2, 3) / 8
    return [{"tokens": (n + tokens).to(dtype).float(), "pooled": torch.full((4,), n)} for n in numbers]


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


def equal(row, expected):
    return row.keys() == expected.keys() and all(torch.equal(row[name].float(), expected[name]) for name in expected)


def assert_holds(made, wanted, missing=()):
    for text, row, expected in zip(wanted, made.read(wanted), rows(wanted), strict=True):
        assert (row is None) == (text in missing), text
        assert row is None or equal(row, expected), text


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_rows_come_back_in_the_order_asked_for(tmp_path):
    made = filled(tmp_path, 3, 1)
    made.write(texts(7, 5, 9), rows(texts(7, 5, 9)))
    for reader in (made, cache(tmp_path)):
        assert_holds(reader, texts(5, 3, 8, 9, 1, 7), missing=texts(8))
        assert_holds(reader, texts(9, 7))
    assert cache(tmp_path).read(texts(8)) == [None]


def test_another_encoder_or_text_has_nothing_in_common(tmp_path):
    filled(tmp_path, 1)
    assert cache(tmp_path, encoder="another").read(texts(1)) == [None]
    assert cache(tmp_path).read(["prompt 1 "]) == [None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_kept_exactly_in_the_smallest_type_that_can(tmp_path, dtype):
    value = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype).float()
    value[:, :3] = torch.tensor([0.0, -0.0, float("inf")])
    cache(tmp_path).write(texts(1, 2, 3), [{"tokens": row} for row in value])
    for row, expected in zip(cache(tmp_path).read(texts(1, 2, 3)), value, strict=True):
        assert row["tokens"].dtype == dtype
        assert torch.equal(row["tokens"].float().view(torch.int32), expected.view(torch.int32))


def test_a_row_of_a_large_batch_takes_no_more_room_than_its_own(tmp_path):
    made = cache(tmp_path)
    made.write(texts(1, 2), [{"tokens": row} for row in torch.zeros(2, 1000)])
    assert all(path.stat().st_size < 3000 for path in tmp_path.iterdir())


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


# --- how large --------------------------------------------------------------------------------------------------------


def large(*numbers):
    """Rows of ten kilobytes each, beside which headers do not count."""
    return [{"tokens": torch.full((5000,), float(number))} for number in numbers]


def test_what_was_unused_for_longest_goes_first(tmp_path):
    made = cache(tmp_path, max_bytes=40_000)
    for age, number in enumerate((1, 2, 3)):
        made.write(texts(number), large(number))
        for path in set(tmp_path.iterdir()):
            os.utime(path, (os.stat(path).st_atime, os.stat(path).st_mtime - 10 + age))
    made.read(texts(1))
    made.write(texts(4), large(4))
    kept = cache(tmp_path).read(texts(1, 2, 3, 4))
    assert [None if row is None else row["tokens"][0].item() for row in kept] == [1, None, 3, 4]
    assert made.read(texts(2)) == [None]


def test_a_bound_that_many_small_writes_reach_holds(tmp_path):
    """Not every write looks at the folder."""
    one, other = (cache(tmp_path, max_bytes=1_000_000) for _ in range(2))
    looks = []
    for number in range(200):
        made = (one, other)[number % 2]
        room = made._room
        made.write(texts(number), [{"tokens": torch.full((2500,), float(number))}])
        looks.append(made._room > room)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1_000_000
    assert not all(looks)
    assert len(files(tmp_path)) > 180


def test_the_folder_stays_below_its_bound_with_all_encoders_together(tmp_path):
    for number in range(40):
        cache(tmp_path, max_bytes=50_000, encoder=f"encoder {number % 3}").write(texts(number), large(number))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 50_000
    assert len(files(tmp_path)) == 4


def test_a_batch_above_the_bound_is_not_kept_and_drives_nothing_out(tmp_path):
    made = filled(tmp_path, 1, max_bytes=5_000)
    with pytest.warns(UserWarning, match=r"Embeddings of 2 prompts .* Set model.policy.embedding_cache_gb") as caught:
        made.write(texts(2, 3), large(2, 3))
        made.write(texts(4, 5), large(4, 5))
    assert len(caught) == 1
    assert_holds(made, texts(1, 2), missing=texts(2))


# --- damage and other mishaps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_truncated_file_is_removed_and_its_row_is_missing(tmp_path, size):
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


def one_bit(tensors, name):
    flipped = tensors[name].clone()
    flipped.view(torch.uint8).view(-1)[0] ^= 1
    return {**tensors, name: flipped}


ALTERATIONS = {
    "one_bit": lambda row, sums: (one_bit(row, "tokens"), sums),
    "one_bit_of_another_tensor": lambda row, sums: (one_bit(row, "pooled"), sums),
    "another_checksum": lambda row, sums: (row, {"crc32": str(int(sums["crc32"]) ^ 1)}),
    "values_swapped": lambda row, sums: ({**row, "tokens": row["tokens"].flip(0)}, sums),
    "another_type": lambda row, sums: ({**row, "tokens": row["tokens"].view(torch.float16)}, sums),
    "another_shape": lambda row, sums: ({**row, "tokens": row["tokens"].reshape(3, 2)}, sums),
    "another_name": lambda row, sums: ({key.replace("tok", "tak"): value for key, value in row.items()}, sums),
    "a_tensor_fewer": lambda row, sums: ({"tokens": row["tokens"]}, sums),
    "no_checksum": lambda row, sums: (row, None),
}


@pytest.mark.parametrize("kind", ALTERATIONS)
def test_a_row_that_was_altered_is_missing_and_encoded_again(tmp_path, kind):
    """Sound as a file, and not what was written: trained on, such a row costs a run its reward without a word."""
    made = filled(tmp_path, 2)
    (name,) = files(tmp_path)
    with safe_open(tmp_path / name, "pt") as file:
        row, sums = {key: file.get_tensor(key).clone() for key in file.keys()}, file.metadata()  # noqa: SIM118
    made.write(texts(1, 3), rows(texts(1, 3)))
    altered, metadata = ALTERATIONS[kind](row, sums)
    save_file(altered, tmp_path / name, metadata)
    with pytest.warns(
        UserWarning, match="is damaged .*its values do not match their checksum.* encoded again"
    ) as caught:
        assert_holds(made, texts(3, 2, 1), missing=texts(2))
        assert_holds(cache(tmp_path), texts(1, 2, 3), missing=texts(2))
    assert len(caught) == 1
    made.write(texts(2), rows(texts(2)))
    assert_holds(made, texts(1, 2, 3))


def test_a_file_under_the_name_of_another_is_not_taken_for_it(tmp_path):
    filled(tmp_path, 1)
    (first,) = files(tmp_path)
    made = filled(tmp_path, 2)
    (second,) = set(files(tmp_path)) - {first}
    (tmp_path / first).replace(tmp_path / second)
    with pytest.warns(UserWarning, match="is damaged"):
        assert_holds(made, texts(2), missing=texts(2))


def test_files_of_earlier_formats_are_not_read_and_go_with_time(tmp_path):
    earlier = tmp_path / f"embeddings-0123456789abcdef-{'0' * 32}.safetensors"
    save_file({"tokens": torch.zeros(1, 2, 3), "_keys": torch.zeros(1, 32), "large": torch.zeros(1, 1000)}, earlier)
    made = cache(tmp_path, max_bytes=4500)
    assert_holds(made, texts(1), missing=texts(1))
    made.write(texts(1), rows(texts(1)))
    assert not earlier.exists()
    assert_holds(made, texts(1))


def test_files_of_others_are_left_alone(tmp_path):
    (tmp_path / "embeddings.txt").write_text("mine")
    (tmp_path / "weights.safetensors").write_text("mine")
    filled(tmp_path, *range(30), max_bytes=3000)
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
    with (
        pytest.warns(UserWarning, match="Cannot cache embeddings in .* The run continues without") as caught,
        no_room(),
    ):
        made.write(texts(2), large(2))
        made.write(texts(3), large(3))
    assert len(caught) == 1
    assert len(files(tmp_path)) == 1
    assert_holds(made, texts(1, 2), missing=texts(2))


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path):
    (tmp_path / "file").touch()
    made = cache(tmp_path / "file" / "folder")
    with pytest.warns(UserWarning, match="Cannot cache embeddings in ") as caught:
        for number in range(3):
            made.write(texts(number), rows(texts(number)))
            assert made.read(texts(number)) == [None]
    assert len(caught) == 1


def test_several_at_once_read_nothing_wrong_and_lose_nothing_but_what_was_driven_out(tmp_path):
    """Each writes and drives out files that the others are about to read."""
    failures, bound = [], 40_000

    def work(seed):
        made, random = cache(tmp_path, max_bytes=bound), torch.Generator().manual_seed(seed)
        try:
            for _ in range(40):
                wanted = texts(*set(torch.randint(0, 150, (4,), generator=random).tolist()))
                kept = made.read(wanted)
                for row, expected in zip(kept, rows(wanted), strict=True):
                    assert row is None or equal(row, expected)
                new = [text for text, row in zip(wanted, kept, strict=True) if row is None]
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
    assert not [name for name in files(tmp_path) if not name.startswith("embeddings-")]
