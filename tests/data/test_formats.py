"""Prompts in every format: what is read from a file, a folder or a dataset, and what is refused."""

import csv
import io
import json
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lit_vgrpo.data import PromptDataModule, PromptError, PromptSource, read_prompts
from lit_vgrpo.data.prompts import TableRows, open_prompts

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


def test_txt_is_one_prompt_a_line(write):
    path = write("p.txt", "\ufeffa cat \r\n\n  \na dog\nein Bär\u2028im Wald")
    assert read_prompts(path) == [{"prompt": "a cat"}, {"prompt": "a dog"}, {"prompt": "ein Bär\u2028im Wald"}]


def test_a_line_like_a_comment_is_a_prompt_that_is_warned_of(write):
    path = write("p.txt", "# animals\na cat\n#1 fan\n# more\n")
    with pytest.warns(UserWarning, match=r'line 1 starts with "# " and is a prompt.*\(lines like it: 2\)'):
        assert prompts(read_prompts(path)) == ["# animals", "a cat", "#1 fan", "# more"]


@pytest.mark.parametrize(
    "content", ["a cat\ra dog\r\rno fox\r", "\ufeffa cat\r\r\na dog\nno fox", "a cat\n\ra dog\rno fox\r\n"]
)
def test_every_kind_of_line_end_ends_a_prompt(write, content):
    three = ["a cat", "a dog", "no fox"]
    assert prompts(read_prompts(write("p.txt", content))) == three
    lines = "".join(f'{{"prompt": "{line}"}}\r' for line in three)
    assert prompts(read_prompts(write("p.jsonl", lines))) == three
    assert prompts(read_prompts(write("p.csv", "\ufeffprompt,n\r" + "".join(f"{line},1\r" for line in three)))) == three
    marks = "a\x85b\u2028c\u2029d\x0be\x0cf\x1cg"
    assert prompts(read_prompts(write("p.txt", f"{marks}\r{marks}"))) == [marks, marks]
    assert "line 3: not UTF-8." in refused(write("p.txt", b"a\rb\r\ncaf\xe9\r"))


def test_jsonl_rows_keep_their_fields_and_duplicates(write):
    row = {"prompt": "a red\u2028circle", "colour": "red", "boxes": [1, 2]}
    text = json.dumps(row, ensure_ascii=False)
    path = write("p.JSONL", f"\ufeff{text}\n\n{text}\r\n")
    assert read_prompts(str(path)) == [row, row]


def test_a_csv_has_a_header_and_its_empty_cells_are_absent(write):
    path = write("p.csv", '\ufeffprompt,tag\r\n"a fox, red",one\r\n\r\n"two\nlines",\r\n" a ""cat"" ",x\r\nNA,007')
    assert read_prompts(path) == [
        {"prompt": "a fox, red", "tag": "one"}, {"prompt": "two\nlines"}, {"prompt": ' a "cat" ', "tag": "x"},
        {"prompt": "NA", "tag": "007"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a"', "not JSON (Expecting ',' delimiter at column 15)."),
        pytest.param("[" * 100_000, "not JSON (", id="nested"),
        ("3", "not an object."),
        ('{"promt": "a"}', 'no column "prompt". Did you mean promt? Set column='),
        ('{"prompt": " "}', "\"prompt\" is ' '. A prompt must be text."),
        ('{"prompt": ["a"]}', "\"prompt\" is ['a']. A prompt must be text."),
        ('{"prompt": NaN}', '"prompt" is nan. A prompt must be text.'),
        ('{"prompt": "a\\ud800b"}', "\"prompt\" is 'a\\ud800b'. A prompt must be text."),
        ('{"prompt": "a\\u0000"}', "\"prompt\" is 'a\\x00'. A prompt must be text."),
    ],
)
def test_a_wrong_line_is_named(write, line, said):
    path = write("p.jsonl", f'{{"prompt": "ok"}}\n\n{line}\n')
    error = refused(path)
    assert error.startswith(f"{path} line 3: {said}")
    assert len(error) < 300 + len(str(path))


def test_several_wrong_lines_are_counted(write):
    path = write("p.jsonl", '{"prompt": "ok"}\nnot json\n3\n{"promt": "a"}\n{"prompt": ""}\n')
    assert refused(path).startswith(f"{path} line 2: not JSON (")
    assert refused(path).endswith("). In all, 4 lines are wrong, the first: 2, 3, 4.")
    path = write("p.csv", "prompt,tag\na\nb,c\n,d\n")
    assert refused(path).startswith(f"{path} line 2: more or fewer cells")
    assert refused(path).endswith(" In all, 2 lines are wrong, the first: 2, 4.")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("id,caption\n1,a\n", 'line 1: no column "prompt". Use one of: id, caption. Set column= to the '),
        ("prompt,tag\na,b\nc\n", "line 3: more or fewer cells than the header. Quote cells with commas."),
        ("prompt,tag\na,b\na, b, c\n", "line 3: more or fewer cells"),
        ('prompt,tag\n"a\nb",c\n,d\n', 'line 4: "prompt" is '),
        ('prompt\na\n"b\nc\n', "line 3: not csv (unexpected end of data)."),
        ('prompt\n"a"b\n', "line 2: not csv ("),
        ("prompt\n", "has no prompts."),
        ("prompt,tag,,tag,\na,b,,c,\n", 'line 1: two columns are "tag". Rename or remove one.'),
        ("prompt\na cat\n".encode("utf-16-le"), 'line 1: no column "prompt".'),
        ("", 'line 1: no column "prompt".'),
        ("prompt;tag\na;b\n", "line 1: cells are separated by ';'. Save the file with commas."),
        ("prompt\ttag\na\tb\n", r"line 1: cells are separated by '\t'. Save"),
        ("prompt\na\ncaf\u00e9\n".encode("latin-1"), "line 3: not UTF-8. Save the file as UTF-8."),
    ],
)
def test_a_wrong_csv_is_refused_with_its_line(write, content, said):
    path = write("p.csv", content)
    assert refused(path).startswith(f"{path} {said}")


@pytest.mark.parametrize(("name", "form"), [("p.txt", "a red circle"), ("p.jsonl", '{"prompt": "a red circle"}')])
def test_an_empty_file_is_told_what_to_write(write, name, form):
    path = write(name, "\n")
    assert refused(path) == f"{path} has no prompts. Write one per line, such as: {form}"
    path.write_text(form)
    assert read_prompts(path) == [{"prompt": "a red circle"}]


def test_another_column_can_hold_the_prompt(write):
    path = write("p.csv", "id,caption,prompt\n1,a cat,old\n")
    assert read_prompts(PromptSource(str(path), column="caption")) == [{"prompt": "a cat", "id": "1"}]
    path = write("p.jsonl", '{"id": 1, "caption": "a cat"}\n')
    assert read_prompts(PromptSource(str(path), column="caption")) == [{"prompt": "a cat", "id": 1}]
    said = refused(PromptSource(str(file := write("q.csv", "caption\na\n")), column="captions"))
    assert "Did you mean caption?" in said
    assert said.endswith(f"such as 'data.train={{path: {file}, column: caption}}'.")
    assert """column: " prompt"}'.""" in refused(write("r.csv", "id, prompt\n1,a\n"))


def test_a_source_gives_its_rows_the_rewards_that_apply(write):
    path = write("p.jsonl", [{"prompt": "a"}, {"prompt": "b", "rewards": "own"}])
    rows = read_prompts(PromptSource(str(path), rewards=["ocr", "clip"], limit=2))
    assert [row["rewards"] for row in rows] == [["ocr", "clip"], "own"]
    assert len(read_prompts(PromptSource(str(path), limit=1))) == 1


def test_a_row_whose_teacher_is_null_has_its_sources(write):
    path = str(write("p.jsonl", [{"prompt": "a", "teacher": None}, {"prompt": "b", "teacher": "own"}]))
    assert read_prompts(path) == [{"prompt": "a"}, {"prompt": "b", "teacher": "own"}]
    assert [row["teacher"] for row in read_prompts(PromptSource(path, teacher="other"))] == ["other", "own"]


def test_a_parquet_file_gives_the_rows_that_it_was_made_of(write, datasets_cache):
    pictured = [{**ROWS[0], "image": {"bytes": b"\x00" * 9, "path": "a.png"}, "raw": b"\x00"}, *ROWS[1:]]
    path = write("p.parquet", pictured)
    assert read_prompts(path) == ROWS  # without the bytes
    assert prompts(read_prompts(PromptSource(str(path), limit=2))) == PROMPTS[:2]


def test_a_wrong_parquet_file_is_refused(write, datasets_cache):
    whole = write("p.parquet", ROWS).read_bytes()
    assert "cannot be read as a dataset (" in refused(write("cut.parquet", whole[: len(whole) // 2]))
    assert 'no column "prompt". Use one of: text, n.' in refused(write("c.parquet", [{"text": "a", "n": 1}]))
    assert 'row 2: "prompt" is ' in refused(write("n.parquet", [{"prompt": "a"}, {"prompt": None}]))


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("large_binary", [b"a cat", "ein Bär".encode()], ["a cat", "ein Bär"]),
        ("dictionary of binary", ["a", "b", "a"], ["a", "b", "a"]),
        ("binary", [b"a cat", b"\xff\xfea"], "row 2: \"prompt\" is b'\\xff\\xfea'. A prompt must be text."),
        ("binary", [b"a", None], 'row 2: "prompt" is None. A prompt must be text.'),
        ("list of string", [["a"], ["b"]], "row 1: \"prompt\" is ['a']. A prompt must be text."),
        ("struct", [{"bytes": b"a", "path": "b"}], 'row 1: "prompt" is {'),
    ],
)
def test_any_cell_of_a_table_is_a_prompt_or_one_line(tmp_path, datasets_cache, kind, values, expected):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    name = kind.rpartition(" ")[2]
    base = None if name == "struct" else getattr(pyarrow, name)()
    column = pyarrow.array(values, pyarrow.list_(base) if kind.startswith("list") else base)
    column = column.dictionary_encode() if kind.startswith("dictionary") else column
    parquet.write_table(pyarrow.table({"prompt": column, "n": list(range(len(values)))}), tmp_path / "p.parquet")
    source = str(tmp_path / "p.parquet")
    if isinstance(expected, list):
        assert read_prompts(source) == [{"prompt": prompt, "n": number} for number, prompt in enumerate(expected)]
        assert PromptDataModule(source, 2, 2).check() == []
    else:
        assert expected in refused(source)
        assert expected in PromptDataModule(source, 2, 2).check()[0]


def test_a_column_of_pictures_is_no_prompt(tmp_path, datasets_cache):
    from PIL import Image

    datasets_cache.Dataset.from_list([{"prompt": Image.new("RGB", (4, 4))}]).save_to_disk(tmp_path / "one")
    assert 'one row 1: "prompt" is <PIL.' in refused(tmp_path / "one")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_folder_of_data_files_is_a_dataset(write, datasets_cache, suffix):
    folder = write(f"set/train.{suffix}", ROWS).parent
    write(f"set/test.{suffix}", [{"prompt": "for the test"}])
    assert read_prompts(folder) == ROWS
    assert prompts(read_prompts(PromptSource(str(folder), split="test"))) == ["for the test"]
    assert prompts(read_prompts(PromptSource(str(folder), limit=2))) == PROMPTS[:2]
    assert refused(PromptSource(str(folder), split="tests")) == f"{folder} has no split tests. Did you mean test?"
    assert 'no column "caption"' in refused(PromptSource(str(folder), column="caption"))
    assert "BuilderConfig 'big' not found" in refused(PromptSource(str(folder), config="big"))
    write("set/more.txt", "not read\n")
    with pytest.warns(UserWarning, match=rf"files of several kinds .*\.{suffix}.*, of which only one is read"):
        assert "not read" not in prompts(read_prompts(folder))
    latin = write("latin/p.txt", "a\ncaf\u00e9\n".encode("latin-1"))
    assert refused(PromptSource(str(latin.parent))) == f"{latin} line 2: not UTF-8. Save the file as UTF-8."


def test_files_of_a_folder_that_are_no_prompts_or_in_no_split(write, datasets_cache, recwarn):
    write("texts/README.txt", "About these prompts\n")
    write("texts/.hidden.txt", "not read\n")
    folder = write("texts/vehicles.txt", "a bus\n").parent
    assert prompts(read_prompts(folder)) == ["a bus"]
    assert not recwarn.list
    write("texts/train_stations.txt", "a station\n")
    with pytest.warns(UserWarning, match=r"^vehicles\.txt of .* is in no split, .*\. Name the files instead"):
        assert prompts(read_prompts(folder)) == ["a station"]
    recwarn.clear()
    write("texts/more.csv", "prompt\na tram\n")
    write("texts/README.md", "---\nlicense: mit\nconfigs:\n- config_name: all\n  data_files: vehicles.txt\n---\n")
    assert prompts(read_prompts(folder)) == ["a bus"]
    assert not recwarn.list


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.csv", "prompt,text\n1984,007\nnull,2024-05-01\n"),
        ("p.jsonl", '{"prompt": "a", "text": "2024-05-01", "n": 1}\n{"prompt": "b", "n": 1.5, "of": null}\n'),
        ("p.txt", "a cat\u2028on a mat\n1984\n"),
    ],
)
def test_a_text_file_has_the_same_rows_in_a_folder(write, datasets_cache, name, content):
    rows = read_prompts(write(name, content))
    folder = write(f"set/{name}", content).parent
    assert repr(read_prompts(folder)) == repr(rows)  # 1 is not 1.0
    write(f"set/more/{name}", content)
    assert read_prompts(folder) == rows * 2
    assert read_prompts(PromptSource(str(folder), limit=3)) == (rows * 2)[:3]


def test_a_folder_that_datasets_saved_is_read_where_it_lies(tmp_path, datasets_cache):
    from PIL import Image

    pictures = datasets_cache.Dataset.from_list([{"prompt": "a", "image": Image.new("RGB", (4, 4))}])
    pictures.save_to_disk(tmp_path / "one")
    assert read_prompts(tmp_path / "one") == [{"prompt": "a"}]  # no picture is opened
    splits = {name: datasets_cache.Dataset.from_list([{"prompt": name}]) for name in ("first", "second")}
    line = f"split=test: {tmp_path / 'one'} is one table, written by save_to_disk. Leave out split."
    assert refused(PromptSource(str(tmp_path / "one"), split="test")) == line
    datasets_cache.DatasetDict(splits).save_to_disk(tmp_path / "two")
    unknown = f"{tmp_path / 'two'} has no split train[:2]. Use one of: first, second."
    assert refused(PromptSource(str(tmp_path / "two"), split="train[:2]")) == unknown
    assert read_prompts(PromptSource(str(tmp_path / "two"), split="second")) == [{"prompt": "second"}]
    assert "train" in refused(tmp_path / "two")


def test_a_folder_without_prompts_or_with_broken_files_is_refused(write, tmp_path, datasets_cache):
    (tmp_path / "empty").mkdir()
    assert "doesn't contain any data files" in refused(tmp_path / "empty")
    write("broken/train.jsonl", '{"prompt": "a"}\n{"prompt": \n')
    assert "train.jsonl line 2: not JSON (" in refused(tmp_path / "broken")
    write("numbers/train.jsonl", '{"prompt": 3}\n')
    assert 'train.jsonl line 1: "prompt" is 3.' in refused(tmp_path / "numbers")
    assert refused("owner/prompts").startswith("owner/prompts cannot be read as a dataset (")


def test_a_missing_package_is_named_with_the_command(write, monkeypatch):
    path = write("p.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        read_prompts(path)
    assert str(caught.value).endswith('Run: pip install "lit-vgrpo[data]"')
    assert PromptDataModule(path, 2, 2).check() == [str(caught.value)]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (PromptSource("p.txt", column="a"), 'no column "a"'),
        (PromptSource("p.jsonl", split="test"), "has no splits or configurations. Leave out split and config."),
        (PromptSource("bare_name"), "does not exist. Use a .txt, .jsonl, .csv or .parquet file"),
        (PromptSource("./no/folder"), "does not exist. Use a .txt"),
        (PromptSource("p.tsv"), "p.tsv is not a prompt file. Use a .txt"),
        (PromptSource("pp.tsv"), "pp.tsv does not exist. Did you mean p.tsv?"),
        (PromptSource("x.txt"), "x.txt does not exist. Use a .txt"),
        (PromptSource("shipped:prompts/shape_train.jsonl"), "is not shipped. Did you mean shapes_train.jsonl?"),
    ],
)
def test_a_path_or_an_option_that_does_not_go_with_it_is_refused(write, monkeypatch, source, said):
    monkeypatch.chdir(write("p.txt", "a\n").parent)
    write("p.jsonl", '{"prompt": "a"}\n')
    write("p.tsv", "")
    assert said in refused(source)


def test_a_table_is_read_on_access_and_selected_by_hash(write, datasets_cache):
    rows = [{"prompt": f"prompt {i}", "number": i} for i in range(2500)]
    path = write("set/train.parquet", rows)
    opened = open_prompts(PromptSource(str(path), limit=2400))
    assert isinstance(opened, TableRows)
    assert list(opened.texts()) == prompts(rows[:2400])
    assert [opened[i] for i in (0, 2399, 7)] == [rows[i] for i in (0, 2399, 7)]
    options = {"heldout_fraction": 0.1, "deduplicate": True}
    table = PromptDataModule(str(path.parent), 4, 2, **options)
    text = PromptDataModule(str(write("p.jsonl", rows)), 4, 2, **options)
    assert table.heldout_rows() == text.heldout_rows()
    batches = [data.train_dataloader().dataset[9] for data in (table, text)]
    assert batches[0] == batches[1]
    assert table.sets.describe() == text.sets.describe()
    assert len(table.sets.fingerprint()) == 64


CELLS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=9)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(CELLS.filter(str.strip), CELLS), min_size=1, max_size=6), st.sampled_from(["\n", "\r\n"]))
def test_every_csv_cell_is_the_text_that_was_written(tmp_path, cells, line_end):
    text = io.StringIO()
    csv.writer(text, lineterminator=line_end, quoting=csv.QUOTE_ALL).writerows([("prompt", "tag"), *cells])
    (tmp_path / "p.csv").write_bytes(text.getvalue().encode())
    rows = read_prompts(tmp_path / "p.csv")
    assert rows == [{"prompt": a, **({"tag": b} if b.strip() else {})} for a, b in [*cells]]
