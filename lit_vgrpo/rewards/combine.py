"""A weighted sum of rewards that tracks each reward's failures separately."""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lit_vgrpo.core.ranges import Finite, checked
from lit_vgrpo.errors import counted, one_line, place_of, shortened, suggestion
from lit_vgrpo.rewards.base import ImageBatch, Reward, RewardOutage, Scores, called, reason_of
from lit_vgrpo.rewards.function import RewardLike, RewardsLike, as_reward, is_custom
from lit_vgrpo.rewards.model import ModelReward
from lit_vgrpo.system.signals import is_stop

# would collide with another metric's key, such as reward/mean or heldout/reward, or a column of eval's table
RESERVED_NAMES = frozenset({"mean", "std", "no_spread", "failed", "reward", "untrained_reward", "diversity"}) | {
    *("diversity_within_prompts", "diversity_across_prompts", "sharpness", "saturation", "distance_to_start"),
    *("reward_std", "fingerprint", "image", "prompt", "variant"),
}
ROW_FIELD = "rewards"
"""The field of a row that names the rewards that apply to it."""


@dataclass(frozen=True)
class Part:
    """One reward of a sum; with weight 0 it is only logged, and so is an untrained one."""

    name: str
    reward: Reward
    weight: float
    clip: tuple[float | None, float | None] | None = None
    is_untrained: bool = False


@checked
class Weighted(Reward):
    """A weighted sum of rewards: ``sum_k w_k clip_k(r_k)``.

    A prompt's row can name the rewards that apply to it in its field ``rewards``; the others do not score it. If it
    names none of the weighted rewards, all of those apply; the same holds for the rewards of weight 0.

    Args:
        rewards: The rewards or functions, at least one.
        weights: One per reward, not all zero; None for the mean. A reward of weight 0 is only logged.
        clips: For each reward the range ``[low, high]`` its scores are clipped to, or null; either end may be null.
        overlap: Score in threads while the next images are sampled, if a reward allows it; scores do not change.

    Raises:
        ValueError: There are no rewards, lists have different lengths, all weights are 0, or a range is empty.
    """

    name = "weighted"
    is_only_logged: bool = False

    def __init__(
        self,
        rewards: list[RewardLike],
        weights: list[Finite] | None = None,
        clips: list[tuple[Finite | None, Finite | None] | None] | None = None,
        overlap: bool = True,
    ) -> None:
        size, built = len(rewards), [as_reward(reward) for reward in rewards]
        if not size:
            raise ValueError("rewards=[] is empty. Name at least one reward, such as PickScore.")
        weights = [1 / size] * size if weights is None else weights
        clips = [None] * size if clips is None else clips
        if not len(weights) == len(clips) == size:
            raise ValueError(f"weights={weights} or clips={clips} does not match {size} rewards. Give one per reward.")
        if not any(weights):
            raise ValueError(f"weights={weights} are all 0. Set at least one to another value.")
        for low, high in filter(None, clips):
            if low is not None and high is not None and not low < high:
                raise ValueError(f"clips=[{low}, {high}] is an empty range. Write [low, high] with low < high.")
        self.overlap = overlap
        self._counts: Counter[str] = Counter()  # since a sum that contains this one took them
        self.parts = [Part(*entry) for entry in zip(_unique_names(built), built, weights, clips, strict=True)]

    @property
    def rewards(self) -> list[Reward]:
        return [part.reward for part in self.parts]

    combined = rewards

    @property
    def part_names(self) -> list[str]:
        return [part.name for part in self.parts]

    @property
    def weight_of(self) -> dict[str, float]:
        """Weights by name."""
        return {part.name: part.weight for part in self.parts}

    def found_at(self, key: str) -> None:
        """Set the rewards' keys in the recipe, for their messages; ``key`` is that of this reward."""
        super().found_at(key)
        for number, reward in enumerate(self.rewards):
            reward.found_at(f"{key}.rewards[{number}]" if key else f"rewards[{number}]")

    def observing(self, other: Weighted | None) -> Weighted:
        """Return the sum for held-out images: this one, extended by another's rewards with weight 0.

        Rewards that compare are left out. If no weighted one remains, the other sum's weights count. A name that both
        have is a ValueError.
        """
        kept = [part for part in self.parts if not part.reward.compares]
        added = [] if other is None else other.parts
        for part in added:
            if part.name in self.part_names:
                advice = "Choose another, or set its name." if has_name(part.reward) else "Choose another."
                raise ValueError(f'untrained_reward and model.reward both have a "{part.name}". {advice}')
        if any(part.weight for part in kept):
            added = [replace(part, weight=0.0, clip=None) for part in added]
        added = [replace(part, is_untrained=True) for part in added]
        parts = [*kept, *added]
        if parts == self.parts or not any(part.weight for part in parts):
            return self
        both = copy(self)
        both.parts = parts
        return both

    def only_logged(self) -> Weighted:
        """Return this sum for a method that does not train on it: an outage fails its images, and ends no run."""
        logged = copy(self)
        logged.is_only_logged = True
        return logged

    @property
    def differentiable(self) -> bool:  # type: ignore[override]
        """True if any reward of non-zero weight is."""
        return bool(self.differentiable_parts)

    @property
    def differentiable_parts(self) -> list[Part]:
        """The rewards of non-zero weight that give a gradient."""
        return [part for part in self.parts if part.weight and part.reward.differentiable]

    def with_gradient(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        """Return the weighted sum ``(B,)`` of the differentiable rewards.

        NaN where none applies, and, with a warning, where one failed.

        Raises:
            RewardOutage: One has no gradient, or cannot continue.
        """
        total = images.new_zeros(len(prompts))
        applies = torch.zeros(len(prompts), dtype=torch.bool)
        for part in self.differentiable_parts:
            applies |= (mask := self._mask(part, rows))
            chosen = mask.nonzero().flatten().tolist()
            if not chosen:
                continue
            inputs = [prompts[i] for i in chosen], [rows[i] for i in chosen]
            scores, reason = _try(part.reward, images[chosen], *inputs, part.reward.with_gradient)
            if reason is not None:
                warnings.warn(f'Reward "{part.name}" failed for images that it differentiates: {reason}', stacklevel=2)
            if images.requires_grad and not scores.requires_grad:
                raise RewardOutage(f'Reward "{part.name}" is differentiable, but its scores carry no gradient.')
            shaped = self.shaped(part.name, {part.name: scores})
            total = total.index_add(0, torch.tensor(chosen, device=images.device), part.weight * shaped)
        return total.where(applies.to(total.device), math.nan)

    @property
    def compares(self) -> bool:  # type: ignore[override]
        """True if any of the rewards does."""
        return any(part.reward.compares for part in self.parts)

    @property
    def takes_videos(self) -> bool:  # type: ignore[override]
        """True if any of the rewards does."""
        return any(part.reward.takes_videos for part in self.parts)

    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        scores = self.score(images, prompts, rows)
        failures = [scores.errors[name] for name, weight in self.weight_of.items() if weight and name in scores.errors]
        self.failure = failures[0] if failures else None
        for counts in scores.counts.values():
            self._counts.update(counts)
        return scores.total

    def take_counts(self) -> dict[str, float]:
        counts: dict[str, float] = {**self._counts}
        self._counts.clear()
        return counts

    def prompt_error(self, prompt: str, row: dict[str, Any]) -> str | None:
        return next(iter(self.errors_of_prompt(prompt, row).values()), None)

    def errors_of_prompt(self, prompt: str, row: dict[str, Any]) -> dict[str, str]:
        """Return by name why rewards that apply to a prompt cannot score it."""
        asked = [part for part in self.parts if self._applies(part, row)]
        errors = {part.name: part.reward.prompt_error(prompt, deepcopy(row)) for part in asked}
        return {name: error for name, error in errors.items() if error is not None}

    def truncations(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return a line for each reward whose model truncates prompts."""
        lines = []
        for part in self.parts:
            prompts = list(dict.fromkeys(row["prompt"] for row in rows if self._applies(part, row)))
            lines += [leaf.truncation(prompts) for leaf in part.reward.leaves() if isinstance(leaf, ModelReward)]
        return [line for line in lines if line is not None]

    def name_errors(self, rows: Iterable[Mapping[str, Any]]) -> list[str]:
        """Return a line for each name in the rows' field ``rewards`` that does not exist."""
        first: dict[str, str] = {}
        for row in rows:
            for name in _named(row):
                if name not in self.part_names:
                    first.setdefault(name, row["prompt"])
        return [
            f'The row of prompt "{shortened(prompt)}" names the reward {name} in its field {ROW_FIELD}, but no '
            f"reward has this name. {suggestion(name, self.part_names)}"
            for name, prompt in first.items()
        ]

    def score(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Scores:
        """Score a batch with every reward.

        Images are rounded to uint8 once, before all rewards. If a reward raises, its images are scored again one by
        one, so that only those that fail are lost. An image with NaN or infinite pixels fails for every reward.

        Args:
            images: Shape ``(B, 3, H, W)``, float in [0, 1].
            prompts: The B prompts.
            rows: The B rows.

        Raises:
            RewardError: A reward returned something other than ``(B,)`` float32, or cannot continue.
            ValueError: Images, prompts and rows differ in number or shape.
        """
        self.load()
        batch = ImageBatch.rounded(images, prompts, rows)
        return self.summed({part.name: self.score_part(part, batch) for part in self.parts}, rows)

    @torch.no_grad()
    def errors_on(self, images: Tensor, rows: Sequence[dict[str, Any]]) -> list[str]:
        """Call every reward that loads nothing on images ``(B, 3, H, W)``; return a line for each that raises.

        Each gets as many images as there are rows that it can score. One that scores none, which may be due to the
        images, gives a warning.
        """
        errors, asked = [], [(row, self.errors_of_prompt(row["prompt"], row)) for row in rows]
        for part in (part for part in self.parts if part.reward.loads_nothing):
            fit = [row for row, row_errors in asked if self._applies(part, row) and part.name not in row_errors]
            chosen = fit[: len(images)]
            try:
                if chosen:
                    inputs = images[: len(chosen)], [row["prompt"] for row in chosen], chosen
                    if not called(part.reward, *inputs).isfinite().any():
                        of = f"any of {counted(len(chosen), 'random image')}"
                        warnings.warn(f'Reward "{part.name}" returned no score for {of}.', stacklevel=2)
            except BaseException as error:
                if is_stop(error):
                    raise
                reason, named = reason_of(error), f'Reward "{part.name}"'
                errors.append(reason if named in reason else f"{named} failed on random images: {reason}")
        return errors

    @torch.no_grad()
    def score_part(self, part: Part, batch: ImageBatch) -> Scores:
        """Return the scores of one reward, before shaping; NaN if it does not apply."""
        start = time.perf_counter()
        applies = self._mask(part, batch.rows)
        chosen = (applies & batch.is_finite).nonzero().flatten().tolist()
        scores = torch.full((len(batch.rows),), math.nan)
        errors = {}
        if lost := int((applies & ~batch.is_finite).sum()):
            errors[part.name] = f"{lost} of {len(batch.rows)} images have NaN or infinite pixels"
        if chosen:
            images = batch.images if len(chosen) == len(batch.rows) else batch.images[chosen]
            prompts, rows = [batch.prompts[i] for i in chosen], [batch.rows[i] for i in chosen]
            try:
                scores[chosen], error = _score(part.reward, images, prompts, rows)
            except RewardOutage as outage:
                if not self.is_only_logged:
                    raise
                error = str(outage)
            if error is not None:
                errors[part.name] = error
        counts = dict(part.reward.take_counts())
        return Scores(
            scores,
            {part.name: scores},
            scores.isfinite(),
            errors,
            seconds={part.name: time.perf_counter() - start},
            counts={part.name: counts} if counts else {},
        )

    def summed(self, scores: Mapping[str, Scores], rows: Sequence[Mapping[str, Any]]) -> Scores:
        """Combine the results of :meth:`score_part`, by name, for the same images."""
        applies = {part.name: self._mask(part, rows) for part in self.parts}
        parts = {part.name: scores[part.name].total for part in self.parts}
        total = self.total(parts, applies)
        columns = [scores[part.name] for part in self.parts]
        return Scores(
            total,
            parts,
            total.isfinite(),
            errors={name: error for column in columns for name, error in column.errors.items()},
            applies=applies,
            seconds={name: seconds for column in columns for name, seconds in column.seconds.items()},
            counts={name: counts for column in columns for name, counts in column.counts.items()},
        )

    def total(self, parts: Mapping[str, Tensor], applies: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted sum, ``(B,)``; NaN if an applicable reward of non-zero weight failed."""
        total = torch.zeros_like(parts[self.parts[0].name])
        for part in self.parts:
            if part.weight:
                total = total + torch.where(applies[part.name], part.weight * self.shaped(part.name, parts), 0.0)
        return total.masked_fill(~total.isfinite(), math.nan)

    def shaped(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """Return one reward's scores as they enter the sum, clipped, before the weight. NaN stays."""
        clip = next(part.clip for part in self.parts if part.name == name)
        return parts[name] if clip in (None, (None, None)) else parts[name].clamp(*clip)

    def _mask(self, part: Part, rows: Sequence[Mapping[str, Any]]) -> Tensor:
        return torch.tensor([self._applies(part, row) for row in rows], dtype=torch.bool)

    def _applies(self, part: Part, row: Mapping[str, Any]) -> bool:
        names = _named(row)
        kind = bool(part.weight), part.is_untrained
        rivals = [other.name for other in self.parts if (bool(other.weight), other.is_untrained) == kind]
        return part.name in names or not any(name in rivals for name in names)


def as_weighted(reward: RewardsLike, key: str | None = None) -> Weighted:
    """Wrap a reward, a function or a list of them in a :class:`Weighted`; return a ``Weighted`` unchanged.

    Args:
        key: The reward's key in the recipe, for its messages.
    """
    reward = Weighted([*reward]) if isinstance(reward, Sequence) and not isinstance(reward, str) else as_reward(reward)
    if key is not None:
        reward.found_at(key)
    return reward if isinstance(reward, Weighted) else Weighted([reward])


def _score(reward: Reward, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> tuple[Tensor, str | None]:
    """Return the scores of images, NaN where the reward failed, and why it did."""
    returned, reason = _try(reward, images, prompts, rows)
    scores = returned.detach().cpu()
    bad = ~scores.isfinite()
    if reason is None and bad.any():
        prompt, row = next((prompts[i], dict(rows[i])) for i in bad.nonzero().flatten().tolist())
        place = place_of(reward) if is_custom(reward) else ""
        nothing = f'{place}returned NaN or infinity for prompt "{shortened(prompt)}"'
        reason = one_line(reward.failure or reward.prompt_error(prompt, row) or nothing)
    return scores.masked_fill(bad, math.nan), reason


def _try(
    reward: Reward,
    images: Tensor,
    prompts: list[str],
    rows: list[dict[str, Any]],
    method: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, str | None]:
    """Return what :func:`called` does; after an error, call it for each image, with NaN where it fails, and why."""
    try:
        return called(reward, images, prompts, rows, method), None
    except BaseException as error:  # sys.exit() would end the run silently
        if is_stop(error) or isinstance(error, RewardOutage):
            raise
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            advice = "Give it fewer images per call: lower model.policy.decode_batch_size or --batch-size."
            raise RewardOutage(f'Reward "{reward.name}" ran out of memory: {reason_of(error)} {advice}') from error
        if len(images) == 1 or reward.compares:
            return math.nan * images.flatten(1).float().sum(dim=1), reason_of(error)  # with a graph, if images have one
        parts = [slice(place, place + 1) for place in range(len(images))]
        singles = [_try(reward, images[one], prompts[one], rows[one], method) for one in parts]
        reasons = [reason for _, reason in singles if reason is not None]
        if not reasons:
            slow = (
                f'Reward "{reward.name}" raised on {len(images)} images at once, but scored each alone, which is slow'
            )
            warnings.warn(f"{slow}: {reason_of(error)}", stacklevel=2)
        return torch.cat([scores for scores, _ in singles]), reasons[-1] if reasons else None


def has_name(reward: Reward) -> bool:
    """Return True if the name of a reward's score is one of its options."""
    return "name" in inspect.signature(type(reward)).parameters


def _named(row: Mapping[str, Any]) -> list[str]:
    named = row.get(ROW_FIELD) or []
    return [named] if isinstance(named, str) else list(named)


def _unique_names(rewards: list[Reward]) -> list[str]:
    names: list[str] = []
    for reward in rewards:
        name, number = reward.name, 2
        while name in names or name in RESERVED_NAMES:
            name, number = f"{reward.name}_{number}", number + 1
        names.append(name)
    return names
