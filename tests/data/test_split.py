import unicodedata
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_vgrpo.data.prompt_sets import is_held_out, normalised, prompt_keys

TEXT = st.text(max_size=20).map(lambda text: text.encode("utf-8", "ignore").decode())
FRACTION = st.floats(0.01, 0.99)
quick = settings(max_examples=100, deadline=None)


def prompt_key(prompt):
    return int(prompt_keys([prompt])[0])


def side(prompt, fraction):
    return bool(is_held_out(prompt_keys([prompt]), fraction)[0])


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
    assert [i for i in range(30) if side(f"prompt {i}", 0.2)] == [2, 6, 7, 14, 15, 19, 25]


@quick
@given(st.lists(TEXT, max_size=12), TEXT, FRACTION, FRACTION)
def test_nothing_but_the_prompt_decides_its_side(others, prompt, small, large):
    small, large = sorted((small, large))
    whole = is_held_out(prompt_keys([*others, prompt, *reversed(others)]), small)
    assert whole[len(others)] == side(prompt, small)
    assert whole.tolist() == [side(text, small) for text in [*others, prompt, *reversed(others)]]
    assert side(prompt, small) <= side(prompt, large)
