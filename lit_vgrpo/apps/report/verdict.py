"""Result of a run: the held-out reward before and after, its cost, and what to check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from lit_vgrpo.apps.report import wording
from lit_vgrpo.apps.report.run_data import RUNNING, UNFINISHED, Interval, RunData, difference, interval
from lit_vgrpo.errors import counted

UNTRAINED = "untrained_reward"
FLAT = 0.9
"""Share of groups without reward spread above which there is little left to learn from."""


@dataclass(frozen=True)
class Change:
    """A held-out metric at the first and the newest evaluation.

    Attributes:
        start: ``None`` if the first evaluation lacks it.
        intervals: of both; ``None`` for a run that kept no scores.
        difference: mean change over the prompts, with its interval.
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
        before, after = (self.run.scores.get(point.iteration, {}) for point in (start, end))
        found = []
        for name in names:
            if name not in end.metrics or name in hidden:
                continue
            intervals = interval(before.get(name)), interval(after.get(name))
            if start is end:
                found.append(Change(name, None, end.metrics[name], intervals))
            else:
                paired = difference(before.get(name), after.get(name))
                found.append(Change(name, start.metrics.get(name), end.metrics[name], intervals, paired))
        return found

    @cached_property
    def reward(self) -> Change | None:
        """The weighted sum that is trained on; ``None`` without an evaluation."""
        return next((change for change in self.changes if change.name == "reward"), None)

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        reward, cost = self.reward, self._cost()
        if reward is None:
            return f"No held-out evaluation yet after {cost}."
        start, end = (
            f"{wording.reward(value)} {wording.brackets(found)}".rstrip()
            for value, found in zip((reward.start, reward.end), reward.intervals, strict=True)
        )
        if reward.start is None:
            return f"The held-out reward is {end} after {cost}."
        verb = {1: "rose from", -1: "fell from", 0: "did not change measurably:"}[reward.direction]
        change = f"{wording.reward(reward.change, '+')} {wording.brackets(reward.difference, '+')}".rstrip()
        so_far = " so far" if self.run.outcome == RUNNING else ""
        return f"Held-out reward {verb} {start} to {end}{so_far}: {change} after {cost}."

    def _cost(self) -> str:
        images, seconds, passes = (self.run.total(cost) for cost in ("images", "seconds", "passes"))
        costs = counted(self.run.num_iterations, "iteration")
        costs += f", {wording.amount(images)} images" if images is not None else ""
        costs += f", {wording.duration(seconds)}" if seconds is not None else ""
        return costs + (f", {wording.amount(passes)} network passes" if passes is not None else "")

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
                    f"{change.name} fell from {wording.reward(change.start)} to {wording.reward(change.end)} while the "
                    "reward rose. Look at the images for reward hacking."
                )
        best = max(evaluations, key=lambda point: point.metrics["reward"])
        at_end = self.reward.intervals[1]
        if at_end is not None and best.metrics["reward"] > at_end.high:
            yield (
                f"The last evaluation is below the best one, {wording.reward(best.metrics['reward'])} at iteration "
                f"{best.iteration}, which is in checkpoints/best.ckpt."
            )
        if failed := evaluations[-1].metrics.get("failed", 0):
            yield f"{wording.amount(failed)} held-out images could not be scored at the last evaluation."

    def _alarms_of_training(self) -> Iterator[str]:
        if self.run.outcome == UNFINISHED:
            yield "The run has not written its summary: it is still running, or was killed."
        elif self.run.outcome not in ("finished", "stopped early", RUNNING):
            yield f"The run ended: {self.run.outcome}. {self.run.summary.get('reason', '')}".strip()
        newest = self.run.iterations[-1].metrics if self.run.iterations else {}
        if (share := newest.get("reward/no_spread", 0)) >= FLAT:
            yield f"{share:.0%} of the groups had equal rewards in the last iteration: little is left to learn from."
        if failed := newest.get("reward/failed", 0):
            yield f"{wording.amount(failed)} images of the last iteration could not be scored."
        if skipped := newest.get("policy/skipped_updates", 0):
            yield f"{wording.amount(skipped)} updates were skipped because their loss or gradient was not finite."
