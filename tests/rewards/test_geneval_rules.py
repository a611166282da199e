import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_vgrpo.rewards.geneval_rules import (
    ALIASES,
    CLASSES,
    COLORS,
    RELATIONS,
    Detection,
    judge,
    objects_by_class,
    objects_to_color,
    official_name,
    relations,
    row_error,
)


def seen(label, score=0.95, box=(0, 0, 10, 10), color=None):
    return Detection(label, score, box, color=color)


def share_of(detections, row):
    return judge(objects_by_class(detections, 0.9 if row.get("tag") == "counting" else 0.3), row)


BENCH = {"tag": "single_object", "include": [{"class": "bench", "count": 1}]}
TWO = {"tag": "two_object", "include": [{"class": "cat", "count": 1}, {"class": "dog", "count": 1}]}
THREE = {"tag": "counting", "include": [{"class": "clock", "count": 3}], "exclude": [{"class": "clock", "count": 4}]}
RED = {"tag": "colors", "include": [{"class": "car", "count": 1, "color": "red"}]}
LEFT = {
    "tag": "position",
    "include": [{"class": "cat", "count": 1}, {"class": "dog", "count": 1, "position": ["left of", 0]}],
}
BOTH = {
    "tag": "color_attr",
    "include": [{"class": "car", "count": 1, "color": "red"}, {"class": "bus", "count": 1, "color": "blue"}],
}
TWO_CATS = {"include": [{"class": "cat", "count": 2}, LEFT["include"][1]]}
BLACK_CAT = {"include": [{"class": "cat", "count": 1, "color": "black"}, LEFT["include"][1]]}
NULLS = {"include": [{**BENCH["include"][0], "color": None, "position": None}], "exclude": None}  # as in a table
EAST, WEST, NORTH, FAR_WEST = (60, 20, 80, 40), (0, 20, 20, 40), (62, -40, 82, -20), (-60, 20, -40, 40)


@pytest.mark.parametrize(
    ("row", "detections", "share"),
    [
        (BENCH, [seen("bench"), seen("bench"), seen("cat")], 1),  # more are allowed
        (BENCH, [seen("bench", 0.3)], 0),
        (TWO, [seen("cat")], 0.5),
        (THREE, [seen("clock", 0.91)] * 3, 1),
        (THREE, [seen("clock")] * 2 + [seen("clock", 0.9)], 2 / 3),  # the score is too low to count
        (THREE, [seen("clock")] * 5, 1 / 3),
        (THREE, [seen("clock")] * 7, 0),
        (RED, [seen("car", 0.9, color="blue"), seen("car", 0.8, color="red")], 0.5),  # the highest score counts
        (LEFT, [seen("cat", box=EAST), seen("dog", box=WEST)], 1),
        (LEFT, [seen("cat", box=EAST), seen("dog", box=NORTH)], 2 / 3),
        (LEFT, [seen("dog", box=WEST)], 1 / 3),  # there is no cat to be left of
        (BOTH, [seen("car", color="blue"), seen("bus", color="red")], 0.5),
        (BOTH, [seen("car", color="red"), seen("bus", color="red")], 0.75),
        (TWO_CATS, [seen("cat", 0.9, EAST), seen("cat", 0.8, EAST), seen("dog", box=WEST)], 1),
        (TWO_CATS, [seen("cat", 0.9, EAST), seen("cat", 0.8, FAR_WEST), seen("dog", box=WEST)], 5 / 6),  # all pairs
        (BLACK_CAT, [seen("cat", box=EAST, color="white"), seen("dog", box=WEST)], 0.5),  # the white cat is no target
        (NULLS, [seen("bench")], 1),
    ],
)
def test_the_share_of_the_requirements_that_is_met(row, detections, share):
    assert row_error(row) is None
    assert share_of(detections, row) == pytest.approx(share)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((0, 0, 10, 10), (30, 0, 40, 10), {"left of"}),
        ((0, 0, 10, 10), (30, 30, 40, 40), {"left of", "above"}),
        ((0, 0, 10, 10), (0, 0, 10, 10), set()),
        ((0, 0, 10, 10), (2, 0, 12, 10), set()),  # apart by 2 of the 0.1 * 20 that are needed
        ((0, 0, 10, 10), (3, 0, 13, 10), set()),  # by 1 beyond, a third of the distance
        ((0, 0, 10, 10), (5, 0, 15, 10), {"left of"}),  # by 3 beyond, more than half of it
    ],
)
def test_where_one_box_lies(a, b, expected):
    assert relations(a, b) == expected


def test_colours_are_asked_only_where_they_decide():
    cars = [seen("car", 0.9), seen("car", 0.8), seen("car", 0.7)]
    row = {"include": [{"class": "car", "count": 2, "color": "red"}, {"class": "bus", "count": 1, "color": "red"}]}
    assert objects_to_color(objects_by_class([*cars, seen("bench")], 0.3), row) == cars[:2]
    assert objects_to_color(objects_by_class(cars, 0.3), BENCH) == []


def official_result(detections, row):
    """The official procedure once more, in numpy and from its description."""
    limit = 0.9 if row.get("tag") == "counting" else 0.3

    def surest(label):
        found = [d for d in detections if d.label == label and d.score > limit]
        return sorted(found, key=lambda d: d.score, reverse=True)[:16]

    def beyond(a, b):
        a, b = np.reshape(a, (2, 2)).astype(float), np.reshape(b, (2, 2)).astype(float)
        offset = a.mean(0) - b.mean(0)
        gap = np.abs(offset) - 0.1 * ((a[1] - a[0]) + (b[1] - b[0]))
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(gap > 0, gap * np.sign(offset), 0) / np.linalg.norm(offset)

    def is_placed(a, relation, b):
        axis, sign = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}[relation]
        return bool(beyond(a.box, b.box)[axis] * sign > 0.5)

    met = []
    for need in row["include"]:
        found = surest(need["class"])[: need["count"]]
        fine = len(found) == need["count"] and all(d.color == need.get("color", d.color) for d in found)
        if fine and "position" in need:
            relation, target = need["position"]
            fine = bool(met[target]) and all(is_placed(d, relation, other) for d in found for other in met[target])
        met.append(found if fine else [])
    return all(met) and all(len(surest(need["class"])) < need["count"] for need in row.get("exclude", []))


LABELS = ["cat", "dog"]
DETECTIONS = st.lists(
    st.builds(
        lambda label, score, x, y, w, h, color: seen(label, score, (x, y, x + w, y + h), color),
        st.sampled_from(LABELS),
        st.sampled_from([0.2, 0.35, 0.5, 0.7, 0.91, 0.95, 0.99]),
        *[st.integers(0, 60)] * 2,
        *[st.integers(1, 30)] * 2,
        st.sampled_from(COLORS[:2]),
    ),
    max_size=6,
    unique_by=lambda detection: (detection.label, detection.score),
)
NEEDS = st.fixed_dictionaries(
    {"class": st.sampled_from(LABELS), "count": st.integers(1, 2)}, optional={"color": st.sampled_from(COLORS[:2])}
)
PLACED = st.tuples(NEEDS, st.sampled_from(RELATIONS)).map(lambda two: {**two[0], "position": [two[1], 0]})
ROWS = st.fixed_dictionaries(
    {"tag": st.sampled_from(["counting", "position"]), "include": st.tuples(NEEDS, NEEDS | PLACED).map(list)},
    optional={
        "exclude": st.lists(
            st.fixed_dictionaries({"class": st.sampled_from(LABELS), "count": st.integers(1, 3)}), max_size=2
        )
    },
)


@given(DETECTIONS, ROWS)
@settings(deadline=None, max_examples=200)
def test_random_detections_are_judged_as_by_the_official_procedure(detections, row):
    assert row_error(row) is None
    share = share_of(detections, row)
    assert 0 <= share <= 1
    assert (share == 1) == official_result(detections, row)


def test_the_classes_are_cocos():
    assert len(set(CLASSES)) == 80
    assert [official_name(name) for name in ("mouse", "bench")] == ["computer mouse", "bench"]
    assert {official_name(name) for name in ALIASES} < set(CLASSES)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "include: Field required"),
        ({"include": []}, "include: List should have at least 1 item"),
        ({"include": [{"class": "banch", "count": 1}]}, "class='banch' is not a class of the detector. Did"),
        ({"include": [{"class": "bench", "count": 0}]}, "include.0.count: Input should be greater than 0"),
        ({"include": [{"class": "bench", "count": 1, "color": "grean"}]}, "include.0.color: Input should be 'red'"),
        ({"include": [*LEFT["include"], {**LEFT["include"][1], "position": ["near", 0]}]}, "include.2.position.0: "),
        ({"include": [{**LEFT["include"][1], "position": ["above", 0]}]}, "does not refer to an earlier requirement"),
        ({**BENCH, "exclude": [{"class": "bench", "count": 0}]}, "exclude.0.count"),
    ],
)
def test_a_row_that_cannot_be_judged_is_one_line(row, said):
    error = row_error(row)
    assert said in error
    assert "\n" not in error
