import json

import pytest

from lit_vgrpo.data.prompts import read_prompts


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_txt_is_one_prompt_a_line(tmp_path):
    path = write(tmp_path, "p.txt", "\ufeffa cat \r\n\n  \na dog\nein Bär\u2028im Wald")
    assert read_prompts(path) == [{"prompt": "a cat"}, {"prompt": "a dog"}, {"prompt": "ein Bär\u2028im Wald"}]


def test_jsonl_rows_keep_their_fields_and_duplicates(tmp_path):
    row = {"prompt": "a red\u2028circle", "colour": "red", "boxes": [1, 2]}
    text = json.dumps(row, ensure_ascii=False)
    path = write(tmp_path, "p.JSONL", f"\ufeff{text}\n\n{text}\r\n")
    assert read_prompts(str(path)) == [row, row]


def test_a_shipped_path_is_found():
    assert len(read_prompts("shipped:prompts/pickscore_heldout.txt")) == 60


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a"', "not JSON (Expecting ',' delimiter"),
        pytest.param("[" * 100_000, "not JSON (", id="nested"),
        ("3", "not an object."),
        ('{"promt": "a"}', 'no column "prompt". Did you mean promt? Set column='),
        ("{}", 'no column "prompt".'),
        ('{"prompt": " "}', "\"prompt\" is ' '. A prompt must be text."),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, said):
    path = write(tmp_path, "p.jsonl", f'{{"prompt": "ok"}}\n\n{line}\n')
    with pytest.raises(ValueError, match="line 3") as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"{path} line 3: {said}")
    assert len(str(caught.value)) < 300 + len(str(path))


@pytest.mark.parametrize(("name", "content"), [("p.txt", "\ufeff"), ("p.jsonl", "\n \n")])
def test_a_file_without_prompts_is_refused(tmp_path, name, content):
    path = write(tmp_path, name, content)
    with pytest.raises(ValueError, match=rf"{path} has no prompts"):
        read_prompts(path)


def test_bytes_that_are_not_utf8_are_refused_with_their_line(tmp_path):
    with pytest.raises(ValueError, match="line 2: not UTF-8"):
        read_prompts(write(tmp_path, "p.txt", "a cat\na caf\u00e9\n".encode("latin-1")))


@pytest.mark.parametrize(
    ("name", "said"), [("no.txt", "does not exist. Use a"), ("p.tsv", ".txt"), ("p.csv", "Did you mean .*p.tsv")]
)
def test_a_missing_or_foreign_file_is_refused(tmp_path, name, said):
    (tmp_path / "p.tsv").touch()
    with pytest.raises(ValueError, match=said):
        read_prompts(tmp_path / name)
