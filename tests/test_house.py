"""Rules of the house that import-linter cannot see: the folder of callbacks, and the sizes of files."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CALLBACKS = sorted((ROOT / "callbacks").glob("*.py"))
PACKAGE = sorted((ROOT / "lit_vgrpo").rglob("*.py"))
MAY_IMPORT_CALLBACKS = ("commands", "cli.py", "__init__.py")
ONE_OF_A_KIND = ("__init__.py", "__main__.py", "unet.py", "adamw8bit.py", "ddpo.py")
"""Small because there is no more to say: a family, a method, or a class whose library is optional."""
MAY_BE_INTIMATE = ("lit_vgrpo/distributed/*.py", "lit_vgrpo/runs/checkpoint.py")
"""Where private names of Lightning and DeepSpeed may stand, beside the version in which they were read."""
PUBLIC_PRIVATE = ("_exit", "_asdict")
"""Names of the standard library that are public all the same."""
OF_TORCH = (
    "_cdata",
    "_version",
    "_local_tensor",
    "_parameters",
    "_buffers",
    "_modules",
    "_foreach_copy_",
    "_foreach_lerp_",
    "_scaled_dot_product_flash_attention_for_cpu",
)
OF_DIFFUSERS = ("_optional_components",)
SETTABLE = ("should_stop", "accumulate_grad_batches", "callbacks", "loggers", "checkpoint_io")
"""Attributes of a Trainer and its strategy that Lightning's own callbacks set, or that have a setter."""
OF_LIBRARIES = (
    *("data", "grad", "layer", "allow_tf32", "scheduler", "set_timesteps", "base_lrs"),
    *("excepthook", "dont_write_bytecode", "completer"),
)
"""Attributes of tensors, autograd contexts, backends, pipelines, schedulers and modules, which have no other way."""
ROOMS = ("core", "objectives", "policies", "optimizers", "rewards", "memory", "data", "runs", "config", "commands")
KEEP_TO_THEMSELVES = (*ROOMS, "module.py")


@cache
def nodes(path):
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imported(path):
    """The modules that a file imports anywhere in it."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{name.name}" for name in node.names]
    return found


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


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name != "_"


@cache
def names(path):
    """The private names that a file defines (functions, classes, variables, attributes of self) and that it uses."""
    defined, used = set(), set()
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            overrides = "override" in map(ast.unparse, node.decorator_list)
            (used if overrides else defined).add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute):
            is_own = isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
            (defined if is_own else used).add(node.attr)
    return set(filter(is_private, defined)), set(filter(is_private, used))


def is_intimate(path):
    return any(path.relative_to(ROOT).match(pattern) for pattern in MAY_BE_INTIMATE)


OTHERS = [path for path in [*PACKAGE, *CALLBACKS] if not is_intimate(path)]


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_names_of_lightning_and_deepspeed_stay_where_their_version_is_noted(path):
    imports = [name for name in imported(path) if name.startswith(("lightning", "pytorch_lightning", "deepspeed"))]
    assert not [name for name in imports if any(is_private(part) for part in name.split("."))]
    # What a file does not define comes from a class of ours that it imports, or is a library's.
    ours = {name.rpartition(".")[0] for name in imported(path) if name.startswith("lit_vgrpo.")}
    bases = [ROOT / f"{name.replace('.', '/')}.py" for name in ours]
    known = [*path.parent.glob("*.py"), *(base for base in bases if base.is_file())]
    foreign = names(path)[1].difference(*(names(other)[0] for other in known))
    assert not foreign - {*PUBLIC_PRIVATE, *OF_TORCH, *OF_DIFFUSERS}


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_attribute_of_a_trainer_is_set_that_has_no_public_way(path):
    stores = [n for n in nodes(path) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    set_here = [node for node in stores if "trainer" in ast.unparse(node.value)]
    assert not [ast.unparse(node) for node in set_here if node.attr not in SETTABLE]


def made_in(function):
    """The names that a function gives to what a call returns: objects of its own."""
    for node in ast.walk(function):
        if isinstance(node, ast.withitem) and node.optional_vars is not None:
            yield ast.unparse(node.optional_vars)
        for target in node.targets if isinstance(node, ast.Assign) else ():
            several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            pairs = zip(target.elts, node.value.elts, strict=True) if several else [(target, node.value)]
            yield from (ast.unparse(name) for name, value in pairs if isinstance(value, ast.Call))


@pytest.mark.parametrize("room", KEEP_TO_THEMSELVES)
def test_nobody_sets_another_objects_attributes(room):
    found = []
    for path in OTHERS:
        if path.relative_to(ROOT / "lit_vgrpo").parts[0] != room if path in PACKAGE else True:
            continue
        for function in (node for node in nodes(path) if isinstance(node, ast.FunctionDef)):
            own = {"self", "cls", *made_in(function)}
            stores = [n for n in ast.walk(function) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
            found += [
                f"{path.name}:{node.lineno} {ast.unparse(node)}"
                for node in stores
                if ast.unparse(node.value) not in own and node.attr not in {*SETTABLE, *OF_LIBRARIES}
            ]
    assert not found
