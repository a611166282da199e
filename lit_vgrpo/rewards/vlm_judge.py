"""A vision-language model as a judge, behind any server that speaks OpenAI's chat completions, such as vLLM."""

from __future__ import annotations

import base64
import json
import math
import re
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from lit_vgrpo.core.pixels import to_uint8
from lit_vgrpo.core.ranges import Finite, PositiveInt, Range, Seed, checked
from lit_vgrpo.errors import one_line, suggestion
from lit_vgrpo.rewards.base import Reward, RewardError
from lit_vgrpo.rewards.connection import Connection
from lit_vgrpo.rewards.transport import Call, Failed, Transport
from lit_vgrpo.rewards.wire import WireError, encode_png

SCORE_PATTERN = r"(?i)final score\W*?(-?\d+(?:\.\d+)?)"
SCORE_RANGE = (1.0, 5.0)
PROMPT_TEMPLATE = """\
Judge how well the image was made from its caption. Look at two things.
1. Agreement: are the objects, their attributes and their relations as the caption says?
2. Quality: is the image sharp, rich in detail, right in its colours and pleasing as a whole?
Name each element of the caption and whether the image shows it, as 'element (type): 1', or 0 where it does not. Then \
give one score from 1 to 5 for the image as a whole, in a last line 'Final Score: x'.
Text Caption: [{prompt}]"""
"""Asks for what UnifiedReward's pointwise prompt asks for, and for an answer of the same form, in other words."""
LONGEST_NAME = 100
"""Letters of a model's name that are shown."""
LONGEST_VERDICT = 10_000
"""Letters at an answer's end in which its JSON object is looked for."""
_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True)
class Verdict:
    """What a judge said of an image: a score, or why there is none and what that is counted as."""

    score: float
    cause: str | None = None
    reason: str | None = None


@checked
class VLMJudge(Reward):
    """The score that a model writes when it is shown the image and a question. One request an image.

    An answer without a score fails its image and is counted: as ``unparsable``, ``out_of_range``, or ``cut`` where it
    ended at ``max_tokens`` before the score came.

    Args:
        url: of the API, such as ``http://127.0.0.1:8000/v1``.
        model: as the server names it.
        name: the key of its score.
        prompt_template: the question; ``{prompt}`` and ``{field}`` stand for fields of the prompt's row. The model card
            of a trained judge has the wording it was trained on: scores of other wordings are not comparable.
        score_pattern: regular expression whose one group is the score; its last match counts.
        score_key: the answer is a JSON object that holds the score under this key; goes before ``score_pattern``.
        score_range: lowest and highest score that the question allows; null for any.
        normalise: map ``score_range`` to [0, 1].
        max_tokens: longest answer.
        temperature: 0 for the likeliest answer.
        seed: of the server's sampler; null sends none.
        system_prompt: goes before the question; null for none.
        extra_body: further fields of the request, such as ``{chat_template_kwargs: {enable_thinking: false}}``.
        connection: timeouts, retries, how many requests at once, the token, what to do when the server is down.

    Source:
        Pointwise judging, the range 1 to 5 and the line with the final score: UnifiedReward, arXiv 2503.05236.
    """

    concurrent = True

    def __init__(
        self,
        url: str,
        model: str,
        name: str = "vlm_judge",
        prompt_template: str = PROMPT_TEMPLATE,
        score_pattern: str = SCORE_PATTERN,
        score_key: str | None = None,
        score_range: tuple[Finite, Finite] | None = SCORE_RANGE,
        normalise: bool = False,
        max_tokens: PositiveInt = 1024,
        temperature: Annotated[float, Range(0, 100)] = 0.0,
        seed: Seed | None = 0,
        system_prompt: str | None = None,
        extra_body: dict[str, Any] | None = None,
        connection: Connection | None = None,
    ) -> None:
        try:
            self.score_pattern = re.compile(score_pattern)
        except re.error as error:
            raise ValueError(
                f"score_pattern={score_pattern!r} is no regular expression ({error}). Use {SCORE_PATTERN!r}."
            ) from error
        if self.score_pattern.groups != 1:
            raise ValueError(
                f"score_pattern={score_pattern!r} has {self.score_pattern.groups} groups. Put one round the score."
            )
        if score_range is not None and not score_range[0] < score_range[1]:
            raise ValueError(f"score_range={list(score_range)} is empty. Write [lowest, highest].")
        if normalise and score_range is None:
            raise ValueError("normalise=true needs the range of the scores. Set score_range=[1,5].")
        self.url = url.rstrip("/")
        self.model = model
        self.name = name
        self.prompt_template = prompt_template
        self.score_key = score_key
        self.score_range = score_range
        self.normalise = normalise
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.seed = seed
        self.system_prompt = system_prompt
        self.extra_body = dict(extra_body or {})
        self._transport = Transport(f"{self.url}/chat/completions", connection or Connection())
        self._is_loaded = False

    def check(self) -> list[str]:
        """A wrong address, httpx missing, or no token where one is named; asks no server."""
        return self._transport.check(self.option)

    def prompt_fault(self, prompt: str, row: dict[str, Any]) -> str | None:
        """A field of the template that the row lacks."""
        known = {"prompt", *row}
        missing = [field for field in _FIELD.findall(self.prompt_template) if field not in known]
        if not missing:
            return None
        return f"prompt_template asks for {{{missing[0]}}}, which the row lacks. {suggestion(missing[0], known)}"

    def load(self) -> None:
        """Ask the server which models it has; a server without such a list is taken at its word.

        Raises:
            RewardError: it cannot be reached, refuses the token or does not have the model.
        """
        if self._is_loaded:
            return
        answer = self._transport.ask(f"{self.url}/models")
        if answer.status in (401, 403):
            raise RewardError(
                f"{self.url} answered with status {answer.status}. "
                f"Set {self.option('connection.token_env')} to a variable that holds its token."
            )
        try:
            models = [str(entry["id"]) for entry in json.loads(answer.body)["data"]] if answer.status == 200 else []
        except (ValueError, TypeError, KeyError, RecursionError):
            models = []
        if models and self.model not in models:
            meant = suggestion(self.model, [name[:LONGEST_NAME] for name in models])
            raise RewardError(f"{self.option('model')}={self.model} is not served at {self.url}. {meant}")
        self._is_loaded = True

    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        self.failure = None
        self.load()
        pixels = to_uint8(images).cpu()
        answers = self._transport.send(
            (Call({"json": self._request(*entry)}, _text_of) for entry in zip(pixels, prompts, rows, strict=True)),
            self.option,
        )
        scores = []
        for answer in answers:
            verdict = Verdict(math.nan, None, answer.reason) if isinstance(answer, Failed) else self.verdict(*answer)
            scores.append(verdict.score)
            self.failure = verdict.reason or self.failure
            if verdict.cause is not None:
                self._transport.count(verdict.cause)
        return torch.tensor(scores, dtype=torch.float32)

    def verdict(self, text: str, is_cut: bool = False) -> Verdict:
        """The score in an answer of the model.

        Args:
            is_cut: the answer ended at ``max_tokens``.
        """
        score = self._score_in(text)
        if score is None:
            if is_cut:
                return Verdict(
                    math.nan, "cut", f"the answer was cut before the score. Raise max_tokens={self.max_tokens}"
                )
            return Verdict(math.nan, "unparsable", f"the answer holds no score: {one_line(text)[-100:]!r}")
        if self.score_range is None:
            return Verdict(score)
        low, high = self.score_range
        if not low <= score <= high:
            return Verdict(math.nan, "out_of_range", f"the score {score:g} is outside {low:g} to {high:g}")
        return Verdict((score - low) / (high - low) if self.normalise else score)

    def take_counts(self) -> dict[str, int]:
        return self._transport.take_counts()

    def close(self) -> None:
        self._transport.close()

    def _score_in(self, text: str) -> float | None:
        if self.score_key is not None:
            found = _object_in(text).get(self.score_key)
        else:
            matches = list(self.score_pattern.finditer(text))
            found = matches[-1].group(1) if matches else None
        if found is None or isinstance(found, bool) or not isinstance(found, (str, int, float)):
            return None
        try:
            score = float(found)
        except (ValueError, OverflowError):
            return None
        return score if math.isfinite(score) else None

    def _request(self, image: Tensor, prompt: str, row: dict[str, Any]) -> dict[str, Any]:
        fields = {**row, "prompt": prompt}
        # one pass: braces inside a prompt are the prompt's own
        question = _FIELD.sub(lambda match: str(fields[match.group(1)]), self.prompt_template)
        picture = "data:image/png;base64," + base64.b64encode(encode_png(image)).decode()
        content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": question}]
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt is not None else []
        request = {
            "model": self.model,
            "messages": [*system, {"role": "user", "content": content}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            **self.extra_body,
        }
        return request if self.seed is None else {"seed": self.seed, **request}


def _text_of(body: bytes) -> tuple[str, bool]:
    """What the model wrote, and whether it was cut."""
    try:
        choice = json.loads(body)["choices"][0]
        text, finish = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise WireError("it is no chat completion") from error
    if not isinstance(text, str):
        text = ""  # a model that only thought, or called a tool
    return text, finish == "length"


def _object_in(text: str) -> dict[str, Any]:
    """The last JSON object in a text, which may stand in a code fence or after other words."""
    text = text[-LONGEST_VERDICT:]  # each brace that opens nothing costs a pass over the text
    decoder, found, place = json.JSONDecoder(), {}, text.find("{")
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            place = text.find("{", place + 1)
            continue
        found, place = value, text.find("{", end)
    return found
