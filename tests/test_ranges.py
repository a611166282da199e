"""Every number that can be set is refused outside of its range, in a line that names its key, or taken as it is."""

import inspect
import math
import typing
from typing import Annotated, Any, Literal

from lit_vgrpo import callbacks, objectives, policies, rewards
from lit_vgrpo.data.module import PromptDataModule
from lit_vgrpo.data.source import PromptSource
from lit_vgrpo.fsdp import FSDP2
from lit_vgrpo.module import VGRPOModule
from lit_vgrpo.optimizer import OptimizerConfig
from lit_vgrpo.ranges import Range
from lit_vgrpo.rewards.connection import Connection
from lit_vgrpo.rollout import RolloutSpec
from lit_vgrpo.schema import _hints, _parameters
from lit_vgrpo.zero import ZeRO

TRIED = {
    "0": 0,
    "-1": -1,
    "nan": math.nan,
    "inf": math.inf,
    "1e12": 1e12,
    "a string": "12x",
    "a list": [1, 2, 3],
    "null": None,
    "a million million": 10**12,
    "true": True,
}
GOOD = {
    "checkpoint": "shipped:assets/tiny_sd3",
    "train": "shipped:prompts/shapes_train.jsonl",
    "reference": "pictures",
    "url": "http://127.0.0.1:1/score",
    "model": "judge",
    "function": "math:sqrt",
    "path": "shipped:prompts/shapes_train.jsonl",
    "rewards": ["JPEGCompressibility"],
    "policy": {"class_path": "SD3Policy", "init_args": {"checkpoint": "shipped:assets/tiny_sd3"}},
    "objective": "VGRPO",
    "reward": "JPEGCompressibility",
    "prompts_per_iteration": 2,
    "group_size": 2,
}
"""Options without a default."""
COMPANIONS = {"lora_alpha": {"lora_rank": 4}, "heldout_fraction": {}, "window": {"solver": "flow_sde"}}
"""What an option needs beside it to have an effect."""


def shipped_classes():
    """Every class of ours that a recipe can name or describe by its options."""
    named = [
        vars(module)[name]
        for module in (policies, objectives, rewards, callbacks)
        for name in module.__all__
        if inspect.isclass(vars(module)[name]) and not inspect.isabstract(vars(module)[name])
    ]
    bags = [RolloutSpec, OptimizerConfig, Connection, PromptDataModule, PromptSource, VGRPOModule, ZeRO, FSDP2]
    return [cls for cls in (*named, *bags) if not issubclass(cls, Exception)]


def numbers_in(hint: Any) -> bool:
    """True where numbers go in."""
    if hint in (int, float):
        return True
    if typing.get_origin(hint) in (Literal, dict) or hint is Any:
        return False
    return any(numbers_in(argument) for argument in typing.get_args(hint) if not isinstance(argument, Range))


def bare_numbers(hint: Any) -> bool:
    """True where numbers go in whose range is nowhere said."""
    if hint in (int, float):
        return True
    if typing.get_origin(hint) is Annotated:
        return not any(isinstance(entry, Range) for entry in hint.__metadata__) and bare_numbers(hint.__origin__)
    if typing.get_origin(hint) in (Literal, dict) or hint is Any:
        return False
    return any(bare_numbers(argument) for argument in typing.get_args(hint))


def numeric_options():
    for cls in shipped_classes():
        hints = _hints(cls)
        for name in _parameters(cls)[0]:
            if numbers_in(hints.get(name, Any)):
                yield cls, name, hints[name]


OPTIONS = list(numeric_options())
