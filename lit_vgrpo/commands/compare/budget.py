"""The search that a method's tuned settings come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from lit_vgrpo.errors import unknown_option


@dataclass(frozen=True)
class Budget:
    """Budget that a sweep gave one method: an overlay's ``found:`` block.

    Attributes:
        points: Number of settings tried.
        seeds: Runs of each.
        iterations: Iterations of each run.
        prompts: Which prompts they were chosen on, and on which task.
    """

    points: int
    seeds: int
    iterations: int
    prompts: str = ""

    def __str__(self) -> str:
        seeds = "1 seed" if self.seeds == 1 else f"{self.seeds} seeds"
        points = "1 point" if self.points == 1 else f"{self.points} points"
        return f"{points} x {seeds} x {self.iterations} iterations" + (f", {self.prompts}" if self.prompts else "")

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value != ""}


def budget_errors(found: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield what is wrong with an overlay's ``found:`` block, a line each."""
    names = [one.name for one in fields(Budget)]
    numbers = names[:-1]
    yield from (
        unknown_option(f"found.{key}", where, [f"found.{n}" for n in names]) for key in found if key not in names
    )
    for name in numbers:
        value = found.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield f"{where}: found.{name}={value} must be a whole number such as 8: paste found: from sweep.md."
    if not isinstance(found.get("prompts", ""), str):
        yield f"{where}: found.prompts={found['prompts']} must be words that say what the settings were chosen on."
