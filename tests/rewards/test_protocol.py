"""The messages between HTTPReward and lightning serve-reward."""

import base64
import io
import json
import struct
import zlib

import numpy as np
import pytest
import torch
from fastapi import HTTPException
from fastapi.testclient import TestClient
from PIL import Image

from lit_vgrpo.apps.serve.app import Worker, decoded, make_app
from lit_vgrpo.core.pixels import encode_png
from lit_vgrpo.rewards import JPEGCompressibility, Weighted
from lit_vgrpo.rewards.http import ScoreRequest, score_request


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


def test_a_request_keeps_every_pixel_prompt_and_row_but_no_path():
    images, prompts = pixels(3, 3, 6, 4), ["a", "zwölf \N{CAT}", '"quoted"']
    rows = [{"prompt": "a", "include": [{"class": "cat"}]}, {"prompt": "b", "x": None}, {"image": "/etc/passwd"}]
    body = score_request(images, prompts, rows)
    assert b"passwd" not in body
    forged = {**json.loads(body), "rows": rows}
    for sent in (json.loads(body), forged):
        request = ScoreRequest.model_validate(sent)
        assert torch.equal(decoded(request.images, 64), images)
        assert request.prompts == prompts
        assert request.rows == [*rows[:2], {}]
    request = ScoreRequest.model_validate({"images": forged["images"], "prompts": prompts})
    assert request.rows == [{"prompt": prompt} for prompt in prompts]


@pytest.mark.parametrize(
    "data",
    [
        b"this is no image",
        file_of(Image.new("RGB", (4, 4)), "JPEG"),
        encode_png(pixels(3, 64, 64))[:2000],
        file_of(Image.fromarray(np.full((4, 4), 40000, np.uint16))),
        header_only(2049, 2048),
        header_only(50_000, 50_000),
    ],
    ids=["text", "jpeg", "cut", "sixteen bits", "large", "bomb"],
)
def test_a_file_that_is_no_8_bit_png_or_would_unpack_to_gigabytes_is_refused(data):
    with pytest.raises(HTTPException):
        decoded([data], 2**22)


def test_grey_transparent_and_palette_files_are_taken_as_rgb():
    for mode in ("L", "RGBA", "P", "1", "LA"):
        data = file_of(Image.new(mode, (5, 4), 1 if mode in "P1" else None))
        assert decoded([data], 20).shape == (1, 3, 4, 5)


@pytest.fixture(scope="module")
def client():
    worker = Worker(Weighted([JPEGCompressibility()]), 4, torch.device("cpu"))
    yield TestClient(make_app(worker, "jpeg", None, 10_000, 8, 64, False))
    worker.close()


PNG, WIDE, LARGE = (base64.b64encode(encode_png(pixels(3, *size))).decode() for size in ((2, 2), (2, 3), (9, 9)))


@pytest.mark.parametrize(
    ("sent", "said", "status"),
    [
        (b"\x80\x04\x95pickle", "", 400),
        ({"version": 2, "images": [PNG], "prompts": ["a"]}, "version", 422),
        ({"images": [], "prompts": []}, "at least one", 422),
        ({"images": [1], "prompts": ["a"]}, '{"detail":"images.0: Input should be a valid bytes"}', 422),
        ({"images": ["YWJj"], "prompts": ["a"]}, "not a readable PNG", 422),
        ({"images": [PNG, WIDE], "prompts": ["a", "b"]}, "differ in size", 422),
        ({"images": [PNG], "prompts": ["a", "b"]}, "1 images, 2 prompts and 2 rows", 422),
        ({"images": [PNG] * 9, "prompts": ["a"] * 9}, "9 images exceed the limit of 8", 413),
        ({"images": [LARGE], "prompts": ["a"]}, "9 x 9 pixels exceeds the limit of 64", 413),
        (b'{"a":' + b"[" * 7_000, "", 400),  # 422 where Python's parser goes that deep
        (bytes(10_001), "", 413),
        ({"images": [PNG], "prompts": ["a"]}, '"scores":[-0.', 200),
    ],
)
def test_a_broken_request_gets_its_reason(client, sent, said, status):
    body = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
    answer = client.post("/score", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in ({400, 422} if status == 400 else {status}), answer.text
    assert said in answer.text
