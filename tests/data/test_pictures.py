"""Prompts with a picture to edit: found beside their file, checked before a run, and part of what a prompt is."""

import os
import re

import pytest
import torch
from PIL import Image

from lit_vgrpo.core.pictures import picture_error, picture_size, read_picture, references_of, stacked_references
from lit_vgrpo.data import PromptDataModule, read_prompts
from lit_vgrpo.data.prompts import PromptError, text_of
from lit_vgrpo.launch.checks import picture_errors
from lit_vgrpo.policies import SD3Policy


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pictures").mkdir()
    for name, colour in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        Image.new("RGB", (6, 4), colour).save(tmp_path / "pictures" / f"{name}.png")
    return tmp_path


EDITS = [{"prompt": "make it green", "image": f"pictures/{name}.png"} for name in ("red", "blue")]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "folder"])
def test_a_picture_is_found_beside_the_prompt_file(folder, write, kind):
    if kind == "csv":
        file = write("edits.csv", "prompt,image\n" + "".join(f"{row['prompt']},{row['image']}\n" for row in EDITS))
    elif kind == "folder":
        file = write("set/train.jsonl", [row | {"image": f"../{row['image']}"} for row in EDITS]).parent
    else:
        file = write(f"edits.{kind}", EDITS)
    rows = read_prompts(file)
    red, blue = references_of(rows)
    assert (red.dtype, red.shape) == (torch.uint8, (3, 4, 6))
    assert red[:, 0, 0].tolist() == [255, 0, 0]
    assert blue[:, 0, 0].tolist() == [0, 0, 255]


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("pictures/gone.png", "gone.png does not exist. Give an image file."),
        ("edits.jsonl", "is not a readable image"),
        (7, "7 does not exist."),
        ("pictures/pipe.png", "pipe.png is not a file. Give an image file."),
        ("pictures/grey.png", "grey.png has more than 8 bits per channel (mode I;16). Save it with 8 bits."),
    ],
)
def test_a_wrong_picture_is_one_line_with_its_row(folder, write, image, said):
    file = write("edits.jsonl", [EDITS[0], {"prompt": "make it green", "image": image}])
    os.mkfifo(folder / "pictures" / "pipe.png")
    Image.new("I;16", (6, 4)).save(folder / "pictures" / "grey.png")
    with pytest.raises(PromptError, match=rf"^{file} line 2: .*{re.escape(said)}.*$"):
        read_prompts(file)


NO_PICTURE = [
    "gone.png",
    "http://a/b.png",
    17,
    {"id": 1},
    ["gone.png", "gone too.png"],
    "",
    f"data:image/png;base64,{'A' * 999}",
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_only_a_policy_that_edits_needs_the_pictures(write, datasets_cache, kind):
    named = NO_PICTURE if kind == "jsonl" else NO_PICTURE[:1] * 7
    rows = [{"prompt": f"prompt {number}", "image": image} for number, image in enumerate(named)]
    data = PromptDataModule(str(write(f"rows.{kind}", rows)), 2, 2, heldout_fraction=0.5, deduplicate=True)
    (error,) = data.check()
    assert "gone.png does not exist. Give an image file." in error
    assert len(error) < 400
    policy = SD3Policy("nowhere")
    data.read_for(policy)
    assert data.check() == []
    found = [*data.training_rows(), *data.heldout_rows()]
    assert sorted(found, key=lambda row: row["prompt"]) == rows  # for rewards, as they were written
    assert picture_errors(policy, found) == []
    assert references_of(found) is None
    assert picture_error("a", found[0]).endswith("has no picture to edit. Give its row an image.")


def test_a_picture_is_part_of_what_a_prompt_is(folder, write):
    """Two pictures under one prompt are no duplicates; the fingerprint follows a picture's content, not its path."""
    file = str(write("edits.jsonl", [*EDITS, EDITS[0]]))
    held = PromptDataModule(file, 2, 2, heldout=file)
    assert [row["image"][-8:] for row in held.heldout_samples(5)] == ["/red.png", "blue.png"]
    alone = PromptDataModule(file, 2, 2, deduplicate=True)
    assert len(list(alone.training_rows())) == 2
    before = alone.sets.fingerprint()
    Image.new("RGB", (6, 4), (1, 2, 3)).save(folder / "pictures" / "red.png")
    assert PromptDataModule(file, 2, 2, deduplicate=True).sets.fingerprint() != before


def test_a_row_names_several_pictures(folder, write):
    several = {"prompt": "join them", "image": [edit["image"] for edit in EDITS]}
    rows = read_prompts(write("edits.jsonl", [several, several | {"image": several["image"][::-1]}, EDITS[0]]))
    both, swapped, alone = references_of(rows)
    assert both.shape == (2, 3, 4, 6)
    assert torch.equal(both, swapped.flip(0))
    assert torch.equal(both[0], alone)
    assert stacked_references(rows[:2]).shape == (2, 2, 3, 4, 6)
    assert len({text_of(row) for row in rows}) == 3
    with pytest.raises(ValueError, match="differ in number or size, 2 x 3 x 4 x 6 and 3 x 4 x 6"):
        stacked_references(rows)


def test_pictures_are_absent_or_everywhere(folder, write):
    rows = read_prompts(write("edits.jsonl", [EDITS[0], {"prompt": "a cat", "image": None}]))
    assert "image" not in rows[1]
    assert references_of(rows[1:]) is None
    with pytest.raises(ValueError, match='Prompt "a cat" has no image, but other rows have'):
        references_of(rows)


@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "tiff"])
def test_the_size_in_the_header_is_that_of_the_upright_picture(tmp_path, kind):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.new("RGB", (6, 4)).save(file := tmp_path / f"turned.{kind}", exif=exif)
    assert picture_size(file) == read_picture(file).shape[1:] == (6, 4)
