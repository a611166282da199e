"""Options of a subcommand, declared as the fields of a dataclass."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from lit_vgrpo.config.arguments import SEVERAL, Options, flag, is_override, option, read_path, whole
from lit_vgrpo.errors import UserError


@dataclass(kw_only=True)
class Drawing(Options):
    subcommand: ClassVar[str] = "draw"
    refused: ClassVar[dict[str, str]] = {"run_dir": "has no effect here. Use --out."}

    batch_size: int = whole(4, most=8)
    colours: list[str] = option(SEVERAL, name="colour")
    out: Path = option(Path("here"), read_path)
    fast: bool = flag()

    def __post_init__(self):
        if not self.words:
            raise UserError("No recipe given.")


def test_every_form_of_an_option():
    drawing = Drawing.parse(
        ["tiny", "--batch_size", "2", "--colour=--red", "--colour", "a=b", "--fast", "--a.b", "-1", "--c.d+=x", "e=1"]
    )
    assert (drawing.batch_size, drawing.colours, drawing.fast) == (2, ["--red", "a=b"], True)
    assert drawing.words == ["tiny", "a.b=-1", "c.d+=x", "e=1"]
    assert drawing.out == Path("here")
    assert [drawing.has(name) for name in ("fast", "colour", "out")] == [True, True, False]


def test_every_error_is_said_at_once():
    with pytest.raises(UserError) as caught:
        Drawing.parse(["--batch-size", "many", "--out=a", "--out=b", "run_dir=x"])
    assert caught.value.errors == [
        "run_dir has no effect here. Use --out.",
        "--batch-size many is not a whole number. Use an integer such as 4.",
        "--out is given twice. Give it once; separate several values by commas if it accepts them.",
    ]
    with pytest.raises(UserError) as caught:
        Drawing.parse(["--batch-size=0"])
    assert caught.value.errors == ["--batch-size 0 is too small. Use 1 or more.", "No recipe given."]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--batch-siz", "2"], "--batch-siz is not an option of draw. Did you mean batch-size?"),
        (["--batch-size=9"], "--batch-size 9 is too large. Use 8 or less."),
        (["--out"], "--out has no value. Write --out VALUE."),
        (["--a.b"], "--a.b has no value. Write a.b=VALUE."),
        (["--fast=yes"], "--fast takes no value. Write --fast."),
        (["--run_dir", "x"], "--run_dir has no effect here. Use --out."),
    ],
)
def test_a_mistake_is_one_line(words, line):
    with pytest.raises(UserError) as caught:
        Drawing.parse(["tiny", *words])
    assert caught.value.errors == [line]


@pytest.mark.parametrize("word", ["=5", "runs/lr=1/config.yaml", "tiny"])
def test_what_is_no_override(word):
    assert not is_override(word)
