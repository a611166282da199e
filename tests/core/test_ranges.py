"""Every number that can be set is refused outside of its range, in a line that names its key, or taken as it is."""

import inspect
import math
import re
import typing
from typing import Annotated, Any, Literal

import pytest

from lit_vgrpo import callbacks, objectives, policies, rewards
from lit_vgrpo.config.schema import _hints, _parameters, recipe_errors, sound_parts
from lit_vgrpo.config.trainer_options import TRAINER_NUMBERS, trainer_errors
from lit_vgrpo.core.probability_paths import VariancePreserving
from lit_vgrpo.core.ranges import Range, checked, options_of, range_errors
from lit_vgrpo.core.types import BlockCache, RolloutSpec, ScoutSpec
from lit_vgrpo.data.module import PromptDataModule
from lit_vgrpo.data.source import PromptSource
from lit_vgrpo.module import VGRPOModule
from lit_vgrpo.rewards import Connection
from lit_vgrpo.training.checkpoint import RunCheckpoint
from lit_vgrpo.training.optimizer import OptimizerConfig
from lit_vgrpo.training.sharded import FSDP2, ZeRO

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
    "images": "lit_vgrpo.tiny.ShapesImages",
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
    "kind": "taylorseer",
}
"""Options without a default."""
UNDER_ANOTHER_NAME = ("lora_dropout", "min_change", "min_diversity_drop")
"""Options whose value the built object holds otherwise; lora_dropout takes 0 alone, which is nothing."""
NOT_IN_RECIPES = (policies.Policy,)
COMPANIONS = {"lora_alpha": {"lora_rank": 4}, "heldout_fraction": {}, "window": {"solver": "flow_sde"}}
"""Other settings that an option needs to have an effect."""


def shipped_classes():
    """Every class of ours that a recipe can name or describe by its options."""
    named = [
        vars(module)[name]
        for module in (policies, objectives, rewards, callbacks)
        for name in module.__all__
        if inspect.isclass(vars(module)[name]) and not inspect.isabstract(vars(module)[name])
    ]
    bags = [
        RunCheckpoint,
        RolloutSpec,
        BlockCache,
        ScoutSpec,
        OptimizerConfig,
        Connection,
        PromptDataModule,
        PromptSource,
        VGRPOModule,
        ZeRO,
        FSDP2,
    ]
    return [
        cls for cls in dict.fromkeys((*named, *bags)) if not issubclass(cls, Exception) and cls not in NOT_IN_RECIPES
    ]


def numbers_in(hint: Any) -> bool:
    """True where numbers go in."""
    if hint in (int, float):
        return True
    if typing.get_origin(hint) in (Literal, dict) or hint is Any:
        return False
    return any(numbers_in(argument) for argument in typing.get_args(hint) if not isinstance(argument, Range))


def words_of(hint: Any) -> list[Any]:
    """The words of a choice, where nothing else but null goes in."""
    options = [option for option in options_of(hint) if option is not type(None)]
    words = [word for option in options for word in typing.get_args(option)]
    return words if all(typing.get_origin(option) is Literal for option in options) else []


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
TAKEN = {
    name: set(values)
    for values, names in (
        (
            ["1e12", "a million million"],
            "advantage_scale time_shift beta DiffusionNFT.advantage_clip embedding_cache_gb eps weight",
        ),
        (
            ["null"],
            "AWM.clip reference_guidance training_guidance DDPO.clip DanceGRPO.clip DiffusionNFT.num_times size "
            "FlowGRPO.clip height lora_alpha lora_rank width MixGRPO.clip heldout_fraction tail window VGRPO.clip "
            "rollout_batch_size score_range clips normalise weights noisiest widen_over time_range EPG.num_times "
            "interval BlockCache.warm_up snr_every_n_iterations",
        ),
        (
            ["0"],
            "ema_decay_max backoff_s retries old_decay_max decay init_seed counting_threshold max_overlap "
            "threshold kept_images PromptDataModule.seed num_workers min_change min_diversity_drop VGRPOModule.seed "
            "temperature",
        ),
        (
            ["0", "1e12", "a million million"],
            "ema_decay_rate ema_weight kl_weight old_decay_rate decay_rate weight_decay anchor_weight",
        ),
        (
            [],
            "images_per_vote AWM.num_times power batch_size connect_timeout_s max_connections timeout_s DGPO.clip "
            "DGPO.num_times train_fraction images_per_prompt fast_window decode_batch_size max_sequence_length "
            "quality flash_share window_size min_height threads betas lr eval_batch_size group_size "
            "heldout_images_per_prompt micro_batch_size prompts_per_iteration updates_per_iteration guidance "
            "steps factor min_pixels num_prompts num_mc_samples snr_draws",
        ),
        (
            ["1e12", "null", "a million million"],
            "VoteReward.timeout_s drop DDPO.advantage_clip DanceGRPO.advantage_clip scale_cap FlowGRPO.advantage_clip "
            "AWM.advantage_clip DGPO.advantage_clip MixGRPO.advantage_clip soft_clip",
        ),
        (
            ["null", "a million million"],
            "CollapseStop.patience heldout_limit limit votes_per_group",
        ),
        (
            ["a million million"],
            "voters patience_evaluations give_up_after max_response_bytes every_n_evaluations window_interval "
            "window_stride lines RewardHackAlarm.patience SampleGrid.every_n_iterations "
            "SurrogateDiagnostics.every_n_iterations max_tokens bucket_size",
        ),
        (
            ["0", "a million million"],
            "RunCheckpoint.every_n_iterations behaviour_from_step decay_from warmup_steps",
        ),
        (
            ["0", "null"],
            "lora_dropout noise_level anchor_decay VLMJudge.seed order BlockCache.threshold",
        ),
    )
    for name in names.split()
}
"""Which of the tried values an option takes, by its name, or by its class and name where classes differ."""
TRAINER_TAKES = {
    name: set(values)
    for values, names in (
        (
            ["a million million"],
            "accumulate_grad_batches",
        ),
        (
            ["null", "a million million"],
            "check_val_every_n_epoch",
        ),
        (
            ["-1", "a string", "a list"],
            "devices",
        ),
        (
            ["0", "a million million", "true"],
            "fast_dev_run",
        ),
        (
            ["0", "1e12", "null", "a million million"],
            "gradient_clip_val",
        ),
        (
            ["0", "null", "a million million"],
            "limit_predict_batches limit_test_batches limit_train_batches limit_val_batches log_every_n_steps "
            "min_epochs min_steps",
        ),
        (
            ["-1", "null", "a million million"],
            "max_epochs",
        ),
        (
            ["-1", "a million million"],
            "max_steps",
        ),
        (
            [],
            "num_nodes",
        ),
        (
            ["0", "-1", "null", "a million million"],
            "num_sanity_val_steps",
        ),
        (
            ["0", "a million million"],
            "overfit_batches reload_dataloaders_every_n_epochs",
        ),
        (
            ["1e12", "a string", "null", "a million million"],
            "val_check_interval",
        ),
    )
    for name in names.split()
}
IDS = [f"{cls.__name__}.{name}" for cls, name, _ in OPTIONS]


def test_every_number_declares_its_range():
    bare = [label for label, (_, _, hint) in zip(IDS, OPTIONS, strict=True) if bare_numbers(hint)]
    assert bare == []
    assert len(OPTIONS) > 100


def outcome(cls, name, value):
    """The error of one value of an option, or what was built with it."""
    needed = [key for key, parameter in _parameters(cls)[0].items() if parameter.default is inspect.Parameter.empty]
    given = {key: GOOD[key] for key in needed} | COMPANIONS.get(name, {}) | {name: value}
    errors = recipe_errors({"part": given}, {"part": cls}, {})
    if errors:
        return errors
    return sound_parts({"part": given}, {"part": cls}, {})["part"]


def holds(built, name, value, depth=3):
    """True where an object, or one that it is made of, has the value under the option's name, or in its settings."""
    if isinstance(built, dict):
        return any(holds(entry, name, value, depth - 1) or entry == value for entry in built.values())
    inside = vars(built) if hasattr(built, "__dict__") and depth else {}
    if name in UNDER_ANOTHER_NAME:
        return True
    if any(key.strip("_") == name and entry == value for key, entry in inside.items()):
        return True
    kept = [entry for entry in inside.values() if isinstance(entry, dict) or "lit_vgrpo" in type(entry).__module__]
    return any(holds(entry, name, value, depth - 1) for entry in kept)


@pytest.mark.parametrize(("cls", "name", "hint"), OPTIONS, ids=IDS)
def test_a_number_is_refused_by_its_key_or_has_its_effect(cls, name, hint):
    taken = set()
    for label, value in TRIED.items():
        found = outcome(cls, name, value)
        if isinstance(found, list):
            assert all(re.match(rf"part\.{name}(\[\d\])?=", line) for line in found), found
            assert all("Use " in line or "Give " in line for line in found), found
            continue
        taken.add(label)
        default = value is None and _parameters(cls)[0][name].default is None
        assert default or value is None or holds(found, name, value), f"{name}={value} has no effect"
    assert taken == TAKEN.get(f"{cls.__name__}.{name}", TAKEN.get(name)), taken


CHOICES = [
    (cls, name, words)
    for cls in shipped_classes()
    for name in _parameters(cls)[0]
    if (words := words_of(_hints(cls).get(name))) and cls is not VariancePreserving
]


@pytest.mark.parametrize(("cls", "name", "words"), CHOICES, ids=[f"{cls.__name__}.{name}" for cls, name, _ in CHOICES])
def test_a_word_that_is_no_choice_is_refused_in_plain_python_too(cls, name, words):
    needed = [key for key, parameter in _parameters(cls)[0].items() if parameter.default is inspect.Parameter.empty]
    listed = ", ".join(map(str, words))
    with pytest.raises(ValueError, match=rf"^{name}='other' is unknown\. Use one of: {listed}\."):
        cls(**{**{key: GOOD[key] for key in needed}, name: "other"})


@pytest.mark.parametrize("name", TRAINER_NUMBERS)
def test_the_trainers_numbers_are_refused_by_their_key(name):
    taken = set()
    for label, value in TRIED.items():
        found = trainer_errors({name: value})
        assert all(line.startswith(f"trainer.{name}=") and "Use " in line for line in found), found
        taken |= set() if found else {label}
    assert taken == TRAINER_TAKES[name], taken


def test_plain_python_is_told_the_same():
    @checked
    class Timer:
        def __init__(self, seconds: Annotated[float, Range(above=0)] | None = None) -> None:
            self.seconds = seconds

    assert Timer(3).seconds == 3
    for value, kind in ((0, ValueError), (math.nan, ValueError), (True, TypeError), ("3", TypeError)):
        with pytest.raises(kind, match=f"^seconds={value} .* Use a number above 0, or null"):
            Timer(value)
    with pytest.raises(TypeError, match="unexpected keyword"):
        Timer(second=3)


def test_a_choice_of_words_beside_a_number():
    hint = Annotated[int, Range(1)] | Literal["auto"] | None
    assert [*range_errors("size", "auto", hint)] == []
    (error,) = range_errors("size", "aut", hint)
    assert str(error) == "size=aut is not a whole number. Use 1 or more, or auto, or null."
