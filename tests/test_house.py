"""Rules of the house that import-linter cannot see: the folder of callbacks, and the sizes of files."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CALLBACKS = sorted((ROOT / "callbacks").glob("*.py"))
PACKAGE = sorted((ROOT / "lit_vgrpo").rglob("*.py"))
MAY_IMPORT_CALLBACKS = ("commands", "cli.py", "__init__.py")
ONE_OF_A_KIND = ("__init__.py", "__main__.py", "unet.py", "adamw8bit.py", "ddpo.py")
"""Small because there is no more to say: a family, a method, or a class whose library is optional."""


def imported(path):
    """The modules that a file imports anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("path", CALLBACKS, ids=lambda path: path.stem)
def test_callbacks_import_no_command(path):
    assert not [name for name in imported(path) if name.startswith(("lit_vgrpo.commands", "lit_vgrpo.cli"))]


def test_only_commands_import_callbacks():
    users = [path for path in PACKAGE if any(name.startswith("lit_vgrpo.callbacks") for name in imported(path))]
    assert users
    rooms = {path.relative_to(ROOT / "lit_vgrpo").parts[0] for path in users}
    assert rooms <= set(MAY_IMPORT_CALLBACKS)


@pytest.mark.parametrize("path", [*PACKAGE, *CALLBACKS], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_neither_a_stub_nor_a_tome(path):
    lines = len(path.read_text().splitlines())
    assert lines <= 400
    assert lines >= 40 or path.name in ONE_OF_A_KIND
