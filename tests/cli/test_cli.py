"""The command before anything heavy is imported."""

import errno
import os
import subprocess
import sys

import pytest
from commands import COMMANDS
from saved_runs import assert_one_line

from lit_vgrpo import __version__
from lit_vgrpo.cli.main import main
from lit_vgrpo.errors import RewardError


def test_the_list_of_commands(capsys):
    shown = []
    for args in ([], ["help"], ["--help"]):
        assert main(args) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2]
    assert all(f" {word} " in shown[0] for word in (*COMMANDS, "Start", "Train", "Look", "Share"))
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lit-vgrpo {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    assert main(["help", name]) == 0
    out = capsys.readouterr().out
    assert f"Usage: lightning {name}" in out
    assert main([name, "--help"]) == 0
    assert capsys.readouterr().out == out


OVERRIDE = "Overrides are written key=value: trainer.max_epochs=3\n"


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["rum"], "No such command 'rum'. Did you mean 'run'?"),
        (["run"], "Missing argument 'recipe'. Shipped recipe, file, or folder with a recipe. Try: "),
        (["report"], "Missing argument 'runs'. Run folders, such as runs/tiny_shapes, or a folder of runs. Try: light"),
        (["run", "tiny_shapes", "--trainer.max_epochs=3"], f"No such option: --trainer.max_epochs. {OVERRIDE}"),
        (["run", "tiny_shapes", "--max-epochs", "3"], f"No such option: --max-epochs. {OVERRIDE}"),
        (["run", "tiny_shapes", "--zzz", "3"], "No such option: --zzz. Overrides are written key=value.\n"),
        (["run", "tiny_shapes", "--resum"], "No such option: --resum (Possible options: --resume). Overrides"),
        (["sample", "x", "--count", "0"], "--count: Use 1 or more."),
        (["sample", "x", "--steps", "x"], "--steps: Use an integer."),
        (["sample", "x", "--format", "gif"], "--format: 'gif' is not one of 'webp', 'mp4'."),
        (["vote", "x", "--token-env", "NO_SUCH_NAME"], "NO_SUCH_NAME is not set in the environment."),
        (["run", "tiny_shape"], "tiny_shape is not a recipe: no such file, and not a shipped name. Did you mean tiny_"),
        (["run", __file__], f"{__file__} is not a recipe: its name does not end with .yaml or .yml."),
        (["init", "..."], "'...' cannot name a run."),
    ],
)
def test_an_error_is_one_line(args, line, capsys, monkeypatch):
    monkeypatch.delenv("NO_SUCH_NAME", raising=False)
    assert_one_line(main, args, capsys, line, starts=True)


def test_a_rank_that_is_no_number_is_named_and_debug_shows_the_traceback(capsys, monkeypatch):
    assert main(["run", "tiny_shape", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "abc")
    assert main(["recipes"]) == 2
    assert capsys.readouterr().err == "LOCAL_RANK=abc in the environment is not a whole number. Run: unset LOCAL_RANK\n"


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (KeyboardInterrupt(), 130, "Stopped."),
        (RewardError("no score"), 1, "no score"),
        (OSError(errno.ENOSPC, "No space left", "x.png"), 1, "Cannot write x.png: No space left. Free some space"),
        (ValueError("bad"), 2, "bad (--debug shows the traceback)"),
    ],
)
def test_exit_codes(error, status, line, monkeypatch, capsys):
    def fail(*words):
        raise error

    monkeypatch.setattr("lit_vgrpo.cli.init.write_starter", fail)
    assert main(["init", "x"]) == status
    assert capsys.readouterr().err.startswith(line)


def test_help_and_a_mistyped_name_import_nothing_heavy():
    code = """
import sys, tempfile
from pathlib import Path
from lit_vgrpo.cli.main import main
main(["run", "--help"])
refused = ["run tiny_shape", "check tiny_shape", "check-reward tiny_shape", "check tiny_shapes --memory big"]
sys.modules["wandb"] = None  # as if it were not installed
refused += ["run tiny_shapes trainer.logger=wandb", "recipes --gpu big", "report no_run", "eval no_run"]
refused += ["export no_run --to x", "sample no_run"]
run = tempfile.mkdtemp()
Path(run, "config.yaml").touch()
refused += [f"export {run} --to {run}", "check-reward tiny_shapes --images no_folder"]
recipe = Path(run, "recipe.yaml")
recipe.write_text("model: [")
refused += [f"{words} {recipe}" for words in ("run", "run tiny_shapes", "check", "check-reward", "vote", "compare")]
assert [main(line.split()) for line in refused] == [2] * len(refused)
sys.exit(str({"torch", "lightning", "diffusers", "transformers", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "set()"


def test_recipes_and_commands_are_completed():
    words = {"COMP_WORDS": "lightning run tiny_sh", "COMP_CWORD": "2"}
    env = {**os.environ, "_LIGHTNING_COMPLETE": "complete_bash", **words}
    code = "import sys; sys.argv = ['lightning']; from lit_vgrpo.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.split() == ["tiny_shapes", "tiny_shapes_pretrain"]


def test_argv_and_a_warning_are_a_line():
    code = """
import sys, warnings
from lit_vgrpo.cli.main import main
status = main()
warnings.warn("two\\n lines")
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", code, "train"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "No such command 'train'.\nWarning: two lines\n"


@pytest.mark.slow
@pytest.mark.parametrize("redirect", ["2>&1 | true", ">&-"])  # read by nobody
@pytest.mark.skipif(not os.path.exists("/bin/bash"), reason="needs a shell")
def test_output_that_nobody_reads_is_no_error(redirect):
    # Slow enough for the reader to have left.
    slow = f"{sys.executable} -c 'import time; time.sleep(.3); import sys; from lit_vgrpo.cli.main import main; "
    script = f'{slow}sys.argv[1:] = ["--help"]; sys.exit(main())\' {redirect}; echo status ${{PIPESTATUS[0]}} >&2'
    done = subprocess.run(["/bin/bash", "-c", script], capture_output=True, text=True)
    assert done.stderr == "status 0\n"
