"""``lightning report``: a run, or several side by side, as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

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
from lit_vgrpo.apps.serve.options import LOOPBACK, MOST_PORT
from lit_vgrpo.config.arguments import Options, flag, is_override, option, read_path, subcommand, whole
from lit_vgrpo.errors import UserError, say
from lit_vgrpo.system.paths import write_atomically
from lit_vgrpo.training.folder import find_run

PORT = 8008


@dataclass(kw_only=True)
class ReportOptions(Options):
    """Options of ``lightning report``; the words are run folders.

    Attributes:
        out: File to write; ``None`` takes ``RUN/report.html``, or ``report.html`` here for several runs.
        serve: Show the page on this machine and refresh it while the runs go on, instead of writing a file.
        port: Port of the page; 0 takes a free one.
        runs: The run folders.
    """

    subcommand: ClassVar[str] = "report"

    out: Path | None = option(read=read_path)
    serve: bool = flag()
    port: int = whole(PORT, least=0, most=MOST_PORT)
    runs: list[Path] = field(init=False)

    def __post_init__(self) -> None:
        settings = [word for word in self.words if is_override(word) and not Path(word).exists()]
        if settings:
            raise UserError(f"{settings[0]} has no effect on a report. Give run folders only.")
        if not self.words:
            raise UserError("No run given. Try: lightning report runs/tiny_shapes")
        if self.serve and self.out is not None:
            raise UserError("--serve writes no file. Leave out --out, or --serve.")
        if self.has("port") and not self.serve:
            raise UserError("--port has no effect without --serve. Add --serve.")
        self.runs = [find_run(word)[0] for word in self.words]


@subcommand(ReportOptions)
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
    with listening_socket(LOOPBACK, options.port) as listener:
        from lit_vgrpo.apps.report.live import serve_report

        serve_report(listener, lambda: read_runs(options.runs), options.runs)
    return 0
