import base64
import io
import json
import math
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lit_vgrpo.rewards.protocol import (
    Limits,
    ProtocolError,
    decode_png,
    encode_png,
    json_request,
    multipart_request,
    read_answer,
    read_json_request,
    read_multipart_request,
    score_answer,
)


def pixels(*shape, seed=0):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def file_of(picture, kind="PNG"):
    buffer = io.BytesIO()
    picture.save(buffer, format=kind)
    return buffer.getvalue()


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize("size", [(1, 1), (7, 5), (64, 48)])
def test_a_png_keeps_every_pixel(size):
    image = pixels(3, *size)
    assert torch.equal(decode_png(encode_png(image)), image)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(encode_png(image)))), image.permute(1, 2, 0).numpy())


def test_a_request_keeps_images_prompts_and_rows():
    images, prompts = pixels(3, 3, 6, 4), ["a", "zwölf \N{CAT}", '"quoted"']
    rows = [{"prompt": "a", "include": [{"class": "cat"}]}, {"prompt": "b", "x": None}, {}]
    field, files = multipart_request(images, prompts, rows)
    for request in (
        read_json_request(json_request(images, prompts, rows), Limits()),
        read_multipart_request(field, files, Limits()),
    ):
        request = request.decoded()
        assert torch.equal(torch.stack(request.images), images)
        assert request.prompts == prompts
        assert request.rows == rows


def test_rows_may_be_left_out():
    picture = base64.b64encode(encode_png(pixels(3, 2, 2))).decode()
    request = read_json_request(json.dumps({"images": [picture], "prompts": ["a"]}).encode(), Limits())
    assert request.rows == [{"prompt": "a"}]


@given(st.lists(st.floats(width=32), min_size=1, max_size=5))
@settings(deadline=None, max_examples=100)
def test_scores_keep_every_bit_and_what_is_no_number_becomes_null(scores):
    sent = torch.tensor(scores, dtype=torch.float32)
    body = json.dumps(score_answer(sent, [None] * len(scores), "x"), allow_nan=False).encode()
    received = read_answer(body, len(scores))
    expected = torch.where(sent.isfinite(), sent, math.nan)
    assert torch.equal(torch.tensor(received.scores).nan_to_num(7), expected.nan_to_num(7))
    assert received.non_finite == 0


SIGNATURE = b"\x89PNG\r\n\x1a\n"


def header(width, height, depth=8):
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0))


def body(lines):
    return chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


BROKEN_FILES = {
    "text": b"this is no image",
    "nothing": b"",
    "jpeg": file_of(Image.new("RGB", (4, 4)), "JPEG"),
    "gif": file_of(Image.new("P", (4, 4)), "GIF"),
    "cut": encode_png(pixels(3, 64, 64))[:2000],
    "only_signature": b"\x89PNG\r\n\x1a\n",
    "only_header": encode_png(pixels(3, 4, 4))[:33],
    "bad_checksum": encode_png(pixels(3, 4, 4))[:-20] + bytes(20),
    "sixteen_bits": file_of(Image.fromarray(np.full((4, 4), 40000, np.uint16))),
    "sixteen_bits_of_colour": SIGNATURE + header(2, 2, depth=16) + body(bytes(26)),
    "animation": SIGNATURE
    + header(2, 2)
    + chunk(b"acTL", struct.pack(">II", 1, 0))
    + chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, 2, 2, 0, 0, 1, 1, 0, 0))
    + body(bytes(14)),
    "chunks_without_end": SIGNATURE + header(2, 2) + chunk(b"zzzz", b"") * 5000 + body(bytes(14)),
    "text_that_unpacks": SIGNATURE
    + header(2, 2)
    + chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(10**7)))
    + body(bytes(14)),
    "no_size": b"\x89PNG\r\n\x1a\n"
    + chunk(b"IHDR", struct.pack(">IIBBBBB", 0, 0, 8, 2, 0, 0, 0))
    + chunk(b"IEND", b""),
}


@pytest.mark.parametrize("kind", BROKEN_FILES)
def test_a_file_that_is_no_image_is_refused_in_a_line(kind):
    with pytest.raises(ProtocolError) as raised:
        decode_png(BROKEN_FILES[kind])
    assert "\n" not in str(raised.value)
    assert raised.value.cause == "garbage"


def test_grey_transparent_and_palette_files_are_taken_as_rgb():
    for mode in ("L", "RGBA", "P", "1", "LA"):
        assert decode_png(file_of(Image.new(mode, (5, 4), 1 if mode in "P1" else None))).shape == (3, 4, 5)


@pytest.mark.parametrize("size", [(2049, 2048), (50_000, 50_000)])
def test_a_file_that_would_unpack_to_gigabytes_is_refused_by_its_header(monkeypatch, size):
    bomb = SIGNATURE + header(*size) + body(bytes(10_000))
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("the file was opened"))
    with pytest.raises(
        ProtocolError, match=f"{size[0]} x {size[1]} pixels .* 4 megapixels .* --max-megapixels"
    ) as raised:
        decode_png(bomb)
    assert raised.value.cause == "too_large"


def test_a_second_header_does_not_enlarge_the_first(monkeypatch):
    bomb = SIGNATURE + header(2, 2) + header(4000, 4000) + body(bytes(4000 * 12_001))
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("the file was opened"))
    with pytest.raises(ProtocolError, match="two headers"):
        decode_png(bomb)


def test_what_follows_a_pictures_last_line_is_not_unpacked():
    lines = zlib.compressobj()
    packed = b"".join(lines.compress(bytes(10**6)) for _ in range(100)) + lines.flush()
    tracemalloc.start()
    picture = decode_png(SIGNATURE + header(2, 2) + chunk(b"IDAT", packed) + chunk(b"IEND", b""))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert torch.equal(picture, torch.zeros(3, 2, 2, dtype=torch.uint8))
    assert peak < 10**6


def test_an_interlaced_file_is_taken_and_measured_like_others():
    whole = SIGNATURE + chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 1)) + body(bytes([0, 1, 2, 3]))
    assert decode_png(whole).flatten().tolist() == [1, 2, 3]
    large = SIGNATURE + chunk(b"IHDR", struct.pack(">IIBBBBB", 5000, 5000, 8, 2, 0, 0, 1)) + body(bytes(4))
    with pytest.raises(ProtocolError, match="5000 x 5000"):
        decode_png(large)


@pytest.mark.parametrize("row", [b"{}", b"[]", b'{"a":{"b":{}}}', b'""', b"0"])
def test_values_are_counted_before_they_are_decoded(monkeypatch, row):
    picture = base64.b64encode(encode_png(pixels(3, 2, 2)))
    bomb = b'{"images":["' + picture + b'"],"prompts":["a"],"rows":[' + b",".join([row] * 5000) + b"]}"
    monkeypatch.setattr(json, "loads", lambda *_: pytest.fail("the request was decoded"))
    for read in (
        lambda limits: read_json_request(bomb, limits),
        lambda limits: read_multipart_request(bomb, [base64.b64decode(picture)], limits),
    ):
        with pytest.raises(ProtocolError, match="more than 3000 values") as raised:
            read(Limits(max_images=3))
        assert raised.value.cause == "too_large"


PNG = base64.b64encode(encode_png(pixels(3, 2, 2))).decode()
BROKEN_REQUESTS = {
    "not_json": (b"\x80\x04\x95pickle", "not JSON", "garbage"),
    "deep": (b'{"a":' + b"[" * 100_000, "more than 3000 values", "too_large"),
    "a_list": (b"[1, 2]", "not a JSON object", "garbage"),
    "version": ({"version": 2}, "version '2'", "garbage"),
    "no_images": ({"prompts": ["a"]}, "images", "garbage"),
    "empty": ({"images": [], "prompts": []}, "no images", "garbage"),
    "numbers": ({"images": [1], "prompts": ["a"]}, "images is not a list of strings", "garbage"),
    "not_base64": ({"images": ["%%%"], "prompts": ["a"]}, "images[0] is not base64", "garbage"),
    "no_png": ({"images": [PNG, "YWJj"], "prompts": ["a", "b"]}, "images[1]: its 3 bytes are not a PNG", "garbage"),
    "prompts": ({"images": [PNG], "prompts": "a"}, "prompts is not a list", "garbage"),
    "number": ({"images": [PNG], "prompts": ["a", "b"]}, "1 image, 2 prompts and 2 rows", "wrong_number"),
    "rows": ({"images": [PNG], "prompts": ["a"], "rows": ["a"]}, "rows is not a list of objects", "garbage"),
    "row_count": ({"images": [PNG], "prompts": ["a"], "rows": []}, "0 rows", "wrong_number"),
    "many": ({"images": [PNG] * 4, "prompts": ["a"] * 4}, "4 images exceed the limit of 3", "too_large"),
    "large": (
        {"images": [base64.b64encode(encode_png(pixels(3, 9, 9))).decode()], "prompts": ["a"]},
        "9 x 9 pixels exceed the limit of 64",
        "too_large",
    ),
    "large_together": (
        {"images": [base64.b64encode(encode_png(pixels(3, 6, 6))).decode()] * 2, "prompts": ["a", "b"]},
        "72 pixels exceed the limit of 64",
        "too_large",
    ),
}


@pytest.mark.parametrize("kind", BROKEN_REQUESTS)
def test_a_broken_request_is_refused_in_a_line(kind):
    request, said, cause = BROKEN_REQUESTS[kind]
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    with pytest.raises(ProtocolError) as raised:
        read_json_request(body, Limits(max_images=3, max_pixels=64, max_request_pixels=64))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.cause == cause


@pytest.mark.parametrize(
    "answer",
    [{"scores": 0.5}, {"scores": [[0.5]]}, {"scores": [{}]}, {"scores": [0.5], "errors": []}, {"errors": [None]}],
)
def test_an_answer_of_another_shape_is_refused(answer):
    with pytest.raises(ProtocolError) as raised:
        read_answer(json.dumps(answer).encode(), 1)
    assert raised.value.cause == "garbage"


def test_an_answer_that_is_nested_without_end_is_refused():
    with pytest.raises(ProtocolError, match="not JSON"):
        read_answer(b'{"scores":' + b"[" * 900_000, 1)


def test_what_a_message_shows_of_garbage_is_safe_to_print():
    with pytest.raises(ProtocolError) as raised:
        read_answer(b"\x1b[2J\x00\xff\n" * 1000, 1)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 200
