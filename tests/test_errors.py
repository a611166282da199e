"""One line a mistake."""

from argparse import ArgumentError

import pytest

from lit_vgrpo.errors import UserError, from_parser, nearest, report, suggestion, unknown_option, with_key


def test_user_error_keeps_each_fault_on_one_line():
    assert UserError("first\n  fault", "second").faults == ["first fault", "second"]


@pytest.mark.parametrize(
    ("word", "expected"),
    [("max_epoch", "max_epochs"), ("SD3Polcy", "SD3Policy"), ("sd3policy", "SD3Policy"), ("zzz", None)],
)
def test_nearest(word, expected):
    assert nearest(word, ["max_epochs", "SD3Policy", "UNetPolicy"]) == expected


def test_suggestion_lists_only_so_many():
    names = [f"option_number_{n}" for n in range(40)]
    text = suggestion("zz", names)
    assert text.startswith("Use one of: option_number_0, ")
    assert text.endswith("option_number_11, ...")
    assert suggestion("x", []) == "It takes no options."


def test_unknown_option_is_the_line_of_the_style_guide():
    line = unknown_option("model.objective.num_mc_sample", "VGRPO", ["num_mc_samples"])
    assert line == "model.objective.num_mc_sample is not an option of VGRPO. Did you mean num_mc_samples?"


@pytest.mark.parametrize(
    ("key", "message", "expected"),
    [
        ("data", "group_size=1 is too small.", "data.group_size=1 is too small."),
        ("model.objective.rollout", "rollout.steps=0 is none.", "model.objective.rollout.steps=0 is none."),
        ("model.optimizer", "model.optimizer.lr=-1 is none.", "model.optimizer.lr=-1 is none."),
        ("model.reward", "there is no file", "model.reward: there is no file"),
    ],
)
def test_a_constructor_message_gets_its_key_once(key, message, expected):
    assert with_key(key, ["group_size", "steps", "lr"], message) == expected


def test_from_parser_tells_the_innermost_cause():
    error = ValueError("Problem with given class_path 'lightning.pytorch.loggers.WandbLogger':\n  ...")
    error.__cause__ = ModuleNotFoundError("Requirement 'wandb' not met. Try pip install wandb")
    assert from_parser(error) == "WandbLogger: Requirement 'wandb' not met. Try pip install wandb."
    assert from_parser(ArgumentError(None, "broken\nGiven value: x")) == "broken."


def test_report_goes_to_stderr(capsys):
    report(["a\nb", "c"])
    out, err = capsys.readouterr()
    assert (out, err) == ("", "a b\nc\n")
