"""A vision-language model as a judge, behind any server that speaks OpenAI's chat completions, such as vLLM."""

from __future__ import annotations

import base64
import math
import re
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from lit_vgrpo.core.pixels import to_uint8
from lit_vgrpo.core.ranges import Finite, PositiveInt, Range, checked
from lit_vgrpo.errors import one_line
from lit_vgrpo.rewards.http import Connection, RemoteReward, RequestError, encode_png

SCORE_PATTERN = r"(?i)final score\W*?(-?\d+(?:\.\d+)?)"
SCORE_RANGE = (1.0, 5.0)
PROMPT_TEMPLATE = """\
Judge how well the image was made from its caption. Look at two things.
1. Agreement: are the objects, their attributes and their relations as the caption says?
2. Quality: is the image sharp, rich in detail, right in its colours and pleasing as a whole?
Name each element of the caption and whether the image shows it, as 'element (type): 1', or 0 where it does not. Then \
give one score from 1 to 5 for the image as a whole, in a last line 'Final Score: x'.
Text Caption: [{prompt}]"""
"""Our wording of UnifiedReward's pointwise prompt, with the same answer format."""


class _Message(BaseModel):
    content: Any = None  # no text: it only reasoned, or called a tool


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Completion(BaseModel):
    """A response of the chat completions API."""

    choices: list[_Choice] = Field(min_length=1)


@checked
class VLMJudge(RemoteReward):
    """Score that a vision-language model writes for an image and a question, one request per image.

    An answer without a valid score fails its image and is counted as ``unparsable``.

    Args:
        url: Address of the API, such as ``http://127.0.0.1:8000/v1``.
        model: The server's name of the model.
        name: Key of the score.
        prompt_template: The question, with ``{prompt}``. The model card of a trained judge has the wording it was
            trained on: scores of other wordings are not comparable.
        score_pattern: Regular expression with one group, the score; the last match counts. For answers in JSON:
            ``"score": *(-?[0-9.]+)``.
        score_range: Lowest and highest valid score; null for any.
        max_tokens: Length limit of an answer.
        temperature: Sampling temperature; 0 is greedy.
        extra_body: Additional fields of the request, such as ``{chat_template_kwargs: {enable_thinking: false}}``; they
            replace the fields above, and ``seed``, which is 0.
        connection: Timeouts, retries, simultaneous requests, and the token.

    Raises:
        ValueError: A pattern without exactly one group, or a number outside its range.

    Source:
        Pointwise judging, the range 1 to 5 and the line with the final score: UnifiedReward, arXiv 2503.05236.
    """

    def __init__(
        self,
        url: str,
        model: str,
        name: str = "vlm_judge",
        prompt_template: str = PROMPT_TEMPLATE,
        score_pattern: str = SCORE_PATTERN,
        score_range: tuple[Finite, Finite] | None = SCORE_RANGE,
        max_tokens: PositiveInt = 1024,
        temperature: Annotated[float, Range(0, 100)] = 0.0,
        extra_body: dict[str, Any] | None = None,
        connection: Connection | None = None,
    ) -> None:
        self.score_pattern = re.compile(score_pattern)
        if self.score_pattern.groups != 1:
            raise ValueError(f"score_pattern={score_pattern!r} needs exactly one group, around the score.")
        self.url = url.rstrip("/")
        super().__init__(f"{self.url}/chat/completions", connection)
        self.model = model
        self.name = name
        self.prompt_template = prompt_template
        self.score_range = score_range
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.extra_body = dict(extra_body or {})

    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        self.failure = None
        entries = zip(to_uint8(images).cpu(), prompts, strict=True)
        calls = [(partial(self._content, *entry), _Completion.model_validate_json) for entry in entries]
        scores = []
        for answer in self._post(calls):
            if isinstance(answer, RequestError):
                self.failure = answer.reason
                scores.append(math.nan)
            else:
                scores.append(self._score_in(answer.choices[0]))
        return torch.tensor(scores, dtype=torch.float32)

    def _score_in(self, answer: _Choice) -> float:
        """Return the score in an answer; count an answer without one and return NaN."""
        text = answer.message.content if isinstance(answer.message.content, str) else ""
        try:
            score = float(self.score_pattern.findall(text)[-1])
        except (IndexError, ValueError):
            score = math.nan
        low, high = self.score_range or (-math.inf, math.inf)
        if math.isfinite(score) and low <= score <= high:
            return score
        cause = f"no score from {low:g} to {high:g} (finish_reason: {answer.finish_reason})"
        self.failure = f"the answer has {cause}: {one_line(text)[-100:]!r}"
        self._counts["unparsable"] += 1
        return math.nan

    def _content(self, image: Tensor, prompt: str) -> dict[str, Any]:
        question = self.prompt_template.replace("{prompt}", prompt)
        picture = "data:image/png;base64," + base64.b64encode(encode_png(image)).decode()
        content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": question}]
        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "seed": 0,
            **self.extra_body,
        }
        return {"json": request}
