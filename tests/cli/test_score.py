"""``lightning score`` on real image files."""

import json
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import score
from helpers import read_csv
from PIL import Image

from lit_vgrpo.cli.image_files import find_images, read_image
from lit_vgrpo.cli.main import main
from lit_vgrpo.rewards import JPEGCompressibility, as_weighted
from lit_vgrpo.tiny.shapes import attributes_of, render

OWN = """
from lit_vgrpo.rewards import RewardError

def width(images, prompts):
    return [float(image.shape[-1]) for image in images]

def picky(images, prompts):
    if images[0].shape[-1] == 48:
        raise RewardError("48 is too narrow")
    return [0.5] * len(images)
"""


@pytest.fixture
def folder(here, monkeypatch):
    """The working directory, with two images of different sizes and a module of the user's own."""
    monkeypatch.syspath_prepend(str(here))
    (here / "score_rewards.py").write_text(OWN)
    generator = np.random.default_rng(0)
    Image.fromarray(generator.integers(0, 255, (64, 48, 3), dtype=np.uint8)).save("noise.png")
    Image.new("RGB", (128, 96), "red").save("red.jpg")
    return here


def errors_of(capsys, words):
    assert score(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_a_table_of_images_of_different_sizes(folder, capsys):
    assert main(["score", "JPEGCompressibility", "noise.png", "red.jpg", "quality=80"]) == 0
    header, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["image", "jpeg", "total"]
    reward = as_weighted(JPEGCompressibility(quality=80))
    for (name, part, total), file in zip(rows, ("noise.png", "red.jpg"), strict=True):
        expected = float(reward.score(read_image(Path(file)), [""], [{}]).total)
        assert name == file
        assert float(part) == float(total) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("size", [1, 8])
def test_a_folder_in_batches_of_one_size(folder, size):
    for number in range(3):
        Image.new("RGB", (16 * (1 + number // 2), 16)).save(f"{number}.png")
    assert score(["python:score_rewards:width", ".", "--batch-size", str(size), "--out", "out.json"]) == 0
    found = json.loads(Path("out.json").read_text())
    assert [Path(own["image"]).name for own in found["images"]] == ["0.png", "1.png", "2.png", "noise.png", "red.jpg"]
    assert [own["total"] for own in found["images"]] == [16, 16, 32, 48, 128]


def test_numbered_images_of_a_folder_are_in_the_order_of_their_prompts(here):
    names = [f"images/{name}.png" for name in ("2/0", "9_seed2", "9_seed10", "0010_seed1", "100_seed0")]
    for name in reversed(names):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(name)
    assert [f"{file}" for file in find_images(["images"])] == names
    assert [f"{file}" for file in find_images([names[-1], "images"], limit=2)] == [names[-1], names[0]]


def test_each_image_has_its_own_prompt(folder, capsys):
    prompts = [{"prompt": "a red circle on the left"}, {"prompt": "a blue square on the right"}]
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    for number, row in enumerate(prompts):
        pixels = (render(**attributes_of(row["prompt"], {})) * 255).round().to(torch.uint8)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(f"{number}.png")
    words = ["score", "tiny_shapes", "0.png", "1.png", "--prompts", "prompts.jsonl", "--out", "scores.csv"]
    assert main(words) == 0
    header, first, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["image", "prompt", "colour", "shape", "place", "total"]
    assert prompts[0]["prompt"] in first
    rows = read_csv("scores.csv")
    assert [float(row["total"]) for row in rows] == pytest.approx([1.0, 1.0])
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in prompts]
    words[2:4] = ["1.png", "0.png"]
    assert main(words) == 0
    assert all(float(row["total"]) < 1 for row in read_csv("scores.csv"))


def test_a_failure_is_shown_with_its_reason_and_is_no_zero(folder, capsys):
    assert score(["python:score_rewards:picky", "noise.png", "red.jpg", "--out", "out.csv"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[1].split() == ["noise.png", "failed", "failed"]
    assert out[2].split() == ["red.jpg", "0.5000", "0.5000"]
    assert out[3] == "noise.png: picky failed: 48 is too narrow"
    failed, fine = read_csv("out.csv")
    assert (failed["picky"], failed["total"], failed["failures"]) == ("", "", "picky: 48 is too narrow")
    assert fine["total"] == "0.5"


def test_pictures_are_upright_and_opaque(folder):
    clear = Image.new("RGBA", (4, 2), (255, 0, 0, 0))
    clear.putpixel((0, 0), (255, 0, 0, 255))
    clear.save("clear.png")
    pixels = read_image(Path("clear.png"))
    assert pixels.shape == (1, 3, 2, 4)
    assert pixels[0, :, 0, 0].tolist() == [1, 0, 0]
    assert pixels[0, :, 1, 3].tolist() == [1, 1, 1]
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.new("RGB", (4, 2)).save("turned.jpg", exif=exif)
    assert read_image(Path("turned.jpg")).shape == (1, 3, 4, 2)
    Image.new("L", (3, 3), 255).save("grey.png")
    assert read_image(Path("grey.png")).mean() == 1


def test_files_that_are_no_images_are_a_line_each(folder, capsys):
    whole = BytesIO()
    Image.open("noise.png").save(whole, "PNG")
    Path("torn.png").write_bytes(whole.getvalue()[:2000])
    Path("text.png").write_text("no image")
    lines = errors_of(capsys, ["JPEGCompressibility", "torn.png", "noise.png", "text.png"])
    advice = "is not a readable image. Leave it out, or save it again."
    assert lines == [f"torn.png {advice}", f"text.png {advice}"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["JPEGCompressibility"], "No image given."),
        (["JPEGCompressibility", "cat.png"], "cat.png does not exist."),
        (["JPEGCompressibility", "empty"], "empty contains no images."),
        (["JPEGCompressibility", "noise.png", "--prompt", "a", "--prompts", "b"], "--prompt and --prompts are both"),
        (["JPEGCompressibility", "noise.png", "--prompts", "two.txt"], "two.txt has 2 prompts for 1 image."),
        (["JPEGCompressibility", "noise.png", "--out", "x.txt"], "--out x.txt is not a .json or .csv file."),
        (["JPEGCompressibility", "--out", "two.txt/x.csv"], "Cannot write two.txt/x.csv: Not a directory. Choose "),
    ],
)
def test_mistakes_are_one_line(folder, capsys, words, said):
    Path("empty").mkdir()
    Path("two.txt").write_text("a\nb\n")
    (line,) = errors_of(capsys, words)
    assert said in line


def test_a_prompt_that_the_reward_needs_is_asked_for_before_weights_are_loaded(folder, capsys, monkeypatch):
    monkeypatch.setattr("lit_vgrpo.rewards.ShapesReward.load", lambda self: pytest.fail("loaded"))
    first, second = errors_of(capsys, ["ShapesReward", "noise.png", "red.jpg"])
    assert first.startswith(
        'Reward "shapes" cannot score 2 of 2 prompts. The first: Prompt "" must name one colour. Write'
    )
    assert second == "No prompt was given. Add --prompt TEXT, or --prompts FILE with one prompt per image."
    (line,) = errors_of(capsys, ["ShapesReward", "noise.png", "red.jpg", "--prompt", "a cat"])
    assert 'Prompt "a cat" must name one' in line
