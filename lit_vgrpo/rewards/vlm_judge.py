"""A vision-language model as a judge, behind any server that speaks OpenAI's chat completions, such as vLLM."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from itertools import combinations
from typing import Any, Literal

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from lit_vgrpo.core.pictures import PICTURE
from lit_vgrpo.core.pixels import encode_png, to_uint8
from lit_vgrpo.core.ranges import Finite, PositiveInt, checked
from lit_vgrpo.errors import one_line
from lit_vgrpo.rewards.chat import ChatReward
from lit_vgrpo.rewards.connection import Connection
from lit_vgrpo.rewards.http import Call
from lit_vgrpo.rewards.servers import RequestError
from lit_vgrpo.rewards.vote_store import choice_scores

SCORE_PATTERN = (
    r"(?i)final score[^\w(\[]*?"
    r"(?>[(\[][^)\]\n]*(?:[a-z\u2013]|\d\s*-)[^)\]\n]*[)\]]|[(\[])?"  # the range in brackets, or the score's bracket
    r"[^\w(\[]*?(-?\d+(?:\.\d+)?)"
)
SCORE_RANGE = (1.0, 5.0)
PROMPT_TEMPLATE = """\
Judge how well the image was made from its caption. Look at two things.
1. Agreement: are the objects, their attributes and their relations as the caption says?
2. Quality: is the image sharp, rich in detail, right in its colours and pleasing as a whole?
Name each element of the caption and whether the image shows it, as 'element (type): 1', or 0 where it does not. Then \
give one score from 1 to 5 for the image as a whole, in a last line 'Final Score: x'.
Text Caption: [{prompt}]"""
"""Our wording of UnifiedReward's pointwise prompt, with the same answer format."""
CHOICE_PATTERN = r"(?i)image (\d+) is (?:the )?(?:better|best)|equally good"
COMPARE_TEMPLATE = """\
The {number} images were made from the same caption. They are numbered from 1, in the order shown. Compare them in two \
things.
1. Agreement: are the objects, their attributes and their relations as the caption says?
2. Quality: is the image sharp, rich in detail, right in its colours and pleasing as a whole?
Then name the best of the {number} images in a last line 'Image k is the best.', with its number for k.
Text Caption: [{prompt}]"""
"""Our wording; the answer format is that of UnifiedReward's pairwise prompt, for any number of images."""
NOT_APPLICABLE = "N/A"


class _Message(BaseModel):
    content: Any = None  # no text: it only reasoned, or called a tool


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1)


@checked
class VLMJudge(ChatReward):
    """Score that a vision-language model writes for an image and a question, or its choice of the best images.

    An answer without a valid score or choice is counted as ``unparsable``, and its image fails. With ``compare``, all
    images of a prompt in a call are compared, and only the invalid comparison is left out. The scores are the strengths
    that best explain the choices, as of :class:`VoteReward`; if all pairs are valid, they rank the images as win rates
    do. An image without a valid comparison fails.

    Args:
        url: Address of the API, such as ``http://127.0.0.1:8000/v1``, or a list of addresses of equal servers.
        model: The server's name of the model.
        name: Key of the score.
        prompt_template: The question, with ``{prompt}``, and ``{number}`` for the number of images. The model card of a
            trained judge has the wording it was trained on: scores of other wordings are not comparable. By default
            ours.
        score_pattern: Regular expression with one group, the score; the last match counts. For answers in JSON:
            ``"score": *(-?[0-9.]+)``. With ``compare``, the group is the number of the best image, and a match without
            it is a tie, which counts for no image. By default the format that our question asks for.
        score_range: Lowest and highest valid score; null for any.
        num_scores: Scores in an answer, of which the mean counts; each must be found. ``N/A`` is left out.
        compare: ``pairs`` shows every two images of a prompt, G (G - 1) / 2 requests for G images, each image first in
            about half of its pairs. ``group`` shows all of them in one request. The order depends only on the prompt
            and the images. Null scores each image separately.
        max_tokens: Length limit of an answer.
        extra_body: Additional fields of the request, such as ``{chat_template_kwargs: {enable_thinking: false}}``; they
            replace the fields above, and ``temperature`` and ``seed``, which are 0.
        connection: Timeouts, retries, simultaneous requests, and the token.

    Raises:
        ValueError: A pattern without exactly one group.

    Source:
        Pointwise judging, the range 1 to 5 and the line with the final score: UnifiedReward, arXiv 2503.05236. Win
        rates of all pairs as rewards: Pref-GRPO, arXiv 2508.20751. The scores: Bradley and Terry, Biometrika 39 (1952).
    """

    def __init__(
        self,
        url: str | list[str],
        model: str,
        name: str = "vlm_judge",
        prompt_template: str | None = None,
        score_pattern: str | None = None,
        score_range: tuple[Finite, Finite] | None = SCORE_RANGE,
        num_scores: PositiveInt = 1,
        compare: Literal["pairs", "group"] | None = None,
        max_tokens: PositiveInt = 1024,
        extra_body: dict[str, Any] | None = None,
        connection: Connection | None = None,
    ) -> None:
        template, pattern = (COMPARE_TEMPLATE, CHOICE_PATTERN) if compare else (PROMPT_TEMPLATE, SCORE_PATTERN)
        self.score_pattern = re.compile(pattern if score_pattern is None else score_pattern)
        if self.score_pattern.groups != 1:
            raise ValueError(f"score_pattern={score_pattern!r} needs exactly one group, around the score.")
        super().__init__(url, model, connection)
        self.name = name
        self.prompt_template = template if prompt_template is None else prompt_template
        self.score_range = score_range or (-math.inf, math.inf)
        self.num_scores = num_scores
        self.compare = compare
        self.compares, self.concurrent = compare is not None, compare is None
        self.sampling = {"max_tokens": max_tokens, **(extra_body or {})}

    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        self.failure = self.failure if self._calls else None  # other calls may not have read it
        files = [encode_png(image) for image in to_uint8(images).cpu()]
        plans = self._plans(files, prompts, rows)
        calls = [self._call([files[i] for i in numbers], prompts[numbers[0]]) for plan in plans for numbers in plan]
        answers = iter(self._post(calls))
        if self.compare is None:
            wanted = "score from {:g} to {:g}".format(*self.score_range)
            return torch.tensor([self._read(answer, self._score, wanted) for answer in answers])
        scores = torch.full((len(files),), math.nan)
        for plan in plans:
            read = [self._read(next(answers), partial(_choice, len(numbers)), "valid choice") for numbers in plan]
            made = [(int(best), numbers) for best, numbers in zip(read, plan, strict=True) if not math.isnan(best)]
            members = sorted({number for _, numbers in made for number in numbers})
            place = {number: i for i, number in enumerate(members)}
            choices = [(place[numbers[best - 1]], [place[n] for n in numbers]) for best, numbers in made if best]
            if members:
                scores[members] = choice_scores(choices, len(members)).float()
        if self.failure is None and scores.isnan().any():
            self.failure = "there is no other image of its prompt to compare with"
        return scores

    def _plans(self, files: list[bytes], prompts: list[str], rows: list[dict[str, Any]]) -> list[list[list[int]]]:
        """Return the images of each request, by number; those of a prompt are in one list if they are compared."""
        if self.compare is None:
            return [[[number]] for number in range(len(files))]
        groups: dict[tuple[Any, ...], list[int]] = {}
        for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            groups.setdefault((prompt, str(row.get(PICTURE))), []).append(number)
        plans = []
        for (prompt, *_), numbers in groups.items():
            order = sorted(numbers, key=lambda number: sha256(prompt.encode() + files[number]).digest())
            pairs = combinations(range(len(order)), 2)
            swapped = [[order[j], order[i]] if (i + j) % 2 else [order[i], order[j]] for i, j in pairs]
            plans.append(swapped if self.compare == "pairs" else [order] * (len(order) > 1))
        return plans

    def _call(self, pictures: list[bytes], prompt: str) -> Call[_Completion]:
        text = self.prompt_template.replace("{number}", str(len(pictures))).replace("{prompt}", prompt)
        return partial(self._request, pictures, text, **self.sampling), _Completion.model_validate_json

    def _read(self, answer: _Completion | RequestError, convert: Callable[[list[str]], float], wanted: str) -> float:
        """Return the value of an answer's matches; NaN after an error, or if it has none, which is counted."""
        if isinstance(answer, RequestError):
            self.failure = answer.reason
            return math.nan
        choice = answer.choices[0]
        text = choice.message.content if isinstance(choice.message.content, str) else ""
        try:
            value = convert(self.score_pattern.findall(text))
        except (IndexError, ValueError, ZeroDivisionError):
            value = math.nan
        if math.isnan(value):
            quote = f"(finish_reason: {choice.finish_reason}): {one_line(text)[-100:]!r}"
            self.failure = f"the answer has no {wanted} {quote}"
            self._count("unparsable")
        return value

    def _score(self, matches: list[str]) -> float:
        """Return the mean of the last matches, without those that do not apply."""
        low, high = self.score_range
        values = [float(text) for text in matches[-self.num_scores :] if text.upper() != NOT_APPLICABLE]
        is_valid = len(matches) >= self.num_scores and all(math.isfinite(v) and low <= v <= high for v in values)
        return sum(values) / len(values) if is_valid else math.nan


def _choice(number: int, matches: list[str]) -> float:
    """Return the last match, a number from 1; 0 for a tie."""
    best = int(matches[-1] or 0)
    return best if best <= number and matches[-1] != "0" else math.nan
