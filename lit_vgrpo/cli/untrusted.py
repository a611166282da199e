"""``lightning check RECIPE --untrusted``: code, variables, hosts and files that an untrusted recipe names."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lit_vgrpo.apps.curriculum.curriculum import Curriculum, is_curriculum
from lit_vgrpo.config.environment import ENVIRONMENT, environment_from
from lit_vgrpo.config.recipe import SUFFIXES, Command, read_recipe
from lit_vgrpo.config.tree import class_name, dotted, leaves, typed_key
from lit_vgrpo.errors import say
from lit_vgrpo.metrics.features import TORCHSCRIPT_SUFFIXES
from lit_vgrpo.system.paths import SHIPPED_PREFIX

PACKAGE = "lit_vgrpo"
TEXT_KEYS = ("name", "run_dir")
"""Keys of a recipe whose values are always text."""
FILE_KEYS = ("ckpt_path", "start_from", "checkpoint")
"""Keys of weight files, which are read and never executed."""
FEATURE_KEYS = ("features", "diversity")
_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_FUNCTION = re.compile(r"([^\W\d][\w.]*):[^\W\d][\w.]*")
_ADDRESS = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#\"'<>]+|(?<![\w.:/])(?=[\w.-]*[A-Za-z.])[\w.-]+:\d{2,5}(?![\w:])"
)
_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(/[\w./-]+\.safetensors)?", re.ASCII)
_DATA = (".txt", ".jsonl", ".csv", ".parquet")


@dataclass
class Findings:
    """Names in a recipe by kind, each with the keys that name it."""

    imports: dict[str, list[str]] = field(default_factory=dict)
    environment: dict[str, list[str]] = field(default_factory=dict)
    hosts: dict[str, list[str]] = field(default_factory=dict)
    hub: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, list[str]] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Yield a paragraph per kind, a line per name."""
        for title, found in (
            ("Code outside lit_vgrpo that it would run:", self.imports),
            ("Environment variables that it would read:", self.environment),
            ("Hosts that it would contact:", self.hosts),
            ("Repositories that it would download from the Hugging Face hub:", self.hub),
            ("Files outside this folder that it would read or write:", self.files),
        ):
            yield title
            width = max(map(len, found), default=0)
            yield from (f"  {name.ljust(width)}  {', '.join(keys)}" for name, keys in sorted(found.items()))
            if not found:
                yield "  none"


def list_untrusted(command: Command) -> int:
    """Print what ``RECIPE.yaml [OVERLAY.yaml ...] [key=value ...]`` names, without importing or reading any of it.

    Raises:
        UserError: A recipe cannot be read, or an interpolation names no key.
    """
    findings = Findings()
    if is_curriculum(command.recipe):
        curriculum = Curriculum.of(command)
        for stage in curriculum.stages:
            _find(Command.parse(curriculum.check_words(stage)), findings, f"stage{stage.number}.")
    else:
        _find(command, findings, "")
    for line in findings.lines():
        say(line)
    say("What that code itself imports, reads or contacts is unknown.")
    return 0


def _find(command: Command, findings: Findings, prefix: str) -> None:
    for takes_defaults in (False, True):  # with each variable, and with its default
        with _no_environment(takes_defaults) as names:
            recipe = read_recipe(command)
        for place, value in leaves(recipe):
            for number, step in enumerate(place, start=1):
                if isinstance(step, str) and _ADDRESS.search(step):
                    _Leaf(typed_key(place[:number]), step).look(findings, prefix)
            if isinstance(value, str):
                _Leaf(dotted(place).replace(".init_args", ""), value).look(findings, prefix)
        for name in names:
            _add(findings.environment, name, f"{prefix}${{{ENVIRONMENT}:{name}}}")
    for key, cls, given in _components(recipe, ""):
        for default in _hub_defaults(cls, given):
            _add(findings.hub, default, f"{prefix}{key}, unless it is set")


@contextmanager
def _no_environment(takes_defaults: bool) -> Iterator[list[str]]:
    """Resolve ``${oc.env:NAME}`` to ``$NAME`` or its default; the yielded names are complete after the block."""
    names: list[str] = []
    nothing = object()

    def stand_in(name: str, default: Any = nothing) -> Any:
        names.append(name)
        return f"${name}" if default is nothing or not takes_defaults else default

    with environment_from(stand_in):
        yield names


@dataclass(frozen=True)
class _Leaf:
    """Text value of a recipe and its key."""

    key: str
    text: str

    def look(self, findings: Findings, prefix: str) -> None:
        """Add what the text names to the findings, under the key with ``prefix``."""
        shown = prefix + self.key
        if self.name.endswith("_env"):
            _add(findings.environment, self.text, shown)
        for host in _ADDRESS.findall(self.text):
            _add(findings.hosts, host, shown)
        if self._is_outside():
            _add(findings.files, self.text, shown)
        if self.name in TEXT_KEYS or "://" in self.text:
            return
        if self._is_code():
            _add(findings.imports, self.text, shown)
        elif self._is_of_the_hub():
            _add(findings.hub, self.text, shown)

    @property
    def name(self) -> str:
        """Last part of the key."""
        return self.key.rpartition(".")[2]

    def _is_code(self) -> bool:
        path, last = Path(self.text), self.text.rpartition(".")[2]
        if self.text.startswith(SHIPPED_PREFIX) or self.key.startswith("data."):
            return False
        if self.text.partition(".")[0] == PACKAGE or last == self.text:
            is_own = last in _classes_of(PACKAGE)
            return not is_own and (self.name == "class_path" or last in _classes_of("lightning"))
        if self.name in FEATURE_KEYS and path.suffix.lower() in TORCHSCRIPT_SUFFIXES:
            return True
        # The options of a part may be in a file of any name; its content is not checked.
        is_file = path.suffix in SUFFIXES or path.is_file()
        return (is_file and self.name not in FILE_KEYS) or bool(
            _FUNCTION.fullmatch(self.text) or _CLASS.fullmatch(self.text)
        )

    def _is_of_the_hub(self) -> bool:
        path = Path(self.text)
        return bool(_HUB.fullmatch(self.text)) and path.suffix not in _DATA and not os.path.exists(self.text)

    def _is_outside(self) -> bool:
        if self.text.startswith(SHIPPED_PREFIX) or "://" in self.text or any(blank in self.text for blank in "\n "):
            return False
        return self.text.startswith(("/", "~")) or ".." in Path(self.text).parts


def _components(node: Any, key: str) -> Iterator[tuple[str, type, Mapping[str, Any]]]:
    """Yield the key, class and arguments of each of our classes that a recipe names."""
    if isinstance(node, str) and class_name(node) in _classes_of(PACKAGE):
        yield key, _classes_of(PACKAGE)[class_name(node)], {}
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from _components(value, f"{key}[{number}]")
    elif isinstance(node, Mapping):
        if class_name(node) in _classes_of(PACKAGE):
            yield key, _classes_of(PACKAGE)[class_name(node)], node.get("init_args") or {}
        for name, value in node.items():
            if name != "class_path":
                yield from _components(value, f"{key}.{name}".strip(".").replace(".init_args", ""))


def _hub_defaults(cls: type, given: Mapping[str, Any]) -> list[str]:
    """Return the hub names that one of our classes uses by default, unless its arguments replace them."""
    constants = vars(sys.modules[cls.__module__]).items()
    names = [value for key, value in constants if key.startswith("HUB_") and isinstance(value, str)]
    replaced = [p.default for name, p in inspect.signature(cls).parameters.items() if name in given]
    return [name for name in names if name not in replaced]


@cache
def _classes_of(package: str) -> dict[str, type]:
    """Return a package's imported classes by name; those with a short name in recipes always are."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == package]
    found = [value for module in modules for value in vars(module).values() if inspect.isclass(value)]
    return {cls.__name__: cls for cls in found if cls.__module__.partition(".")[0] == package}


def _add(found: dict[str, list[str]], name: str, key: str) -> None:
    keys = found.setdefault(name, [])
    if key not in keys:
        keys.append(key)
