"""The folder of embeddings: what goes in comes out, whatever else happens to the folder."""

import os
import threading
import warnings
from pathlib import Path

import pytest
import torch

from lit_vgrpo.policies.embeddings import EmbeddingCache

PLENTY = 10**9


def rows(texts):
    """Rows that tell by their values which text they are of."""
    numbers = [float(text.rpartition(" ")[2]) for text in texts]
    tokens = torch.arange(6.0).view(2, 3) / 8
    return [{"tokens": n + tokens, "pooled": torch.full((4,), n)} for n in numbers]


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
    return row.keys() == expected.keys() and all(torch.equal(row[name], expected[name]) for name in expected)


def assert_holds(made, wanted, missing=()):
    for text, row, expected in zip(wanted, made.read(wanted), rows(wanted), strict=True):
        assert (row is None) == (text in missing), text
        assert row is None or equal(row, expected), text


def test_rows_come_back_in_the_order_asked_for(tmp_path):
    made = filled(tmp_path, 3, 1)
    made.write(texts(7, 5, 9), rows(texts(7, 5, 9)))
    for reader in (made, cache(tmp_path)):
        assert_holds(reader, texts(5, 3, 8, 9, 1, 7), missing=texts(8))
        assert_holds(reader, texts(9, 7))
    assert cache(tmp_path).read([*texts(8), "prompt 1 "]) == [None, None]
    assert cache(tmp_path, encoder="another").read(texts(1)) == [None]


def large(*numbers):
    """Rows of ten kilobytes each, beside which headers do not count."""
    return [{"tokens": torch.full((5000,), float(number), dtype=torch.bfloat16)} for number in numbers]


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
        made.write(texts(number), [{"tokens": torch.full((2500,), float(number), dtype=torch.bfloat16)}])
        looks.append(made._room > room)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1_000_000
    assert not all(looks)
    assert len(files(tmp_path)) > 180


def test_a_batch_above_the_bound_is_not_kept_and_drives_nothing_out(tmp_path):
    made = filled(tmp_path, 1, max_bytes=5_000)
    with pytest.warns(UserWarning, match=r"Embeddings exceed model.policy.embedding_cache_gb and are not cached"):
        made.write(texts(2, 3), large(2, 3))
    assert_holds(made, texts(1, 2), missing=texts(2))


def test_a_damaged_file_or_one_under_the_name_of_another_is_removed_and_its_row_is_missing(tmp_path):
    filled(tmp_path, 1)
    (name,) = files(tmp_path)
    content = (tmp_path / name).read_bytes()
    made = filled(tmp_path, 2)
    (other,) = set(files(tmp_path)) - {name}
    flipped = bytes([*content[:-1], content[-1] ^ 1])
    for damaged in (b"", content[:5], content[:-1], flipped, (tmp_path / other).read_bytes()):
        (tmp_path / name).write_bytes(damaged)
        assert_holds(made, texts(1, 2), missing=texts(1))
        assert name not in files(tmp_path)
    made.write(texts(1), rows(texts(1)))
    assert_holds(made, texts(1, 2))


def test_a_disk_that_is_read_only_or_full_costs_only_rows(tmp_path, monkeypatch):
    filled(tmp_path, 1)
    (name,) = files(tmp_path)
    (tmp_path / name).write_bytes(b"damaged")

    def refuse(*args, **named):
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        assert cache(tmp_path).read(texts(1)) == [None]
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.warns(UserWarning, match="Cannot cache embeddings in "):
        cache(tmp_path).write(texts(2), rows(texts(2)))
    assert [*files(tmp_path)] == [name], "no draft is left"


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


def test_only_files_of_the_cache_are_driven_out(tmp_path):
    mine = [tmp_path / name for name in ("embeddings-mine.row", "embeddings.txt", "weights.safetensors")]
    for path in mine:
        path.write_bytes(bytes(5000))
        os.utime(path, (1, 1))
    filled(tmp_path, *range(20), max_bytes=3000)
    assert {path.stat().st_size for path in mine} == {5000}
    assert 3 < len(files(tmp_path)) < 20
