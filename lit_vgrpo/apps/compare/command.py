"""``lightning compare``: train several methods on the same task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lit_vgrpo.apps.compare.options import CompareOptions
from lit_vgrpo.apps.compare.picture import draw
from lit_vgrpo.apps.compare.plan import Entrant, entrants, runs_of
from lit_vgrpo.apps.compare.progress import Status
from lit_vgrpo.apps.compare.report import write_report
from lit_vgrpo.apps.compare.results import curves_of, rows_of
from lit_vgrpo.apps.compare.runner import Stopped, locked, run_all
from lit_vgrpo.apps.compare.sweep import trials_of, write_sweep
from lit_vgrpo.errors import counted, say


def compare(options: CompareOptions) -> int:
    """Train methods from the same start; with ``--sweep``, search each method's best settings.

    Returns:
        Exit status: 0, 1 when a run failed, 2 for a mistake in what was typed or in a recipe, 130 after Ctrl-C.
    """
    found = entrants(options)
    with locked(options.out):
        runs = runs_of(options, found)
        names = [entrant.name for entrant in found]
        if options.sweep:
            names = [f"{name} {counted(n, 'point')}" for name, n in Counter(one.method for one in found).items()]
        say(
            f"{counted(len(runs), 'run')} of {counted(options.iterations, 'iteration')} ({', '.join(names)}; "
            f"seeds {', '.join(map(str, options.seeds))}), {options.jobs} at once, in {options.out}",
            error=True,
        )
        try:
            statuses = run_all(runs, options.jobs)
        except Stopped as stopped:
            say(f"Stopped. What is finished is kept; continue: {options.line}", error=True)
            return 128 + stopped.signum
        if options.sweep:
            text = write_sweep(options, trials_of(found, curves_of(statuses), options.targets))
            say(f"{text}\n\nEverything is in {options.out}: sweep.md, .json, .csv, recipes, runs, logs.")
        else:
            _write_race(options, found, statuses)
    failed = sum(status.state == "failed" for status in statuses)
    if failed:
        say(f"{failed} of {len(runs)} runs failed. The same command runs them again.", error=True)
    return 1 if failed else 0


def _write_race(options: CompareOptions, found: Sequence[Entrant], statuses: Sequence[Status]) -> None:
    budgets = {(entrant.method, entrant.settings): entrant.found for entrant in found}
    rows = rows_of(curves_of(statuses), options.targets, options.base_method, budgets)
    text = write_report(options, rows)
    count = len(options.seeds)
    title = f"{options.command.recipe.stem}: " + ("one seed" if count == 1 else f"mean and range of {count} seeds")
    draw(options.out / "compare.png", rows, options.targets, title)
    say(f"{text}\n\nEverything is in {options.out}: compare.md, .json, .csv, .png, targets.csv, recipes, runs, logs.")
