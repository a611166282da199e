import csv
import io
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lit_vgrpo.data import PromptError, PromptSource
from lit_vgrpo.data.text_files import IndexedRows, read_text

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=9)
PROMPT = TEXT.filter(str.strip)
LINE = st.one_of(PROMPT.filter(lambda text: "\n" not in text), st.sampled_from(["", " ", "\t\r", "\u00a0", "\u2003"]))
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def both_ways(path, kind, limit=None):
    source = PromptSource(str(path), limit=limit)
    whole, indexed = read_text(source, kind), IndexedRows(source, kind)
    assert list(indexed) == whole
    assert [indexed[i] for i in reversed(range(len(indexed)))] == whole[::-1]
    return whole


@quick
@given(st.lists(LINE, min_size=1, max_size=8), st.booleans())
def test_an_index_of_a_txt_finds_the_same_rows(tmp_path, lines, bom):
    path = tmp_path / "p.txt"
    path.write_bytes(("\ufeff" * bom + "\n".join(["first", *lines])).encode())
    rows = both_ways(path, "txt")
    assert [row["prompt"] for row in rows] == [line.strip() for line in ["first", *lines] if line.strip()]
    both_ways(path, "txt", limit=1)


@quick
@given(st.lists(PROMPT, min_size=1, max_size=6))
def test_an_index_of_a_jsonl_finds_the_same_rows(tmp_path, prompts):
    path = tmp_path / "p.jsonl"
    path.write_bytes("\n\n".join(json.dumps({"prompt": text, "n": 1}, ensure_ascii=False) for text in prompts).encode())
    assert both_ways(path, "jsonl") == [{"prompt": text, "n": 1} for text in prompts]


@quick
@given(st.lists(st.tuples(PROMPT, TEXT), min_size=1, max_size=6), st.sampled_from(["\n", "\r\n"]))
def test_an_index_of_a_csv_finds_the_same_rows(tmp_path, cells, line_end):
    text = io.StringIO()
    # the writer knows only its own line end as one that needs quotes
    quoting = csv.QUOTE_MINIMAL if line_end == "\r\n" else csv.QUOTE_ALL
    csv.writer(text, lineterminator=line_end, quoting=quoting).writerows([("prompt", "tag"), *cells])
    path = tmp_path / "p.csv"
    path.write_bytes(text.getvalue().encode())
    rows = both_ways(path, "csv")
    assert rows == [{"prompt": a, **({"tag": b} if b.strip() else {})} for a, b in cells]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": 7}\n{"prompt": "b"}\n', 'line 3: "prompt" is a number.'),
        ("p.csv", 'prompt,tag\n"a\nb",c\nd\ne,f\n', "line 4: 1 cells where the header has 2."),
    ],
)
def test_a_wrong_row_is_named_when_it_comes(write, name, content, said):
    path = write(name, content)
    rows = IndexedRows(PromptSource(str(path)), path.suffix[1:])
    assert [len(rows), len(rows[0]["prompt"]), len(rows[2]["prompt"])] == [3, 1 if name == "p.jsonl" else 3, 1]
    for _ in range(2):
        with pytest.raises(PromptError) as caught:
            rows[1]
        assert str(caught.value).startswith(f"{path} {said}")


def test_an_index_takes_eight_bytes_a_row_and_notices_a_shorter_file(write):
    path = write("p.txt", "a\nb\nc\n")
    rows = IndexedRows(PromptSource(str(path)), "txt")
    assert rows.offsets.nbytes == 24
    path.write_text("a\n")
    with pytest.raises(PromptError, match="has become shorter"):
        rows[2]


def test_an_endless_cell_does_not_swallow_the_file(write, monkeypatch):
    monkeypatch.setattr("lit_vgrpo.data.text_files.LONGEST_CELL", 1000)
    path = write("p.csv", 'prompt\n"never closed\n' + "line\n" * 1000)
    with pytest.raises(PromptError, match=r"line 2: not csv \(field larger than field limit \(1000\)\)"):
        read_text(PromptSource(str(path)), "csv")
    assert csv.field_size_limit() == 131072
