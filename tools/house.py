"""House rules that import-linter cannot check; ``make lint`` runs them: ``python tools/house.py``.

Sizes of folders and recipes, private names of libraries, and fast tests that start a process. Prints one line per
breach.
"""

import ast
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

MOST_LINES_PER_RECIPE = 60
MOST_LINES, MOST_FILES, MOST_TEST_LINES = 38_911, 223, 35_320
"""What the tree has now. Lower them whenever it shrinks; raise them with a feature that pays for its lines."""
MOST_FAST_PROCESSES = 6
"""Test functions that start a process and are not marked slow: importing torch and Lightning takes 7 s."""
STARTERS = {"subprocess.run", "subprocess.Popen", "run_ranks", "run_command"}

PRIVATE_API_ALLOWED = ("training/checkpoint.py", "training/trainer_internals.py", "training/sharded.py")
"""Files that may use private names of Lightning and DeepSpeed, next to the version in which they were read."""
PUBLIC_DESPITE_UNDERSCORE = {
    *("_exit", "_asdict"),  # the standard library
    *("_cdata", "_version", "_local_tensor", "_parameters", "_buffers", "_modules", "_foreach_copy_"),  # torch
    *("_foreach_lerp_", "_scaled_dot_product_flash_attention_for_cpu", "_compiled_call_impl"),
    *("_cp_plan", "_fix_state_dict_keys_on_load", "_keys_to_ignore_on_load_unexpected"),  # diffusers
    "_optional_components",
}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a file."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imported(path: Path) -> list[tuple[int, str]]:
    """Return line and full name of everything that a file imports, also lazily or for types."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [(node.lineno, name.name) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.lineno, f"{node.module}.{name.name}") for name in node.names]
    return found


def lines_of(path: Path) -> int:
    """Return the number of lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def check_sizes(package: list[Path], tests: list[Path], recipes: list[Path]) -> Iterator[str]:
    """Yield folders and recipes that are too long."""
    for path in recipes:
        if (lines := lines_of(path)) > MOST_LINES_PER_RECIPE:
            yield f"{path}: {lines} lines, at most {MOST_LINES_PER_RECIPE}"
    for name, total, most in (
        ("lines in lit_vgrpo/ and callbacks/", sum(map(lines_of, package)), MOST_LINES),
        ("files in lit_vgrpo/ and callbacks/", len(package), MOST_FILES),
        ("lines in tests/", sum(map(lines_of, tests)), MOST_TEST_LINES),
    ):
        if total > most:
            yield f"{total} {name}, at most {most}"


def is_private(name: str) -> bool:
    """Return True for a name with one underscore in front."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


@cache
def private_names(path: Path) -> tuple[set[str], dict[str, int]]:
    """Return the private names that a file defines, and those that it uses with a line of each."""
    defined, used = set(), {}
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if "override" in map(ast.unparse, node.decorator_list):
                used[node.name] = node.lineno
            else:
                defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute):
            if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
                defined.add(node.attr)
            else:
                used[node.attr] = node.lineno
    return set(filter(is_private, defined)), {name: line for name, line in used.items() if is_private(name)}


def check_private_names(path: Path) -> Iterator[str]:
    """Yield private names that neither this file, its folder nor an imported file of ours defines: a library's."""
    for line, name in imported(path):
        if name.startswith(("lightning", "pytorch_lightning", "deepspeed")) and any(map(is_private, name.split("."))):
            yield f"{path}:{line}: imports the private {name}"
    ours = {name.rpartition(".")[0].replace(".", "/") for _, name in imported(path) if name.startswith("lit_vgrpo.")}
    known = [*path.parent.glob("*.py"), *(file for name in ours if (file := Path(f"{name}.py")).is_file())]
    defined = PUBLIC_DESPITE_UNDERSCORE.union(*(private_names(other)[0] for other in known))
    for name, line in private_names(path)[1].items():
        if name not in defined:
            yield f"{path}:{line}: uses the private {name} of a library"


def fast_processes(path: Path) -> Iterator[str]:
    """Yield the tests of a file that start a process, by themselves or by what they use of the file, and are fast."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    marks = [
        node.value for node in body if isinstance(node, ast.Assign) and "pytestmark" in map(ast.unparse, node.targets)
    ]
    if any("pytest.mark.slow" in map(ast.unparse, ast.walk(mark)) for mark in marks):  # one, or a list
        return
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    words = {
        name: {ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.Name | ast.Attribute | ast.arg)}
        for name, function in functions.items()
    }
    start = {name for name in words if words[name] & STARTERS}
    while more := {name for name in words.keys() - start if words[name] & start}:
        start |= more
    for name in sorted(start):
        if name.startswith("test_") and "pytest.mark.slow" not in map(ast.unparse, functions[name].decorator_list):
            yield f"{path}: {name}"


def find(folder: str, pattern: str) -> list[Path]:
    """Return a folder's files, relative to the root."""
    return sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob(pattern))


def main() -> int:
    """Print every breach and return the exit status."""
    os.chdir(ROOT)
    package = [*find("lit_vgrpo", "*.py"), *find("callbacks", "*.py")]
    found = list(check_sizes(package, find("tests", "*.py"), find("recipes", "*.yaml")))
    for path in package:
        if not path.as_posix().endswith(PRIVATE_API_ALLOWED):
            found += check_private_names(path)
    fast = [test for path in find("tests", "test_*.py") for test in fast_processes(path)]
    if len(fast) > MOST_FAST_PROCESSES:
        found += [f"{len(fast)} tests start a process and are not slow, at most {MOST_FAST_PROCESSES}:", *fast]
    print("\n".join(found) or f"House rules: {len(package)} files kept")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
