"""Every shipped recipe parses and trains, the large ones on small stand-ins; some are checked too."""

import json
from pathlib import Path
from typing import get_args

import pytest
import yaml
from commands import check, run
from helpers import read_csv, repeating
from stand_ins import StandIns, judge

from lit_vgrpo import VGRPO, SD3Policy
from lit_vgrpo.apps.curriculum.curriculum import Curriculum
from lit_vgrpo.cli.main import main
from lit_vgrpo.config.header import LEVELS, Header
from lit_vgrpo.config.recipe import STAGES, Command, loaded
from lit_vgrpo.options import Task

ROOT = Path(__file__).parents[2] / "recipes"
OTHERS = ("compare", "strategy", "starter", "benchmarks", "judges")
FILES = [path for path in sorted(ROOT.rglob("*.yaml")) if path.parent.name not in OTHERS]
CURRICULA = [path for path in FILES if STAGES in loaded(path)]
RECIPES = [path for path in FILES if path not in CURRICULA]  # overlays have their own tests

PLAIN = "chroma_pickscore flux_pickscore flux2_dev_pickscore flux2_klein_pickscore kontext_edit qwen_image21_pickscore "
PLAIN += "qwen_image_pickscore sd15_aesthetic sd35m_stage1 sd35m_stage3 sdxl_preference z_image_pickscore"
TWO_PASSES = ("auraflow", "ltx", "flux3", "wan", "hidream", "wan_i2v")  # one of them for the negative prompt
# By recipe: network passes an image, with and without gradient; at the steps of SIZES.
PASSES = {
    **{name: {"rollout": (0, 8), "update": (4, 0)} for name in PLAIN.split()},
    "flux_hps_flowbp": {"rollout": (0, 8), "update": (3, 0)},
    "flux_multireward": {"rollout": (0, 8), "old": (0, 3), "update": (4, 0)},
    "sd35m_stage2": {"rollout": (0, 8), "update": (10, 0)},
    "sd35m_stage4": {"rollout": (0, 8), "update": (10, 0)},
    "sd35m_stage5": {"rollout": (0, 8), "old": (0, 10), "update": (10, 0)},
    "sd35m_opd": {"rollout": (0, 10), "teacher": (0, 4), "update": (4, 0)},
    "sd3_pickscore": {"rollout": (0, 40), "update": (4, 0)},
    "sd3_pickscore_awm": {"rollout": (0, 14), "reference": (0, 6), "ema": (0, 6), "update": (6, 0)},
    "sd3_pickscore_dgpo": {"rollout": (0, 20), "reference": (0, 4), "old": (0, 4), "update": (4, 0)},
    "sd3_pickscore_fast": {"rollout": (0, 10), "update": (1.5, 0)},  # groups of 2
    "sd3_pickscore_flowgrpo": {"rollout": (0, 20), "reference": (0, 18), "update": (18, 0)},
    "sd3_pickscore_flowbp": {"rollout": (0, 50), "update": (4, 4)},  # the negative prompt's passes keep no graph
    "sd3_pickscore_nft": {"rollout": (0, 10), "old": (0, 9), "reference": (0, 9), "update": (9, 0)},
    "sd3_pickscore_ram": {"rollout": (0, 20), "old": (0, 8), "reference": (0, 8), "update": (8, 0)},
    "tiny_edit": {"rollout": (0, 10), "anchor": (0, 2), "update": (2, 0)},
    "tiny_hacked": {"rollout": (0, 10), "anchor": (0, 2), "update": (2, 0)},
    "tiny_motion": {"rollout": (0, 5), "anchor": (0, 2), "update": (2, 0)},  # only the second has advantages
    "tiny_ocr": {"rollout": (0, 5), "anchor": (0, 1), "update": (1, 0)},  # one iteration of the two has advantages
    "tiny_ocr_pretrain": {"update": (2, 0)},
    "tiny_opd": {"rollout": (0, 5), "teacher": (0, 5), "update": (5, 0)},
    "tiny_shapes": {"rollout": (0, 5), "anchor": (0, 1.5), "update": (1.5, 0)},  # replay has nothing in the first
    "tiny_shapes_pretrain": {"update": (2, 0)},
    "tiny_unet": {"rollout": (0, 5), "anchor": (0, 1), "update": (1, 0)},
    "tiny_unet_pretrain": {"update": (1, 0)},
    "hunyuan_image_pickscore": {"rollout": (0, 8), "update": (4, 0)},
    **{f"{model}_pickscore": {"rollout": (0, 16), "update": (4, 0)} for model in TWO_PASSES},
}
UPDATES = {"flux_multireward": 4, "sd35m_stage5": 2, "sd3_pickscore_flowgrpo": 2}
LESS = ["trainer.accelerator=cpu", "data.prompts_per_iteration=2", "data.group_size=2"]
LESS += ["data.heldout_limit=1", "data.heldout_images_per_prompt=1"]
FEW_STEPS = "model.objective.rollout.steps=8"
FEW_EVALUATION_STEPS = "model.evaluation.steps=2"
SMALL = ["model.policy.height=128", "model.policy.width=128", FEW_EVALUATION_STEPS]
SMALL_UNET = ["model.policy.height=256", "model.policy.width=256"]  # fewer pixels end before the network's last level
SMALLEST = ["model.policy.height=32", "model.policy.width=32", FEW_EVALUATION_STEPS]
SHORT = "model.policy.max_sequence_length=64"
NEWER = ("flux2_klein", "qwen_image", "z_image", "chroma", "flux2_dev", "qwen_image21", "wan")
SIZES = {
    **{f"{model}_pickscore": [FEW_STEPS, *SMALLEST] for model in NEWER},
    **{f"flux2_{kind}_pickscore": [FEW_STEPS, *SMALLEST, SHORT] for kind in ("klein", "dev")},
    "wan_pickscore": [FEW_STEPS, *SMALLEST, "model.policy.num_frames=5"],
    **{f"{model}_pickscore": [FEW_STEPS, *SMALLEST] for model in ("auraflow", "flux3")},
    "ltx_pickscore": [FEW_STEPS, *SMALLEST, "model.policy.num_frames=9"],
    "hidream_pickscore": [FEW_STEPS, *SMALL_UNET, FEW_EVALUATION_STEPS],
    "hunyuan_image_pickscore": [FEW_STEPS, *SMALLEST],
    "wan_i2v_pickscore": [FEW_STEPS, *SMALLEST, "model.policy.num_frames=5"],
    "flux_hps_flowbp": [FEW_STEPS, *SMALL],
    **{f"flux_{kind}": [FEW_STEPS, *SMALL] for kind in ("pickscore", "multireward")},
    "kontext_edit": [FEW_STEPS, *SMALLEST],
    "sdxl_preference": [FEW_STEPS, *SMALL_UNET],
    "sd15_aesthetic": [FEW_STEPS, *SMALL_UNET],
    **{f"sd35m_stage{number}": [FEW_STEPS, *SMALL] for number in range(1, 5)},
    "sd35m_stage5": [FEW_STEPS, *SMALL, "model.reward.detect=false"],
    "sd35m_opd": SMALL,
    "sd3_pickscore": SMALL,
    "tiny_shapes": ["seed_everything=3"],  # a seed with a spread of rewards in both iterations
    **{f"sd3_pickscore_{method}": SMALL for method in ("awm", "dgpo", "fast", "flowbp", "flowgrpo", "nft", "ram")},
}
REPEATS = (
    "sd3_pickscore",  # trained and exported below
    *("sd35m_stage3", "sd35m_stage4", "tiny_shapes_pretrain", "tiny_unet_pretrain"),
    *("sd35m_stage1", "sd35m_stage2", "sd3_pickscore_awm", "sd3_pickscore_dgpo"),
    *(f"{model}_pickscore" for model in NEWER),
    *(f"{model}_pickscore" for model in ("auraflow", "ltx", "flux3", "hidream", "hunyuan_image", "wan_i2v")),
    *("sd3_pickscore_nft", "kontext_edit", "sd15_aesthetic", "flux_multireward", "sdxl_preference"),
    *("sd3_pickscore_fast", "sd3_pickscore_flowbp", "flux_hps_flowbp", "flux_pickscore", "tiny_hacked"),
    *("tiny_ocr", "tiny_edit", "tiny_opd", "tiny_motion"),
    *("sd3_pickscore_flowgrpo", "sd3_pickscore_ram", "sd35m_stage5", "sd35m_opd", "tiny_ocr_pretrain"),
)
"""The stages are sd3_pickscore with other rewards; pre-trainings differ in their pictures, other methods in their loss,
and recipes of the other families in their network."""
CHECKED = {"sd3_pickscore": False, **dict.fromkeys(("tiny_ocr_pretrain", "kontext_edit", "wan_pickscore"), True)}
"""A large recipe; slow: one without a reward, one with pictures, one for videos."""
SHOWN = ("evaluation", "samples")
"""Phases that nothing is trained on."""
BLIND = ("sd35m_stage2", "sd35m_stage4", "sd35m_stage5", "tiny_ocr", "tiny_edit", "tiny_motion")
"""Random pictures seldom hold the objects or the text asked for, so that all of so few groups may lack spread."""


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    with judge() as server:
        yield StandIns(tmp_path_factory.mktemp("stand_ins"), server)


def test_there_are_recipes():
    assert set(PASSES) == {path.stem for path in RECIPES}
    assert [path.stem for path in CURRICULA] == ["sd35m_curriculum"]


@pytest.mark.parametrize("recipe", FILES, ids=lambda path: path.stem)
def test_a_header_has_the_command_the_needs_and_what_the_settings_rest_on(recipe):
    lines = recipe.read_text().splitlines()
    assert max(map(len, lines)) <= 128
    assert f"lightning run {recipe.stem}" in "\n".join(lines[:4])
    header = Header.of_file(recipe)
    assert header.needs
    level, _, command = header.evidence.partition(" (")
    assert level in LEVELS
    assert bool(command) == (level == LEVELS[0])
    assert not command or (command.startswith(f"lightning run {recipe.stem}") and command.endswith(")"))


def test_a_list_names_every_recipe_with_its_evidence(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["recipes"]) == 0
    piped = capsys.readouterr().out.splitlines()
    assert all(any(line.endswith(Header.of_file(path).title) for line in piped) for path in FILES)
    monkeypatch.setenv("COLUMNS", "120")  # entries wrap to the terminal
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout.isatty", lambda: True)
        assert main(["recipes"]) == 0
    first, *parts = capsys.readouterr().out.strip().split("\n\n")
    assert first.startswith("Begin with: lightning run tiny_shapes (one minute on a CPU). ")
    assert "lightning recipes NAME" in first
    groups = dict(zip(get_args(Task), (part.splitlines()[1:] for part in parts), strict=True))
    lines = [line for group in groups.values() for line in group]
    assert max(map(len, lines)) <= 120
    assert all(line.startswith("  ") for line in lines)
    assert sorted(line.split()[0] for line in lines) == [path.stem for path in FILES]
    assert " a CPU core " in lines[0]
    for task, group in groups.items():
        assert main(["recipes", f"--task={task}"]) == 0
        out = capsys.readouterr().out
        assert "\n\n\n" not in out
        assert not out.endswith("\n\n")
        parts = out.split("\n\n")
        entries = [part for part in parts if not part.strip().startswith("--- ")]
        assert sorted(entry.partition(":")[0] for entry in entries) == sorted(line.split()[0] for line in group)
        assert all("\n  needs     " in entry and "\n  evidence  " in entry for entry in entries)
    assert main(["recipes", "--task=video", "--gpu=48GiB"]) == 0
    *parts, last = capsys.readouterr().out.strip().split("\n\n")
    cards = ("a 24 GB GPU", "a 48 GB GPU")
    assert [part.strip() for part in parts[::2]] == [f"--- Videos, on {card}" for card in cards]
    assert [part.partition(":")[0] for part in parts[1::2]] == ["wan_pickscore", "ltx_pickscore"]
    assert last.endswith("lightning check RECIPE --memory 48GiB")
    assert main(["recipes", "--gpu=big"]) == 2
    assert capsys.readouterr().err == "big is not a GPU size. Write it as 80GiB.\n"
    assert main(["recipes", "sd15_aesthetic"]) == 0
    assert capsys.readouterr().out == (
        "sd15_aesthetic: SD 1.5 + V-GRPO + LAION's aesthetic predictor on the variance-preserving path, LoRA r16\n"
        "  needs     weights of SD 1.5, CLIP ViT-L/14 and the predictor, and a 48 GB GPU; lightning check estimates "
        "39.7 GiB\n  evidence  ours, not measured\n"
    )
    assert main(["recipes", "tiny_shape"]) == 2
    assert "Did you mean tiny_shapes?" in capsys.readouterr().err


@pytest.mark.parametrize("words", repeating([[], ["data.group_size=8"]], slow=[["data.group_size=8"]]))
def test_a_check_says_the_evidence(words, here, capsys):
    assert check(["tiny_shapes", *words]) == 0
    changed = " (before your changes)" if words else ""
    assert f"Evidence{changed}: measured here (lightning run tiny_shapes)." in capsys.readouterr().out.splitlines()


def cases(recipes):
    """A case for each of ``{recipe: is slow}``, named after it."""
    marks = {True: [pytest.mark.slow], False: []}
    return [pytest.param(ROOT / f"{name}.yaml", id=name, marks=marks[slow]) for name, slow in recipes.items()]


def sized(recipe, stand_ins):
    """The command's words: all settings are the recipe's own but for the paths and the amount of work."""
    return [recipe.stem, *stand_ins.words(recipe), *LESS, *SIZES.get(recipe.stem, [])]


@pytest.mark.parametrize("recipe", cases(CHECKED))
def test_passes_the_check(recipe, stand_ins, here):
    assert check(sized(recipe, stand_ins)) == 0


@pytest.mark.parametrize("recipe", cases({path.stem: path.stem in REPEATS for path in RECIPES}))
def test_trains(recipe, stand_ins, here, capfd):
    iterations = 1 if recipe.stem in REPEATS and "tiny" not in recipe.stem else 2
    assert run([*sized(recipe, stand_ins), f"trainer.max_epochs={iterations}"]) == 0
    folder = here / "runs" / recipe.stem
    summary = json.loads((folder / "summary.json").read_text())
    updates = UPDATES.get(recipe.stem, 1)
    counted = (summary["outcome"], summary["iterations"], summary["optimizer_steps"], summary["images"])
    images = 4 * iterations
    assert counted == ("finished", iterations, iterations * updates, images)
    counts = {"with_grad": 0, "without_grad": 0}
    trained = {phase: found for phase, found in summary["network_passes"].items() if phase not in SHOWN}
    passes = {phase: {**counts, **found} for phase, found in trained.items()}
    rows = read_csv(folder / "metrics.csv")
    done = [float(row["policy/updates"]) > 0 for row in rows if row["policy/updates"]]
    assert len(done) == iterations
    assert recipe.stem in BLIND or all(done)  # an iteration without any advantage rolls out and does no more
    planned = {
        phase: {"with_grad": count * with_grad, "without_grad": count * without}
        for phase, (with_grad, without) in PASSES[recipe.stem].items()
        if (count := images if phase == "rollout" else 4 * sum(done))
    }
    assert passes == planned
    norms = [float(row["policy/grad_norm"]) for row in rows if row.get("policy/grad_norm")]
    assert len(norms) == sum(done)
    assert all(norm > 0 for norm in norms)
    printed = capfd.readouterr().err
    assert "truncated" not in printed
    assert "Cannot write" not in printed  # a grid of samples, which does not end a run


@pytest.mark.slow
def test_sd3_pickscore_exports_its_lora(stand_ins, here):
    recipe = ROOT / "sd3_pickscore.yaml"
    assert run([str(recipe), *stand_ins.words(recipe), *LESS, *SMALL, "trainer.max_epochs=1", FEW_STEPS]) == 0
    folder = here / "runs" / "sd3_pickscore"
    assert {path.stem for path in (folder / "samples").glob("*.png")} == {"before", "after"}
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["model"]["policy"]["init_args"]["lora_rank"] == 32
    pipeline = SD3Policy(str(stand_ins.policy("SD3Policy"))).load().pipeline
    pipeline.load_lora_weights(str(folder / "export"))


def test_sd3_pickscore_without_weights_lists_what_to_type(here, capsys):
    assert run(["sd3_pickscore"]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert errors[0].startswith("Cannot load models: ")
    assert ".download('stabilityai/stable-diffusion-3.5-medium')\" # or set model.policy.checkpoint" in errors[1]
    assert errors[2].startswith("hf download ")
    assert not (here / "runs").exists()


def test_the_curriculum_has_the_published_steps():
    steps = []
    for stage in Curriculum.of(Command.parse(["sd35m_curriculum"])).stages:
        recipe = yaml.safe_load(stage.recipe.read_text())
        steps.append(recipe["trainer"]["max_epochs"] * recipe["data"].get("updates_per_iteration", 1))
    assert steps == [150, 200, 150, 50, 30]


@pytest.mark.parametrize("stage", ["sd35m_stage1", "sd35m_stage3"])
def test_the_preference_stages_add_raw_scores_as_diffusionnft_does(stage):
    model = yaml.safe_load((ROOT / f"{stage}.yaml").read_text())["model"]
    assert model["reward"]["init_args"] == {"rewards": ["HPSv2", "PickScore", "CLIPScore"], "weights": [1, 1, 1]}
    assert {"advantage_aggregate", "advantage_std"}.isdisjoint(model)  # V-GRPO's: the sum, by the iteration's std
    assert (VGRPO.advantage_aggregate, VGRPO.advantage_std) == ("rewards", "global")


@pytest.mark.parametrize("kind", ["tiny_sd3", "tiny_unet", "tiny_ocr", "tiny_edit", "tiny_motion"])
def test_shipped_pipelines_are_small(kind):
    folder = ROOT / "assets" / kind
    assert 1e6 < sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 8e6
