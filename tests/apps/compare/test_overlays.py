"""Overlays: what a method changes in a recipe, and what it may not change."""

import json
from pathlib import Path

import pytest
import yaml
from commands import compare_options
from teachers import save_teachers

from lit_vgrpo.apps.compare import plan
from lit_vgrpo.apps.compare.plan import entrants, find_overlay, for_race, read_overlay, with_overlay
from lit_vgrpo.errors import UserError
from lit_vgrpo.launch.build import part_errors
from lit_vgrpo.system.paths import resolve_path, shipped

BASE = {
    "model": {
        "policy": {"class_path": "SD3Policy", "init_args": {"checkpoint": "x"}},
        "objective": {
            "class_path": "VGRPO",
            "init_args": {"num_mc_samples": 2, "rollout": {"solver": "dpm++", "steps": 6, "guidance": 2.0}},
        },
        "optimizer": {"lr": 1e-3, "weight_decay": 0.5},
    },
    "data": {"prompts_per_iteration": 4, "group_size": 4},
    "trainer": {"max_epochs": 9},
}
PART = {
    "model": {
        "objective": {"class_path": "MixGRPO", "init_args": {"rollout": {"solver": "flow_sde", "shared_noise": True}}},
        "optimizer": {"lr": 3e-4},
    },
    "data": {"updates_per_iteration": 4},
}


def overlay_file(folder, name="mine", **content):
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"published": {"model": {"objective": "VGRPO"}}, **content}, sort_keys=False))
    return path


def errors_of(call, *args):
    with pytest.raises(UserError) as caught:
        call(*args)
    return caught.value.errors


def test_the_objective_is_replaced_and_the_rollout_kept():
    recipe = with_overlay(BASE, PART)
    assert recipe["model"]["objective"] == {
        "class_path": "MixGRPO",
        "init_args": {"rollout": {"solver": "flow_sde", "steps": 6, "guidance": 2.0, "shared_noise": True}},
    }
    assert recipe["model"]["optimizer"] == {"lr": 3e-4, "weight_decay": 0.5}
    assert recipe["data"] == {"prompts_per_iteration": 4, "group_size": 4, "updates_per_iteration": 4}
    assert recipe["model"]["policy"] == BASE["model"]["policy"]
    assert BASE["model"]["objective"]["class_path"] == "VGRPO"
    # Every method is evaluated with the recipe's own ODE.
    assert recipe["model"]["evaluation"] == {"solver": "dpm++", "steps": 6, "guidance": 2.0}
    own = {"solver": "euler", "steps": 20}
    base = {**BASE, "model": {**BASE["model"], "evaluation": own}}
    assert with_overlay(base, PART)["model"]["evaluation"] == own


def test_what_depends_on_the_network_is_the_recipes_for_all_methods_that_have_it():
    base = {**BASE, "model": {**BASE["model"], "objective": {"class_path": "VGRPO", "init_args": {"scale_cap": 1.0}}}}

    def cap(objective):
        args = with_overlay(base, {"model": {"objective": objective}})["model"]["objective"]["init_args"]
        return args.get("scale_cap", "none")

    assert (cap("VGRPO"), cap("DiffusionNFT"), cap("DDPO"), cap("mine.Own")) == (1.0, 1.0, "none", "none")
    assert cap({"class_path": "VGRPO", "init_args": {"scale_cap": 3.0}}) == 3.0


@pytest.mark.slow
def test_a_method_that_cannot_run_on_the_policy_is_one_line(here):
    (error,) = errors_of(entrants, compare_options(["tiny_unet", "--methods", "vgrpo,awm"]))
    assert error.startswith("awm: model.objective=AWM does not work on UNetPolicy: ")
    assert not (here / "runs").exists()


def test_a_race_drops_what_costs_and_keeps_the_average():
    average = {"class_path": "EMA", "init_args": {"decay": 0.9}}
    callbacks = [average, {"class_path": "lit_vgrpo.callbacks.SampleGrid"}, "SurrogateDiagnostics", "Export"]
    callbacks += ["lightning.pytorch.callbacks.ModelCheckpoint", {"class_path": "RunCheckpoint", "init_args": {}}]
    base = {**BASE, "name": "x", "seed_everything": 3, "trainer": {"callbacks": callbacks, "max_steps": 4}}
    recipe = for_race(base, iterations=7, evaluate_every=2)
    expected = {"callbacks": [average], "max_epochs": 7, "check_val_every_n_epoch": 2, "max_steps": -1}
    assert expected.items() <= recipe["trainer"].items()
    assert not {"name", "seed_everything", "run_dir"} & recipe.keys()


def test_an_edited_file_of_the_recipe_is_another_run(here):
    recipe = {"data": {"train": "mine.txt"}, "model": {"reward": {"python": "scores.mine:bright"}, "name": "~nobody/x"}}
    Path("scores").mkdir()
    marks = []
    for text in ("one", "two"):
        for file in ("mine.txt", "scores/mine.py"):
            Path(file).write_text(text)
            marks.append(plan.fingerprint(recipe, 0))
    assert len({*marks}) == 4


def test_other_weights_to_start_from_are_another_run(here):
    recipe = {"model": {"policy": {"init_args": {"start_from": "pre", "checkpoint": "base"}}}}
    files, marks = [Path("pre/checkpoints/last.ckpt"), Path("base/unet/x.safetensors"), Path("base/cache.json")], []
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        marks.append(plan.fingerprint(recipe, 0))
        file.write_bytes(b"one")
        marks.append(plan.fingerprint(recipe, 0))
    assert len({*marks[:4]}) == 4
    assert {*marks[4:]} == {marks[3]}, "no weights"
    Path("pre/config.yaml").touch()
    recipe["model"]["policy"]["init_args"]["start_from"] = "pre/config.yaml"
    before = plan.fingerprint(recipe, 0)
    files[0].write_bytes(b"others")
    assert plan.fingerprint(recipe, 0) != before


OF_A_UNET = ["ddpo"]
OF_TEACHERS = ["opd"]
BY_GRADIENT = ["draft_k", "draft_lv", "flowbp", "refl"]
ELSEWHERE = (*OF_A_UNET, *BY_GRADIENT, *OF_TEACHERS)
SMOOTH = ("tiny_shapes", "model.reward=SmoothShapesReward", "model.untrained_reward=ShapesReward")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "methods"),
    [
        (["tiny_unet"], OF_A_UNET),
        (SMOOTH, BY_GRADIENT),
        (["tiny_shapes"], [name for name in shipped("compare") if name not in ELSEWHERE]),
        (["tiny_opd"], [*OF_TEACHERS, "vgrpo"]),
    ],
)
def test_every_shipped_overlay_builds(recipe, methods, here):
    if methods[0] in OF_TEACHERS:
        folders = save_teachers(resolve_path("shipped:assets/tiny_sd3"), here, ("colour", "shape", "place"))
        recipe = [*recipe, f"model.objective.init_args.teachers={json.dumps(folders)}"]
    race = entrants(compare_options([*recipe, "--methods", ",".join(methods), "--settings", "published"]))
    assert [entrant.method for entrant in race] == methods
    options = compare_options([*recipe, "--methods", ",".join(methods), "--sweep"])
    for method in methods:
        overlay = read_overlay(find_overlay(method))
        points = plan.swept(options, overlay)
        assert len(points) == len({plan.fingerprint(point.recipe, 0) for point in points}) == 8
        tuned = for_race(with_overlay(options.base, overlay.part("tuned")), 1, 1)  # one of the points
        assert part_errors(tuned)[0] == [], method


DECAY = {"rate": 0.001, "max": 0.5}


def test_an_overlay_may_start_from_a_shipped_methods_published_settings(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("like: nft\npublished: {model: {objective: {init_args: {beta: 0.5}}}}")
    nft = read_overlay(find_overlay("nft")).published
    mine = read_overlay(path).published
    assert mine["model"]["objective"] == {"class_path": "DiffusionNFT", "init_args": {"beta": 0.5, "old_decay": DECAY}}
    assert (mine["model"]["optimizer"], mine["data"]) == (nft["model"]["optimizer"], nft["data"])
    path.write_text("like: nft")
    assert read_overlay(path).published == nft


@pytest.mark.slow
def test_a_sweep_may_be_a_list_of_points(tmp_path, tiny_recipe):
    points = [{"model.optimizer.lr": 0.1}, {"model.optimizer.lr": 0.2, "model.objective.clip": None}]
    path = overlay_file(tmp_path, sweep=points)
    assert read_overlay(path).points == points
    found = entrants(compare_options([str(tiny_recipe), "--methods", str(path), "--sweep"]))
    assert [entrant.changed for entrant in found] == points
    assert found[1].recipe["model"]["objective"]["init_args"]["clip"] is None


def test_an_overlay_may_not_change_the_task(tmp_path):
    published = {"model": {"objective": "VGRPO", "reward": "JPEGCompressibility"}, "data": {"group_size": 8}}
    path = overlay_file(tmp_path, published=published, sweep={"data.train": ["x"]})
    errors = errors_of(read_overlay, path)
    refused = ("data.group_size", "data.train", "model.reward")
    assert [error.partition(" cannot")[0] for error in errors] == [f"{path}: {key}" for key in refused]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("publishd: {model: {objective: VGRPO}}", "Did you mean published?"),
        ("published: {model: {optimizer: {lr: 1}}}", "Add published: with a model.objective"),
        ("published: {model: {objective: VGRPO}}\nsweep: {model.optimizer.lr: 3}", "is not an overlay"),
        ("published: {model: {objective: VGRPO}}\nfound: {point: 8}", "unexpected keyword argument 'point'"),
        ("like: mixgrop", "mixgrop is neither a method nor an overlay file. Did you mean mixgrpo?"),
    ],
)
def test_a_broken_overlay_is_one_line(text, message, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    (error,) = errors_of(read_overlay, path)
    assert message in error


def test_all_errors_come_before_the_first_run(tmp_path, tiny_recipe):
    wrong = {"objective": {"class_path": "VGRPO", "init_args": {"clipp": 1}}}
    odd = {"model": {"objective": "VGRPO"}, "data": {"updates_per_iteration": 0}}
    published = {"wrong": {"model": wrong}, "odd": odd}
    paths = [overlay_file(tmp_path, name, published=part) for name, part in published.items()]
    options = compare_options([str(tiny_recipe), "--methods", ",".join(map(str, paths))])
    errors = errors_of(entrants, options)
    assert errors[0] == "wrong: model.objective.clipp is not an option of VGRPO. Did you mean clip?"
    assert errors[1].startswith("odd: data.updates_per_iteration=0: Use")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_an_override_that_a_method_undoes_is_refused(tiny_recipe):
    words = [str(tiny_recipe), "--methods", "vgrpo", "--settings", "published"]
    for word in ("model.objective.num_mc_samples=3", "model.optimizer.lr=0.5", "model.objective=VGRPO"):
        key = word.split("=")[0]
        (error,) = errors_of(entrants, compare_options([*words, word]))
        assert error.startswith(f"{key} has no effect: the overlay of vgrpo sets it.")
    kept = ["model.objective.rollout.steps=3", "data.group_size=4", "model.optimizer.weight_decay=0.5"]
    (entrant,) = entrants(compare_options([*words, *kept]))
    assert entrant.recipe["model"]["objective"]["init_args"]["rollout"]["steps"] == 3
    assert entrant.recipe["model"]["evaluation"]["steps"] == 3


def test_without_held_out_prompts_there_is_no_race(tiny_recipe):
    options = compare_options([str(tiny_recipe), "data.heldout=null", "--methods", "vgrpo"])
    assert "data.heldout" in errors_of(entrants, options)[0]
