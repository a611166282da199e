"""Rewards of edits: they get the pictures, and rewards that do not ask for them work as before."""

import pytest
import torch
from helpers import Brightness
from make_tiny_edit import random_edits
from PIL import Image

from lit_vgrpo.core.pixels import to_uint8
from lit_vgrpo.rewards import CLIPImageSimilarity, PythonReward, RecolourReward, Reward, Weighted
from lit_vgrpo.tiny.shapes import edit_of


class Difference(Reward):
    name = "difference"

    def __call__(self, images, prompts, rows, references=None):
        assert references is not None
        return (images - references).abs().mean((1, 2, 3))


@pytest.fixture(scope="module")
def edits(tmp_path_factory):
    """Pictures before and after, and the rows that name the former's files."""
    folder = tmp_path_factory.mktemp("edits")
    before, after, prompts = random_edits(6, torch.Generator().manual_seed(0))
    rows = []
    for number, (picture, prompt) in enumerate(zip(before, prompts, strict=True)):
        file = folder / f"{number}.png"
        Image.fromarray(to_uint8(picture).permute(1, 2, 0).numpy()).save(file)
        rows.append({"prompt": prompt, "image": str(file)})
    return before, after, prompts, rows


def test_a_reward_gets_the_pictures_only_if_it_asks_for_them(edits):
    before, after, prompts, rows = edits
    found = Weighted([Difference(), Brightness()]).score(before, prompts, rows)
    assert found.parts["difference"].abs().max() < 1e-6
    torch.testing.assert_close(found.parts["brightness"], (to_uint8(before) / 255).mean((1, 2, 3)))
    assert Weighted([Difference()]).score(after, prompts, rows).total.min() > 0.005


def test_an_own_function_gets_the_pictures_in_its_format(edits, here, monkeypatch):
    before, after, prompts, rows = edits
    (here / "own_edits.py").write_text(
        "def same(images, prompts, rows, references):\n"
        "    return [float(a.tobytes() == b.tobytes()) for a, b in zip(images, references)]\n"
    )
    monkeypatch.syspath_prepend(str(here))
    reward = PythonReward("own_edits:same", images="pil")
    assert reward.check() == []
    assert Weighted([reward]).score(before, prompts, rows).total.tolist() == [1.0] * 6
    assert Weighted([reward]).score(after, prompts, rows).total.tolist() == [0.0] * 6
    given = PythonReward(lambda images, prompts, references: [len(one) for one in references], images="pil")
    several = [{**row, "image": [row["image"]] * 2} for row in rows]
    assert Weighted([given]).score(before, prompts, several).total.tolist() == [2.0] * 6


def test_recolouring_scores_the_edit_and_a_copy_scores_nothing(edits):
    before, after, prompts, rows = edits
    reward = Weighted([RecolourReward()])
    assert reward.score(after, prompts, rows).total.tolist() == [1.0] * 6
    assert reward.score(before, prompts, rows).total.tolist() == [0.0] * 6
    elsewhere = after.flip(3).flip(2)  # the other side: the place is wrong, and a triangle's shape
    assert reward.score(elsewhere, prompts, rows).total.max() <= 0.5
    assert "does not ask for a colour" in reward.prompt_error("a red circle", rows[0])
    assert "has no picture to edit" in reward.prompt_error(edit_of("red"), {"prompt": edit_of("red")})


def test_clip_similarity_of_a_copy_is_1(edits, tiny_clip):
    before, after, prompts, rows = edits
    reward = CLIPImageSimilarity(str(tiny_clip), batch_size=4)
    assert reward.check() == []
    copies, changed = (Weighted([reward]).score(images, prompts, rows).total for images in (before, after))
    torch.testing.assert_close(copies, torch.ones(6))
    assert changed.max() < 1 - 1e-5
    both = [{**row, "image": [row["image"], other["image"]]} for row, other in zip(rows, rows[1:] + rows, strict=False)]
    others = Weighted([reward]).score(before, prompts, [{**row, "image": row["image"][1]} for row in both]).total
    torch.testing.assert_close(Weighted([reward]).score(before, prompts, both).total, (copies + others) / 2)
    assert "has no picture to edit" in reward.prompt_error("red", {"prompt": "red"})
