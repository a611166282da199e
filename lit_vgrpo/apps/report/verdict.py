"""Opening of a report: the held-out reward before and after, what it cost, and what to worry about."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf, isclose

from lit_vgrpo.apps.report import wording
from lit_vgrpo.apps.report.kept import Interval, difference, interval
from lit_vgrpo.apps.report.run_data import RUNNING, UNFINISHED, Point, RunData

UNTRAINED = "untrained_reward"
FLAT = 0.9
"""Share of groups without reward spread from which on there is little left to learn from."""
GOOD_ENDS = ("finished", "stopped early", RUNNING)


@dataclass(frozen=True)
class Change:
    """A held-out metric at the first and the newest evaluation.

    Attributes:
        start: None where the first evaluation lacks it.
        intervals: of both; ``None`` for a run that kept no scores.
        difference: mean change of the prompts, with its interval.
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
        """1 or -1 where the interval of the change, or without one the change, is above or below 0; else 0."""
        low, high = (self.difference.low, self.difference.high) if self.difference else (self.change or 0.0,) * 2
        return 1 if low > 0 else -1 if high < 0 else 0


class Verdict:
    """The result of a run."""

    def __init__(self, run: RunData) -> None:
        self.run = run

    @cached_property
    def changes(self) -> list[Change]:
        """The weighted sum, the untrained sum where there is one, then every reward that is not it and other metric."""
        if not self.run.evaluations:
            return []
        start, end = self.run.evaluations[0], self.run.evaluations[-1]
        rewards = self.run.reward_names
        is_sum = len(rewards) == 1 and all(_is_sum(rewards[0], point) for point in (start, end))
        hidden = ["failed", *(rewards if is_sum else [])]
        first = [name for name in ("reward", UNTRAINED, *rewards) if name in end.metrics and name not in hidden]
        names = [*first, *sorted(name for name in end.metrics if name not in (*first, *hidden))]
        before, after = (self.run.scores.get(point.iteration, {}) for point in (start, end))
        found = []
        for name in names:
            # Where one of them is missing, the other is of other prompts or of an earlier part of the run.
            own = (before.get(name), after.get(name))
            intervals = (interval(own[0]) if own[0] else None, interval(own[1]) if own[1] else None)
            paired = difference(own[0], own[1]) if own[0] and own[1] and start is not end else None
            earlier = start.metrics.get(name) if start is not end else None
            found.append(Change(name, earlier, end.metrics[name], intervals, paired))
        return found

    @cached_property
    def reward(self) -> Change | None:
        """The weighted sum that is trained on; ``None`` without an evaluation."""
        return next((change for change in self.changes if change.name == "reward"), None)

    @property
    def sentence(self) -> str:
        """The result in a sentence or two."""
        reward, run = self.reward, self.run
        after = self._cost()
        if reward is None:
            return f"No held-out evaluation yet {after}."
        if reward.start is None:
            where = wording.brackets(reward.intervals[1])
            return f"The held-out reward is {wording.reward(reward.end)}{where and ' ' + where} {after}."
        verb = {1: "rose", -1: "fell", 0: "did not change measurably:"}[reward.direction]
        pairs = zip((reward.start, reward.end), reward.intervals, strict=True)
        start, end = (f"{wording.reward(value)} {wording.brackets(found)}".strip() for value, found in pairs)
        change = wording.reward(reward.change, "+")
        margin = f" {wording.brackets(reward.difference, '+')}" if reward.difference else ""
        link = "from" if reward.direction else ""
        so_far = " so far" if run.outcome == RUNNING else ""
        return f"Held-out reward {verb} {link} {start} to {end}{so_far}: {change}{margin} {after}.".replace("  ", " ")

    def _cost(self) -> str:
        run = self.run
        costs = [f"{wording.amount(run.num_iterations)} iteration{'s' * (run.num_iterations != 1)}"]
        images, seconds, passes = (run.total(cost) for cost in ("images", "seconds", "passes"))
        costs += [f"{wording.amount(images)} images"] if images is not None else []
        costs += [wording.duration(seconds)] if seconds is not None else []
        costs += [f"{wording.amount(passes)} network passes"] if passes is not None else []
        return "after " + (", ".join(costs[:-1]) + " and " + costs[-1] if len(costs) > 1 else costs[0])

    @property
    def has_intervals(self) -> bool:
        return any(found is not None for change in self.changes for found in change.intervals)

    @cached_property
    def alarms(self) -> list[str]:
        """Alarms, a sentence each."""
        return list(self._alarms())

    def _alarms(self) -> Iterator[str]:
        run, reward = self.run, self.reward
        if run.outcome == UNFINISHED:
            yield "The run has not written its summary: it is still running, or was killed."
        elif run.outcome not in GOOD_ENDS:
            yield f"The run ended: {run.outcome}. {run.summary.get('reason', '')}".strip()
        if reward is not None and reward.direction < 0:
            yield "The held-out reward fell."
        for change in self.changes:
            falls = change.name in (UNTRAINED, *run.reward_names) and change.direction < 0
            if falls and change.difference and reward is not None and reward.direction > 0:
                yield (
                    f"{change.name} fell from {wording.reward(change.start)} to {wording.reward(change.end)} while the "
                    "reward rose. Look at the images for reward hacking."
                )
        yield from self._of_evaluations()
        yield from self._of_training()

    def _of_evaluations(self) -> Iterator[str]:
        evaluations = [point for point in self.run.evaluations if "reward" in point.metrics]
        if not evaluations:
            return
        best, end = max(evaluations, key=lambda point: point.metrics["reward"]), evaluations[-1]
        own = self.reward.intervals[1] if self.reward is not None else None
        if own is not None and best.metrics["reward"] > own.high:
            yield (
                f"The last evaluation is below the best one, {wording.reward(best.metrics['reward'])} at iteration "
                f"{best.iteration}, which checkpoints/best.ckpt holds."
            )
        failed = end.metrics.get("failed", 0)
        if failed:
            yield f"{wording.amount(failed)} held-out images could not be scored at the last evaluation."

    def _of_training(self) -> Iterator[str]:
        newest = self.run.iterations[-1].metrics if self.run.iterations else {}
        if newest.get("reward/no_spread", 0) >= FLAT:
            share = newest["reward/no_spread"]
            yield f"{share:.0%} of the groups had equal rewards in the last iteration: little is left to learn from."
        if newest.get("reward/failed", 0):
            yield f"{wording.amount(newest['reward/failed'])} images of the last iteration could not be scored."
        if newest.get("policy/skipped_updates", 0):
            skipped = wording.amount(newest["policy/skipped_updates"])
            yield f"{skipped} updates were left out: their loss or gradient was not finite."


def _is_sum(reward: str, point: Point) -> bool:
    """Return True if a reward's mean is the weighted sum's, as far as the table's digits tell."""
    return isclose(point.metrics.get(reward, inf), point.metrics.get("reward", -inf), rel_tol=1e-5, abs_tol=1e-6)
