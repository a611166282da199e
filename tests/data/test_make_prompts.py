import re
from collections import Counter

import pytest
from make_geneval import CLASSES, COLORS, RELATIONS, geneval_rows
from make_ocr import ocr_prompts
from make_prompts import files, write

from lit_vgrpo.data.prompt_sets import normalised
from lit_vgrpo.data.prompts import read_prompts
from lit_vgrpo.rewards.geneval_rules import row_error
from lit_vgrpo.rewards.ocr import OCRReward
from lit_vgrpo.system.paths import resolve_path

SETS = {"pickscore": ("txt", 400, 60), "ocr": ("txt", 400, 60), "geneval": ("jsonl", 1456, 264)}


@pytest.mark.slow
def test_the_shipped_files_are_what_the_script_writes(tmp_path):
    write(tmp_path)
    shipped = {path.name for path in resolve_path("shipped:prompts").iterdir()}
    assert set(files()) == {name for name in shipped if not name.startswith(("edit_", "motion_"))}  # of other tools
    for name in files():
        assert resolve_path(f"shipped:prompts/{name}").read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.parametrize("name", SETS)
def test_train_and_heldout_are_disjoint_and_without_duplicates(name):
    kind, train, heldout = SETS[name]
    prompts = [
        [row["prompt"] for row in read_prompts(f"shipped:prompts/{name}_{side}.{kind}")]
        for side in ("train", "heldout")
    ]
    assert [len(side) for side in prompts] == [train, heldout]
    assert len({normalised(prompt) for side in prompts for prompt in side}) == train + heldout


def fact(row):
    """Return what a row asks for, however it is worded."""
    things = [(thing["class"], thing["count"], thing.get("color")) for thing in row["include"]]
    place = row["include"][-1].get("position", [None])[0]
    if place in RELATIONS[1::2]:  # the opposite, seen from the other object
        things, place = things[::-1], RELATIONS[RELATIONS.index(place) - 1]
    return (row["tag"], place, tuple(things) if place else frozenset(things))


@pytest.mark.slow
def test_geneval_rows_are_sound_and_no_fact_is_on_both_sides():
    train, heldout = geneval_rows()
    assert not [row for row in train + heldout if row_error(row)]
    assert len({fact(row) for row in train + heldout}) == len(train + heldout)
    assert Counter(row["tag"] for row in heldout) == {
        "single_object": 16, "counting": 48, "two_object": 50, "colors": 50, "position": 50, "color_attr": 50,
    }  # fmt: skip
    used = {thing["class"] for row in train for thing in row["include"]}
    assert used == set(CLASSES)
    assert {thing["color"] for row in train for thing in row["include"] if "color" in thing} == set(COLORS)
    assert {row["include"][1]["position"][0] for row in train if row["tag"] == "position"} == set(RELATIONS)


def test_every_ocr_prompt_quotes_one_text_and_none_is_on_both_sides():
    train, heldout = ocr_prompts()
    texts = [re.findall(r'"([^"]+)"', prompt) for prompt in train + heldout]
    assert all(len(found) == 1 for found in texts)
    assert len({found[0].lower() for found in texts}) == len(texts)
    assert not [prompt for prompt in train + heldout if OCRReward().prompt_error(prompt, {"prompt": prompt})]
