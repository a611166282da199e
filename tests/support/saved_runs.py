"""Finished runs in a folder, for the tests of what reads them, and what those tests have in common."""

from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import run


@contextmanager
def folder_with(folder, recipe, checkpoint, prompts):
    """A folder as the working directory, with the recipe as tiny.yaml, in which CHECKPOINT is replaced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("train.txt").write_text("\n".join(prompts))
        Path("tiny.yaml").write_text(recipe.replace("CHECKPOINT", str(checkpoint)))
        yield


def train(*words):
    assert run(["tiny.yaml", *words]) == 0


def assert_one_line(command, words, capsys, line):
    """The command refuses its words with one line that holds ``line``, and prints nothing else."""
    assert command(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert line in err
    assert err.count("\n") == 1, err
