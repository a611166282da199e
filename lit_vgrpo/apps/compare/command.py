"""``lightning compare``: train several methods on the same task."""

from __future__ import annotations

from lit_vgrpo.apps.compare.options import CompareOptions
from lit_vgrpo.apps.compare.plan import entrants, runs_of
from lit_vgrpo.apps.compare.report import Curve, write_race, write_sweep
from lit_vgrpo.apps.compare.runner import Stopped, locked, run_all
from lit_vgrpo.errors import counted, say
from lit_vgrpo.options import Compare
from lit_vgrpo.system.paths import typed_path


def compare(typed: Compare) -> int:
    """Train methods from the same start, or, with ``--sweep``, search for their settings; return 1 if a run failed."""
    options = CompareOptions(**vars(typed))
    chosen = entrants(options)
    with locked(typed_path(options.out)):
        runs = runs_of(options, chosen)
        size = f"{counted(len(runs), 'run')} of {counted(options.iterations, 'iteration')}"
        say(f"{size}, {options.jobs} at a time, in {options.out}", error=True)
        try:
            errors = run_all(runs, options.jobs)
        except Stopped as stopped:
            say(f"Stopped. Finished runs are kept; continue: {options.line}", error=True)
            return 128 + int(stopped.args[0])
        curves = [Curve.of(run, errors.get(run.name, "")) for run in runs]
        write = write_sweep if options.sweep else write_race
        say(f"{write(options, chosen, curves)}\n\nAll files are in {options.out}.")
    if errors:
        say(f"{len(errors)} of {len(runs)} runs failed. Run the same command to retry them.", error=True)
    return 1 if errors else 0
