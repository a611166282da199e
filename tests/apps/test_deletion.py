"""An app can be deleted with its folder and its tests."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import COMMANDS

import lit_vgrpo

PACKAGE = Path(lit_vgrpo.__file__).parent
APPS = sorted(path.parent.name for path in PACKAGE.glob("apps/*/__init__.py"))
HELP = "from lit_vgrpo.cli.main import main; import sys; sys.exit(main(['--help']))"
REST = "import lit_vgrpo.launch.build, lit_vgrpo.callbacks, lit_vgrpo.report.model_card"
REST += "".join(f", lit_vgrpo.cli.{name}" for name in ("check", "check_reward", "eval", "export", "sample", "score"))


def run_without(apps, code, folder):
    """Run code with a copy of the package that lacks some apps."""
    ignored = shutil.ignore_patterns("__pycache__")
    copy = shutil.copytree(PACKAGE, folder / "lit_vgrpo", ignore=ignored)  # callbacks/ too, which is a link
    for app in apps:
        shutil.rmtree(copy / "apps" / app)
    code = f"import lit_vgrpo; assert lit_vgrpo.__file__.startswith({str(folder)!r}); {code}"
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=folder)


@pytest.mark.parametrize("app", APPS)
def test_the_command_works_without_an_app(app, tmp_path):
    done = run_without([app], HELP, tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in COMMANDS)


def test_training_needs_no_app(tmp_path):
    assert len(APPS) >= 7
    done = run_without(APPS, REST, tmp_path)
    assert done.returncode == 0, done.stderr
