"""``lightning sample``: an image depends on its prompt, its seed and the weights alone, and nothing is overwritten."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import sample_images
from PIL import Image
from saved_runs import assert_one_line, folder_with, train

from lit_vgrpo.core.pictures import references_of
from lit_vgrpo.core.sampling import sample
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.data import read_prompts
from lit_vgrpo.policies import KontextPolicy, SD3Policy
from lit_vgrpo.system.paths import resolve_path
from lit_vgrpo.training.saved_weights import SavedWeights

pytestmark = pytest.mark.slow

PROMPTS = ["a red circle on the left", "a blue square at the top"]
RECIPE = """
seed_everything: 7
trainer:
  {max_epochs: 2, accelerator: cpu, devices: 1, logger: false, callbacks: [{class_path: EMA, init_args: {decay: 0.5}}]}
model:
  policy: {class_path: SD3Policy, init_args: {checkpoint: CHECKPOINT, max_sequence_length: 4, lora_rank: 2}}
  objective: {class_path: FlowGRPO, init_args: {rollout: {solver: flow_sde, steps: 3, guidance: 2.0}}}
  reward: JPEGCompressibility
  optimizer: {lr: 0.3}
data: {train: train.txt, prompts_per_iteration: 1, group_size: 2, micro_batch_size: 2}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_sd3):
    """A folder with a finished run, runs/tiny."""
    place = tmp_path_factory.mktemp("sample")
    with folder_with(place, RECIPE, tiny_sd3, PROMPTS):
        train()
    return place


@pytest.fixture
def inside(trained, monkeypatch):
    """The same folder as the working directory; what was drawn is removed afterwards."""
    monkeypatch.chdir(trained)
    yield trained
    for path in [*trained.glob("runs/tiny/sample*"), *trained.glob("out*")]:
        shutil.rmtree(path)


def drawn(capsys, *words):
    """The pictures of one call, by the names that were printed."""
    assert sample_images(["runs/tiny", *words]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    return {path.name: pixels(path) for path in paths}


def pixels(path):
    return np.asarray(Image.open(path)).astype(int)


def by_hand(folder, spec, prompt, seed, variant=None):
    policy = SD3Policy(str(folder), max_sequence_length=4, lora_rank=2).load()
    if variant is not None:
        SavedWeights.read(Path("runs/tiny/checkpoints/last.ckpt")).put_into(policy, variant)
    noise = torch.randn(1, *policy.latent_shape, generator=torch.Generator().manual_seed(seed))
    latents, _ = sample(policy, policy.encode([prompt]), torch.zeros(1, dtype=int), spec, noise)
    return (policy.decode(latents)[0].permute(1, 2, 0) * 255).round().numpy()


def test_an_image_depends_on_prompt_and_seed_alone(inside, capsys):
    many = drawn(capsys, "--prompt", PROMPTS[0], f"--prompt={PROMPTS[1]}", "--count=2", "--out=out")
    assert list(many) == ["001_seed0.png", "001_seed1.png", "002_seed0.png", "002_seed1.png"]
    one = drawn(capsys, "--prompt", PROMPTS[1], "--seed", "1")
    assert np.array_equal(one["001_seed1.png"], many["002_seed1.png"])
    assert len({image.tobytes() for image in many.values()}) == 4
    Path("out.txt").write_text("\n".join(PROMPTS))
    again = drawn(capsys, "--prompts", "out.txt", "--count=2", "--out=out2")
    assert all(np.array_equal(again[name], image) for name, image in many.items())
    assert sorted(path.name for path in Path("out").iterdir()) == list(many)
    Path("out.txt").unlink()


def test_it_is_drawn_as_the_run_evaluates(inside, capsys, tiny_sd3):
    asked = ["--prompt", PROMPTS[0], "--seed", "5"]
    (found,) = drawn(capsys, *asked).values()
    # the objective's rollout, without its noise
    assert np.array_equal(found, by_hand(tiny_sd3, RolloutSpec("euler", 3, 2.0), PROMPTS[0], 5, "EMA"))
    (found,) = drawn(capsys, *asked, "--steps=4", "--guidance", "1").values()
    assert np.array_equal(found, by_hand(tiny_sd3, RolloutSpec("euler", 4, 1.0), PROMPTS[0], 5, "EMA"))
    (found,) = drawn(capsys, *asked, "--steps=2", "model.evaluation={solver: dpm++, steps: 4, guidance: 3.0}").values()
    assert np.array_equal(found, by_hand(tiny_sd3, RolloutSpec("dpm++", 2, 3.0), PROMPTS[0], 5, "EMA"))


def test_which_weights(inside, capsys, tiny_sd3):
    spec, images = RolloutSpec("euler", 3, 2.0), set()
    for weights, flag in {"trained": ["--no-ema"], "EMA": [], "reference": ["--reference"]}.items():
        assert sample_images(["runs/tiny", "--prompt", PROMPTS[0], *flag, f"--out=out/{weights}"]) == 0
        assert f"Sampled with the {weights} weights" in capsys.readouterr().err
        found = pixels(f"out/{weights}/001_seed0.png")
        expected = by_hand(tiny_sd3, spec, PROMPTS[0], 0, None if weights == "reference" else weights)
        assert np.array_equal(found, expected), weights
        images.add(found.tobytes())
    assert len(images) == 3


def test_nothing_is_overwritten(inside, capsys):
    asked = ["runs/tiny/config.yaml", "--prompt", "x", "--steps=1", "--reference"]
    for _ in range(2):
        assert sample_images(asked) == 0
    assert capsys.readouterr().out.splitlines() == [f"runs/tiny/sample{n}/001_seed0.png" for n in ("", "-2")]
    assert sample_images([*asked, "--out=runs/tiny/sample"]) == 2
    err = capsys.readouterr().err
    assert err == "runs/tiny/sample is not empty and will not be overwritten. Choose a new folder.\n"
    assert sample_images([*asked, "--out=out/one.png"]) == 0
    assert np.array_equal(pixels("out/one.png"), pixels("runs/tiny/sample/001_seed0.png"))
    capsys.readouterr()
    for words, line in (
        (["--out=out/one.png"], "out/one.png is a file and will not be overwritten."),
        (
            ["--out=out/two.png", "--count=2"],
            "--out out/two.png is the name of a file. Name a folder, or for a single",
        ),
        (["--out=out/one.jpg"], "--out out/one.jpg is the name of a file. Name a folder, or for a single"),
    ):
        assert_one_line(sample_images, [*asked, *words], capsys, line)


def test_a_picture_is_edited(here, capsys):
    Path("config.yaml").write_text(resolve_path("shipped:tiny_edit.yaml").read_text())
    given = {row["image"]: references_of([row])[0] for row in read_prompts("shipped:prompts/edit_heldout.jsonl")[:2]}
    asked = ["config.yaml", "--reference", "--steps=2", "--prompt=make it red"]
    options = {"max_sequence_length": 4, "height": 32, "width": 32, "decode_batch_size": 32}
    policy = KontextPolicy("shipped:assets/tiny_edit", **options).load()
    noise, row = torch.randn(1, *policy.latent_shape, generator=torch.Generator().manual_seed(0)), torch.zeros(1).long()
    for number, (file, picture) in enumerate(given.items()):
        assert sample_images([*asked, "--image", file, f"--out=out{number}"]) == 0
        latents, _ = sample(policy, policy.encode(["make it red"], [picture]), row, RolloutSpec("euler", 2), noise)
        expected = (policy.decode(latents)[0].permute(1, 2, 0) * 255).round().numpy()
        assert np.array_equal(pixels(f"out{number}/001_seed0.png"), expected)
    assert (pixels("out0/001_seed0.png") != pixels("out1/001_seed0.png")).any()
    capsys.readouterr()

    Image.new("RGB", (48, 32)).save("wide.png")
    for image, line in (
        ([], 'KontextPolicy edits pictures, but row 1 of the prompts, "make it red", has none. Add --image FILE'),
        (["--image=none.png"], "none.png does not exist. Give an image file."),
        (["--image=config.yaml"], "config.yaml is not a readable image."),
        (["--image=wide.png"], "has 32 x 48 pixels (height x width), but the images have 32 x 32. Resize it"),
    ):
        assert_one_line(sample_images, [*asked, *image, "--out=out"], capsys, line)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], 'No prompt given. Add --prompt "a red circle", or --prompts FILE.'),
        (["--prompts=none.txt"], "none.txt does not exist."),
        (["--prompt=x", "--no-ema", "--reference"], "--no-ema and --reference are both given. Sample once "),
        (["--prompt=x", "--guidance=nan"], "--guidance: Use"),
        (["--prompt=x", "--out=train.txt"], "train.txt is a file and will not be overwritten."),
        (["--prompt=x", "--steps=1", "--out=train.txt/y"], "Cannot write train.txt/y/001_seed0.png: "),
        (["--prompt=x", "trainer.devices=2"], "trainer.devices=2 has no effect on sampling, which uses only "),
        (["--prompt=x", "model.evaluation.solver=ddim"], "ddim"),
        (["--prompt=x", "model.policy.lora_alpha=24"], "was trained with lora_alpha=2, but the policy has 24"),
    ],
)
def test_mistakes_are_one_line(inside, capsys, words, line):
    assert_one_line(sample_images, ["runs/tiny", *words], capsys, line)
    assert not list(Path("runs/tiny").glob("sample*"))
