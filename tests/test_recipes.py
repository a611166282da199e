"""Every shipped recipe parses and builds; the large one runs on small stand-ins."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from diffusers import AutoencoderKL

from lit_vgrpo import SD3Policy
from lit_vgrpo.cli import build, run
from lit_vgrpo.tiny.build import build_sd3

FILES = sorted((Path(__file__).parents[1] / "recipes").rglob("*.yaml"))
RECIPES = [path for path in FILES if path.parent.name not in ("compare", "strategy")]  # overlays have their own tests


def test_there_are_recipes():
    assert {"tiny_shapes", "tiny_unet", "sd3_pickscore", "tiny_shapes_pretrain", "tiny_ocr"} <= {
        path.stem for path in RECIPES
    }


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_parses_and_builds(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli = build([str(recipe)], make_folder=False)
    assert cli.plan()
    missing = [fault for fault in cli.faults() if "checkpoint" not in fault and "Cannot load" not in fault]
    assert missing == []


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_is_short_and_says_its_command(recipe):
    lines = recipe.read_text().splitlines()
    assert len(lines) <= 60
    assert f"lightning run {recipe.stem}" in "\n".join(lines[:4])


@pytest.fixture(scope="module")
def wide_sd3(tmp_path_factory):
    """An SD3 folder whose VAE shrinks 64 times, so that 512 pixels are few tokens."""
    torch.manual_seed(0)
    blocks = 7
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(2,) * blocks,
        latent_channels=8,
        norm_num_groups=1,
        scaling_factor=0.8,
        shift_factor=0.1,
        mid_block_add_attention=False,
    )
    return build_sd3(tmp_path_factory.mktemp("wide"), vae=vae, small=True)


def test_sd3_pickscore_runs_on_a_small_sd3_and_a_small_clip(wide_sd3, tiny_clip, tmp_path, monkeypatch, capfd):
    """All settings are the recipe's own, 512 pixels and bfloat16 included, but for the paths and the amount of work."""
    monkeypatch.chdir(tmp_path)
    paths = [f"model.policy.checkpoint={wide_sd3}", f"model.reward.checkpoint={tiny_clip}"]
    less = ["trainer.max_epochs=2", "data.prompts_per_iteration=2", "data.group_size=4", "data.heldout_limit=2"]
    assert run(["sd3_pickscore", *paths, *less, "trainer.accelerator=cpu"]) == 0
    folder = tmp_path / "runs" / "sd3_pickscore"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["images"] == 16
    assert summary["network_passes"]["rollout"]["without_grad"] == 16 * 40
    assert summary["network_passes"]["update"] == {"with_grad": 16 * 4, "without_grad": 0}
    assert {path.stem for path in (folder / "samples").glob("*.png")} == {"before", "after"}
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["model"]["policy"]["init_args"]["lora_rank"] == 32
    pipeline = SD3Policy(str(wide_sd3)).load().pipeline
    pipeline.load_lora_weights(str(folder / "export"))
    assert "truncated" not in capfd.readouterr().err


def test_sd3_pickscore_without_weights_is_one_clear_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["sd3_pickscore"]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert errors[0].startswith("Cannot load stabilityai/stable-diffusion-3.5-medium: ")
    assert "hf download stabilityai/stable-diffusion-3.5-medium" in errors[0]
    assert "model.policy.checkpoint=/a/local/folder" in errors[0]
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("kind", ["tiny_shapes", "tiny_unet"])
def test_a_pretraining_recipe_runs(kind, tmp_path, monkeypatch, tiny_sd3, tiny_unet):
    monkeypatch.chdir(tmp_path)
    start = tiny_sd3 if kind == "tiny_shapes" else tiny_unet
    less = ["trainer.max_epochs=2", "data.prompts_per_iteration=4", "data.micro_batch_size=8", "data.heldout_limit=2"]
    few = ["data.heldout_images_per_prompt=1"]
    assert run([f"{kind}_pretrain", f"model.policy.checkpoint={start}", *less, *few]) == 0
    folder = tmp_path / "runs" / f"{kind}_pretrain"
    passes = json.loads((folder / "summary.json").read_text())["network_passes"]
    assert "rollout" not in passes
    assert passes["update"]["with_grad"] == 2 * 16 * (2 if kind == "tiny_shapes" else 1)
    assert (folder / "export" / "model_index.json").is_file()


@pytest.mark.parametrize("kind", ["tiny_sd3", "tiny_unet", "tiny_ocr"])
def test_shipped_pipelines_are_small(kind):
    folder = Path(__file__).parents[1] / "recipes" / "assets" / kind
    assert 1e6 < sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 8e6
