"""Modules that wait for their use: the import system must not be able to tell them from others."""

import importlib
import subprocess
import sys
import threading
from importlib.util import find_spec

import pytest
from processes import BARE

from lit_vgrpo.system import lazy_imports

NAME = "lit_vgrpo_waiting"
WAITS = lazy_imports.OPENINGS["bitsandbytes"]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that waits; its body and its submodule's say when they run."""
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "__init__.py").write_text(
        f"import sys, time\nsys.ran.append(__name__)\ntime.sleep(.05)\nif sys.broken: raise ImportError('broken')\n"
        f"from {NAME} import sub\nvalue = 1\n"
    )
    (tmp_path / NAME / "sub.py").write_text("import sys\nsys.ran.append(__name__)\nclass Sub: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "ran", [], raising=False)
    monkeypatch.setattr(sys, "broken", False, raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(lazy_imports, "OPENINGS", {NAME: WAITS})
    lazy_imports.install()
    yield NAME
    for name in (NAME, f"{NAME}.sub"):
        sys.modules.pop(name, None)


def test_a_body_runs_at_the_first_use_and_once(package):
    module = importlib.import_module(package)
    assert importlib.import_module(package) is module
    assert find_spec(package).origin == module.__file__
    assert sys.ran == []
    assert module.value == 1
    assert module.sub.Sub is sys.modules[f"{package}.sub"].Sub
    assert sys.ran == [package, f"{package}.sub"]
    assert type(module) is type(sys)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = module.nothing


def test_what_is_not_there_is_missed_at_once(package, monkeypatch):
    monkeypatch.setattr(lazy_imports, "OPENINGS", {"lit_vgrpo_nowhere": WAITS})
    assert find_spec("lit_vgrpo_nowhere") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("lit_vgrpo_nowhere")


def test_names_are_listed_as_ever(package):
    assert {"value", "sub"} <= set(dir(importlib.import_module(package)))


@pytest.mark.parametrize("imported_before", [True, False])
def test_a_submodule_comes_after_its_package_and_runs_once(package, imported_before):
    if imported_before:
        importlib.import_module(package)
    sub = importlib.import_module(f"{package}.sub")
    assert sys.ran == [package, f"{package}.sub"]
    assert sys.modules[package].sub is sub is sys.modules[f"{package}.sub"]
    assert sub.__spec__.loader is sub.__loader__
    assert importlib.reload(sub) is sub
    assert sys.ran[2:] == [f"{package}.sub"]


def test_an_error_is_raised_at_every_use(package):
    sys.broken = True
    module = importlib.import_module(package)
    for _ in range(2):
        with pytest.raises(ImportError, match="broken"):
            _ = module.value
    sys.broken = False
    assert module.value == 1


def test_threads_wait_for_the_one_that_runs_the_body(package):
    module, found = importlib.import_module(package), []
    threads = [threading.Thread(target=lambda: found.append(module.value)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1] * 4
    assert sys.ran.count(package) == 1


def test_a_module_that_is_imported_stays(package, monkeypatch):
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != lazy_imports.__name__]
    module = importlib.import_module(package)
    lazy_imports.install()
    assert importlib.import_module(package) is module
    assert sys.ran == [package, f"{package}.sub"]


def run(code):
    done = subprocess.run([BARE, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout or done.stderr


def test_two_classes_of_torchmetrics_come_without_the_rest():
    code = """
import sys
from lit_vgrpo.system.lazy_imports import install
install()
import torchmetrics
from torchmetrics import Metric, MetricCollection
print([name in sys.modules for name in ("scipy", "torchvision", "torchmetrics.functional")])
early = sys.modules["torchmetrics.metric"]
from torchmetrics.aggregation import MeanMetric
assert issubclass(MeanMetric, Metric) and torchmetrics.MeanMetric is MeanMetric
assert torchmetrics.metric is early and torchmetrics.Metric is Metric is early.Metric
assert torchmetrics.aggregation is sys.modules["torchmetrics.aggregation"]
assert set(torchmetrics.__all__) <= set(dir(torchmetrics)) and len(torchmetrics._logger.handlers) == 1
print([name in sys.modules for name in ("scipy", "torchvision", "torchmetrics.functional")])
"""
    assert run(code) == "[False, False, False]\n[True, True, True]\n"


def test_scipy_is_the_same_in_any_order():
    code = """
import sys
from lit_vgrpo.system.lazy_imports import install
install()
from scipy.optimize import linear_sum_assignment
import scipy.stats
assert linear_sum_assignment([[1, 0], [0, 1]])[1].tolist() == [1, 0]
print([name in sys.modules for name in ("scipy.linalg", "scipy.optimize._optimize", "scipy.stats._stats_py")])
assert round(scipy.stats.beta.ppf(.5, 2, 2), 6) == .5
from scipy.optimize import minimize
assert abs(minimize(lambda x: (x - 3) ** 2, 0).x[0] - 3) < 1e-4
assert scipy.optimize.linear_sum_assignment is linear_sum_assignment
print(type(scipy.optimize) is type(scipy.stats) is type(sys), scipy.optimize is sys.modules["scipy.optimize"])
"""
    assert run(code) == "[False, False, False]\nTrue True\n"


def test_torchmetrics_of_another_shape_is_imported_as_a_whole(tmp_path):
    (tmp_path / "torchmetrics").mkdir()
    (tmp_path / "torchmetrics" / "__init__.py").write_text("class Metric: pass\nfrom torchmetrics import later\n")
    (tmp_path / "torchmetrics" / "later.py").write_text("")
    code = f"""
import sys
from lit_vgrpo.system.lazy_imports import install
install()
sys.path.insert(0, {str(tmp_path)!r})
import torchmetrics
print(torchmetrics.__file__, "torchmetrics.later" in sys.modules, torchmetrics.Metric.__name__, type(torchmetrics))
"""
    assert run(code) == f"{tmp_path}/torchmetrics/__init__.py True Metric <class 'module'>\n"
