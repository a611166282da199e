from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
from make_tiny_motion import render as render_video
from tiny_prompts import shape_rows

from lit_vgrpo.tiny import words
from lit_vgrpo.tiny.shapes import (
    CHOICES,
    PLACES,
    SHAPES,
    ShapesImages,
    attributes_of,
    coverage,
    prompt_of,
    render,
)


def generators(count: int, offset: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(offset + i) for i in range(count)]


def test_every_prompt_parses_back_to_its_attributes() -> None:
    rows = [row for part in shape_rows() for row in part]
    assert len({row["prompt"] for row in rows}) == 72
    for row in rows:
        found = attributes_of(row["prompt"], {})
        assert prompt_of(**found) == row["prompt"]
        assert {"prompt": row["prompt"], **found} == row


def test_attributes_are_found_in_any_words_and_those_named_twice_are_not() -> None:
    assert attributes_of("On the left, a big red Circle.", {}) == attributes_of("a red circle on the left", {})
    assert attributes_of("a red or blue squared circle", {}) == {"shape": "circle"}
    assert attributes_of("", {}) == {}


def test_fields_win_over_words_and_unknown_values_are_dropped() -> None:
    prompt = "a red circle on the left"
    assert attributes_of(prompt, {"colour": "blue"}) == {"colour": "blue", "shape": "circle", "place": "on the left"}
    assert attributes_of("a house", {"shape": "square", "colour": "beige"}) == {"shape": "square"}


def test_split_holds_every_value_in_both_parts() -> None:
    train, heldout = shape_rows()
    assert (len(train), len(heldout)) == (60, 12)
    for name, values in CHOICES.items():
        for part in (train, heldout):
            counts = Counter(row[name] for row in part)
            assert set(counts) == set(values)
            assert len(set(counts.values())) == 1


@pytest.mark.parametrize(
    ("draw", "shape"),
    [
        (partial(render, "red", "circle", "on the left"), (3, 32, 32)),
        (partial(render_video, "red", "circle", "up"), (5, 3, 32, 32)),
        (partial(words.render, "CAT"), (3, 16, 40)),
    ],
)
def test_rendering_depends_on_the_generator_alone(draw, shape) -> None:
    pictures = []
    for seed in (3, 3, 4):
        torch.rand(seed)  # the global generator must not matter
        pictures.append(draw(generator=torch.Generator().manual_seed(seed)))
    assert pictures[0].shape == shape
    assert pictures[0].dtype == torch.float32
    assert 0 <= pictures[0].min() <= pictures[0].max() <= 1
    assert torch.equal(pictures[0], pictures[1])
    assert not torch.equal(pictures[0], pictures[2])


@pytest.mark.parametrize("shape", SHAPES)
def test_coverage_has_the_area_and_centroid_asked_for(shape: str) -> None:
    x, y, area = torch.tensor([16.3, 12.0]), torch.tensor([15.2, 20.5]), torch.tensor([80.0, 110.0])
    mask = coverage(shape, x, y, area)
    grid = torch.arange(32) + 0.5
    total = mask.sum((1, 2))
    torch.testing.assert_close(total, area, rtol=0.03, atol=0)
    torch.testing.assert_close((mask.sum(1) * grid).sum(1) / total, x, rtol=0, atol=0.1)
    torch.testing.assert_close((mask.sum(2) * grid).sum(1) / total, y, rtol=0, atol=0.1)


def test_shapes_stay_inside_the_picture() -> None:
    for generator, shape, place in product(generators(60), SHAPES, PLACES):
        picture = render("blue", shape, place, generator)
        edge = torch.cat([picture[:, 0], picture[:, -1], picture[:, :, 0], picture[:, :, -1]], dim=1)
        assert (edge - edge[:, -1:]).abs().max() < 0.1  # a triangle's tip may shade the outermost row


@pytest.mark.slow
def test_captions_are_swapped_at_the_given_rate_and_pictures_stay_true() -> None:
    rows = shape_rows()[0] * 20
    prompts = [row["prompt"] for row in rows]
    pictures, captions = ShapesImages(caption_noise=0.45)(prompts, rows, generators(len(rows)))
    clean, same = ShapesImages(caption_noise=0)(prompts, rows, generators(len(rows)))
    assert torch.equal(pictures, clean)
    assert same == prompts
    for name in CHOICES:
        swapped = [attributes_of(caption, {})[name] != row[name] for caption, row in zip(captions, rows, strict=True)]
        assert sum(swapped) / len(swapped) == pytest.approx(0.45, abs=0.05)


def test_bad_values_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"caption_noise=2: Use 1 or less"):
        ShapesImages(caption_noise=2)
    with pytest.raises(ValueError, match=r"prompt 'a house' does not belong to the shapes task"):
        ShapesImages()(["a house"], [{}], generators(1))
