"""Scores from a server, such as ``lightning serve-reward``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, get_args
from urllib.parse import urljoin

import torch
from torch import Tensor

from lit_vgrpo.core.pixels import to_uint8
from lit_vgrpo.core.ranges import BatchSize, checked
from lit_vgrpo.errors import one_line
from lit_vgrpo.rewards.base import Reward, RewardError
from lit_vgrpo.rewards.connection import Connection
from lit_vgrpo.rewards.transport import Call, Failed, Transport
from lit_vgrpo.rewards.wire import VERSION, ScoreAnswer, json_request, multipart_request, read_answer, row_fault

Encoding = Literal["json", "multipart"]


@checked
class HTTPReward(Reward):
    """What a server answers; its protocol stands in :mod:`lit_vgrpo.rewards.wire`.

    An image that the server cannot score, or whose request failed after all retries, gets NaN.

    Args:
        url: where requests are posted, such as ``http://127.0.0.1:8000/score``.
        name: the key of its score.
        batch_size: images in one request.
        encoding: ``json`` carries the pictures as base64, ``multipart`` as files, a quarter smaller.
        connection: timeouts, retries, how many requests at once, the token, what to do when the server is down.
    """

    concurrent = True

    def __init__(
        self,
        url: str,
        name: str = "http",
        batch_size: BatchSize = 8,
        encoding: Encoding = "json",
        connection: Connection | None = None,
    ) -> None:
        if encoding not in get_args(Encoding):
            raise ValueError(f"encoding={encoding!r} is unknown. Use one of: {', '.join(get_args(Encoding))}.")
        self.url = url
        self.name = name
        self.batch_size = batch_size
        self.encoding = encoding
        self._transport = Transport(url, connection or Connection())
        self._is_loaded = False

    def check(self) -> list[str]:
        """A wrong address, httpx missing, or no token where one is named; asks no server."""
        return self._transport.check(self.option)

    def prompt_fault(self, prompt: str, row: dict[str, Any]) -> str | None:
        """A row that JSON cannot hold."""
        return row_fault(row)

    def load(self) -> None:
        """Ask the server once, at ``version`` beside ``url``; a server that has no such page is there all the same.

        Raises:
            RewardError: it cannot be reached, refuses the token or speaks another protocol.
        """
        if self._is_loaded:
            return
        answer = self._transport.ask(urljoin(self.url, "version"))
        if answer.status in (401, 403):
            raise RewardError(
                f"{self.url} answered with status {answer.status}. "
                f"Set {self.option('connection.token_env')} to a variable that holds its token."
            )
        try:
            spoken = json.loads(answer.body).get("protocol", VERSION) if answer.status == 200 else VERSION
        except (ValueError, AttributeError, RecursionError):
            spoken = VERSION  # a server of another make, whose /version says something else
        if spoken != VERSION:
            raise RewardError(
                f"{self.url} speaks version {one_line(spoken)[:60]} of the protocol. Install the same lit-vgrpo there."
            )
        self._is_loaded = True

    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        self.failure = None
        self.load()
        scores: list[float] = []
        sizes = [len(prompts[start : start + self.batch_size]) for start in range(0, len(prompts), self.batch_size)]
        answers = self._transport.send(self._calls(to_uint8(images).cpu(), prompts, rows), self.option)
        for count, answer in zip(sizes, answers, strict=True):
            if isinstance(answer, Failed):
                scores += [math.nan] * count
                self.failure = answer.reason
                continue
            scores += answer.scores
            self._transport.count("non_finite", answer.non_finite)
            reasons = [reason for reason in answer.errors if reason is not None]
            self.failure = reasons[-1] if reasons else self.failure
        return torch.tensor(scores, dtype=torch.float32)

    def take_counts(self) -> dict[str, int]:
        return self._transport.take_counts()

    def close(self) -> None:
        self._transport.close()

    def _calls(self, pixels: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Iterator[Call[ScoreAnswer]]:
        """The requests, each made while those before it are under way."""
        for start in range(0, len(prompts), self.batch_size):
            part = slice(start, start + self.batch_size)
            content: dict[str, Any]
            if self.encoding == "json":
                body = json_request(pixels[part], prompts[part], rows[part])
                content = {"content": body, "headers": {"Content-Type": "application/json"}}
            else:
                request, pictures = multipart_request(pixels[part], prompts[part], rows[part])
                files = [("images", (f"{number}.png", data, "image/png")) for number, data in enumerate(pictures)]
                content = {"data": {"request": request.decode()}, "files": files}
            yield Call(content, partial(read_answer, count=len(prompts[part])))
