"""Contents of an installed package."""

import re
import sys
import tomllib
from importlib import import_module, metadata
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]


def test_both_commands_are_ours():
    scripts = metadata.entry_points(group="console_scripts")
    assert {one.name for one in scripts if one.value == "lit_vgrpo.cli.main:main"} == {"lightning", "lit-vgrpo"}


def test_callbacks_are_not_a_global_package():
    module = import_module("lit_vgrpo.callbacks")
    assert Path(str(module.__file__)).parent.name == "callbacks"
    assert module.__name__ == "lit_vgrpo.callbacks"
    assert "callbacks" not in sys.modules


def test_every_package_folder_is_listed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {".".join(path.relative_to(ROOT).parent.parts) for path in (ROOT / "lit_vgrpo").rglob("__init__.py")}
    assert folders | {"lit_vgrpo.callbacks", "lit_vgrpo.recipes"} == set(settings["packages"])


def test_constraints_name_every_dependency_that_has_a_version():
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    wanted = {re.split(r"[;\[><]", text)[0].strip() for text in metadata.requires("lit-vgrpo") or []}
    assert wanted - {"lit-vgrpo", "wandb"} <= pinned


@pytest.mark.parametrize("file", sorted(path.name for path in (ROOT / "deploy").iterdir() if path.is_file()))
def test_a_deployment_says_that_it_has_not_been_run(file):
    text = (ROOT / "deploy" / file).read_text()
    assert "Not run" in text.partition("\n\n")[0]
    if file == "ray_train.py":
        compile(text, file, "exec")
    else:  # the same command everywhere, under the name that no other package installs
        assert "lit-vgrpo" in text
        assert "--resume" in text
    if file.endswith(".yaml"):
        assert yaml.safe_load(text)["run"].startswith(".venv/bin/lit-vgrpo run")
