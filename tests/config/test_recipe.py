"""The command line of a recipe, and the file it names."""

from pathlib import Path

import pytest

from lit_vgrpo.config.recipe import Command, find_recipe, loaded, parser_config, read_recipe, shipped_recipes
from lit_vgrpo.errors import UserError
from lit_vgrpo.system.paths import shipped_root


def test_overrides_come_in_three_forms(tiny_recipe):
    command = Command.parse([str(tiny_recipe), "a.b=1=2", "--c=3", "--d", "-4", "e+=x"])
    assert command.overrides == [("a.b", "1=2"), ("c", "3"), ("d", "-4"), ("e+", "x")]


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ([], "No recipe given"),
        (["x=1"], "No recipe given"),
        (["tiny_shapes", "--x"], "--x has no value. Write x=VALUE."),
        (["tiny_shapes", "other.yaml"], "other.yaml is not an overlay: .* An override is written key=value."),
        (["tiny_shapes", "trainer.max_epochs", "5"], "trainer.max_epochs is not an overlay"),
        (["tiny_shape"], "tiny_shape is not a recipe: .* Did you mean tiny_shapes?"),
        (
            ["tiny_shapes", "trainer.max_epochs", "=", "5"],
            "An override is a single argument: trainer.max_epochs=VALUE.",
        ),
        (["tiny_shapes", "--resum"], "--resum is not an option. Did you mean --resume?"),
        (["tiny_shapes", "--rsume", "run_dir=x"], "--rsume is not an option. Did you mean --resume?"),
        (["zzz.yaml"], "zzz.yaml is not a recipe: .* Shipped: .*tiny_unet"),
    ],
)
def test_a_wrong_command_line(args, line):
    with pytest.raises(UserError, match=line):
        Command.parse(args)


@pytest.mark.parametrize("name", ["tiny_shapes", "tiny_shapes.yaml", "recipes/tiny_shapes.yaml"])
def test_shipped_recipes_go_by_name_from_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe(name) == shipped_root() / "tiny_shapes.yaml"


def test_a_file_here_wins_over_a_shipped_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny_shapes.yaml").write_text("")
    assert find_recipe("tiny_shapes.yaml") == Path("tiny_shapes.yaml")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("god.yaml", "good.yaml"), ("sub/good.yml", "sub/good.yaml"), ("tiny_shape.yaml", "tiny_shapes")],
)
def test_a_mistyped_file_names_the_one_beside_it(typed, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (".", "sub"):
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "good.yaml").write_text("")
    with pytest.raises(UserError, match=f"Did you mean {meant}[?]"):
        find_recipe(typed)


def test_a_path_may_hold_an_equals_sign(tmp_path):
    recipe = tmp_path / "lr=1e-4" / "my.yaml"
    recipe.parent.mkdir()
    recipe.write_text("a: 1")
    command = Command.parse([str(recipe), f"data.train={recipe}"])
    assert command.recipe == recipe
    assert command.overrides == [("data.train", str(recipe))]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: [1\nb: 2", "line 2 is not YAML"),
        ("- 1", "top level must be a mapping"),
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
def shipped(tmp_path, monkeypatch):
    """A folder of recipes and overlays in place of the installed ones."""
    root = tmp_path / "shipped"
    (root / "strategy").mkdir(parents=True)
    (root / "base.yaml").write_text(
        "trainer: {max_epochs: 3, callbacks: [EMA], strategy: {class_path: DDP, init_args: {timeout: 5}}}\n"
        "data: {group_size: 4, micro_batch_size: '${data.group_size}'}\n"
    )
    (root / "strategy" / "zero2.yaml").write_text("trainer: {strategy: {class_path: ZeRO, init_args: {stage: 2}}}\n")
    monkeypatch.setattr("lit_vgrpo.config.recipe.shipped_root", lambda: root)
    monkeypatch.chdir(tmp_path)
    return root


@pytest.mark.parametrize("name", ["strategy/zero2", "strategy/zero2.yaml", "recipes/strategy/zero2.yaml"])
def test_overlays_are_laid_over_the_recipe_in_order(name, shipped, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("trainer: {max_epochs: 5, callbacks: [Export]}\ndata: {group_size: 8}\n")
    command = Command.parse(["base", name, str(own), "trainer.max_epochs=7"])
    assert read_recipe(command) == {
        "trainer": {
            "max_epochs": 7,
            "callbacks": ["Export"],
            "strategy": {"class_path": "ZeRO", "init_args": {"stage": 2}},
        },
        "data": {"group_size": 8, "micro_batch_size": 8},
    }


@pytest.mark.parametrize("name", ["strategy/zero", "zero2", "strategy/zreo2.yaml"])
def test_an_overlay_that_does_not_exist_names_the_near_one(name, shipped):
    with pytest.raises(UserError, match=f"{name} is not an overlay: .* Did you mean strategy/zero2?"):
        Command.parse(["base", name])


def test_a_run_folder_stands_for_the_recipe_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("two", "tiny_shapes"):
        Path(name).mkdir()
        Path(name, "config.yaml").write_text("data: {}")
    assert Command.parse(["two", "--resume"]).recipe == Path("two/config.yaml")
    assert Command.parse(["tiny_shapes"]).recipe == shipped_recipes()["tiny_shapes"]


def test_resume_takes_no_value():
    command = Command.parse(["--resume", "tiny_shapes", "x=1"])
    assert command.resume
    assert command.overrides == [("x", "1")]


def test_another_method_keeps_the_rollout_and_nothing_else_of_the_recipes_own(tiny_recipe):
    command = Command.parse([str(tiny_recipe), "model.objective=DiffusionNFT", "model.objective.beta=0.1"])
    objective = read_recipe(command)["model"]["objective"]
    assert objective == {"class_path": "DiffusionNFT", "init_args": {"rollout": {"steps": 2}, "beta": 0.1}}
    same = Command.parse([str(tiny_recipe), "model.objective=VGRPO"])
    assert read_recipe(same)["model"]["objective"]["init_args"]["num_mc_samples"] == 2


def test_numbers_in_a_list_may_come_from_the_environment(monkeypatch):
    """The parser itself refuses them: within lists it resolves nothing."""
    monkeypatch.setenv("BETA", "0.9")
    command = Command.parse(["tiny_shapes", 'model.optimizer.betas=["${oc.env:BETA}",0.99]'])
    assert command.plain_overrides == []
    with parser_config(command) as (path, _):
        assert loaded(path)["model"]["optimizer"]["betas"] == [0.9, 0.99]
