"""The command line of a recipe, and the file it names."""

import importlib
import sys
from pathlib import Path

import pytest

from lit_vgrpo.config.recipe import Command, find_recipe, find_runs, read_recipe, refuse_overrides
from lit_vgrpo.errors import UserError
from lit_vgrpo.system.paths import shipped, shipped_root


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["x=1"], "No recipe given"),
        (["tiny_shapes", "other.yaml"], "other.yaml is not an overlay: .* An override is written key=value."),
        (["tiny_shapes", "trainer.max_epochs", "=", "5"], "max_epochs has no value. Write: trainer.max_epochs=5$"),
        (["tiny_shapes", "data.train"], "data.train has no value. Write: data.train=VALUE$"),
        (
            ["zzz.yaml"],
            "zzz.yaml is not a recipe: .* not a shipped name. To list the shipped ones, run: lightning recipes$",
        ),
    ],
)
def test_a_wrong_command_line(args, line):
    with pytest.raises(UserError, match=line):
        Command.parse(args)


def test_a_folder_of_a_recipe_is_its_recipe(here):
    Path("mine").mkdir()
    with pytest.raises(UserError, match="mine is not a recipe: it is a folder without recipe.yaml."):
        find_recipe("mine")
    for name in ("recipe.yaml", "config.yaml"):  # a run's is what was trained
        Path("mine", name).touch()
        assert find_recipe("mine") == Path("mine", name)


def test_overrides_that_a_subcommand_refuses():
    with pytest.raises(UserError, match="^name is set. Leave it out.$"):
        refuse_overrides(["tiny_shapes", "name=x", "data.name=y"], {"name": "is set. Leave it out."})
    with pytest.raises(UserError, match="^a.b.c is set.$"):
        refuse_overrides(["a.b.c=1", "a.bc=1"], {"a.b": "is set."})


def test_a_folder_of_runs_stands_for_the_runs_below(here):
    for name, text in (("a", "found_in: []"), ("b/1_first", "found_in: []"), ("a/wandb/files", "wandb_version: 1")):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "config.yaml").write_text(f"name: x\n{text}\n")
    assert [path.relative_to(here) for path in find_runs("runs")] == [Path("runs/a"), Path("runs/b/1_first")]
    assert find_runs("runs/a/wandb/files") == [here / "runs/a/wandb/files"]
    with pytest.raises(UserError, match="^b is not a run. "):
        find_runs("b")


@pytest.mark.parametrize("name", ["tiny_shapes", "tiny_shapes.yaml", "recipes/tiny_shapes.yaml"])
def test_shipped_recipes_go_by_name_from_any_folder(name, here):
    assert find_recipe(name) == shipped_root() / "tiny_shapes.yaml"


def test_a_file_here_wins_over_a_shipped_recipe(here):
    Path("tiny_shapes.yaml").write_text("")
    assert find_recipe("tiny_shapes.yaml") == Path("tiny_shapes.yaml")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("god.yaml", "good.yaml"), ("sub/god.yml", "sub/good.yaml"), ("tiny_shape.yaml", "tiny_shapes")],
)
def test_a_mistyped_file_names_the_one_beside_it(typed, meant, here):
    for folder in (".", "sub"):
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "good.yaml").write_text("")
    with pytest.raises(UserError, match=f"Did you mean {meant}[?]"):
        find_recipe(typed)


def test_a_path_may_hold_an_equals_sign(here):
    recipe = here / "lr=1e-4" / "my.yaml"
    recipe.parent.mkdir()
    recipe.write_text("a: 1")
    command = Command.parse([str(recipe), f"data.train={recipe}"])
    assert command.recipe == recipe
    assert Command.parse(["lr=1e-4/my.yaml"]).recipe == Path("lr=1e-4/my.yaml")
    assert command.overrides == [("data.train", str(recipe))]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: [1\nb: 2", r'not YAML at lines 1 to 2, "a: \[1": '),
        ("a: 1\nb\nc: 2", 'not YAML at lines 2 to 3, "b": '),
        ("a:\n  b: 1\n   c: 2", 'not YAML at line 3, "c: 2": .* Write "key: value", indented'),
        ("a: 1\na: 2", r'not YAML at line 2, "a: 2": found duplicate key a\.$'),
        ("- 1", "top level must be a mapping"),
        ("42", "Cannot read .*r.yaml: Invalid loaded object type: int"),
        ("a: ${b.c}", r"a: Interpolation key 'b.c' not found"),
    ],
)
def test_an_unreadable_recipe(text, line, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=line):
        read_recipe(Command.parse([str(path)]))


def test_a_binary_recipe(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"r\.yaml"):
        read_recipe(Command.parse([str(path)]))


@pytest.fixture
def installed(here, monkeypatch):
    """A folder of recipes and overlays in place of the installed ones."""
    root = here / "shipped"
    (root / "strategy").mkdir(parents=True)
    (root / "base.yaml").write_text(
        "trainer: {max_epochs: 3, callbacks: [EMA], strategy: {class_path: DDP, init_args: {timeout: 5}}}\n"
        "data: {group_size: 4, micro_batch_size: '${data.group_size}'}\n"
    )
    (root / "strategy" / "zero2.yaml").write_text("trainer: {strategy: {class_path: ZeRO, init_args: {stage: 2}}}\n")
    for module in ("system.paths", "config.recipe"):
        monkeypatch.setattr(f"lit_vgrpo.{module}.shipped_root", lambda: root)
    return root


@pytest.mark.parametrize("name", ["strategy/zero2", "strategy/zero2.yaml", "recipes/strategy/zero2.yaml"])
def test_overlays_are_laid_over_the_recipe_in_order(name, installed, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("trainer: {max_epochs: 5, callbacks: [Export]}\ndata: {group_size: 8}\n")
    command = Command.parse(["base", name, str(own), "trainer.max_epochs=7"])
    assert read_recipe(command).values == {
        "trainer": {
            "max_epochs": 7,
            "callbacks": ["Export"],
            "strategy": {"class_path": "ZeRO", "init_args": {"stage": 2}},
        },
        "data": {"group_size": 8, "micro_batch_size": 8},
    }


@pytest.mark.parametrize("name", ["strategy/zero", "zero2", "strategy/zreo2.yaml"])
def test_an_overlay_that_does_not_exist_names_the_near_one(name, installed):
    with pytest.raises(UserError, match=f"{name} is not an overlay: .* Did you mean strategy/zero2?"):
        Command.parse(["base", name])


def test_a_run_folder_stands_for_the_recipe_in_it(here):
    for name in ("two", "tiny_shapes"):
        Path(name).mkdir()
        Path(name, "config.yaml").write_text("model: {reward: CLIPScore}")
    assert Command.parse(["two"]).recipe == Path("two/config.yaml")
    assert Command.parse(["tiny_shapes"]).recipe == shipped()["tiny_shapes"]


def test_another_method_keeps_the_rollout_and_nothing_else_of_the_recipes_own(tiny_recipe):
    command = Command.parse([str(tiny_recipe), "model.objective.beta=0.1", "model.objective=DiffusionNFT"])
    recipe = read_recipe(command)
    objective = recipe.values["model"]["objective"]
    assert objective == {"class_path": "DiffusionNFT", "init_args": {"rollout": {"steps": 2}, "beta": 0.1}}
    assert recipe.swapped == "DiffusionNFT"
    assert recipe.notes == ["DiffusionNFT uses its default options; only rollout is kept from the recipe's objective."]
    (note,) = read_recipe(Command.parse([str(tiny_recipe), "model.policy=FluxPolicy"])).notes
    assert note.startswith("model.policy=FluxPolicy replaces SD3Policy, whose options are dropped: checkpoint")
    same = Command.parse([str(tiny_recipe), "model.objective=VGRPO"])
    assert read_recipe(same).values["model"]["objective"]["init_args"]["num_mc_samples"] == 2


def test_values_from_the_environment_are_known_as_written(tiny_recipe, monkeypatch):
    monkeypatch.setenv("PROMPTS", "secret.txt")
    command = Command.parse([str(tiny_recipe), "data.train=${oc.env:PROMPTS}", "data.heldout=${data.train}"])
    recipe = read_recipe(command)
    assert recipe.values["data"]["heldout"] == "secret.txt"
    assert recipe.texts == {("data", "train"): "${oc.env:PROMPTS}", ("data", "heldout"): "${data.train}"}
    monkeypatch.delenv("PROMPTS")
    with pytest.raises(UserError, match=r"data\.train: the variable PROMPTS is not set. Set it: export PROMPTS="):
        read_recipe(command)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A recipe in ``there/`` while the current folder is ``here/``."""
    there, here = tmp_path / "there", tmp_path / "here"
    for folder, names in ((there, ("train.txt", "both.txt", "logs.d", "model")), (here, ("both.txt", "only_here.txt"))):
        folder.mkdir()
        for name in names:
            (folder / name).write_text("a cat\n")
    (there / "module_of_there.py").write_text("def score(images, prompts):\n    return [0.0] * len(prompts)\n")
    text = "data: {train: [train.txt, both.txt, {path: only_here.txt, split: model}]}\n"
    text += "model: {policy: {class_path: SD3Policy, init_args: {checkpoint: model}}}\n"
    text += "trainer: {logger: {class_path: CSVLogger, init_args: {save_dir: logs.d}}}\n"
    (there / "recipe.yaml").write_text(text)
    monkeypatch.chdir(here)
    monkeypatch.setattr("sys.path", [*sys.path])
    return there


def test_paths_are_found_next_to_the_recipe_then_here(elsewhere, monkeypatch):
    values = read_recipe(Command.parse(["../there/recipe.yaml", "data.heldout=both.txt"])).values
    in_there = [str(elsewhere / name) for name in ("train.txt", "both.txt")]
    assert values["data"]["train"] == [*in_there, {"path": "only_here.txt", "split": "model"}]
    assert values["data"]["heldout"] == "both.txt"  # typed here
    assert values["model"]["policy"]["init_args"]["checkpoint"] == str(elsewhere / "model")
    assert values["trainer"]["logger"]["init_args"]["save_dir"] == "logs.d"  # written, not read
    assert importlib.import_module("module_of_there").__file__ == str(elsewhere / "module_of_there.py")
    monkeypatch.chdir(elsewhere.parent)
    values = read_recipe(Command.parse(["there/recipe.yaml"])).values
    assert values["data"]["train"][:2] == ["there/train.txt", "there/both.txt"]


def test_the_recipe_of_a_run_knows_where_it_found_them(elsewhere):
    run = elsewhere / "runs" / "first"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("data: {train: train.txt, embedding_cache: model}\nfound_in: ['../..']\n")
    found = {"train": str(elsewhere / "train.txt"), "embedding_cache": str(elsewhere / "model")}
    assert read_recipe(Command.parse([str(run)])).values == {"data": found}
