"""Prompts in every format, with what ``datasets`` keeps of them in a folder of the test's own."""

import json

import pytest


@pytest.fixture(scope="session")
def datasets_cache(tmp_path_factory):
    datasets = pytest.importorskip("datasets", reason="needs the extra data")
    before, datasets.config.HF_DATASETS_CACHE = datasets.config.HF_DATASETS_CACHE, tmp_path_factory.mktemp("cache")
    yield datasets
    datasets.config.HF_DATASETS_CACHE = before


@pytest.fixture
def write(tmp_path):
    """``write("p.txt", content)``: a file of text, bytes, or rows as jsonl, csv or parquet; returns its path."""

    def write_file(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = {".jsonl": as_jsonl, ".parquet": as_parquet}[path.suffix](content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


def as_jsonl(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def as_parquet(rows):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra data")
    from pyarrow import parquet

    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()
