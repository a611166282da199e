"""Questions about an image to a vision-language model, scored by the probability of the expected answers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch
from pydantic_core import from_json
from torch import Tensor

from lit_vgrpo.core.pixels import encode_png, to_uint8
from lit_vgrpo.core.ranges import checked
from lit_vgrpo.rewards.chat import ChatReward
from lit_vgrpo.rewards.connection import Connection
from lit_vgrpo.rewards.servers import RequestError

QUESTION = 'Does this image show what "{prompt}" asks for?'
INSTRUCTION = "Answer in one word."
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DIGITS = {word: str(number) for number, word in enumerate(NUMBERS)}
CANDIDATES = 20
"""Most probable tokens that a server lists; OpenAI, and vLLM by default, refuse more."""
SAMPLING = {"max_tokens": 1, "logprobs": True, "top_logprobs": CANDIDATES}


def _read(body: bytes) -> dict[str, float]:
    """Return the log-probabilities of the most probable first tokens in a chat completion."""
    try:
        listed = from_json(body)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        tokens = {str(token["token"]): float(token["logprob"]) for token in listed}
    except (KeyError, IndexError, TypeError, OverflowError) as error:
        raise ValueError("no log-probabilities: does the server support logprobs?") from error
    if not all(number < 1e-3 for number in tokens.values()):  # 0, but for rounding
        raise ValueError("a log-probability is above 0, or not a number")
    return tokens


@checked
class QuestionScore(ChatReward):
    """Mean probability of the expected answers to questions about an image, in [0, 1], one request per question.

    The model behind an OpenAI-compatible API, such as vLLM's, writes one token. The probability of an answer is that of
    the tokens that spell it (ignoring case, and numbers also as digits) among the 20 most probable ones. An answer that
    is not among them gets the probability of the least probable one, which is an upper bound.

    Args:
        url: Address of the API, such as ``http://127.0.0.1:8000/v1``, or a list of addresses of equal servers.
        model: Name of the model on the server.
        name: Key of the score.
        field: Field of a row with its questions and answers, ``[[question, answer], ...]``.
        question: Asked if a row has no questions, with ``{prompt}``; the expected answer is yes. If the row has a
            picture or several, the model sees them before the image.
        instruction: Added to every question.
        mean: Geometric: all answers must be as expected. Arithmetic: each answer counts separately.
        connection: Timeouts, retries, simultaneous requests, and the token.

    Source:
        Soft-TIFA, geometric and arithmetic: arXiv 2512.16853; one question about the whole prompt: arXiv 2404.01291.
    """

    def __init__(
        self,
        url: str | list[str],
        model: str,
        name: str = "questions",
        field: str = "vqa_list",
        question: str = QUESTION,
        instruction: str = INSTRUCTION,
        mean: Literal["geometric", "arithmetic"] = "geometric",
        connection: Connection | None = None,
    ) -> None:
        super().__init__(url, model, connection)
        self.name, self.field = name, field
        self.question, self.instruction = question, instruction
        self.mean = mean

    def __call__(
        self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]], references: Tensor | None = None
    ) -> Tensor:
        self.failure = self.failure if self._calls else None  # other calls may not have read it
        seen = [[encode_png(image)] for image in to_uint8(images).cpu()]
        if references is not None:
            pictures = to_uint8(references).cpu().unflatten(0, (len(images), -1)).flatten(1, -4)  # (B, N, 3, H, W)
            seen = [[*map(encode_png, given), *own] for given, own in zip(pictures, seen, strict=True)]
        default = [[(self.question.replace("{prompt}", prompt), "yes")] for prompt in prompts]
        asked = [row.get(self.field) or own for row, own in zip(rows, default, strict=True)]
        calls = [
            (partial(self._request, pictures, f"{question} {self.instruction}", **SAMPLING), _read)
            for pictures, questions in zip(seen, asked, strict=True)
            for question, _ in questions
        ]
        answers = iter(self._post(calls))
        scores = []
        for questions in asked:
            values = torch.tensor([self._log_probability(next(answers), answer) for _, answer in questions])
            scores.append(values.mean().exp() if self.mean == "geometric" else values.exp().mean())
        return torch.stack(scores).float() if scores else torch.zeros(0)

    def _log_probability(self, tokens: dict[str, float] | RequestError, expected: str) -> float:
        if isinstance(tokens, RequestError):
            self.failure = tokens.reason
            return math.nan
        wanted = {expected.casefold(), DIGITS.get(expected.casefold(), expected.casefold())}
        probability = sum(math.exp(number) for token, number in tokens.items() if token.strip().casefold() in wanted)
        return min(math.log(probability), 0.0) if probability else min(tokens.values(), default=math.nan)
