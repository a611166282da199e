"""Scores from a server, such as ``lightning serve-reward``."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any, Literal
from urllib.parse import urljoin

import torch
from torch import Tensor

from lit_vgrpo.core.pixels import to_uint8
from lit_vgrpo.core.ranges import BatchSize, checked
from lit_vgrpo.errors import one_line
from lit_vgrpo.rewards.base import RewardError
from lit_vgrpo.rewards.connection import Connection
from lit_vgrpo.rewards.protocol import VERSION, json_request, multipart_request, read_answer, row_error
from lit_vgrpo.rewards.remote import Call, Failed, RemoteReward

Encoding = Literal["json", "multipart"]


@checked
class HTTPReward(RemoteReward):
    """Scores from a server that speaks the protocol of :mod:`lit_vgrpo.rewards.protocol`.

    An image that the server cannot score, or whose request failed after all retries, gets NaN.

    Args:
        url: address to post to, such as ``http://127.0.0.1:8000/score``.
        name: key of the score.
        batch_size: images per request.
        encoding: ``json`` carries images as base64, ``multipart`` as files, a quarter smaller.
        connection: timeouts, retries, simultaneous requests, the token, and the reaction to an outage.
    """

    def __init__(
        self,
        url: str,
        name: str = "http",
        batch_size: BatchSize = 8,
        encoding: Encoding = "json",
        connection: Connection | None = None,
    ) -> None:
        super().__init__(url, connection)
        self.url = url
        self.name = name
        self.batch_size = batch_size
        self.encoding = encoding

    def prompt_error(self, prompt: str, row: dict[str, Any]) -> str | None:
        """Return why JSON cannot represent the row, or None."""
        return row_error(row)

    def _check_server(self) -> None:
        answer = self._transport.ask(urljoin(self.url, "version"), self.option)
        try:
            spoken = json.loads(answer.body).get("protocol", VERSION) if answer.status == 200 else VERSION
        except (ValueError, AttributeError, RecursionError):
            spoken = VERSION  # another server software, with a different /version
        if spoken != VERSION:
            raise RewardError(
                f"{self.url} uses version {one_line(spoken)[:60]} of the protocol. Install the same lit-vgrpo there."
            )

    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        self.failure = None
        self.load()
        pixels = to_uint8(images).cpu()
        slices = [slice(start, start + self.batch_size) for start in range(0, len(prompts), self.batch_size)]
        parts = [(pixels[part], prompts[part], rows[part]) for part in slices]
        calls = (Call(partial(self._content, *part), partial(read_answer, count=len(part[1]))) for part in parts)
        answers = self._transport.send(calls, self.option)
        scores: list[float] = []
        for part, answer in zip(parts, answers, strict=True):
            if isinstance(answer, Failed):
                scores += [math.nan] * len(part[1])
                self.failure = answer.reason
                continue
            scores += answer.scores
            self._transport.count("non_finite", answer.non_finite)
            reasons = [reason for reason in answer.errors if reason is not None]
            self.failure = reasons[-1] if reasons else self.failure
        return torch.tensor(scores, dtype=torch.float32)

    def _content(self, pixels: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> dict[str, Any]:
        if self.encoding == "json":
            headers = {"Content-Type": "application/json"}
            return {"content": json_request(pixels, prompts, rows), "headers": headers}
        request, pictures = multipart_request(pixels, prompts, rows)
        files = [("images", (f"{number}.png", data, "image/png")) for number, data in enumerate(pictures)]
        return {"data": {"request": request.decode()}, "files": files}
