"""Contents of an installed package."""

import ast
import inspect
import re
import runpy
import sys
import tomllib
from importlib import import_module, metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_both_commands_are_ours():
    scripts = metadata.entry_points(group="console_scripts")
    assert {one.name for one in scripts if one.value == "lit_vgrpo.cli.main:main"} == {"lightning", "lit-vgrpo"}


def test_completion_shows_the_public_names():
    assert dir(import_module("lit_vgrpo")) == sorted(import_module("lit_vgrpo").__all__)


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


DEPLOY = ROOT / "deploy"
RUN_HERE = {"slurm.sh", "ray_train.py"}
"""Deployments whose tests run them; the others need a cloud."""


@pytest.mark.parametrize("file", sorted(path.name for path in DEPLOY.iterdir() if path.is_file()))
def test_a_deployment_says_if_it_has_not_been_run_and_continues_the_commands_run(file):
    text = (DEPLOY / file).read_text()
    head = text.removeprefix("#!/usr/bin/env bash\n").partition("\n")[0]
    assert ("Not run" in head) == (file not in RUN_HERE)
    assert "--resume" in text
    assert "lit-vgrpo" in text  # the name that no other package installs


def test_skypilot_reads_its_deployment():
    sky = pytest.importorskip("sky", minversion="0.10", reason="SkyPilot is missing")
    task = sky.Task.from_yaml(str(DEPLOY / "skypilot.yaml"))
    assert task.run.startswith(".venv/bin/lit-vgrpo run")


def test_modal_reads_its_deployment():
    pytest.importorskip("modal", reason="Modal is missing")
    assert set(runpy.run_path(str(DEPLOY / "modal_app.py"))) >= {"app", "volume", "train", "main"}


def test_lightning_studio_takes_the_arguments_of_its_deployment():
    sdk = pytest.importorskip("lightning_sdk", reason="lightning-sdk is missing")
    tree = ast.parse((DEPLOY / "lightning_studio.py").read_text())
    (call,) = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Job.run"]
    inspect.signature(sdk.Job.run).bind(**{word.arg: word.value for word in call.keywords})
    (machine,) = [word.value.attr for word in call.keywords if word.arg == "machine"]
    assert hasattr(sdk.Machine, machine)
