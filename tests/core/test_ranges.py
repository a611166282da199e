"""Every number that can be set is refused outside of its range, in Python and in a recipe."""

import inspect
import math
import re
import types
import typing
from pathlib import Path
from typing import Annotated, Literal

import pytest
from annotated_types import Interval
from pydantic import InstanceOf
from torch import nn

from lit_vgrpo import callbacks, objectives, policies, rewards
from lit_vgrpo.config.parts import built_part, options_of_class
from lit_vgrpo.core.ranges import OnlyWith, PositiveInt, Range, checked
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.data.module import PromptDataModule
from lit_vgrpo.data.source import PromptSource
from lit_vgrpo.errors import UserError
from lit_vgrpo.module import VGRPOModule
from lit_vgrpo.rewards import Connection
from lit_vgrpo.training.checkpoint import RunCheckpoint
from lit_vgrpo.training.evaluation import EvaluationSpec
from lit_vgrpo.training.optimizer import OptimizerConfig
from lit_vgrpo.training.sharded import FSDP2, ZeRO

GOOD = {
    "checkpoint": "shipped:assets/tiny_sd3",
    "train": "shipped:prompts/shapes_train.jsonl",
    "reference": "pictures",
    "images": "lit_vgrpo.tiny.ShapesImages",
    "url": "http://127.0.0.1:1/score",
    "model": "judge",
    "name": "geneval",
    "function": "math:sqrt",
    "path": "shipped:prompts/shapes_train.jsonl",
    "rewards": ["JPEGCompressibility"],
    "policy": {"class_path": "SD3Policy", "init_args": {"checkpoint": "shipped:assets/tiny_sd3"}},
    "objective": "VGRPO",
    "reward": "JPEGCompressibility",
    "prompts_per_iteration": 2,
    "group_size": 2,
    "teachers": {"ocr": "runs/ocr/export"},
}
"""Options without a default."""
NAMED = [
    cls
    for module in (policies, objectives, rewards, callbacks)
    for cls in map(vars(module).get, module.__all__)
    if inspect.isclass(cls)
    and not inspect.isabstract(cls)
    and not issubclass(cls, Exception | policies.Policy.__base__)
]
FAMILIES = [policies.SD3Policy, policies.UNetPolicy, policies.FluxPolicy]
BAGS = [RunCheckpoint, RolloutSpec, OptimizerConfig, Connection, PromptDataModule, PromptSource]
CLASSES = list(dict.fromkeys([*NAMED, *FAMILIES, *BAGS, VGRPOModule, FSDP2, ZeRO]))


def hints_of(cls):
    """Return the type hints of a class's options, with those of its bases."""
    found = {}
    for owner in reversed(cls.__mro__[:-1]):
        if "__dataclass_fields__" in vars(owner) or "__init__" in vars(owner):
            source = owner if "__dataclass_fields__" in vars(owner) else inspect.unwrap(owner.__init__)
            try:
                found |= typing.get_type_hints(source, include_extras=True)
            except NameError:  # a base of another package
                continue
    return {name: found[name] for name in options_of_class(cls) if name in found}


def has_bare_number(hint):
    """Return True if the hint takes a number without a range."""
    if hint in (int, float):
        return True
    if typing.get_origin(hint) is Annotated:
        return has_bare_number(hint.__origin__) and not any(isinstance(note, Interval) for note in hint.__metadata__)
    return typing.get_origin(hint) not in (Literal, dict) and any(map(has_bare_number, typing.get_args(hint)))


def outside(hint):
    """Return the numbers just outside the range of an option that takes one number."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = typing.get_args(hint) if is_union else (hint,)
    for member in (one for one in members if typing.get_origin(one) is Annotated):
        limits = [limit for entry in member.__metadata__ if isinstance(entry, Interval) for limit in entry]
        for limit in limits:
            for name, step in (("ge", -1), ("le", 1), ("gt", 0), ("lt", 0)):
                if hasattr(limit, name):
                    yield member.__origin__(getattr(limit, name) + step)


OPTIONS = [(cls, name, value) for cls in CLASSES for name, hint in hints_of(cls).items() for value in outside(hint)]


def test_every_number_declares_its_range():
    found = {
        f"{cls.__name__}.{name}" for cls in CLASSES for name, hint in hints_of(cls).items() if has_bare_number(hint)
    }
    assert found == set()
    assert len(OPTIONS) > 100


def test_signatures_show_the_ranges():
    shown = str(inspect.signature(objectives.VGRPO))
    assert "num_mc_samples: typing.Annotated[int, Range(least=1, most=1000)] = 4" in shown
    assert "scale_cap: Optional[Annotated[float, Range(above=0), OnlyWith('space', 'x', 'v')]] = 5.0" in shown
    assert not [cls for cls in CLASSES if re.search("FieldInfo|object at 0x", str(inspect.signature(cls)))]


@pytest.mark.parametrize("cls", dict.fromkeys(cls for cls, *_ in OPTIONS), ids=lambda cls: cls.__name__)
def test_a_number_outside_its_range_is_refused(cls):
    needed = {n: GOOD[n] for n, p in inspect.signature(cls).parameters.items() if n in GOOD and p.default is p.empty}
    needed |= {"checkpoint": GOOD["checkpoint"]} if issubclass(cls, policies.Policy) else {}
    cases = [(name, value) for owner, name, value in OPTIONS if owner is cls]
    for name, value in cases:
        with pytest.raises(ValueError, match=rf"^{name}={value!r}: Use "):
            cls(**needed | {name: value})
    name, value = cases[0]
    with pytest.raises(UserError, match=rf"^part\.{name}={value!r}: Use "):
        built_part(
            {"part": {"class_path": f"{cls.__module__}.{cls.__name__}", "init_args": needed | {name: value}}},
            "part",
            cls,
        )


class Part:
    pass


class Timer:
    def __init__(
        self,
        seconds: Annotated[float, Range(above=0, most=10)] | None = None,
        size: PositiveInt | Literal["auto"] = "auto",
        pair: tuple[PositiveInt, PositiveInt] = (1, 1),
        unit: Literal["s", "min"] = "s",
        digits: Annotated[PositiveInt, OnlyWith("unit", "min")] = 1,
        part: InstanceOf[Part] | None = None,
        copies: Annotated[PositiveInt, OnlyWith("part")] | None = None,
        spec: RolloutSpec | None = None,
        names: list[str] | None = None,
        quiet: bool = False,
        place: str | dict[str, str] = ".",
    ) -> None:
        self.seconds, self.pair, self.spec = seconds, pair, spec


Timer = checked(Timer)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"seconds": 0}, ValueError, "seconds=0: Use a number above 0"),
        ({"seconds": 10.5}, ValueError, "seconds=10.5: Use 10 or less"),
        ({"seconds": math.nan}, ValueError, "seconds=nan: Use a finite number"),
        ({"seconds": "3"}, TypeError, "seconds='3': Use a number"),
        ({"size": True}, ValueError, "size=True: Use an integer, or 'auto'"),
        ({"size": "aut"}, ValueError, "size='aut': Use an integer, or 'auto'"),
        ({"pair": [1, 0]}, ValueError, "pair=[1, 0]: Use 1 or more"),
        ({"digits": 2}, ValueError, "digits=2 has no effect with unit=s. Set digits=1, or unit=min."),
        ({"copies": 2}, ValueError, "copies=2 has no effect with part=None. Set copies=None, or part."),
        ({"part": Part}, TypeError, ": Use an instance of Part"),
        ({"part": "hub/name"}, TypeError, "part='hub/name': Use an instance of"),
        (
            {"part": nn.Sequential(nn.ReLU())},
            TypeError,
            "part=Sequential( (0): ReLU() ): Use an instance of",
        ),
        ({"spec": 5}, TypeError, "spec=5: Use an instance of RolloutSpec"),
        ({"spec": RolloutSpec}, TypeError, ": Use an instance of RolloutSpec"),
        ({"spec": {"steps": 0}}, ValueError, "steps=0: Use 1 or more"),
        ({"spec": {"stepz": 1}}, TypeError, "stepz is not an option of RolloutSpec. Did you mean steps?"),
        ({"names": "to_q"}, TypeError, "names='to_q': Use a list"),
        ({"quiet": "false"}, TypeError, "quiet='false': Use true or false"),
        ({"second": 1}, TypeError, "second is not an option of Timer. Did you mean seconds?"),
        ({"spec": {"solver": "ueler"}}, ValueError, "solver=ueler does not exist. Did you mean euler?"),
        ({"steps": 1}, TypeError, "steps is not an option of Timer. Pass spec=RolloutSpec(steps=...)."),
    ],
)
def test_a_message_names_the_argument(given, kind, message):
    with pytest.raises(kind) as caught:
        Timer(**given)
    assert message in str(caught.value)


def test_missing_arguments_are_named():
    with pytest.raises(TypeError, match=re.escape("Both lacks one and two. Pass Both(..., one=..., two=...).")):
        checked(type("Both", (), {"__init__": lambda self, first, one, two, third=1: None}))(0)


SDES = "flow_sde or cps or dance_sde or ddim_sde"


@pytest.mark.parametrize(
    ("cls", "given", "message"),
    [
        (RolloutSpec, {"noise_level": 0.7}, f"with solver=None. Set noise_level=None, or solver={SDES}."),
        (RolloutSpec, {"solver": "unipc", "window": (1, 2)}, f"with solver=unipc. Set window=None, or solver={SDES}."),
        (RolloutSpec, {"solver": "ddim", "tail": 0.5}, f"with solver=ddim. Set tail=None, or solver={SDES}."),
        (EvaluationSpec, {"noise_level": 0.7}, "with solver=None."),
        (objectives.FlowGRPO, {"fast_window": 2}, "with fast=False. Set fast_window=3, or fast."),
        (objectives.FlowGRPO, {"fast_range": (0, 4)}, "with fast=False. Set fast_range=None, or fast."),
        (
            objectives.MixGRPO,
            {"window_strategy": "random", "window_interval": 5},
            "with window_strategy=random. Set window_interval=25, or window_strategy=progressive or decay.",
        ),
        (objectives.MixGRPO, {"window_strategy": "frozen", "window_stride": 2}, "with window_strategy=frozen."),
        (objectives.VGRPO, {"kl_to": "reference"}, "with kl_weight=0.0."),
        (objectives.VGRPO, {"space": "eps", "scale_cap": 2.0}, "with space=eps. Set scale_cap=5.0, or space=x or v."),
        (objectives.AWM, {"ema_weight": 0.0, "ema_decay": 0.5}, "with ema_weight=0.0."),
    ],
)
def test_an_option_without_effect_is_refused(cls, given, message):
    with pytest.raises(ValueError, match=rf"^{[*given][-1]}=.* has no effect {message.replace('.', '[.]')}"):
        cls(**given)


def test_an_option_with_effect_is_taken():
    RolloutSpec("cps", noise_level=0.5, window=(1, 2), tail=0.5)
    objectives.MixGRPO(window_strategy="decay", window_interval=5)
    objectives.FlowGRPO(fast=True, fast_window=2, fast_range=(0, 4))
    objectives.VGRPO(kl_weight=0.1, kl_to="reference", scale_cap=2.0)


def test_the_ends_of_a_range_are_valid():
    pair = [1, 1]
    assert Timer(10, 1, pair).pair is pair  # validated, not replaced
    assert Timer(None).seconds is None
    Timer(place=Path())  # Python may accept more than a recipe can name


def test_the_options_of_a_dataclass_may_be_a_mapping():
    nested = {"steps": 9}
    expected = RolloutSpec(steps=9)
    assert Timer(spec=nested).spec == expected
    assert objectives.VGRPO(nested).rollout == expected
    assert objectives.VGRPO(times={"grid": 10}).times.grid == 10
    child = type("Child", (RolloutSpec,), {})(steps=2)
    assert Timer(spec=child).spec is child
