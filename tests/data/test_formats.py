import json
import socket
import sys

import pytest

from lit_vgrpo.data import PromptDataModule, PromptError, PromptSource, read_prompts
from lit_vgrpo.data.prompts import open_prompts
from lit_vgrpo.data.tables import StreamedRows, TableRows

ROWS = [
    {"prompt": "a red fox", "tag": "one", "include": [{"class": "fox", "count": 1, "color": "red"}]},
    {"prompt": "two foxes", "tag": "many", "include": [{"class": "fox", "count": 2}]},
    {"prompt": "ein Bär"},
]
PROMPTS = [row["prompt"] for row in ROWS]


def prompts(rows):
    return [row["prompt"] for row in rows]


def refused(source):
    with pytest.raises(PromptError) as caught:
        list(read_prompts(source))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_csv_has_a_header_and_its_empty_cells_are_absent(write):
    path = write("p.csv", '\ufeffprompt,tag\r\n"a fox, red",one\r\n\r\n"two\nlines",\r\n" a ""cat"" ",x')
    assert read_prompts(path) == [
        {"prompt": "a fox, red", "tag": "one"}, {"prompt": "two\nlines"}, {"prompt": ' a "cat" ', "tag": "x"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("id,caption\n1,a\n", 'line 1: no column "prompt", but "id", "caption". Set column= to the prompts'),
        ("prompt,tag\na,b\nc\n", "line 3: 1 cells where the header has 2. Put a cell with a comma in quotes."),
        ("prompt,tag\na,b\na, b, c\n", "line 3: 3 cells where the header has 2."),
        ('prompt,tag\n"a\nb",c\n,d\n', 'line 4: "prompt" is empty.'),
        ('prompt\na\n"b\nc\n', "line 3: not csv (unexpected end of data)."),
        ('prompt\n"a"b\n', "line 2: not csv ("),
        ("prompt,a,a\nx,y,z\n", 'line 1: two columns are called "a". Rename one.'),
        ("prompt\n", "has no prompts."),
        ("", "has no prompts."),
        ("prompt\na\ncaf\u00e9\n".encode("latin-1"), "line 3: not UTF-8. Save the file as UTF-8."),
    ],
)
def test_a_wrong_csv_is_refused_with_its_line(write, content, said):
    path = write("p.csv", content)
    assert refused(path).startswith(f"{path} {said}")


def test_another_column_can_hold_the_prompt(write):
    path = write("p.csv", "id,caption,prompt\n1,a cat,old\n")
    assert read_prompts(PromptSource(str(path), column="caption")) == [{"prompt": "a cat", "id": "1"}]
    path = write("p.jsonl", '{"id": 1, "caption": "a cat"}\n')
    assert read_prompts(PromptSource(str(path), column="caption")) == [{"prompt": "a cat", "id": 1}]
    assert "Did you mean caption?" in refused(PromptSource(str(write("q.csv", "caption\na\n")), column="captions"))


def test_a_source_gives_its_rows_the_rewards_that_apply(write):
    path = write("p.jsonl", [{"prompt": "a"}, {"prompt": "b", "rewards": "own"}])
    rows = read_prompts(PromptSource(str(path), rewards=["ocr", "clip"], limit=2))
    assert [row["rewards"] for row in rows] == [["ocr", "clip"], "own"]
    assert len(read_prompts(PromptSource(str(path), limit=1))) == 1


def test_a_parquet_file_gives_the_rows_that_it_was_made_of(write):
    pictured = [{**ROWS[0], "image": {"bytes": b"\x00" * 9, "path": "a.png"}, "raw": b"\x00"}, *ROWS[1:]]
    path = write("p.parquet", pictured)
    assert read_prompts(path) == ROWS  # without the bytes
    assert prompts(read_prompts(PromptSource(str(path), limit=2))) == PROMPTS[:2]


def test_a_wrong_parquet_file_is_refused(write):
    whole = write("p.parquet", ROWS).read_bytes()
    for content in (whole[:-9], whole[: len(whole) // 2], b"", b"PAR1"):
        assert "cannot be read as parquet (" in refused(write("cut.parquet", content))
    assert 'no column "prompt", but "text", "n".' in refused(write("c.parquet", [{"text": "a", "n": 1}]))
    assert 'row 2: "prompt" is null.' in refused(write("n.parquet", [{"prompt": "a"}, {"prompt": None}]))
    assert 'row 1: "prompt" is a number.' in refused(write("i.parquet", [{"prompt": 7}]))
    assert "has no rows." in refused(write("e.parquet", _empty_parquet()))


def _empty_parquet():
    import pyarrow
    from pyarrow import parquet

    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_folder_of_data_files_is_a_dataset(write, datasets_cache, suffix):
    folder = write(f"set/train.{suffix}", ROWS).parent
    write(f"set/test.{suffix}", [{"prompt": "for the test"}])
    assert read_prompts(folder) == ROWS
    assert prompts(read_prompts(PromptSource(str(folder), split="test"))) == ["for the test"]
    assert prompts(read_prompts(PromptSource(str(folder), limit=2))) == PROMPTS[:2]
    assert "Unknown split" in refused(PromptSource(str(folder), split="tests"))
    assert 'no column "caption", but "prompt"' in refused(PromptSource(str(folder), column="caption"))
    assert "BuilderConfig 'big' not found" in refused(PromptSource(str(folder), config="big"))


def test_a_folder_that_datasets_saved_is_read_where_it_lies(tmp_path, datasets_cache):
    from PIL import Image

    pictures = datasets_cache.Dataset.from_list([{"prompt": "a", "image": Image.new("RGB", (4, 4))}])
    pictures.save_to_disk(tmp_path / "one")
    assert read_prompts(tmp_path / "one") == [{"prompt": "a"}]  # no picture is opened
    splits = {name: datasets_cache.Dataset.from_list([{"prompt": name}]) for name in ("first", "second")}
    datasets_cache.DatasetDict(splits).save_to_disk(tmp_path / "two")
    assert read_prompts(PromptSource(str(tmp_path / "two"), split="second")) == [{"prompt": "second"}]
    assert refused(tmp_path / "two").endswith("has no split train, but first, second. Set split= to one of them.")


def test_a_folder_without_prompts_or_with_broken_files_is_refused(write, tmp_path, datasets_cache):
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty").startswith(f"{tmp_path / 'empty'} has no data files. Put .jsonl, .csv or")
    write("broken/train.jsonl", '{"prompt": "a"}\n{"prompt": \n')
    assert "cannot be read as a dataset (" in refused(tmp_path / "broken")
    write("numbers/train.jsonl", '{"prompt": 3}\n')
    assert refused(tmp_path / "numbers").endswith('numbers row 1: "prompt" is a number.')


def test_a_dataset_of_the_hub_is_read_from_where_hf_download_puts_it(tmp_path, monkeypatch, write, datasets_cache):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    said = refused("owner/prompts")
    assert said == (
        "Cannot load owner/prompts: not in the local cache and HF_HUB_OFFLINE is set. "
        "Run: hf download owner/prompts --repo-type dataset, or give a local folder."
    )
    write("datasets--owner--prompts/refs/main", "abc")
    write("datasets--owner--prompts/snapshots/abc/data/train-00000-of-00002.jsonl", ROWS[:2])
    assert "its copy in the local cache lacks data/train-00001-of-00002.jsonl" in refused("owner/prompts")
    write("datasets--owner--prompts/snapshots/abc/data/train-00001-of-00002.jsonl", ROWS[2:])
    assert prompts(read_prompts("owner/prompts")) == PROMPTS


def test_a_hub_that_never_answers_is_one_line(monkeypatch, tmp_path, datasets_cache):
    from huggingface_hub import constants

    from lit_vgrpo.system import hub

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 0.3)
        monkeypatch.setattr(hub, "_silent_since", -hub.SILENCE_S)
        said = refused("owner/prompts")
    assert said.startswith("Cannot load owner/prompts: not in the local cache and the hub cannot be reached. Run: hf")


@pytest.mark.parametrize(("name", "package"), [("set", "datasets"), ("p.parquet", "pyarrow")])
def test_a_missing_package_is_named_with_the_command(write, monkeypatch, name, package):
    folder = write("set/train.jsonl", ROWS).parent.parent
    path = write("p.parquet", ROWS).parent / name
    assert folder == path.parent
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError) as caught:
        read_prompts(path)
    assert str(caught.value).endswith('Run: pip install "lit-vgrpo[data]"')
    assert PromptDataModule(str(path), 2, 2).check() == [str(caught.value)]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (PromptSource("p.txt", column="a"), "has one prompt per line and no columns. Leave out column=a."),
        (PromptSource("p.jsonl", split="test"), "is a file and has no split. Leave out split=test."),
        (PromptSource("p.jsonl", config="big"), "is a file and has no config. Leave out config=big."),
        (PromptSource("bare_name"), "does not exist. Use a .txt, .jsonl, .csv or .parquet file"),
        (PromptSource("./no/folder"), "does not exist. Use a .txt"),
    ],
)
def test_an_option_that_does_not_go_with_the_path_is_refused(write, monkeypatch, source, said):
    monkeypatch.chdir(write("p.txt", "a\n").parent)
    write("p.jsonl", '{"prompt": "a"}\n')
    assert said in refused(source)


def test_what_is_left_on_disk_gives_the_same_rows(write, datasets_cache):
    rows = [{"prompt": f"prompt {i}", "number": str(i)} for i in range(2500)]
    for name in ("p.jsonl", "p.parquet"):
        source = PromptSource(str(write(name, rows)), limit=2400)
        opened = open_prompts(source, streaming=True)
        assert not isinstance(opened, list)
        assert list(opened) == read_prompts(source) == rows[:2400]
        assert [opened[i] for i in (0, 2399, 7)] == [rows[i] for i in (0, 2399, 7)]
    assert isinstance(opened, TableRows)
    assert list(opened.prompts()) == prompts(rows[:2400])


def test_a_stream_shuffles_every_pass_and_can_go_back(write, datasets_cache):
    folder = write("set/train.jsonl", [{"prompt": f"prompt {i}"} for i in range(20)]).parent
    first = open_prompts(PromptSource(str(folder)), streaming=True, seed=3)
    assert isinstance(first, StreamedRows)
    walk = [first.at(position)["prompt"] for position in range(60)]
    passes = [walk[start : start + 20] for start in (0, 20, 40)]
    assert all(sorted(one) == sorted(passes[0]) for one in passes)
    assert len({tuple(one) for one in passes}) == 3
    resumed = open_prompts(PromptSource(str(folder)), streaming=True, seed=3)
    assert [resumed.at(position)["prompt"] for position in (41, 41, 5, 59)] == [walk[i] for i in (41, 41, 5, 59)]
    other = open_prompts(PromptSource(str(folder)), streaming=True, seed=4)
    assert [other.at(position)["prompt"] for position in range(20)] != passes[0]


def test_a_wrong_row_of_a_stream_is_named_when_it_comes(write, datasets_cache):
    rows = [{"prompt": "a"}, {"prompt": ""}]
    folder = write("set/train.jsonl", rows).parent
    stream = open_prompts(PromptSource(str(folder)), streaming=True)
    with pytest.raises(PromptError, match=r'set row \d of the stream: "prompt" is empty.'):
        [stream.at(position) for position in range(2)]
    assert json.loads((folder / "train.jsonl").read_text().splitlines()[0]) == rows[0]
