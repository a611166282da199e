"""Every name of the package that the documents show in code font exists."""

import ast
import inspect
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from textwrap import dedent

import lightning as L
import pytest

import lit_vgrpo
from lit_vgrpo import PromptDataModule, RolloutSpec, VGRPOModule
from lit_vgrpo.callbacks import EMA
from lit_vgrpo.core.records import IterationRecord
from lit_vgrpo.core.types import Rollout, Trajectory
from lit_vgrpo.objectives.base import Objective
from lit_vgrpo.policies import Policy
from lit_vgrpo.rewards import Reward
from lit_vgrpo.training.evaluation import Evaluator
from lit_vgrpo.training.optimizer import OptimizerConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```|(?<!`)`([^`\n]+)`(?!`)", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"(?<![\w./:@-])([A-Za-z_]\w*)((?:\.[A-Za-z_]\w*)+)(?![\w/])")
FOLDERS = "lit_vgrpo|callbacks|recipes|tests|tools|docs|benchmarks|findings"
PATH = re.compile(rf"(?<![\w./:-])(?:{FOLDERS})/[\w./-]*\w/?(?![\w*{{<])")
OBJECTS = {"module": VGRPOModule, "policy": Policy, "objective": Objective}
"""Variables of the documents, always of these classes or of a subclass."""
HELD = {
    VGRPOModule: {"policy": Policy, "objective": Objective, "evaluator": Evaluator, "record": IterationRecord},
    Rollout: {"trajectory": Trajectory, "spec": RolloutSpec},
}
SECTIONS = {"model": VGRPOModule, "data": PromptDataModule, "trainer": L.Trainer}
FILES = (".py", ".md", ".yaml", ".csv", ".json", ".html", ".safetensors")
OPTIONS = {"policy": Policy, "objective": Objective, "reward": Reward, "untrained_reward": Reward}
OPTIONS |= {"rollout": RolloutSpec, "evaluation": RolloutSpec, "optimizer": OptimizerConfig}


@cache
def package():
    """Names of the package's classes, with the classes."""
    names = [one.name for one in walk_packages(lit_vgrpo.__path__, "lit_vgrpo.") if "__main__" not in one.name]
    modules = [import_module(name) for name in names if not name.startswith("lit_vgrpo.recipes")]
    return {name: one for module in modules for name, one in vars(module).items() if inspect.isclass(one)}


def family(cls):
    package()
    return [cls, *(one for child in cls.__subclasses__() for one in family(child))]


@cache
def members(cls):
    """All attributes of a class and its subclasses in the package, those that a method sets included."""
    found = set()
    for one in family(cls):
        found |= {*dir(one), *options(one)}
        for base in one.__mro__:
            found |= set(vars(base).get("__annotations__", ()))
            if base.__module__.startswith("lit_vgrpo"):
                nodes = ast.walk(ast.parse(dedent(inspect.getsource(base))))
                stores = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
                found |= {node.attr for node in stores if ast.unparse(node.value) == "self"}
    return found


@cache
def options(cls):
    """Names that the constructors of a class and its subclasses take."""
    return {name for one in family(cls) for base in one.__mro__ for name in inspect.signature(base.__init__).parameters}


def resolves(name):
    """Return whether a dotted name of the package can be reached by imports and attributes."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for number, part in enumerate(parts[length:], start=length):
            if inspect.isclass(found):
                return number == len(parts) - 1 and part in members(found)
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def wrong_attribute(cls, path):
    for part in path:
        if cls is None:
            return None
        if part not in members(cls):
            return f"{cls.__name__} has no {part}"
        cls = HELD.get(cls, {}).get(part)
    return None


def wrong_option(cls, path):
    for part in path:
        if part.isupper() or cls is None:  # OPTION stands for any
            return None
        if part == "init_args":
            continue
        if part not in options(cls) and not (cls is L.Trainer and hasattr(cls, part)):
            return f"{cls.__name__} has no option {part}"
        cls = OPTIONS.get(part)
    return None


def problem(root, rest, language):
    """Return what is wrong with a name, or None for one that is right or not the package's."""
    path = rest[1:].split(".")
    if root == "lit_vgrpo":
        return None if resolves(f"{root}{rest}") else "does not exist"
    if root == "rollout":  # a recipe's section, or what it samples
        return wrong_attribute(Rollout, path) and wrong_option(RolloutSpec, path)
    if root in OBJECTS:
        return wrong_attribute(OBJECTS[root], path)
    if root == "self" and language == "":
        known = set().union(*map(members, (Objective, Policy, Reward, EMA)))
        return None if path[0] in known else "no class of the package has it"
    if root == "model":  # a recipe's section, or the module in Python
        return wrong_attribute(VGRPOModule, path) and wrong_option(VGRPOModule, path)
    if root in SECTIONS and language != "python":
        return wrong_option(SECTIONS[root], path)
    if root[0].isupper() and root in package() and package()[root].__module__.startswith("lit_vgrpo"):
        return wrong_attribute(package()[root], path[:1])
    return None


def problems(text):
    """Yield the wrong names and paths of a document."""
    for language, block, inline in FENCE.findall(text):
        code = block or inline
        for root, rest in NAME.findall(code):
            if rest not in FILES and (wrong := problem(root, rest, language)) is not None:
                yield f"{root}{rest}: {wrong}"
        for path in PATH.findall(inline):
            if not (ROOT / path).exists():
                yield f"{path} does not exist"


def test_messages_name_options_by_their_place():
    """As ``model.policy.dtype``, in a recipe and in Python."""
    keys = set()
    for path in sorted([*(ROOT / "lit_vgrpo").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")]):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
        sentences = [text for text in texts if isinstance(text, str) and {" ", "="} & set(text)]
        keys |= {key for text in sentences for key in re.findall(r"\b(?:model|data)(?:\.[a-z]\w*)+", text)}
    assert len(keys) > 40
    wrong = [key for key in keys if wrong_option(SECTIONS[key.partition(".")[0]], key.split(".")[1:])]
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_code_font_exist(page):
    assert not list(problems(page.read_text(encoding="utf-8")))


WRONG = ["module.all_ranks", "self.all_the_ranks(values)", "policy.is_loaded", "lit_vgrpo.callbacks.NoSuchCallback"]
WRONG += ["python -m lit_vgrpo.no_such_module", "SD3Policy.no_such_attribute", "model.policy.no_such_option=3"]
RIGHT = "`module.policy.save`, `model.policy.lora_rank=4`, `lit_vgrpo.callbacks.EMA`, `torch.no_x`"


@pytest.mark.parametrize("wrong", [*WRONG, "data.no_such_option", "lit_vgrpo/no_such_folder/"])
def test_a_wrong_name_is_seen(wrong):
    assert list(problems(f"Call `{wrong}`."))
    assert not list(problems(RIGHT))
