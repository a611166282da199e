"""Runs of the larger families: resumed ones end like undisturbed ones, and plain diffusers draws what they trained."""

from contextlib import chdir
from functools import cache
from pathlib import Path

import pytest
import yaml
from commands import run
from helpers import picture_prompts
from saved_runs import IN_16, assert_resumed_alike, assert_same, draw_exports

from lit_vgrpo import policies
from lit_vgrpo.data import read_prompts
from lit_vgrpo.policies.checks import difference

FAMILIES = {
    "kontext": ("KontextPolicy", 16),
    "qwen_image": ("QwenImagePolicy", 48),
    "qwen_image_edit": ("QwenImageEditPolicy", 48),
    "flux2": ("Flux2Policy", 48),
    "z_image": ("ZImagePolicy", 48),
    "qwen_image21": ("QwenImage21Policy", 48),
    "sana": ("SanaPolicy", 16),
    "flux2_dev": ("Flux2DevPolicy", 48),
    "flux2_dev_edit": ("Flux2DevEditPolicy", 48),
    "flux2_edit": ("Flux2EditPolicy", 48),
    "chroma": ("ChromaPolicy", 16),
    "krea2": ("Krea2Policy", 48),
    "lumina2": ("Lumina2Policy", 48),
    "wan": ("WanPolicy", 16),
    "wan22": ("WanPolicy", 16),
}
RESUMED = ("kontext", "qwen_image_edit", "wan22")
"""Families with pictures among the prompts, or with two networks; the others resume as SD3 does."""
CASES = [(family, solver) for family, (policy, _) in FAMILIES.items() for solver in getattr(policies, policy).solvers]
CASES += [("qwen_image", "euler", "--merge"), ("lumina2", "euler", "--format=comfyui")]
CASES += [(family, "euler", IN_16) for family in ("kontext", "qwen_image_edit", "flux2_edit", "z_image")]
SIDE = 32
RECIPE = """
seed_everything: 7
trainer: {accelerator: cpu, devices: 1, callbacks: [{class_path: EMA, init_args: {decay: 0.5}}]}
model:
  objective: {class_path: VGRPO, init_args: {num_mc_samples: 1, kl_weight: 0.5, rollout: {steps: 2, guidance: 2.0}}}
  reward: JPEGCompressibility
  optimizer: {lr: 0.1, warmup_steps: 0}
data: {prompts_per_iteration: 2, group_size: 4, updates_per_iteration: 2, micro_batch_size: 4}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, large_folder, flux_folder):
    """``runs(family)``: a folder with a run ``whole`` and, for RESUMED, ``half``, resumed after one iteration."""

    @cache
    def made(family):
        policy, length = FAMILIES[family]
        folder = tmp_path_factory.mktemp(family)
        network = family.removesuffix("_edit") if family.startswith("flux2") else family
        checkpoint = flux_folder(False, True) if family == "kontext" else large_folder(network)
        side = 2 * SIDE if family.startswith("flux2") else SIDE  # FLUX.2 edits pictures of at least 64 pixels
        options = {"checkpoint": str(checkpoint), "max_sequence_length": length, "height": side, "width": side}
        options |= {"num_frames": 5} if family.startswith("wan") else {}
        edits = getattr(policies, policy).edits
        recipe = yaml.safe_load(RECIPE)
        recipe["model"]["policy"] = {"class_path": policy, "init_args": {**options, "lora_rank": 2, "lora_alpha": 4}}
        recipe["data"]["train"] = picture_prompts(folder, side) if edits else "shipped:prompts/shapes_train.jsonl"
        with chdir(folder):
            Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
            iterations = 2 if family in RESUMED else 1
            assert run(["recipe.yaml", "run_dir=whole", f"trainer.max_epochs={iterations}"]) == 0
            if family in RESUMED:
                assert run(["recipe.yaml", "run_dir=half", "trainer.max_epochs=1"]) == 0
                assert run(["half/config.yaml", "--resume", "trainer.max_epochs=2"]) == 0
        return folder

    return made


@pytest.mark.slow
@pytest.mark.parametrize("family", RESUMED)
def test_a_resumed_run_ends_like_one_undisturbed(runs, family):
    whole, half = assert_resumed_alike(runs(family))
    assert whole["global_step"] == half["global_step"] == 4
    trained = [value for name, value in whole["state_dict"].items() if "lora_B" in name]  # from 0
    assert sum((value.abs().max() > 0.01).item() for value in trained) > 0.8 * len(trained)


@pytest.fixture(scope="module")
def drawn(runs, tmp_path_factory):
    """``drawn(family)``: by case, image of plain diffusers, our sampler's, and the start's."""

    @cache
    def made(family):
        folder, of_family = tmp_path_factory.mktemp("drawn"), [case for case in CASES if case[0] == family]
        row = read_prompts(yaml.safe_load((runs(family) / "recipe.yaml").read_text())["data"]["train"])[0]
        cases = [(runs(family), "whole", "EMA", options, row, {"solver": one}) for _, one, *options in of_family]
        found = dict(zip(of_family, draw_exports(cases, folder), strict=True))
        for number, (_, _, *options) in enumerate(of_family):
            assert (folder / f"{number}/{number}.safetensors").is_file() == ("--format=comfyui" in options)
        return found

    return made


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_plain_diffusers_draws_what_a_run_trained(drawn, case):
    theirs, ours, start = drawn(case[0])[case]
    print(f"\n{' '.join(case)}: {difference(theirs[..., :3, :, :], ours):.0e}")
    assert_same(theirs[..., :3, :, :], ours, case[2:], most=1.5)  # Qwen and FLUX round the time too
    assert (ours - start).abs().max() > 0.02  # what was trained shows
