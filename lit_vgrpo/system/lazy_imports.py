"""Third-party modules whose bodies run when they are first used, in place of when they are first imported.

Lightning imports the whole of torchmetrics for two classes, and with it scipy's signals and torchvision; transformers
all optimizers of scipy for one function; diffusers all distributions of scipy for one of them; peft bitsandbytes, and
with it torch's code generator, for weights in 8 bits. A command that uses none of it need not wait for it. Only the
command calls :func:`install`: whoever imports this package in a process of their own imports as ever.
"""

from __future__ import annotations

import ast
import copy
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class WaitingModule(ModuleType):
    """A module whose body has not run, or not to its end: an attribute that it lacks has it run first.

    ``importlib.util.LazyLoader`` would run it at the second ``import`` or at ``find_spec``, before Python 3.12 in two
    threads at once, and a submodule that is imported first twice. An error of the body is raised at every use.
    """

    def __getattr__(self, name: str) -> Any:
        _bodies[self.__name__].run(self)
        return ModuleType.__getattribute__(self, name)

    def __dir__(self) -> list[str]:
        _bodies[self.__name__].run(self)
        return dir(self)


class _Body(Loader):
    """The body of a waiting module, and its loader until then.

    Args:
        loader: The module's own.
        opening: Runs what is needed at the import; returns what runs the rest, ``None`` if there is none.
    """

    def __init__(self, loader: Loader, opening: Callable[[ModuleType, Loader], Callable[[], None] | None]) -> None:
        self.loader = loader
        self.opening = opening
        self.rest: Callable[[], None] | None = None
        self.is_running = False
        self.lock = threading.RLock()

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.is_running = True
        try:
            self.rest = self.opening(module, self.loader)
        finally:
            self.is_running = False
        if self.rest is not None:
            module.__class__ = WaitingModule

    def run(self, module: ModuleType) -> None:
        """Run the rest of the body, unless it has run or runs in this very thread."""
        with self.lock:
            if self.rest is None or self.is_running:
                return
            self.is_running = True
            try:
                self.rest()
                self.rest = None
                module.__class__ = ModuleType
            finally:
                self.is_running = False


_bodies: dict[str, _Body] = {}


def _nothing(module: ModuleType, loader: Loader) -> Callable[[], None]:
    """Run nothing of a body yet."""
    return lambda: loader.exec_module(module)


def _the_assignment(module: ModuleType, loader: Loader) -> Callable[[], None] | None:
    """Import nothing of ``scipy.optimize`` but the function that transformers' losses of detectors need."""
    try:
        module.__dict__["linear_sum_assignment"] = import_module(f"{module.__name__}._lsap").linear_sum_assignment
    except (ImportError, AttributeError):  # it is not where it was
        loader.exec_module(module)
        return None
    return lambda: loader.exec_module(module)


def _two_classes_of_torchmetrics(module: ModuleType, loader: Loader) -> Callable[[], None] | None:
    """Run torchmetrics' body up to its first import of scipy or of metrics, and add the classes that Lightning needs.

    Returns:
        The rest; ``None`` if it has run, where the body has no such place or the classes are not where they were.
    """
    name = module.__name__
    source = loader.get_source(name) if isinstance(loader, InspectLoader) else None
    if source is None:
        loader.exec_module(module)
        return None
    body = ast.parse(source).body
    end = next((place for place, statement in enumerate(body) if _imports_metrics(statement, name)), len(body))
    _execute(body[:end], module)

    def rest() -> None:
        _execute(body[end:], module)

    try:
        import_module(f"{name}.utilities")  # which metric.py imports in a circle
        module.__dict__["Metric"] = import_module(f"{name}.metric").Metric
        module.__dict__["MetricCollection"] = import_module(f"{name}.collections").MetricCollection
    except (ImportError, AttributeError):
        rest()
        return None
    return rest


def _imports_metrics(statement: ast.stmt, package: str) -> bool:
    imported = {
        alias.name if isinstance(node, ast.Import) else str(node.module)
        for node in ast.walk(statement)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    return any(name.partition(".")[0] in ("scipy", package) for name in imported - {f"{package}.__about__"})


def _execute(statements: list[ast.stmt], module: ModuleType) -> None:
    code = compile(ast.Module(statements, []), str(module.__file__), "exec", dont_inherit=True)
    exec(code, module.__dict__)


OPENINGS = {
    "bitsandbytes": _nothing,
    "onnxruntime": _nothing,
    "scipy.integrate": _nothing,
    "scipy.optimize": _the_assignment,
    "scipy.stats": _nothing,
    "torchmetrics": _two_classes_of_torchmetrics,
}
"""What runs of a module when it is imported."""


class _Imported(Loader):
    """Loader of a submodule that its package's body has imported, so that it is not made anew."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if target is not None:  # which is reloaded
            return None
        if fullname in OPENINGS:
            return self._waiting(fullname, path)
        package = next((name for name in OPENINGS if fullname.startswith(f"{name}.")), None)
        body = _bodies.get(package) if package is not None else None
        if package is None or body is None or body.is_running or body.rest is None:
            return None
        body.run(sys.modules[package])  # as a package's body does before its submodules'
        module = sys.modules.get(fullname)
        if module is None or module.__spec__ is None:
            return None
        spec = copy.copy(module.__spec__)
        spec.loader = _Imported(module)
        module.__spec__ = spec  # which the import system takes for a module that a finder has imported
        return spec

    def _waiting(self, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _bodies[name] = _Body(spec.loader, OPENINGS[name])
        return spec


def install() -> None:
    """Have the modules that are imported from here on wait for their use; one that is imported stays as it is."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
