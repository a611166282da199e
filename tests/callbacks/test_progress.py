"""The progress bar on real terminals of several widths, and without one."""

import os
import re
import struct
import sys

import pytest
from helpers import make_data, make_module, make_trainer

from lit_vgrpo.callbacks import ProgressBar

fcntl = pytest.importorskip("fcntl", reason="needs a Unix terminal")
pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
LINES = ["iteration 1/3", "iteration 2/3", "iteration 3/3"]


def train(folder, tmp_path, **options):
    trainer = make_trainer(tmp_path, 3, [ProgressBar(**options)], enable_progress_bar=True)
    trainer.fit(make_module(folder), datamodule=make_data())


def shown_on_a_terminal(columns, folder, tmp_path, monkeypatch):
    """What a run of three iterations writes to a terminal so wide."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40 if columns else 0, columns, 0, 0))
    with open(inner, "w") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        train(folder, tmp_path, lines=3)
        monkeypatch.undo()
    text = b""
    try:
        while part := os.read(outer, 65536):
            text += part
    except OSError:  # how the end of a terminal reads on Linux
        pass
    os.close(outer)
    return text.decode()


def test_without_a_terminal_it_prints_lines(tiny_sd3, tmp_path, capsys):
    train(tiny_sd3, tmp_path, lines=3)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("iteration")]
    assert [line.split(",")[0] for line in lines] == LINES
    assert all("reward 0." in line and "held-out 0." in line for line in lines)


@pytest.mark.parametrize(
    ("columns", "last"),
    [
        (100, r"iteration 3/3, reward 0\.\d{3}, held-out 0\.\d{3}, step 2/2 \d\d:\d\d<00:00 100%\|.+\|"),
        (60, r"3/3, reward 0\.\d{3}, held-out 0\.\d{3} \d\d:\d\d<00:00 100%\|.+\|"),
    ],
)
def test_the_time_that_is_left_stands_in_the_line_at_any_width(columns, last, tiny_sd3, tmp_path, monkeypatch):
    text = shown_on_a_terminal(columns, tiny_sd3, tmp_path, monkeypatch)
    frames = [frame.strip() for frame in re.split(r"[\r\n]", text) if frame.strip()]
    assert re.fullmatch(last, frames[-1])
    assert max(map(len, frames)) <= columns


def test_on_a_terminal_that_does_not_know_its_size_it_prints_lines(tiny_sd3, tmp_path, monkeypatch):
    """As a container and a recorder of terminals often give it; a bar would not be seen at all."""
    lines = shown_on_a_terminal(0, tiny_sd3, tmp_path, monkeypatch).splitlines()
    assert [line.split(",")[0] for line in lines if line.startswith("iteration")] == LINES
