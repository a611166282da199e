"""Help on a recipe's keys and on options, read from the sources: importing their classes would take seconds."""

from __future__ import annotations

import ast
import re
import shutil
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

MOST_COLUMNS = 120
COLUMN = 36
"""Where the text of an option starts."""
ENTRY = re.compile(r"(?:    )?(\w+): (.*)")
ROOT = Path(__file__).parents[1]
PARTS = {
    "model": "lit_vgrpo.module:VGRPOModule",
    "model.optimizer": "lit_vgrpo.training.optimizer:OptimizerConfig",
    "data": "lit_vgrpo.data.module:PromptDataModule",
}
"""By the key of a part of a recipe: the class of its options."""
LINKED = ("seed",)
"""Options that follow a key of the top level."""
TOP = {
    "name": (None, "name of the run; null takes the recipe's"),
    "run_dir": (None, "folder to write to; null takes runs/NAME"),
    "seed_everything": (0, "seed of all random numbers; true draws one"),
    "ckpt_path": (None, "checkpoint to continue from"),
    "allow_changes": (False, "continue even if the checkpoint was made by a different recipe"),
}
TRAINER = {
    "max_epochs": (None, "iterations; -1 trains until it is stopped"),
    "check_val_every_n_epoch": (1, "iterations between evaluations on the held-out prompts"),
    "accelerator": ("auto", "cpu or gpu; auto takes a GPU where there is one"),
    "devices": ("auto", "number of GPUs, or of processes on the CPU"),
    "num_nodes": (1, "number of machines"),
    "strategy": ("auto", "ddp, or an overlay: strategy/zero2, strategy/fsdp2 and others (docs/scaling.md)"),
    "gradient_clip_val": (None, "largest norm of the gradient"),
    "callbacks": (None, "EMA, SampleGrid, Export, FID, RewardHackAlarm and others, Lightning's too"),
    "logger": (None, "loggers beside metrics.csv and TensorBoard, such as WandbLogger"),
}
"""Options of Lightning's Trainer that many runs set."""
CLASSES = {
    "policy": "Flux2Policy FluxPolicy KontextPolicy QwenImageEditPolicy QwenImagePolicy SD3Policy SDXLPolicy "
    "UNetPolicy ZImagePolicy",
    "objective": "AWM DDPO DGPO DanceGRPO Denoising DiffusionNFT EPG FlowGRPO MixGRPO VGRPO",
    "reward": "AestheticScore CLIPImageSimilarity CLIPScore GenEval HPSv2 HTTPReward ImageReward JPEGCompressibility "
    "JPEGIncompressibility OCRReward PickScore PythonReward RecolourReward ShapesReward VLMJudge VoteReward Weighted",
}
"""Classes that a recipe may name, by the key under ``model``."""
PACKAGES = {"policy": "policies", "objective": "objectives", "reward": "rewards"}
"""Their packages."""
UNSHOWN = ("None", "SEVERAL")
"""Defaults of options that say nothing."""


class Described(NamedTuple):
    """An option: its default in YAML, ``None`` where it is required, and its description."""

    name: str
    default: str | None
    text: str


def recipe_keys() -> str:
    """Return the keys of a recipe, with their defaults and a description each."""
    tables = [table("Keys of a recipe (key=value on the command line):", _fixed(TOP))]
    for key, place in PARTS.items():
        tables.append(table(f"{key}:", [option for option in class_options(place) if option.name not in LINKED]))
    for key, names in CLASSES.items():
        tables.append(textwrap.fill(f"model.{key} is one of: {', '.join(names.split())}.", text_width()))
    return "\n\n".join([*tables, table("trainer, besides other options of Lightning's Trainer:", _fixed(TRAINER))])


def text_width() -> int:
    """Return the columns of the terminal, at most :data:`MOST_COLUMNS`, which are those of other outputs."""
    return min(MOST_COLUMNS, shutil.get_terminal_size((MOST_COLUMNS, 24)).columns)


def table(title: str, options: Sequence[Described]) -> str:
    """Return a title and one entry per option."""
    lines = [title]
    for name, default, text in options:
        start = f"  {name} (required)" if default is None else f"  {name}={default}" if default else f"  {name}"
        gap = " " * COLUMN
        filled = textwrap.fill(text, text_width(), initial_indent=gap, subsequent_indent=gap, break_on_hyphens=False)
        lines.append(f"{start:<{COLUMN}}{filled.lstrip()}" if len(start) < COLUMN else f"{start}\n{filled}")
    return "\n".join(lines)


def class_options(place: str) -> list[Described]:
    """Return the options of a class: its constructor's arguments, or a dataclass's fields, and those of its base.

    Args:
        place: ``module:Class`` in this package.
    """
    module, _, name = place.partition(":")
    node, tree = _classes(module)[name], _tree(module)
    said = described(ast.get_docstring(node) or "")
    made = next((child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == "__init__"), None)
    pairs: list[tuple[str, ast.expr | None]] = []
    if made is not None:
        names = [argument.arg for argument in made.args.args][1:]
        required = len(names) - len(made.args.defaults)
        pairs = [*zip(names, [*[None] * required, *made.args.defaults], strict=True)]
    elif _is_dataclass(node):
        fields = [child for child in node.body if isinstance(child, ast.AnnAssign)]
        pairs = [(ast.unparse(field.target), field.value) for field in fields if not _is_no_option(field)]
    own = [Described(key, None if node is None else _value(node, tree), said.get(key, "")) for key, node in pairs]
    base = _base(node, module) if made is None or made.args.kwarg is not None else None
    if base is None:
        return own
    names = [key for key, _ in pairs]
    return [*own, *(option for option in class_options(base) if option.name not in names)]


def options_of(part: str, name: str) -> list[Described]:
    """Return the options of a class that ships, by its short name; none of another class.

    Args:
        part: key of :data:`CLASSES`.
    """
    module = _origin(name, _tree(f"lit_vgrpo.{PACKAGES[part]}.__init__"))
    return [] if module is None else class_options(f"{module}:{name}")


def command_options(place: str) -> list[Described]:
    """Return the options of a subcommand as typed, with those of the base classes.

    Args:
        place: ``module:Class`` of its :class:`~lit_vgrpo.config.arguments.Options`.
    """
    module, _, name = place.partition(":")
    if name == "Options":
        return []
    node, tree = _classes(module)[name], _tree(module)
    base = ast.unparse(node.bases[0])
    inherited = command_options(f"{module if base in _classes(module) else _origin(base, tree)}:{base}")
    said = described(ast.get_docstring(node) or "")
    found = []
    for field in node.body:
        call = field.value if isinstance(field, ast.AnnAssign) else None
        if not isinstance(call, ast.Call) or ast.unparse(call.func) not in ("option", "whole", "flag"):
            continue
        own = ast.unparse(field.target)  # type: ignore[attr-defined]
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        typed = ast.literal_eval(keywords["name"]) if "name" in keywords else own
        shown = _value(call.args[0], tree) if call.args and ast.unparse(call.args[0]) not in UNSHOWN else ""
        shown = shown.removeprefix("torch.").strip("[]").replace(", ", ",")
        text = re.sub(r"\bNone (takes|uses) ", "by default ", said.get(own) or said.get(typed, ""))
        found.append(Described(f"--{typed.replace('_', '-')}", shown, text))
    return [*found, *inherited]


def described(docstring: str) -> dict[str, str]:
    """Return the descriptions under ``Args:`` or ``Attributes:`` of a docstring, by name.

    >>> described("Noun.\\n\\nArgs:\\n    a: first\\n        line.\\n    b: second, see\\n        :class:`~x.Y`.")
    {'a': 'first line.', 'b': 'second, see Y.'}
    """
    section = re.search(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)*)", docstring, re.MULTILINE)
    found: dict[str, str] = {}
    name = ""
    for line in section[1].splitlines() if section else []:
        entry = ENTRY.match(line.removeprefix("    ")) if not line.startswith("     ") else None
        name = entry[1] if entry else name
        found[name] = entry[2] if entry else f"{found[name]} {line.strip()}"
    plain = {key: re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", text) for key, text in found.items()}
    return {key: text.replace("``", "").strip() for key, text in plain.items()}


def in_yaml(value: Any) -> str:
    """Return a default as it is written in a recipe.

    >>> in_yaml(None), in_yaml(True), in_yaml("auto"), in_yaml((0.9, 0.999)), in_yaml(3e-4)
    ('null', 'true', 'auto', '[0.9, 0.999]', '0.0003')
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(in_yaml, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _fixed(options: dict[str, tuple[Any, str]]) -> list[Described]:
    return [Described(name, in_yaml(default), text) for name, (default, text) in options.items()]


def _value(node: ast.expr, tree: ast.Module) -> str:
    """Return a default in YAML; a constant's name is looked up, here or in the module it comes from."""
    try:
        return in_yaml(ast.literal_eval(node))
    except ValueError:
        pass
    if not isinstance(node, ast.Name):
        return ast.unparse(node)
    for statement in tree.body:
        if not isinstance(statement, ast.Assign):
            continue
        target, value = statement.targets[0], statement.value
        both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        pairs = zip(target.elts, value.elts, strict=True) if both else [(target, value)]  # type: ignore[attr-defined]
        for name, assigned in pairs:
            if ast.unparse(name) == node.id:
                return _value(assigned, tree)
    origin = _origin(node.id, tree)
    return node.id if origin is None else _value(node, _tree(origin))


def _origin(name: str, tree: ast.Module) -> str | None:
    """Return the module of this package that a name is imported from."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return node.module if node.module and node.module.startswith("lit_vgrpo.") else None
    return None


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any(ast.unparse(decorator).startswith("dataclass") for decorator in node.decorator_list)


def _is_no_option(field: ast.AnnAssign) -> bool:
    kept = field.value is not None and "init=False" in ast.unparse(field.value)
    return kept or ast.unparse(field.annotation).startswith(("ClassVar", "KW_ONLY"))


def _base(node: ast.ClassDef, module: str) -> str | None:
    """Return the place of a class's first base in this package, of a dataclass if that is one too."""
    name = ast.unparse(node.bases[0]) if node.bases else ""
    origin = module if name in _classes(module) else _origin(name, _tree(module))
    if origin is None or (_is_dataclass(node) and not _is_dataclass(_classes(origin)[name])):
        return None
    return f"{origin}:{name}"


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text(encoding="utf-8"))


def _classes(module: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in _tree(module).body if isinstance(node, ast.ClassDef)}
