"""``lightning report``: a run, or several side by side, as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lit_vgrpo.apps.report.kept import REPORT_NAME
from lit_vgrpo.apps.report.page import MARK, render
from lit_vgrpo.apps.report.run_data import RunData, read_run
from lit_vgrpo.apps.report.tasks import (
    existing_report,
    refuse_different_tasks,
    refuse_without_evaluations,
    summary_line,
)
from lit_vgrpo.apps.serve.listening import listening_socket, require_packages
from lit_vgrpo.apps.serve.options import LOOPBACK
from lit_vgrpo.config.recipe import is_override
from lit_vgrpo.errors import UserError, say
from lit_vgrpo.system.paths import write_atomically
from lit_vgrpo.training.saved_run import find_run

PORT = 8008


@dataclass(kw_only=True)
class ReportOptions:
    """Options of ``lightning report``, whose help describes the first ones.

    Attributes:
        words: Names of the runs.
        runs: The run folders.
    """

    words: Sequence[str]
    out: Path | None = None
    serve: bool = False
    port: int | None = None
    runs: list[Path] = field(init=False)

    def __post_init__(self) -> None:
        settings = [word for word in self.words if is_override(word) and not Path(word).exists()]
        if settings:
            raise UserError(f"{settings[0]} has no effect on a report. Give run folders only.")
        if self.serve and self.out is not None:
            raise UserError("--serve writes no file. Leave out --out, or --serve.")
        if self.port is not None and not self.serve:
            raise UserError("--port has no effect without --serve. Add --serve.")
        self.runs = [find_run(word)[0] for word in self.words]


def report(options: ReportOptions) -> int:
    """Write or serve the report of runs: ``RUN [RUN ...] [--out FILE.html] [--serve] [--port 8008]``."""
    if options.serve:
        return _serve(options)
    runs = read_runs(options.runs)
    out = options.out or (options.runs[0] / REPORT_NAME if len(runs) == 1 else Path(REPORT_NAME))
    if out.is_dir():
        raise UserError(f"--out {out} is a folder. Use --out {out / REPORT_NAME}.")
    if not out.parent.is_dir():
        raise UserError(f"--out {out} is in no folder that exists. Make {out.parent} first.")
    if out.exists() and not existing_report(out, MARK):
        raise UserError(f"{out} exists and is not a report. Give another --out FILE.html.")
    write_atomically(out, render(runs))
    for run in runs:
        say(summary_line(run))
    say(f"Written: {out} ({out.stat().st_size / 1e6:.1f} MB)")
    return 0


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """Return the data of runs that a report can show together.

    Raises:
        UserError: a run cannot be read or has no evaluation, or the runs are of different tasks.
    """
    runs = [read_run(folder) for folder in folders]
    refuse_without_evaluations(runs)
    refuse_different_tasks(runs)
    return runs


def _serve(options: ReportOptions) -> int:
    require_packages()
    read_runs(options.runs)
    with listening_socket(LOOPBACK, PORT if options.port is None else options.port) as listener:
        from lit_vgrpo.apps.report.live import serve_report

        serve_report(listener, lambda: read_runs(options.runs), options.runs)
    return 0
