import random
import unicodedata
from hashlib import sha256

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lit_vgrpo.data import PromptDataModule, read_prompts
from lit_vgrpo.data.prompt_sets import is_held_out, normalised, prompt_keys
from lit_vgrpo.data.prompts import prompt_errors
from lit_vgrpo.system.paths import shipped_root

SIZES = {"prompts_per_iteration": 4, "group_size": 2}
PROMPTS = st.lists(st.sampled_from([f"{word} {i}" for i in range(40) for word in ("cat", "CAT", " cat ")]), min_size=20)
TEXT = st.text(max_size=20).map(lambda text: text.encode("utf-8", "ignore").decode())
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def data_module(train, **options):
    return PromptDataModule(train if isinstance(train, list | dict) else str(train), **{**SIZES, **options})


def training(data):
    data.setup()
    return [row["prompt"] for source in data._sets.training.sources for row in source]


def heldout(data):
    return [row["prompt"] for row in data.heldout_rows()]


@pytest.fixture
def file(write):
    return lambda prompts, name="p.txt": str(write(name, "".join(f"{prompt}\n" for prompt in prompts)))


def prompt_key(prompt):
    return int(prompt_keys([prompt])[0])


@pytest.mark.slow
@quick
@given(TEXT)
def test_what_does_not_make_another_prompt_plays_no_part(text):
    key = prompt_key(text)
    assert normalised(normalised(text)) == normalised(text)
    for same in (unicodedata.normalize("NFC", text), unicodedata.normalize("NFD", text), f"\t{text}  \u00a0"):
        assert prompt_key(same) == key
    assert prompt_key(text.replace(" ", " \n ")) == key
    if text.isascii():
        assert prompt_key(text.upper()) == key


@pytest.mark.parametrize(
    ("one", "other"),
    [("A  cat", "a cat"), ("Caf\u00e9", "cafe\u0301"), ("STRASSE", "stra\u00dfe"), ("a\u3000cat", "a cat")],
)
def test_prompts_that_are_the_same(one, other):
    assert prompt_key(one) == prompt_key(other)
    assert prompt_key(one) != prompt_key(other + "s")


def test_the_split_is_pinned():
    # a prompt may not change sides between versions
    assert prompt_key("A cat") == int(sha256(b"a cat").hexdigest()[:16], 16) == 0x51E4674156077982
    sides = is_held_out(prompt_keys([f"prompt {i}" for i in range(30)]), 0.2)
    assert sides.nonzero()[0].tolist() == [2, 6, 7, 14, 15, 19, 25]


def test_excluded_prompts_are_on_neither_side(file):
    prompts = [f"prompt {i}" for i in range(30)]
    data = data_module(file(prompts), heldout_fraction=0.2, exclude={"prompts": ["PROMPT 1", "prompt 2"]})
    assert {*prompts} - {*training(data), *heldout(data)} == {"prompt 1", "prompt 2"}


@quick
@given(PROMPTS, st.randoms(use_true_random=False), st.floats(0.2, 0.8))
def test_no_prompt_is_on_both_sides_and_none_ever_moves(file, prompts, draw, fraction):
    options = {"heldout_fraction": fraction}
    data = data_module(file(prompts), **options)
    if data.check():
        return
    train, aside = training(data), heldout(data)
    assert sorted(train + aside) == sorted(prompt.strip() for prompt in prompts)
    assert not set(map(normalised, train)) & set(map(normalised, aside))
    keys = prompt_keys(aside)
    assert is_held_out(keys, fraction + 0.1).all()
    draw.shuffle(prompts)
    moved = data_module(file([*(f"new {i}" for i in range(9)), *prompts], "q.txt"), **options)
    assert set(aside) <= set(heldout(moved))
    assert set(train) <= set(training(moved))
    split = data_module([file(prompts[::2], "a.txt"), file(prompts[1::2], "b.txt")], **options)
    if not split.check():
        assert sorted(heldout(split)) == sorted(aside)


def test_held_out_prompts_keep_their_order_when_the_file_is_reordered(file):
    prompts = [f"prompt {i}" for i in range(200)]
    ordered = data_module(file(prompts), heldout_fraction=0.3, heldout_limit=7)
    assert len(heldout(ordered)) == 7
    everything = heldout(data_module(file(prompts), heldout_fraction=0.3))
    assert everything[:7] == heldout(ordered)
    assert not set(everything) & set(training(ordered))  # a limit gives nothing back to the training
    random.Random(0).shuffle(prompts)
    assert heldout(data_module(file(prompts, "q.txt"), heldout_fraction=0.3)) == everything
    parts = [file(prompts[:90], "a.txt"), file(prompts[90:], "b.txt")]
    assert heldout(data_module(parts, heldout_fraction=0.3, heldout_limit=9)) == everything[:9]


@quick
@given(PROMPTS, PROMPTS)
def test_the_first_of_equal_prompts_stays(file, first, second):
    sources = [file(first, "a.txt"), file(second, "b.txt")]
    data = data_module(sources, deduplicate=True)
    firsts = {normalised(prompt): prompt.strip() for prompt in reversed(first + second)}
    if set(map(normalised, second)) <= set(map(normalised, first)):
        assert data.check() == [f"{sources[1]} has no prompts left for training: all are held out or duplicates."]
        return
    assert set(training(data)) == set(firsts.values())
    assert len(training(data)) == len(firsts)
    untouched = data_module(sources)
    assert training(untouched) == [prompt.strip() for prompt in first + second]


def test_a_prompt_of_the_held_out_file_is_said_or_left_out(file):
    train, apart = file(["a", "b", "B", "c", "d"]), file(["b", "d", "D"], "held.txt")
    data = data_module(train, heldout=apart, heldout_limit=1)
    assert training(data) == ["a", "b", "B", "c", "d"]
    assert data.sets.describe() == "Prompts: 5 to train on, 1 held out."
    drop = "To drop them, set data.deduplicate=true (in Python: PromptDataModule(deduplicate=True))."
    assert data.sets.heldout_warning() == f"3 training prompts are also held-out prompts. {drop}"
    same = data_module(train, heldout=train).sets.heldout_warning()
    assert same == "All 5 training prompts are also held-out prompts. Set data.heldout to other prompts."
    data = data_module(train, heldout=apart, heldout_limit=1, deduplicate=True)
    assert (training(data), heldout(data)) == (["a", "c"], ["b"])  # "d" is no training prompt with a limit either
    assert heldout(data_module("none.txt", heldout=apart, deduplicate=True)) == ["b", "d"]
    assert data.sets.describe() == "Prompts: 2 to train on, 1 held out."
    assert data.sets.heldout_warning() is None
    assert data_module(train).sets.heldout_warning().startswith("No prompts are held out, so")


def test_wrong_options_are_refused_at_once():
    with pytest.raises(TypeError, match=r"^A source has no path\. Write"):
        data_module([{"weight": 1}])
    with pytest.raises(ValueError, match=r"^heldout_fraction=0\.1 and heldout are"):
        data_module("a.txt", heldout_fraction=0.1, heldout="b.txt")


def test_sources_that_cannot_be_read_are_errors(file):
    bad = [str(file([], "empty.txt")), "none.csv", {"path": file(["a"]), "column": "b"}]
    errors = prompt_errors([*bad, {"oops": 1}, 3], "gone.txt", None)
    assert [part in error for part, error in zip(("empty.txt", "none.csv", "column=b", "gone"), errors, strict=True)]
    assert data_module([*bad, file(["a"])], heldout="gone.txt").check() == errors[:1]
    (error,) = data_module(file(["a", "b"]), heldout_fraction=1e-9).check()
    assert error.startswith("heldout_fraction=1e-09 holds out no prompts.")


def test_a_report_says_where_held_out_prompts_come_from(file):
    path = file(["a", "b"])
    digest = sha256(b"a\nb\n").hexdigest()
    assert data_module("none.txt", heldout=path).heldout_origin() == {"file": path, "sha256": digest}
    data = data_module(file([f"prompt {i}" for i in range(50)], "q.txt"), heldout_fraction=0.2)
    origin = data.heldout_origin()
    assert origin["file"].startswith("0.2 of ")
    assert origin["sha256"] == sha256("\n".join(heldout(data)).encode()).hexdigest()
    assert data.has_heldout
    assert not data_module(path).has_heldout
    assert data_module(path).heldout_rows() == []


def test_the_shipped_held_out_prompts_are_no_training_prompts():
    found = sorted(shipped_root().glob("prompts/*_train.*"))
    assert len(found) >= 2
    for train in found:
        apart = train.with_name(train.name.replace("_train", "_heldout"))
        data = data_module(train, heldout=str(apart))
        assert data.check() == []
        assert data.sets.heldout_warning() is None
        assert len(read_prompts(apart)) >= 12
