"""Result of a run: the held-out reward before and after, its cost and problems; numbers as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from lit_vgrpo.apps.report.run_data import RUNNING, UNFINISHED, Interval, RunData, difference, interval
from lit_vgrpo.errors import counted

UNTRAINED = "untrained_reward"
NONE, MINUS = "\u2013", "\u2212"
FLAT = 0.9
"""Share of groups without reward spread above which there is little left to learn from."""


@dataclass(frozen=True)
class Change:
    """A held-out metric at the first and the newest evaluation.

    Attributes:
        start: ``None`` if the first evaluation lacks it.
        intervals: Intervals of both; ``None`` for a run that kept no scores.
        difference: Mean change over the prompts, with its interval.
    """

    name: str
    start: float | None
    end: float
    intervals: tuple[Interval | None, Interval | None] = (None, None)
    difference: Interval | None = None

    @property
    def change(self) -> float | None:
        return None if self.start is None else self.end - self.start

    @property
    def direction(self) -> int:
        """1 or -1 if the change, or its interval if there is one, is above or below 0; otherwise 0."""
        low, high = (self.difference.low, self.difference.high) if self.difference else (self.change or 0.0,) * 2
        return 1 if low > 0 else -1 if high < 0 else 0


class Verdict:
    """Result of a run."""

    def __init__(self, run: RunData) -> None:
        self.run = run

    @cached_property
    def changes(self) -> list[Change]:
        """The weighted sum, the untrained sum, each of several rewards, then other metrics."""
        if not self.run.evaluations:
            return []
        start, end = self.run.evaluations[0], self.run.evaluations[-1]
        rewards = self.run.reward_names
        hidden = ["failed", *(rewards if len(rewards) == 1 else [])]
        names = dict.fromkeys([*("reward", UNTRAINED, *rewards), *sorted(end.metrics)])
        found = []
        for name in names:
            if name not in end.metrics or name in hidden:
                continue
            before, after = (self.run.scores.get(point.iteration, {}).get(name) for point in (start, end))
            is_first = start is end
            first, paired = (None, None) if is_first else (start.metrics.get(name), difference(before, after))
            found.append(Change(name, first, end.metrics[name], (interval(before), interval(after)), paired))
        return found

    @cached_property
    def reward(self) -> Change | None:
        """The weighted sum that is trained on; ``None`` without an evaluation."""
        return next((change for change in self.changes if change.name == "reward"), None)

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        reward, run = self.reward, self.run
        images, seconds, passes = (run.total(cost) for cost in ("images", "seconds", "passes"))
        costs = [
            counted(run.num_iterations, "iteration"),
            "" if images is None else f"{amount(images)} images",
            "" if seconds is None else duration(seconds),
            "" if passes is None else f"{amount(passes)} network passes",
        ]
        cost = ", ".join(filter(None, costs))
        if reward is None:
            return f"No held-out evaluation yet after {cost}."
        end = f"{score(reward.end)} {brackets(reward.intervals[1])}".rstrip()
        if reward.start is None:
            return f"The held-out reward is {end} after {cost}."
        start = f"{score(reward.start)} {brackets(reward.intervals[0])}".rstrip()
        verb = {1: "rose from", -1: "fell from", 0: "did not change measurably:"}[reward.direction]
        change = f"{score(reward.change, '+')} {brackets(reward.difference, '+')}".rstrip()
        so_far = " so far" if run.outcome == RUNNING else ""
        return f"Held-out reward {verb} {start} to {end}{so_far}: {change} after {cost}."

    @cached_property
    def alarms(self) -> list[str]:
        """One sentence for each problem."""
        return [*self._alarms_of_training(), *self._alarms_of_evaluations()]

    def _alarms_of_evaluations(self) -> Iterator[str]:
        evaluations = [point for point in self.run.evaluations if "reward" in point.metrics]
        if self.reward is None or not evaluations:
            return
        if self.reward.direction < 0:
            yield "The held-out reward fell."
        for change in self.changes:
            is_reward = change.name in (UNTRAINED, *self.run.reward_names)
            if is_reward and change.difference and change.direction < 0 < self.reward.direction:
                yield (
                    f"{change.name} fell from {score(change.start)} to {score(change.end)} while the reward rose. Look "
                    "at the images for reward hacking."
                )
        best = max(evaluations, key=lambda point: point.metrics["reward"])
        at_end = self.reward.intervals[1]
        if at_end is not None and best.metrics["reward"] > at_end.high:
            yield (
                f"The last evaluation is below the best one, {score(best.metrics['reward'])} at iteration "
                f"{best.iteration}, which is in checkpoints/best.ckpt."
            )
        if failed := evaluations[-1].metrics.get("failed", 0):
            yield f"{amount(failed)} held-out images could not be scored at the last evaluation."

    def _alarms_of_training(self) -> Iterator[str]:
        if self.run.outcome == UNFINISHED:
            yield "The run has not written its summary: it is still running, or was killed."
        elif self.run.outcome not in ("finished", "stopped early", RUNNING):
            yield f"The run ended: {self.run.outcome}. {self.run.summary.get('reason', '')}".strip()
        newest = self.run.iterations[-1].metrics if self.run.iterations else {}
        if (share := newest.get("reward/no_spread", 0)) >= FLAT:
            yield f"{share:.0%} of the groups had equal rewards in the last iteration: little is left to learn from."
        if failed := newest.get("reward/failed", 0):
            yield f"{amount(failed)} images of the last iteration could not be scored."
        if skipped := newest.get("policy/skipped_updates", 0):
            yield f"{amount(skipped)} updates were skipped because their loss or gradient was not finite."


# --- numbers as text --------------------------------------------------------------------------------------------------


def score(value: float | None, sign: str = "") -> str:
    """Return a reward with three decimals, or five digits if it is large.

    >>> score(0.97049), score(12345.6), score(0.25, "+")
    ('0.970', '12346', '+0.250')
    """
    if value is None:
        return NONE
    return format(value, f"{sign}.3f" if abs(value) < 100 else f"{sign}.5g").replace("-", MINUS)


def brackets(found: Interval | None, sign: str = "") -> str:
    """Return an interval in brackets; empty for none."""
    return "" if found is None else f"[{score(found.low, sign)}, {score(found.high, sign)}]"


def amount(value: float | None) -> str:
    """Return a count with a comma between thousands.

    >>> amount(7680.0)
    '7,680'
    """
    return NONE if value is None else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """Return a time in its two largest units.

    >>> duration(3.21), duration(73.3), duration(7500), duration(200000)
    ('3.2 s', '1 min 13 s', '2 h 5 min', '2 d 7 h')
    """
    if seconds is None:
        return NONE
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
