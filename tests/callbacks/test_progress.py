"""The progress bar on a real terminal, and the lines without one."""

import os
import re
import sys
import threading
from contextlib import contextmanager

import pytest
from helpers import fit

from lit_vgrpo.callbacks import ProgressBar

pty = pytest.importorskip("pty", reason="needs a Unix terminal")


WITH_BAR = {"enable_progress_bar": True}


@contextmanager
def terminal(monkeypatch):
    """A terminal as stderr, and the text that it was sent."""
    outer, inner = pty.openpty()
    sent = bytearray()

    def read():
        try:
            while part := os.read(outer, 65536):
                sent.extend(part)
        except OSError:  # how the end of a terminal reads on Linux
            pass

    reader = threading.Thread(target=read)
    reader.start()
    with open(inner, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        yield sent
        monkeypatch.undo()
    reader.join()
    os.close(outer)


def test_without_a_terminal_it_prints_lines(tiny_sd3, tmp_path, capsys):
    fit(tiny_sd3, tmp_path, [ProgressBar(lines=3)], trainer=WITH_BAR)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("iteration")]
    rest = r"iteration {}/3, reward 0\.\d{{3}}, images/s [\d.]+, held-out 0\.\d{{3}}{}"
    assert len(lines) == 3
    for number, line in enumerate(lines, start=1):
        assert re.fullmatch(rest.format(number, r", \d+:\d\d left" if number < 3 else ""), line)


@pytest.mark.slow
def test_on_a_terminal_it_is_a_bar(tiny_sd3, tmp_path, monkeypatch):
    with terminal(monkeypatch) as sent:
        fit(tiny_sd3, tmp_path, [ProgressBar()], trainer=WITH_BAR)
    ends = r"3/3 \|█+\| \d\d:\d\d<00:00, reward=0\.\d{3}, images/s=[\d.]+, held-out=0\.\d{3}\s*$"
    assert re.search(ends, sent.decode())
