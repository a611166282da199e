"""The progress bars on a real terminal, and the lines without one."""

import os
import re
import sys
import threading
from contextlib import contextmanager

import lightning as L
import pytest
from commands import evaluate, run, sample_images
from helpers import fit

from lit_vgrpo.callbacks import ProgressBar, progress
from lit_vgrpo.system import process

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
    with open(inner, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        yield sent
    reader.join()
    os.close(outer)


def test_without_a_terminal_it_prints_lines(tiny_sd3, tmp_path, capsys):
    fit(tiny_sd3, tmp_path, [ProgressBar(lines=3)], trainer=WITH_BAR)
    err = capsys.readouterr().err
    assert "\r" not in err
    assert "Loading" not in err
    lines = [line for line in err.splitlines() if line.startswith("iteration")]
    rest = r"iteration {}/3, reward 0\.\d{{3}}, images/s (?:\d\.\d\d|\d{{2,}}\.\d), held-out 0\.\d{{3}}{}"
    assert len(lines) == 3
    for number, line in enumerate(lines, start=1):
        assert re.fullmatch(rest.format(number, r", \d+:\d\d left" if number < 3 else ""), line)


@pytest.mark.slow
def test_on_a_terminal_every_wait_has_a_bar_with_a_word(tiny_recipe, tiny_sd3, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "DELAY_S", 0)
    process.shows_bars.set(False)  # as a Trainer without ProgressBar leaves it
    loaded = [f"Loading {part}" for part in ("text_encoder 0/4", "text_encoder_2 1/4", "transformer 2/4", "vae 3/4")]
    work = ["Encoding prompts 0/2", "Sampling 0/2"]
    recipe = "Reading the recipe 0/1"
    start = [recipe, "Checking the recipe 0/1", *loaded, "Evaluating 0/2", *work, "Drawing samples 0/1"]
    training = ["iteration 0/2", "Writing the report 0/1", "Rollout 0/4", "Updating 0/2"]
    first = [*start, *training, "iteration 2/2", "Exporting the weights 0/1"]
    ends = r"iteration 2/2 \|█+\| \d\d:\d\d<00:00, reward=-?[\d.]+, images/s=[\d.]+, held-out=-?[\d.]+\s*$"
    for command, words, bars in (
        (run, [str(tiny_recipe), "trainer.callbacks=[SampleGrid,Export]"], first),
        (evaluate, ["runs/tiny"], [recipe, *loaded, "Evaluating trained 0/2", *work]),
        (sample_images, ["runs/tiny", "--prompt", "a circle"], [*loaded, "Images 0/1", "Encoding prompts 0/1"]),
    ):
        with terminal(monkeypatch) as sent:
            assert command(words) == 0
        assert [*dict.fromkeys(re.findall("|".join(bars), sent.decode()))] == bars
        if command is run:
            assert re.search(ends, sent.decode(), re.MULTILINE)
    with terminal(monkeypatch) as sent:
        fit(tiny_sd3, tmp_path, trainer={"enable_progress_bar": False})
    assert sent == b""


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_run_that_ends_early_shows_no_time_left(tiny_sd3, tmp_path, monkeypatch, is_asked):
    class Stops(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.should_stop = trainer.current_epoch == 1
            if is_asked:
                monkeypatch.setattr(progress, "is_stop_requested", lambda: True)

    with terminal(monkeypatch) as sent:
        fit(tiny_sd3, tmp_path, [Stops(), ProgressBar()], iterations=4, trainer=WITH_BAR)
    last = {done: line for line, done in re.findall(r"(iteration (\d)/4 [^\r\n]*)", sent.decode())}
    assert [bool(re.search(r"\d\d:\d\d<", last[done])) for done in "12"] == [not is_asked, False]
