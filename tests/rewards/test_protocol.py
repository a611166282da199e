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
from lit_vgrpo.rewards import JPEGCompressibility, Reward, Weighted
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
        ({"images": [PNG], "prompts": ["a"], "pictures": [LARGE]}, "9 x 9 pixels exceeds the limit of 64", 413),
        ({"images": [PNG] * 2, "prompts": ["a"] * 2, "pictures": [PNG, WIDE]}, "differ in size", 422),
        *(
            ({"images": [PNG], "prompts": ["a"], "rows": [{"rewards": named}]}, "rows.0.rewards: send the names", 422)
            for named in (5, {"a": 1}, ["a", ["b"]])
        ),
        *(({"images": [PNG], "prompts": ["a"], "rows": rows}, "rows", 422) for rows in (5, [None], [{}, {}])),
        *(({"images": [PNG], "prompts": prompts}, "prompts", 422) for prompts in ("a", [None], [])),
        *(({"images": images, "prompts": ["a"]}, "image", 422) for images in (PNG, [None], [""], ["%"])),
        *(({"images": [PNG], "prompts": ["a"], "pictures": of}, "picture", 422) for of in (PNG, [5], [PNG] * 2)),
        *((body, "", 422) for body in (b"", b"5", b"\xff\xfe", b'{"images":' + b"9" * 5_000 + b"}")),
        (b'{"images": ["a"], "prompts": ["\\ud800"]}', "", 422),
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
    assert "\n" not in answer.text


class Counted(Reward):
    """Zero; notes the size of each call."""

    name = "counted"

    def __init__(self):
        self.sizes = []

    def __call__(self, images, prompts, rows):
        self.sizes.append(len(images))
        return torch.zeros(len(images))


def post(reward, images, pictures=(), batch_size=4, max_pixels=64):
    """Post images ``(B, 3, H, W)`` or files to a server of a reward."""
    worker = Worker(Weighted([reward]), batch_size, torch.device("cpu"))
    files, sources = (
        [base64.b64encode(one if isinstance(one, bytes) else encode_png(one)).decode() for one in of]
        for of in (images, pictures)
    )
    sent = {"images": files, "prompts": ["a"] * len(files), "pictures": sources}
    answer = TestClient(make_app(worker, "x", None, 1_000_000, 99, max_pixels, False)).post("/score", json=sent)
    worker.close()
    return answer


def test_the_pixels_of_a_request_and_of_a_call_are_limited_by_headers_before_decoding(monkeypatch):
    reward = Counted()
    answer = post(reward, pixels(17, 3, 8, 8))
    assert (answer.status_code, reward.sizes) == (413, [])
    assert "1088 pixels exceed the limit of 1024 pixels per request. Send fewer images" in answer.json()["detail"]
    assert post(reward, pixels(10, 3, 8, 8), pixels(10, 3, 8, 8)).status_code == 413, "pictures do not count"
    assert post(reward, [header_only(64, 16)], max_pixels=1024).status_code == 422, "a header is not enough"
    assert post(reward, [header_only(64, 16)] * 17, max_pixels=1024).status_code == 413, (
        "decoded before it was added up"
    )
    assert post(reward, pixels(16, 3, 8, 8)).status_code == 200
    assert reward.sizes == [4] * 4
    for limit, sizes in ((200, [3, 3, 1]), (1, [1] * 7)):
        monkeypatch.setattr("lit_vgrpo.apps.serve.app.CALL_PIXELS", limit)
        reward.sizes.clear()
        assert post(reward, pixels(7, 3, 8, 8)).json()["scores"] == [0.0] * 7
        assert reward.sizes == sizes
    reward.sizes.clear()
    assert post(reward, pixels(4, 3, 8, 8), pixels(4, 3, 8, 4), batch_size=2).status_code == 200
    assert reward.sizes == [1] * 4


def test_images_are_decoded_batch_by_batch():
    reward, noise = Counted(), [encode_png(image) for image in pixels(5, 3, 64, 64)]
    answer = post(reward, [*noise, noise[0][:2000]], batch_size=2, max_pixels=64 * 64)
    assert (answer.status_code, reward.sizes) == (422, [2, 2]), "all were decoded at once"
