"""Completion in a shell: the command as the shell's function calls it, and a real bash that presses Tab."""

import os
import shutil
import subprocess
import sys

import pytest

from lit_vgrpo.cli.main import main
from lit_vgrpo.cli.subcommands import SUBCOMMANDS


def completed(line, folder):
    """What the command completes a line with, and the names of the modules that it imports for that."""
    env = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_COMP_WORDBREAKS": " =",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(folder / "out"),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    code = "import sys; sys.argv[0] = 'lightning'; from lit_vgrpo.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], env=env, cwd=folder, capture_output=True, text=True
    )
    modules = {row.rpartition("|")[2].strip() for row in done.stderr.splitlines()}
    return [text.strip() for text in (folder / "out").read_text().split("\n")], modules


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lightning ex", {"export"}),
        ("lightning help ex", {"export"}),
        ("lightning run tiny_sh", {"tiny_shapes", "tiny_shapes_pretrain"}),
        ("lightning run tiny_shapes --res", {"--resume"}),
        ("lightning run tiny_shapes model.objective.kl", {"model.objective.kl_weight=", "model.objective.kl_to="}),
        ("lightning check tiny_shapes data.prompts_per", {"data.prompts_per_iteration="}),
        ("lightning run tiny_shapes model.objective=Diff", {"DiffusionNFT"}),
        (
            "lightning run tiny_shapes model.objective=AWM model.objective.ema_d",
            {
                "model.objective.ema_decay_max=",
                "model.objective.ema_decay_rate=",
            },
        ),
        ("lightning run tiny_shapes model.objective=AWM model.objective.num_mc", {""}),
        ("lightning run tiny_shapes model.policy.lora_r", {"model.policy.lora_rank="}),
        ("lightning eval ru", {"runs/one", "runs/two", "runs/"}),
        ("lightning export runs/one --me", {"--merge"}),
        ("lightning score Pick", {"PickScore"}),
    ],
)
def test_the_line_is_completed_without_large_imports(line, expected, tmp_path):
    for name in ("one", "two"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_text("name: x\n")
    found, modules = completed(line, tmp_path)
    assert set(found) == expected
    assert "argcomplete" in modules
    assert not modules & {"torch", "omegaconf", "lightning", "rich"}


@pytest.mark.slow
def test_every_subcommand_is_completed(tmp_path):
    assert {*SUBCOMMANDS, "help"} <= set(completed("lightning ", tmp_path)[0])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_printed_code_works_in_bash(capsys, tmp_path):
    assert main(["--print-completion", "bash"]) == 0
    (tmp_path / "code.sh").write_text(capsys.readouterr().out)
    line = "lightning rec"
    script = f"source code.sh; COMP_LINE='{line}' COMP_POINT={len(line)} COMP_TYPE=9 COMP_WORDS=({line}) COMP_CWORD=1"
    script += "; export COMP_LINE COMP_POINT COMP_TYPE; _python_argcomplete lightning; echo ${COMPREPLY[@]}"
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "recipes"


def test_an_unknown_shell_is_refused(capsys):
    assert main(["--print-completion", "tcsh"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "tcsh is not a shell with completion. Use --print-completion bash or zsh or fish or powershell.\n"
