"""Result of a run: the held-out reward before and after, signs of cheating, cost and problems; numbers as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lit_vgrpo.config.tree import class_name
from lit_vgrpo.core.records import FINGERPRINT
from lit_vgrpo.errors import counted, decimals_of, score_with
from lit_vgrpo.metrics.looks import ACROSS, DISTANCE, SATURATION, SHARPNESS, WITHIN
from lit_vgrpo.report.run_data import RUNNING, UNFINISHED, Interval, Point, RunData, difference, interval

UNTRAINED = "untrained_reward"
NONE, MINUS = "\u2013", "\u2212"
FLAT = 0.9
"""Share of groups without reward spread above which there is little left to learn from."""
SIGNS = {
    ACROSS: (0.6, float("inf"), "images of different prompts became alike", ""),
    SHARPNESS: (0.5, 2.0, "images became blurred", "images became noisy or hard-edged"),
    SATURATION: (0.5, 2.0, "colours faded", "colours became oversaturated"),
}
"""Smallest and largest ratio to the start that is no sign of cheating, and the signs below and above them."""
MEANING = {
    UNTRAINED: "Untrained reward",
    ACROSS: "Difference between prompts",
    WITHIN: "Difference between a prompt's images",
    SHARPNESS: "Sharpness",
    SATURATION: "Saturation",
    DISTANCE: "Difference from the start, same noise",
}
LEAST_CHANGE = 0.01
"""Smaller changes of these metrics, which are in [0, 1], are never a sign."""
HELP = "docs/when_it_goes_wrong.md"
ADVICE = "add model.untrained_reward, such as CLIPScore"


def signs(start: Mapping[str, float], end: Mapping[str, float]) -> list[str]:
    """Return the signs of reward hacking in held-out metrics, named without ``heldout/``.

    >>> signs({"saturation": 0.1}, {"saturation": 0.3})
    ['colours became oversaturated']
    """
    result = []
    for name, (least, most, below, above) in SIGNS.items():
        before, after = start.get(name), end.get(name)
        if before is not None and after is not None and abs(after - before) >= LEAST_CHANGE:
            result += [below] if after < least * before else [above] if after > most * before else []
    return result


def limits() -> str:
    """Return the limits of :func:`signs` in a sentence.

    >>> limits()[:80]
    'Signs of cheating, as ratios to the start: difference between prompts below 0.6;'
    """
    texts = [
        f"{MEANING[name].lower()} below {least:g}" + (f" or above {most:g}" if math.isfinite(most) else "")
        for name, (least, most, *_) in SIGNS.items()
    ]
    usual = "Images of one prompt usually become more alike: that is no sign."
    return f"Signs of cheating, as ratios to the start: {'; '.join(texts)}. {usual}"


@dataclass(frozen=True)
class Cheating:
    """Answer to "Did it cheat?": is the rise of the reward due to reward hacking?

    Attributes:
        is_likely: True if the reward rose and there are signs of it.
        words: The answer in one or two sentences.
        signs: What changed, such as "images became blurred".
    """

    is_likely: bool
    words: str
    signs: list[str]


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
        """The mean over the prompts that were scored in both, if their scores were kept."""
        if self.start is None:
            return None
        return self.difference.mean if self.difference else self.end - self.start

    def is_like(self, other: Change) -> bool:
        """Return whether both have the same values, up to rounding."""
        pairs = ((self.start, other.start), (self.end, other.end))
        return all(a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=1e-6)) for a, b in pairs)

    @property
    def ends(self) -> list[str]:
        """The start, if there is one, and the end, as text, all with their intervals or none."""
        both = [(self.start, self.intervals[0])] * (self.start is not None) + [(self.end, self.intervals[1])]
        known = all(brackets(ends) for _, ends in both)
        texts = [" ".join(cell if known else cell[:1]) for cell in self.cells]
        return texts[2 - len(both) : 2]

    @property
    def cells(self) -> list[tuple[str, str]]:
        """Start, end and change, each with its interval, as text with the same decimals."""
        of = decimals_of([self.start, self.end])
        ends = zip(("", "", "+"), (self.start, self.end, self.change), (*self.intervals, self.difference), strict=True)
        return [(score(value, sign, of), brackets(interval, sign, of)) for sign, value, interval in ends]

    @property
    def direction(self) -> int:
        """1 or -1 if the change, or its interval if there is one, is above or below 0; 0 if both ends print alike."""
        if self.cells[0][0] == self.cells[1][0]:
            return 0
        low, high = (self.difference.low, self.difference.high) if self.difference else (self.change or 0.0,) * 2
        return 1 if low > 0 else -1 if high < 0 else 0


@dataclass(eq=False)
class Verdict:
    """Result of a run."""

    run: RunData

    @cached_property
    def compared(self) -> list[Point]:
        """The evaluations that can be compared with the newest one, without those in which no image was scored."""
        return [point for point in self.run.comparable if "reward" in point.metrics] or self.run.comparable

    @cached_property
    def changes(self) -> list[Change]:
        """The trained reward, the untrained reward, each of several rewards, then other metrics."""
        if not self.run.evaluations:
            return []
        start, end = self.compared[0], self.compared[-1]
        rewards = self.run.reward_names
        names = dict.fromkeys([*("reward", UNTRAINED, *rewards), *sorted(end.metrics)])
        changes: list[Change] = []
        for name in names:
            if name not in end.metrics or name in ("failed", "reward_std", FINGERPRINT):
                continue
            before, after = (self.run.scores_at(point).get(name) for point in (start, end))
            first, before = (None, None) if start is end else (start.metrics.get(name), before)
            both = interval(before), interval(after)
            change = Change(name, first, end.metrics[name], both, difference(before, after))
            if name not in rewards or not any(map(change.is_like, changes[:2])):  # a sum of one reward is that reward
                changes.append(change)
        return changes

    @cached_property
    def reward(self) -> Change | None:
        """The trained reward; ``None`` without an evaluation."""
        return next((change for change in self.changes if change.name == "reward"), None)

    @property
    def unmoved(self) -> str:
        """A sentence on the rewards that did not rise, if the trained reward has several; else empty."""
        names = self.run.reward_names if len(self.run.reward_names) > 1 else []
        compared = [change for change in self.changes if change.name in names and change.start is not None]
        lagging = [change.name for change in compared if change.direction <= 0]
        return f"Did not rise measurably: {listed(lagging)}." if lagging else ""

    @cached_property
    def cheating(self) -> Cheating:
        """The answer to "Did it cheat?", which the page, the headline, the summary and the model card repeat."""
        if self.reward is None or self.reward.start is None or self.compared[0].iteration:
            is_changed = len(self.run.comparable) < len(self.run.evaluations)
            why = " Earlier ones had other prompts, settings or rewards." if is_changed else ""
            return Cheating(False, f"Not checked: that needs an evaluation at the start and a later one.{why}", [])
        start, end = self.compared[0].metrics, self.compared[-1].metrics
        image_signs = signs(start, end)
        other = next((change for change in self.changes if change.name == UNTRAINED and change.start is not None), None)
        if other is not None and other.direction < 0:
            image_signs.append("the untrained reward fell")
        unchecked = "" if other is not None else f" Not checked with another reward: {ADVICE}."
        if self.reward.direction <= 0:
            after = f", but {listed(image_signs)}" if image_signs else ", so there is nothing to check"
            return Cheating(False, f"The reward did not rise measurably{after}.", image_signs)
        if image_signs:
            return Cheating(True, f"Probably: the reward rose, and {listed(image_signs)}.{unchecked}", image_signs)
        if ACROSS not in start or ACROSS not in end:
            return Cheating(False, "Not checked: the images were not measured.", image_signs)
        if other is None:
            words = "No sign of it in the images: those of different prompts still differ."
            return Cheating(False, f"{words}{unchecked}", image_signs)
        course = "rose too," if other.direction > 0 else "did not fall measurably:"
        values = f"{other.cells[0][0]} before, {other.cells[1][0]} after"
        words = f"images of different prompts still differ, and the untrained reward {course} {values}."
        return Cheating(False, f"No sign of it: {words}", image_signs)

    @property
    def evidence(self) -> list[Change]:
        """The metrics behind :attr:`cheating`."""
        by_name = {change.name: change for change in self.changes}
        return [by_name[name] for name in MEANING if name in by_name]

    @property
    def method(self) -> str:
        """Class name of the training method; empty if unknown."""
        return class_name((self.run.recipe.get("model") or {}).get("objective"))

    @property
    def unseen(self) -> str:
        """Class name of the untrained reward; empty if unknown."""
        return class_name((self.run.recipe.get("model") or {}).get("untrained_reward"))

    @property
    def headline(self) -> str:
        """The result without numbers."""
        ended = {"failed": "failed", "interrupted": "was interrupted"}.get(self.run.outcome)
        if ended is not None:
            done = self.run.num_iterations
            last = f", last evaluated {self.evaluated}" if self.reward and self.compared[-1].iteration != done else ""
            return f"The run {ended} after {counted(done, 'iteration')}{last}"
        if self.reward is None:
            return "No held-out evaluation yet"
        if self.reward.start is None:
            return "Held-out reward, evaluated once"
        course = {1: "rose", -1: "fell", 0: "did not change measurably"}[self.reward.direction]
        so_far = " so far" if self.run.outcome == RUNNING else ""
        return f"Reward {course}{so_far}{self._and_signs}"

    @property
    def _and_signs(self) -> str:
        return f", and {self.cheating.signs[0]}" if self.cheating.is_likely else ""

    @property
    def evaluated(self) -> str:
        """When the newest evaluation was made."""
        at = self.compared[-1].iteration
        return f"after {counted(at, 'iteration')}" if at else "before training"

    @property
    def brief(self) -> str:
        """The result in a line, for a list of runs."""
        if self.reward is None:
            return f"{self.headline}."
        return f"{self.headline}: {' to '.join(self.reward.ends)} {self.evaluated}."

    @property
    def change(self) -> str:
        """The reward's change and its interval; empty with one evaluation."""
        return "" if self.reward is None or self.reward.change is None else " ".join(self.reward.cells[2]).rstrip()

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        reward, run = self.reward, self.run
        images, seconds, passes = (run.total(cost) for cost in ("images", "seconds", "passes"))
        cost = counted(run.num_iterations, "iteration")
        cost += "" if images is None else f", {amount(images)} images"
        cost += "" if seconds is None else f", {duration(seconds)}"
        cost += "" if passes is None else f", {amount(passes)} network passes"
        if reward is None:
            return f"No held-out evaluation yet after {cost}."
        is_newest = self.compared[-1].iteration == run.num_iterations
        when = f"after {cost}" if is_newest else f"{self.evaluated}, not evaluated since; the run has {cost}"
        *start, end = reward.ends
        if not start:
            return f"Held-out reward {end} {when}."
        at = f" at iteration {first}" if (first := self.compared[0].iteration) else ""
        verb = {1: "rose from", -1: "fell from", 0: "did not change measurably:"}[reward.direction]
        so_far = " so far" if run.outcome == RUNNING else ""
        return f"Held-out reward {verb} {start[0]}{at} to {end}{so_far}{self._and_signs}: {self.change} {when}."

    @property
    def help(self) -> list[str]:
        """Links to the sections of the troubleshooting page that apply to this result."""
        run, direction = self.run, self.reward.direction if self.reward and self.reward.start is not None else 1
        newest = run.iterations[-1].metrics if run.iterations else {}
        is_flat = direction == 0 or newest.get("reward/no_spread", 0) >= FLAT
        sections = {
            "the-reward-falls-or-all-images-look-alike": direction < 0 or run.outcome in ("diverged", "collapsed"),
            "the-reward-rises-but-the-images-got-worse": self.cheating.is_likely or run.summary.get("alarms"),
            "the-reward-does-not-move": is_flat and run.outcome != RUNNING,
            "out-of-memory": "out of memory" in str(run.summary.get("reason")).lower(),
            "it-hangs": run.outcome == UNFINISHED,
        }
        return [f"{HELP}#{section}" for section, applies in sections.items() if applies]

    @cached_property
    def alarms(self) -> list[str]:
        """One sentence for each problem."""
        left_out = [f"Left out: {line}" for line in self.run.left_out]
        return [*self._alarms_of_training(), *self._alarms_of_evaluations(), *left_out]

    def _alarms_of_evaluations(self) -> Iterator[str]:
        newest = self.run.evaluations[-1].metrics if self.run.evaluations else {}
        if failed := newest.get("failed", 0):
            yield f"{amount(failed)} held-out images could not be scored at the last evaluation."
        if self.reward is None:
            return
        if self.reward.direction < 0:
            yield "The held-out reward fell."
        names = () if self.cheating.is_likely else (UNTRAINED, *self.run.reward_names)
        for change in self.changes:
            if change.name in names and change.difference and change.direction < 0 < self.reward.direction:
                fall = f"{change.name} fell from {change.cells[0][0]} to {change.cells[1][0]}"
                yield f"{fall} while the reward rose. Look at the images for reward hacking."
        best = max(self.compared, key=lambda point: point.metrics["reward"])
        at_end = self.reward.intervals[1]
        if at_end is not None and best.metrics["reward"] > at_end.high:
            where = f"{score(best.metrics['reward'])} at iteration {best.iteration}"
            yield f"The last evaluation is below the best one, {where}, which is in checkpoints/best.ckpt."

    def _alarms_of_training(self) -> Iterator[str]:
        if self.run.outcome == UNFINISHED:
            yield "The run has not written its summary: it is still running, or was killed."
        elif self.run.outcome not in ("finished", "stopped early", RUNNING):
            yield f"The run ended: {self.run.outcome}. {self.run.summary.get('reason', '')}".strip()
        newest = self.run.iterations[-1].metrics if self.run.iterations else {}
        if (share := newest.get("reward/no_spread", 0)) >= FLAT:
            yield f"{share:.0%} of the groups had equal rewards in the last iteration, so little is left to learn."
        if failed := newest.get("reward/failed", 0):
            yield f"{amount(failed)} images of the last iteration could not be scored."
        if skipped := newest.get("policy/skipped_updates", 0):
            yield f"{amount(skipped)} updates were skipped because their loss or gradient was not finite."


# --- numbers as text --------------------------------------------------------------------------------------------------


def listed(parts: list[str]) -> str:
    """Join parts with commas and "and".

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def score(value: float | None, sign: str = "", decimals: int | None = None) -> str:
    """Return a reward as text, with these decimals if given, or a dash for none.

    >>> score(-0.000742), score(-0.000742, "+", 3), score(-0.0001, "+", 3)
    ('\u22120.000742', '\u22120.001', '+0.000')
    """
    if value is None:
        return NONE
    return score_with(value, sign, decimals).replace("-", MINUS)


def brackets(ends: Interval | None, sign: str = "", decimals: int | None = None) -> str:
    """Return an interval in brackets; empty for none, or that of a single prompt."""
    if ends is None or math.isnan(ends.low):
        return ""
    return f"[{score(ends.low, sign, decimals)}, {score(ends.high, sign, decimals)}]"


def column(values: Sequence[float | None]) -> list[str]:
    """Return a table's column of rewards as text with the same decimals.

    >>> column([0.0, 0.00999, 0.136])
    ['0.000', '0.010', '0.136']
    """
    of = decimals_of(values)
    return [score(value, "", of) for value in values]


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
