"""Measure what requests made to exhaust ``lightning serve-reward`` cost it: seconds until the answer, and memory.

    python benchmarks/hostile_requests.py

Serves ``JPEGCompressibility`` in a fresh process for each request and prints the peak of that process's resident
memory (Linux), before the request and after it.
"""

from __future__ import annotations

import base64
import json
import re
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import httpx

PATIENCE_S = 120
SIDE = 11_270  # 127 megapixels


def grey_png(side: int) -> bytes:
    """A black square of one bit a pixel: some 16 kB for 127 megapixels."""
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in (
            (b"IHDR", header),
            (b"IDAT", zlib.compress(bytes((side // 8 + 2) * side), 9)),
            (b"IEND", b""),
        )
    )


def large_picture(count: int) -> bytes:
    picture = base64.b64encode(grey_png(SIDE)).decode()
    return json.dumps({"images": [picture] * count, "prompts": ["a"] * count}).encode()


def many_rows() -> bytes:
    picture = base64.b64encode(grey_png(8)).decode()
    rows = b",".join([b"{}"] * 20_000_000)
    return b'{"images": ["' + picture.encode() + b'"], "prompts": ["a"], "rows": [' + rows + b"]}"


REQUESTS: dict[str, Callable[[], bytes]] = {
    "an ordinary request of 8 images": lambda: json.dumps(
        {"images": [base64.b64encode(grey_png(512)).decode()] * 8, "prompts": ["a"] * 8}
    ).encode(),
    "one PNG of 127 megapixels": lambda: large_picture(1),
    "60 MB of {} as rows": many_rows,
}


def main() -> None:
    for name, make in REQUESTS.items():
        body = make()
        before, after, answer, seconds = asked(body)
        print(f"{name:32} {len(body) / 1e6:8.3f} MB  {seconds:6.1f} s  {answer:40}  {before:5.2f} -> {after:5.2f} GB")


def asked(body: bytes) -> tuple[float, float, str, float]:
    command = [sys.executable, "-m", "lit_vgrpo", "serve-reward", "JPEGCompressibility", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http\S+/score", server.stdout.readline())
            assert found is not None
            before, start = peak_gb(server.pid), time.monotonic()
            try:
                answer = httpx.post(
                    found.group(), content=body, headers={"Content-Type": "application/json"}, timeout=PATIENCE_S
                )
                said = f"{answer.status_code} {answer.text[:60]}"
            except httpx.TimeoutException:
                said = "no answer"
            return before, peak_gb(server.pid), said, time.monotonic() - start
        finally:
            server.kill()


def peak_gb(process: int) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e9


if __name__ == "__main__":
    main()
