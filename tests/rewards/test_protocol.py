import base64
import io
import json
import math
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lit_vgrpo.apps.serve.app import REQUEST_PIXELS, _decoded
from lit_vgrpo.rewards.protocol import ProtocolError, ScoreAnswer, decode_png, encode_png, open_png, score_request


def pixels(*shape, seed=0):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def file_of(picture, kind="PNG"):
    buffer = io.BytesIO()
    picture.save(buffer, format=kind)
    return buffer.getvalue()


def header_only(width, height):
    """The header of a PNG file that would unpack to so many pixels."""
    data = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + data + struct.pack(">I", zlib.crc32(data))
    return header + struct.pack(">I", 10_000) + b"IDAT" + bytes(10_004)


def read(body, max_images=8, max_pixels=64):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return _decoded(body, max_images, max_pixels)


def test_a_request_keeps_every_pixel_prompt_and_row_but_no_path():
    images, prompts = pixels(3, 3, 6, 4), ["a", "zwölf \N{CAT}", '"quoted"']
    rows = [{"prompt": "a", "include": [{"class": "cat"}]}, {"prompt": "b", "x": None}, {"image": "/etc/passwd"}]
    body = score_request(images, prompts, rows)
    assert b"passwd" not in body
    forged = {**json.loads(body), "rows": rows}
    for sent in (body, forged):
        found, request = read(sent)
        assert torch.equal(torch.stack(found), images)
        assert request.prompts == prompts
        assert request.rows == [*rows[:2], {}]
    assert read({"images": forged["images"], "prompts": prompts})[1].rows == [{"prompt": prompt} for prompt in prompts]


@given(st.lists(st.floats(width=32), min_size=1, max_size=5))
@settings(deadline=None, max_examples=100)
def test_scores_keep_every_bit_and_what_is_not_finite_becomes_null(scores):
    sent = torch.tensor(scores, dtype=torch.float32)
    received = ScoreAnswer.model_validate_json(ScoreAnswer(scores=sent.tolist()).model_dump_json())
    expected = [score if math.isfinite(score) else None for score in sent.tolist()]
    assert received.scores == expected


@pytest.mark.parametrize(
    "data",
    [
        b"this is no image",
        file_of(Image.new("RGB", (4, 4)), "JPEG"),
        encode_png(pixels(3, 64, 64))[:2000],
        file_of(Image.fromarray(np.full((4, 4), 40000, np.uint16))),
    ],
    ids=["text", "jpeg", "cut", "sixteen bits"],
)
def test_a_file_that_is_no_8_bit_png_is_refused(data):
    with pytest.raises(ProtocolError):
        decode_png(open_png(data, 64**2))


def test_grey_transparent_and_palette_files_are_taken_as_rgb():
    for mode in ("L", "RGBA", "P", "1", "LA"):
        data = file_of(Image.new(mode, (5, 4), 1 if mode in "P1" else None))
        assert decode_png(open_png(data, 20)).shape == (3, 4, 5)


@pytest.mark.parametrize("size", [(2049, 2048), (50_000, 50_000)])
def test_a_file_that_would_unpack_to_gigabytes_is_refused_by_its_header(size):
    with pytest.raises(ProtocolError):
        open_png(header_only(*size), 2**22)


PNG = base64.b64encode(encode_png(pixels(3, 2, 2))).decode()
LARGE = base64.b64encode(encode_png(pixels(3, 9, 9))).decode()


@pytest.mark.parametrize(
    ("request_", "said", "is_too_large"),
    [
        (b"\x80\x04\x95pickle", "JSON", False),
        ({"version": 2, "images": [PNG], "prompts": ["a"]}, "version", False),
        ({"images": [], "prompts": []}, "at least one", False),
        ({"images": [1], "prompts": ["a"]}, "images.0", False),
        ({"images": ["%%%"], "prompts": ["a"]}, "not base64", False),
        ({"images": ["YWJj"], "prompts": ["a"]}, "not a readable PNG", False),
        ({"images": [PNG], "prompts": ["a", "b"]}, "1 images, 2 prompts and 2 rows", False),
        ({"images": [PNG] * 9, "prompts": ["a"] * 9}, "9 images exceed the limit of 8", True),
        ({"images": [LARGE], "prompts": ["a"]}, "9 x 9 pixels exceeds the limit of 64", True),
        (b'{"rows": [' + b"{}," * 9000, "more than 8000 JSON values", True),
        (b'{"a":' + b"[" * 100_000, "more than 8000 JSON values", True),
    ],
)
def test_a_broken_request_is_refused_in_a_line(request_, said, is_too_large):
    with pytest.raises(ProtocolError) as raised:
        read(request_)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.is_too_large is is_too_large


def test_the_pixels_of_a_request_are_bounded_together(monkeypatch):
    monkeypatch.setattr("lit_vgrpo.apps.serve.app.REQUEST_PIXELS", 7)
    with pytest.raises(ProtocolError, match="8 pixels exceed the limit of 7 per request"):
        read({"images": [PNG] * 2, "prompts": ["a"] * 2})
    assert REQUEST_PIXELS > 2**22
