"""Errors in one line each, and text that a terminal would obey."""

import ast
from pathlib import Path

import pytest

import lit_vgrpo
from lit_vgrpo import callbacks
from lit_vgrpo.errors import UserError, nearest, one_line, printable, report, say, suggestion, without_controls, wrapped

PRINT_THEMSELVES = ("errors.py", "cli/commands.py", "policies/verify.py")
"""Files that make text safe or print no text of others."""


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("max_epoch", "max_epochs"),
        ("SD3Polcy", "SD3Policy"),
        ("sd3policy", "SD3Policy"),
        ("unet", "UNetPolicy"),
        ("zzz", None),
        ("lst.ckpt", "last.ckpt"),
        ("nope.ckpt", None),
        ("notfn", None),
        ("OcrReward", "OCRReward"),
        ("NoSuchReward", None),
        ("PixArtPolicy", None),
    ],
)
def test_nearest(word, expected):
    known = ["max_epochs", "SD3Policy", "UNetPolicy", "best.ckpt", "last.ckpt", "nothing", "OCRReward"]
    assert nearest(word, known) == expected


def test_suggestion_lists_only_so_many():
    names = [f"option_number_{n}" for n in range(40)]
    text = suggestion("zz", names)
    assert text.startswith("Use one of: option_number_0, ")
    assert text.endswith("option_number_4, ... There are 40.")
    assert suggestion("x", []) == "It takes no options."


@pytest.mark.parametrize(
    "hostile",
    [
        "\x1b[2J\x1b]0;title\x07",  # clears the screen, sets the window's title
        "\x9b31m",  # the same in one letter
        "\r\x08over",
        "\u202egnp.exe",  # shown backwards
        "\u2066\u200b\ufeff",
        "\ud800",
        "\x00\x7f\x85",
    ],
)
def test_what_a_terminal_would_obey_is_shown_as_a_question_mark(capsys, hostile):
    report([f"before {hostile}\n after"])
    say(f"before {hostile} after\n\tsecond")
    out, err = capsys.readouterr()
    assert err.strip().isprintable()  # nor a second line
    assert err.endswith(" after\n")
    assert all(letter.isprintable() or letter in "\n\t" for letter in out)
    assert out.endswith(" after\n\tsecond\n")
    assert all(line.isprintable() for line in UserError(f"{hostile}\n after", hostile).errors)
    assert printable(hostile.encode(errors="replace"), 50).isprintable()


PERSIAN, EMOJI = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "\U0001f469\u200d\U0001f4bb"


@pytest.mark.parametrize("text", ["Größe, 猫, 20 €", PERSIAN, EMOJI])
def test_what_people_write_stays(text):
    assert one_line(text) == without_controls(text) == text


def test_all_that_is_printed_goes_through_one_place():
    """``print`` beside it would let a server's or a file's text take over the terminal."""
    for package in (lit_vgrpo, callbacks):
        root = Path(package.__file__).parent
        for file in root.rglob("*.py"):
            name = file.relative_to(root).as_posix()
            if name in PRINT_THEMSELVES or name.startswith("tiny/"):
                continue
            calls = [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
            prints = [call.lineno for call in calls if isinstance(call, ast.Name) and call.id == "print"]
            assert not prints, f"{file}:{prints[0]}: use lit_vgrpo.errors.say"


def test_a_paragraph_is_wrapped_on_a_terminal_only(monkeypatch):
    text = "rose by 0.5 [0.25, 0.75]"
    assert wrapped(text, 20) == text
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert wrapped(text, 20) == "rose by 0.5\n  [0.25, 0.75]"
