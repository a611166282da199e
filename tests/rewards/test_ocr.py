import math
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from helpers import repeating
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from lit_vgrpo.rewards.ocr import OCRReward, wanted_text

FONT_FOLDER = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
FONTS = ["default", "DejaVuSans", "DejaVuSans-Oblique", "DejaVuSerif", "DejaVuSansMono", "cmr10", "cmtt10"]
TEXTS = ["cat", "Open", "Hello World", "SALE 50%", "Ice Cream", "meet me at noon"]
COLOURS = [("black", "white"), ("yellow", "navy"), ("white", "darkred")]


@pytest.fixture(scope="module")
def line_reward():
    return OCRReward(detect=False)


@pytest.fixture(scope="module")
def page_reward():
    return OCRReward()


# The detector enlarges the shorter side to 736 pixels: square pictures cost it the least.
def drawn(lines, font="default", size=24, shape=None, colours=("black", "white"), noise=0.0):
    """A picture of lines ``(text, (x, y))``, or of one text in its middle; shape (1, 3, H, W)."""
    face = ImageFont.load_default(size) if font == "default" else ImageFont.truetype(FONT_FOLDER / f"{font}.ttf", size)
    if isinstance(lines, str):
        left, top, right, bottom = face.getbbox(lines)
        height, width = shape or (round(bottom - top + size / 2), round(right - left + size))
        lines, anchor = [(lines, (width / 2, height / 2))], "mm"
    else:
        (height, width), anchor = shape, "la"
    picture = Image.new("RGB", (width, height), colours[1])
    for text, place in lines:
        ImageDraw.Draw(picture).text(place, text, font=face, fill=colours[0], anchor=anchor)
    image = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
    grain = torch.randn(image.shape, generator=torch.Generator().manual_seed(0))
    return (image + noise * grain).clamp(0, 1)[None]


def score(reward, image, text):
    return reward(image, [f'a sign that says "{text}"'], [{}]).item()


@pytest.mark.parametrize("font", repeating(FONTS, slow=FONTS[2:]))
def test_a_line_of_text_is_read_in_every_font(line_reward, font):
    for number, text in enumerate(TEXTS):
        colours = COLOURS[number % len(COLOURS)]
        assert score(line_reward, drawn(text, font, 16, colours=colours), text) == 1, text
        assert score(line_reward, drawn(text, font, 24, colours=colours, noise=0.1), text) == 1, text


def test_text_is_found_on_a_whole_picture_in_every_font(page_reward):
    lines = [drawn("Hello World", font, 40, (64, 64 * len(FONTS)), COLOURS[1], noise=0.1) for font in FONTS]
    assert page_reward.read(torch.cat(lines, dim=2)) == [" ".join(["Hello World"] * len(FONTS))]


def test_each_wrong_letter_costs_its_share(line_reward):
    written = ["marble", "marbie", "marpie", "morpie", "mospie", "nospie"]
    scores = [score(line_reward, drawn(text, size=32), "marble") for text in written]
    assert scores == pytest.approx([1 - wrong / 6 for wrong in range(6)])


def test_lines_are_joined_in_reading_order(page_reward):
    lines = [("on Sunday", (40, 300)), ("24 hours", (220, 74)), ("OPEN", (30, 60))]
    image = drawn(lines, size=44, shape=(448, 448))
    assert page_reward.read(image) == ["OPEN 24 hours on Sunday"]
    assert score(page_reward, image, "Open 24 hours on Sunday") == 1


def test_an_empty_or_noisy_picture_is_a_zero_and_no_failure(line_reward, page_reward):
    flat = torch.full((1, 3, 96, 96), 0.4)
    noise = torch.rand(1, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    for reward in (line_reward, page_reward):
        scores = reward(torch.cat([flat, noise]), ['"hello world"'] * 2, [{}] * 2)
        assert scores.tolist() == [0, 0]
        assert reward.failure is None


@pytest.mark.parametrize("detect", repeating([True, False], slow=[True]))
def test_a_score_depends_on_neither_batch_nor_neighbours(line_reward, page_reward, detect):
    reward, shape = (page_reward, (128, 128)) if detect else (line_reward, (24, 160))
    texts = ["cat", "Open", "meet me at noon", "SALE 50%", "x", "Ice Cream", "zebra", "a b c", "12:30"]
    texts = texts[:2] if detect else texts
    images = torch.cat([drawn(text, size=18, shape=shape, noise=0.3) for text in texts])
    together = reward.read(images)
    assert len(set(together)) == len(texts)
    assert together == [reward.read(image[None])[0] for image in images]
    assert together == reward.read(images.flip(0))[::-1]


def test_small_pictures_are_enlarged_first(line_reward, page_reward):
    image = drawn("pizza", "DejaVuSans", size=8, shape=(16, 28))
    assert score(line_reward, image, "pizza") == 1
    assert score(page_reward, image, "pizza") == 1


def test_case_blanks_and_signs(line_reward):
    image = drawn("It's Noon!")
    assert score(line_reward, image, "IT\N{RIGHT SINGLE QUOTATION MARK}SNOON\N{FULLWIDTH EXCLAMATION MARK}") == 1


def test_extra_text_costs_unless_it_is_allowed(line_reward):
    image = drawn("my cat naps")
    assert score(line_reward, image, "cat") == 0
    assert score(OCRReward(detect=False, allow_extra=True), image, "cat") == 1
    assert score(OCRReward(detect=False, allow_extra=True), image, "cab") == 0


@given(st.text(max_size=12), st.text(max_size=12).filter(str.strip))
@settings(deadline=None, max_examples=60)
def test_a_score_is_between_0_and_1(found, wanted):
    reward = OCRReward()
    assert 0 <= reward.score(found, wanted) <= 1
    assert reward.score(wanted, wanted) == 1


@pytest.mark.parametrize(
    ("prompt", "row", "text"),
    [
        ('"one" and then "two"', {}, "one two"),
        ("a mug with \N{LEFT DOUBLE QUOTATION MARK}tea time\N{RIGHT DOUBLE QUOTATION MARK}", {}, "tea time"),
        ("ein Schild: \N{DOUBLE LOW-9 QUOTATION MARK}Halt\N{LEFT DOUBLE QUOTATION MARK}", {}, "Halt"),
        ("it's a 'sign'", {}, ""),
        ('an empty "" sign', {}, ""),
        ('a 5" ruler', {}, ""),
        ('a "sign"', {"text": "Closed"}, "Closed"),
        ('a 5" ruler with "mm', {"text": "mm"}, "mm"),
        ('a 12" pizza box with the words "HOT SLICE"', {}, "HOT SLICE"),
        ('a man 5\'10" tall holds "HI"', {}, "HI"),
        ('5" x 7½" prints at 40°26\'46", one says "Smile"', {}, "Smile"),
        ('a 12 " by 14 " board with "No. 5" on a 9" plate', {}, "No. 5"),
        ("a 3” mug with “tea” and a 4” spoon", {}, "tea"),
        ('the "12" door and "A" door', {}, "12 A"),
        ("\"it's 5 o'clock\"", {}, "it's 5 o'clock"),
        ('"a “b” c" and “say "hi"”', {}, 'a “b” c say "hi"'),
        ("„Halt“ ”Hej” «bonjour» »Hallo«", {}, "Halt Hej bonjour Hallo"),
        ('写着2024"新年快乐"的牌子', {}, "新年快乐"),
        ("「営業中」『出口』 \uff02OPEN\uff02 〝左〟", {}, "営業中 出口 OPEN 左"),
        (r"a sign \"OPEN\" and \"24h\"", {}, "OPEN 24h"),
        (r'it says "say \"hi\" now"', {}, 'say "hi" now'),
    ],
)
def test_the_text_of_a_prompt(prompt, row, text):
    assert wanted_text(prompt, row) == text
    assert (OCRReward().prompt_error(prompt, row) is None) == bool(text)


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        ('a sign "OPEN', '"OPEN'),
        ('a sign OPEN" on a door', '" on a door'),
        ('"HOT", "COLD" and "WARM', '"WARM'),
        ('the words "a 12" pizza"', '"'),
        ("an “open quote and “another”", "“open quote and “ano"),
        ("“a “b” c”", "“a “b” c”"),
        ('a „Halt and a "B"', '„Halt and a "B"'),
        ("tall” “A”", "” “A”"),
        ("a 「sign and 「two」", "「sign and 「two」"),
    ],
)
def test_a_quotation_mark_without_its_partner_is_reported(prompt, place):
    error = OCRReward().prompt_error(prompt, {})
    assert f"has a quotation mark without its partner, at {place}. Close it, or put the text in the row" in error
    assert OCRReward().prompt_error(prompt, {"text": "OPEN"}) is None


def test_a_prompt_without_text_is_an_error_and_a_failure(line_reward):
    prompt, row = "a red cat", {"text": " "}
    error = line_reward.prompt_error(prompt, row)
    assert error.startswith('Prompt "a red cat" has no text to render. Put it in quotes')
    image = drawn("cat", shape=(24, 48))
    scores = line_reward(torch.cat([image, image]), [prompt, '"cat"'], [row, {}])
    assert math.isnan(scores[0])
    assert scores[1] == 1
    assert line_reward.failure == error
    line_reward(image, ['"cat"'], [{}])
    assert line_reward.failure is None
