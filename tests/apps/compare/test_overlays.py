"""Overlays: what a method changes in a recipe, and what it may not change."""

from pathlib import Path

import pytest
import yaml
from commands import compare_options

from lit_vgrpo.apps.compare.overlays import find_overlay, for_race, read_overlay, shipped_methods, with_overlay
from lit_vgrpo.apps.compare.plan import entrants, fingerprint, runs_of, swept
from lit_vgrpo.config.schema import recipe_errors
from lit_vgrpo.errors import UserError
from lit_vgrpo.launch.build import build
from lit_vgrpo.launch.recipe_cli import LINKED, TOP_LEVEL

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
    content = {"published": {"model": {"objective": "VGRPO"}}, **content}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


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


def test_every_method_is_evaluated_with_the_recipes_own_ode():
    assert with_overlay(BASE, PART)["model"]["evaluation"] == {"solver": "dpm++", "steps": 6, "guidance": 2.0}
    own = {"solver": "euler", "steps": 20}
    base = {**BASE, "model": {**BASE["model"], "evaluation": own}}
    assert with_overlay(base, PART)["model"]["evaluation"] == own


def test_samplers_race_at_the_recipes_own_evaluation():
    folder = Path(__file__).parents[3] / "benchmarks" / "samplers"
    names = ("vgrpo_euler10", "vgrpo_dpm5", "vgrpo_unipc5")
    race = entrants(compare_options(["tiny_shapes", "--methods", ",".join(f"{folder / n}.yaml" for n in names)]))
    models = {entrant.method: entrant.recipe["model"] for entrant in race}
    rollouts = {name: model["objective"]["init_args"]["rollout"] for name, model in models.items()}
    assert {name: (r["solver"], r["steps"]) for name, r in rollouts.items()} == {
        "vgrpo_euler10": ("euler", 10),
        "vgrpo_dpm5": ("dpm++", 5),
        "vgrpo_unipc5": ("unipc", 5),
    }
    assert {(m["evaluation"]["solver"], m["evaluation"]["steps"]) for m in models.values()} == {("euler", 10)}


def test_what_depends_on_the_network_is_the_recipes_for_all_methods_that_have_it():
    base = {**BASE, "model": {**BASE["model"], "objective": {"class_path": "VGRPO", "init_args": {"scale_cap": 1.0}}}}

    def cap(objective):
        args = with_overlay(base, {"model": {"objective": objective}})["model"]["objective"]["init_args"]
        return args.get("scale_cap", "none")

    assert (cap("VGRPO"), cap("DiffusionNFT"), cap("DDPO"), cap("mine.Own")) == (1.0, 1.0, "none", "none")
    assert cap({"class_path": "VGRPO", "init_args": {"scale_cap": 3.0}}) == 3.0


def test_a_method_that_cannot_run_on_the_policy_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    errors = errors_of(entrants, compare_options(["tiny_unet", "--methods", "vgrpo,awm,nft,flowgrpo"]))
    assert errors == [
        "awm: model.objective=AWM does not work on UNetPolicy: it is not defined on a variance-preserving path.",
        "flowgrpo: model.objective=FlowGRPO does not work on UNetPolicy: it is not defined on a variance-preserving "
        "path.",
        "Without these: --methods vgrpo,nft",
    ]
    assert not (tmp_path / "runs").exists()


def test_a_recipe_with_an_sde_gives_the_others_its_ode():
    rollout = {"solver": "flow_sde", "steps": 8, "noise_level": 0.7, "shared_noise": True}
    base = {**BASE, "model": {**BASE["model"], "objective": {"class_path": "X", "init_args": {"rollout": rollout}}}}
    recipe = with_overlay(base, {"model": {"objective": "VGRPO"}})
    plain = {"solver": "euler", "steps": 8, "guidance": 1.0}
    assert recipe["model"]["objective"] == {"class_path": "VGRPO", "init_args": {"rollout": plain}}
    assert recipe["model"]["evaluation"] == plain


def test_a_race_drops_what_costs_and_keeps_the_average():
    callbacks = [
        {"class_path": "EMA", "init_args": {"decay": 0.9}},
        {"class_path": "lit_vgrpo.callbacks.SampleGrid"},
        "SurrogateDiagnostics",
        "Export",
    ]
    base = {**BASE, "name": "x", "seed_everything": 3, "trainer": {"callbacks": callbacks, "max_steps": 4}}
    recipe = for_race(base, iterations=7, evaluate_every=2)
    assert recipe["trainer"]["callbacks"] == callbacks[:1]
    assert recipe["trainer"]["max_epochs"] == 7
    assert recipe["trainer"]["check_val_every_n_epoch"] == 2
    assert recipe["trainer"]["max_steps"] == -1
    assert not {"name", "seed_everything", "run_dir"} & recipe.keys()


def test_tuned_lies_over_published(tmp_path):
    published = {
        "model": {"objective": {"class_path": "VGRPO", "init_args": {"soft_clip": 3.0}}, "optimizer": {"lr": 1}}
    }
    tuned = {"model": {"objective": {"init_args": {"clip": 0.1}}, "optimizer": {"lr": 2}}}
    overlay = read_overlay(overlay_file(tmp_path, published=published, tuned=tuned))
    assert overlay.part("tuned")["model"] == {
        "objective": {"class_path": "VGRPO", "init_args": {"soft_clip": 3.0, "clip": 0.1}},
        "optimizer": {"lr": 2},
    }
    assert overlay.part("published") == published


def test_a_fingerprint_tells_recipe_and_seed_apart():
    prints = [
        fingerprint(for_race(BASE, 5, 1), 0),
        fingerprint(for_race(BASE, 6, 1), 0),
        fingerprint(for_race(BASE, 5, 1), 1),
        fingerprint(for_race(with_overlay(BASE, PART), 5, 1), 0),
    ]
    assert len(set(prints)) == 4
    assert fingerprint(for_race(BASE, 5, 1), 0) == prints[0]


OF_A_UNET = ["ddpo"]


@pytest.mark.parametrize(
    ("recipe", "methods"),
    [("tiny_unet", OF_A_UNET), ("tiny_shapes", [name for name in shipped_methods() if name not in OF_A_UNET])],
)
def test_every_shipped_overlay_builds(recipe, methods, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    race = entrants(compare_options([recipe, "--methods", ",".join(methods), "--settings", "published"]))
    assert [entrant.method for entrant in race] == methods
    options = compare_options([recipe, "--methods", ",".join(methods), "--sweep"])
    for method in methods:
        overlay = read_overlay(find_overlay(method))
        points = swept(options, overlay)
        assert len(points) == len({fingerprint(point.recipe, 0) for point in points}) == 8
        tuned = for_race(with_overlay(options.base, overlay.part("tuned")), 1, 1)
        for other in (tuned, points[-1].recipe):  # the rest have other numbers for the same keys
            assert recipe_errors(other, TOP_LEVEL, LINKED) == [], method


@pytest.mark.parametrize("method", shipped_methods())
def test_a_shipped_overlay_says_its_command_and_source(method):
    lines = shipped_methods()[method].read_text().splitlines()
    head = [line for line in lines if line.startswith("#")]
    assert "arXiv 25" in head[0] or "arXiv 26" in head[0] or "arXiv 23" in head[0]
    assert head[1].startswith("#   lightning compare tiny_")
    assert method in head[1].partition("--methods ")[2].split(",")
    assert max(map(len, lines)) <= 120


def test_the_methods_of_the_race_are_there():
    names = {
        "vgrpo",
        "flowgrpo",
        "flowgrpo_fast",
        "dancegrpo",
        "mixgrpo",
        "mixgrpo_flash",
        "nft",
        "dgpo",
        "awm",
        "ddpo",
    }
    assert names <= set(shipped_methods())


def test_a_merged_recipe_runs_by_itself(tmp_path, monkeypatch, tiny_recipe):
    options = compare_options(
        [str(tiny_recipe), "--methods", "vgrpo", "--settings", "published", "--seeds", "1", "--out", "out"]
    )
    runs = runs_of(options, entrants(options))
    cli = build([str(runs[0].recipe)], make_folder=False)
    assert cli.errors() == []
    assert cli.model.objective.num_mc_samples == 4
    assert cli.model.objective.rollout.steps == 2
    assert cli.model.evaluation.steps == 2


def test_an_overlay_may_start_from_a_shipped_methods_published_settings(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("like: nft\npublished: {model: {objective: {init_args: {beta: 0.5}}}}")
    nft = read_overlay(find_overlay("nft")).published
    mine = read_overlay(path).published
    assert mine["model"]["objective"] == {"class_path": "DiffusionNFT", "init_args": {"beta": 0.5, "decay_type": 1}}
    assert (mine["model"]["optimizer"], mine["data"]) == (nft["model"]["optimizer"], nft["data"])
    path.write_text("like: nft")
    assert read_overlay(path).published == nft


def test_a_sweep_may_be_a_list_of_points(tmp_path, tiny_recipe):
    points = [{"model.optimizer.lr": 0.1}, {"model.optimizer.lr": 0.2, "model.objective.clip": None}]
    path = overlay_file(tmp_path, sweep=points)
    assert read_overlay(path).points == points
    found = entrants(compare_options([str(tiny_recipe), "--methods", str(path), "--sweep"]))
    assert [entrant.changed for entrant in found] == points
    assert found[1].recipe["model"]["objective"]["init_args"]["clip"] is None
    (error,) = errors_of(read_overlay, overlay_file(tmp_path, sweep=[{"data.train": "x"}]))
    assert error.startswith(f"{path}: sweep.data.train cannot be set by an overlay")


def test_an_overlay_says_what_its_search_was_given(tmp_path, tiny_recipe):
    found = {"points": 8, "seeds": 2, "iterations": 30, "prompts": "tiny_shapes, training prompts"}
    path = overlay_file(tmp_path, tuned={"model": {"optimizer": {"lr": 0.2}}}, found=found)
    budget = read_overlay(path).found
    assert str(budget) == "8 points x 2 seeds x 30 iterations, tiny_shapes, training prompts"
    assert budget.as_dict() == found
    race = entrants(compare_options([str(tiny_recipe), "--methods", str(path)]))
    assert {entrant.settings: entrant.found for entrant in race} == {"published": None, "tuned": budget}
    wrong = overlay_file(tmp_path, found={"point": 8, "seeds": 0, "iterations": 30})
    errors = errors_of(read_overlay, wrong)
    assert [error.partition(" is not")[0].partition(" must")[0] for error in errors] == [
        "found.point",
        f"{wrong}: found.points=None",
        f"{wrong}: found.seeds=0",
    ]


def test_a_sweep_needs_no_held_out_prompts_in_the_recipe(tmp_path, tiny_recipe):
    recipe = yaml.safe_load(tiny_recipe.read_text())
    recipe["data"].pop("heldout")
    tiny_recipe.write_text(yaml.safe_dump(recipe, sort_keys=False))
    path = overlay_file(tmp_path, sweep={"model.optimizer.lr": [0.1]})
    (point,) = entrants(compare_options([str(tiny_recipe), "--methods", str(path), "--sweep"]))
    assert point.recipe["data"]["heldout_fraction"] == 0.2


def errors_of(call, *args):
    with pytest.raises(UserError) as caught:
        call(*args)
    return caught.value.errors


def test_an_unknown_method_names_the_nearest_and_all():
    (error,) = errors_of(find_overlay, "mixgrop")
    assert error.startswith("mixgrop is not a method. Did you mean mixgrpo? Use one of awm, awm_anchor, ")


def test_an_overlay_may_not_change_the_task(tmp_path):
    published = {"model": {"objective": "VGRPO", "reward": "JPEGCompressibility"}, "data": {"group_size": 8}}
    path = overlay_file(tmp_path, published=published, sweep={"data.train": ["x"], "model.optimizer.lr": 3})
    errors = errors_of(read_overlay, path)
    assert [error.split(" cannot")[0] for error in errors[:3]] == [
        f"{path}: published.model.reward",
        f"{path}: published.data.group_size",
        f"{path}: sweep.data.train",
    ]
    assert errors[3] == f"{path}: sweep.model.optimizer.lr=3 must be a list of the values to try."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("published: [", "is not YAML"),
        ("publishd: {model: {objective: VGRPO}}", "it needs published:"),
        ("published: {model: {objective: VGRPO}}\ntunned: {}", "Did you mean tuned?"),
        ("published: {model: {optimizer: {lr: 1}}}", "published.model.objective has no class_path"),
        ("published: {model: {objective: VGRPO}}\ntuned: 3", "tuned must be a mapping"),
        ("published: {model: 3}", "published.model.objective has no class_path"),
        ("like: mixgrop", "like=mixgrop is not a shipped method. Did you mean mixgrpo?"),
        ("like: [nft]", "is not a shipped method"),
        ("like: nft\npublished: 3", "it needs published:"),
    ],
)
def test_a_broken_overlay_is_one_line(text, message, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert any(message in error for error in errors_of(read_overlay, path))


def test_all_errors_come_before_the_first_run(tmp_path, tiny_recipe):
    wrong = overlay_file(
        tmp_path, "wrong", published={"model": {"objective": {"class_path": "VGRPO", "init_args": {"clipp": 1}}}}
    )
    sizes = overlay_file(
        tmp_path, "odd", published={"model": {"objective": "VGRPO"}, "data": {"updates_per_iteration": 0}}
    )
    options = compare_options([str(tiny_recipe), "--methods", f"{wrong},{sizes}"])
    errors = errors_of(entrants, options)
    assert errors[0] == "wrong published: model.objective.clipp is not an option of VGRPO. Did you mean clip?"
    assert errors[1].startswith("odd published: data.updates_per_iteration=0 is too small.")
    assert not (tmp_path / "runs").exists()


def test_an_override_that_a_method_undoes_is_refused(tiny_recipe):
    words = [str(tiny_recipe), "--methods", "vgrpo", "--settings", "published"]
    lost = ["model.objective.num_mc_samples=3", "model.optimizer.lr=0.5", "model.objective=VGRPO"]
    for word in lost:
        key = word.split("=")[0]
        (error,) = errors_of(entrants, compare_options([*words, word]))
        assert error.startswith(f"{key} has no effect: the overlay of vgrpo sets it.")
    kept = ["model.objective.rollout.steps=3", "data.group_size=4", "model.optimizer.weight_decay=0.5"]
    (entrant,) = entrants(compare_options([*words, *kept]))
    assert entrant.recipe["model"]["objective"]["init_args"]["rollout"]["steps"] == 3
    assert entrant.recipe["model"]["evaluation"]["steps"] == 3


def test_tuned_is_refused_where_nothing_is_tuned(tmp_path, tiny_recipe):
    path = overlay_file(tmp_path)
    options = compare_options([str(tiny_recipe), "--methods", str(path), "--settings", "tuned"])
    assert errors_of(entrants, options)[0].startswith("mine has no tuned settings: ")
    default = entrants(compare_options([str(tiny_recipe), "--methods", str(path)]))
    assert [entrant.settings for entrant in default] == ["published"]


def test_without_held_out_prompts_there_is_no_race(tiny_recipe):
    options = compare_options([str(tiny_recipe), "data.heldout=null", "--methods", "vgrpo"])
    assert "data.heldout" in errors_of(entrants, options)[0]
