"""The help is read from sources; here it is compared with the classes themselves."""

import inspect
import subprocess
import sys
from dataclasses import MISSING, fields
from importlib import import_module

import pytest
from lightning.pytorch import Trainer

from lit_vgrpo import objectives, policies, rewards
from lit_vgrpo.cli.main import main
from lit_vgrpo.cli.subcommands import SUBCOMMANDS
from lit_vgrpo.config.help import (
    CLASSES,
    PACKAGES,
    PARTS,
    TOP,
    TRAINER,
    class_options,
    command_options,
    in_yaml,
    options_of,
    recipe_keys,
)
from lit_vgrpo.config.recipe import find_recipe
from lit_vgrpo.config.schema import options_of_class
from lit_vgrpo.launch.recipe_cli import LINKED, TOP_LEVEL, TRAINER_DEFAULTS


def found(place):
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


@pytest.mark.parametrize("key", PARTS)
def test_options_and_defaults_of_a_part_are_the_constructors(key):
    shown = class_options(PARTS[key])
    parameters = inspect.signature(found(PARTS[key])).parameters
    empty = inspect.Parameter.empty
    defaults = {name: None if p.default is empty else in_yaml(p.default) for name, p in parameters.items()}
    assert {option.name: option.default for option in shown} == defaults
    assert all(option.text for option in shown)


def test_the_top_level_is_complete():
    assert {*TOP, *(key for key in PARTS if "." not in key), "trainer"} == set(TOP_LEVEL)
    assert {key.partition(".")[0] for key in LINKED} == {"model", "data"}


def test_options_of_the_trainer_have_its_defaults():
    parameters = inspect.signature(Trainer).parameters
    own = {name: TRAINER_DEFAULTS.get(name, parameters[name].default) for name in TRAINER}
    assert {name: default for name, (default, _) in TRAINER.items()} == own


@pytest.mark.parametrize(
    ("key", "package", "base"),
    [
        ("policy", policies, policies.Policy),
        ("objective", objectives, objectives.Objective),
        ("reward", rewards, rewards.Reward),
    ],
)
def test_classes_are_those_that_ship(key, package, base):
    public = [getattr(package, name) for name in package.__all__]
    ours = {cls.__name__ for cls in public if inspect.isclass(cls) and issubclass(cls, base) and cls is not base}
    assert set(CLASSES[key].split()) == ours


@pytest.mark.parametrize("part", CLASSES)
def test_options_of_every_class_are_those_of_its_constructor(part):
    package = import_module(f"lit_vgrpo.{PACKAGES[part]}")
    for name in CLASSES[part].split():
        assert {option.name for option in options_of(part, name)} == set(options_of_class(getattr(package, name)))
    assert options_of(part, "Unknown") == []


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_options_of_a_subcommand_are_its_dataclass(name):
    subcommand = SUBCOMMANDS[name]
    cls = found(subcommand.options)
    stated = {f"--{(one.metadata['name'] or one.name).replace('_', '-')}": one for one in fields(cls) if one.metadata}
    shown = {option.name: option for option in command_options(subcommand.options)}
    assert set(shown) == set(stated)
    for option, one in stated.items():
        assert shown[option].text, option
        default = "" if any(one.default is none for none in (MISSING, None, False)) else one.default
        plain = ",".join(default) if isinstance(default, list | tuple) else str(default).removeprefix("torch.")
        assert shown[option].default == plain
    words = subcommand.example.split()
    assert words[0] == name
    assert {word for word in words if word.startswith("--")} <= set(stated)
    if subcommand.takes_recipe:
        find_recipe(words[1])


def test_help_shows_keys_and_an_example(capsys):
    assert main(["run", "--help"]) == 0
    out = capsys.readouterr().out
    assert "\nExample: lightning run tiny_shapes" in out
    assert recipe_keys() in out
    assert max(map(len, out.splitlines()[1:])) <= 120
    assert main(["help", "run"]) == 0
    assert capsys.readouterr().out == out


def test_help_imports_nothing_heavy():
    code = """
import sys
from lit_vgrpo.cli.main import main
from lit_vgrpo.cli.subcommands import SUBCOMMANDS
for name in SUBCOMMANDS:
    main([name, "--help"])
print({"torch", "lightning", "diffusers", "yaml", "numpy"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\nset()\n")
