"""The table of progress on real terminals of several widths, and without one."""

import os
import re
import struct
import sys
import threading
from contextlib import contextmanager

import lightning as L
import pyte
import pytest
from helpers import make_data, make_module, make_trainer

from lit_vgrpo.callbacks import ProgressBar
from lit_vgrpo.system.process import say_from_handler

fcntl = pytest.importorskip("fcntl", reason="needs a Unix terminal")
pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
LINES = ["iteration 1/3", "iteration 2/3", "iteration 3/3"]
TITLES = ["iteration", "reward", "held-out", "images/s", "s/iteration"]
ROW = r" *{} +0\.\d{{3}} +0\.\d{{3}} +[\d.]+ +[\d.]+"


class Stop(L.Callback):
    """Ctrl-C in the second iteration, with a line on each stream before it."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.current_epoch == 1:
            print("a line on stderr", file=sys.stderr)
            say_from_handler("\na line of a handler\n")
            raise KeyboardInterrupt


def train(folder, tmp_path, *callbacks, **options):
    trainer = make_trainer(tmp_path, 3, [ProgressBar(**options), *callbacks], enable_progress_bar=True)
    trainer.fit(make_module(folder), datamodule=make_data())


@contextmanager
def terminal(columns, monkeypatch):
    """A terminal so wide as stderr, and the text that it was sent; zero does not know its size."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40 if columns else 0, columns, 0, 0))
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
        monkeypatch.setenv("TERM", "xterm-256color")
        yield sent
        monkeypatch.undo()
    reader.join()
    os.close(outer)


def screen_of(sent, columns):
    screen = pyte.Screen(columns, 40)
    pyte.ByteStream(screen).feed(bytes(sent))
    return screen, [line.rstrip() for line in screen.display if line.strip()]


def test_without_a_terminal_it_prints_lines(tiny_sd3, tmp_path, capsys):
    train(tiny_sd3, tmp_path, lines=3)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("iteration")]
    assert [line.split(",")[0] for line in lines] == LINES
    rest = r"iteration \d/3, reward 0\.\d{3}, held-out 0\.\d{3}, [\d.]+ images/s, [\d.]+ s/iteration(, \d+:\d\d left)?"
    assert all(re.fullmatch(rest, line) for line in lines)
    assert ["left" in line for line in lines] == [True, True, False]


def test_the_table_fits_into_a_narrow_terminal(tiny_sd3, tmp_path, monkeypatch):
    with terminal(60, monkeypatch) as sent:
        train(tiny_sd3, tmp_path)
    screen, lines = screen_of(sent, 60)
    assert max(map(len, lines)) <= 58  # a terminal's ^C still fits into the line
    assert lines[0].split() == TITLES
    assert re.fullmatch(r" *0 +0\.\d{3}", lines[2])  # before training there is no reward
    assert [bool(re.fullmatch(ROW.format(n), lines[2 + n])) for n in (1, 2, 3)] == [True] * 3
    assert re.fullmatch(r"3/3 +━+ +\d+:\d\d < 0:00 +update", lines[-1])
    assert not screen.cursor.hidden


def test_after_ctrl_c_the_last_table_and_every_line_stay(tiny_sd3, tmp_path, monkeypatch):
    with terminal(80, monkeypatch) as sent, pytest.raises(SystemExit):
        train(tiny_sd3, tmp_path, Stop())
    screen, lines = screen_of(sent, 80)
    table = next(n for n, line in enumerate(lines) if line.split() == TITLES)
    assert lines[:table] == ["a line on stderr", "a line of a handler"]
    assert re.match(r"2/3 +━+", lines[-1])
    assert not screen.cursor.hidden


def test_on_a_terminal_that_does_not_know_its_size_it_prints_lines(tiny_sd3, tmp_path, monkeypatch):
    """As a container and a recorder of terminals often give it; a table would not be seen at all."""
    with terminal(0, monkeypatch) as sent:
        train(tiny_sd3, tmp_path, lines=3)
    lines = sent.decode().splitlines()
    assert [line.split(",")[0] for line in lines if line.startswith("iteration")] == LINES
