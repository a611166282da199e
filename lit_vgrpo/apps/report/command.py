"""``lightning report``: one run, or several side by side, as an HTML file or as a page that follows them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_vgrpo.config.recipe import find_runs, is_override
from lit_vgrpo.errors import UserError, say, wrapped
from lit_vgrpo.options import Report
from lit_vgrpo.report.page import MARK, render
from lit_vgrpo.report.run_data import IMAGES_NAME, KEPT, REPORT_NAME, SCORES_NAME, by_task, read_run
from lit_vgrpo.report.verdict import Verdict
from lit_vgrpo.system.paths import write_atomically
from lit_vgrpo.system.sockets import LOOPBACK, listening_socket, require_packages

WATCHED = ("metrics.csv", "summary.json", "samples", f"{KEPT}/{SCORES_NAME}", f"{KEPT}/{IMAGES_NAME}")


def report(options: Report) -> int:
    """Write or serve the report of runs: ``RUN [RUN ...] [--out FILE.html] [--serve] [--port 8008]``."""
    if settings := [word for word in options.words if is_override(word)]:
        raise UserError(f"{settings[0]} has no effect on a report. Give run folders only.")
    folders = list(dict.fromkeys(folder for word in options.words for folder in find_runs(word)))
    runs = [read_run(folder) for folder in folders]
    if options.serve:
        require_packages()
        from lit_vgrpo.system.server import BACKLOG, serve_page

        with listening_socket(LOOPBACK, options.port) as listener:
            listener.listen(BACKLOG)
            address = f"http://{LOOPBACK}:{listener.getsockname()[1]}/"
            serve_page(make_app(folders), listener, [f"Report at {address} on this machine only. Ctrl-C stops it."])
        say("Stopped.")
        return 0
    out = options.out or (folders[0] / REPORT_NAME if len(runs) == 1 else Path(REPORT_NAME))
    if out.exists() and not (out.is_file() and out.read_bytes().startswith(MARK.encode())):
        raise UserError(f"{out} exists and is not a report. Give another --out FILE.html.")
    write_atomically(out, render(runs))
    groups, apart = by_task(runs)
    if len(groups) > 1:
        say(apart)
    for group in groups:
        if len(groups) > 1:
            say(f"--- {', '.join(run.name for run in group)}")
        verdicts = [Verdict(run) for run in group]
        for verdict in sorted(verdicts, key=lambda one: one.reward.end if one.reward else -math.inf, reverse=True):
            run = verdict.run
            say(wrapped(f"{run.folder}: {verdict.sentence}") if len(runs) == 1 else f"{run.folder}: {verdict.brief}")
            if len(runs) == 1:
                say(wrapped(f"Did it cheat? {verdict.cheating.words}"))
            for line in run.left_out:
                say(f"Left out: {line}", error=True)
    size = out.stat().st_size
    say(f"Written: {out} ({f'{size / 1e3:.0f} kB' if size < 1e6 else f'{size / 1e6:.1f} MB'})")
    return 0


def make_app(folders: Sequence[Path]) -> Any:
    """Return the server of runs' report at ``/``, and at ``/version`` of a text that changes with their files."""
    from fastapi.responses import HTMLResponse, PlainTextResponse

    from lit_vgrpo.system.server import bounded_app

    app = bounded_app(max_body_size=0, is_local=True)

    @app.get("/", response_class=HTMLResponse)
    def page() -> HTMLResponse:
        headers = {"Cache-Control": "no-store", "X-Frame-Options": "DENY"}
        try:
            return HTMLResponse(render([read_run(folder) for folder in folders], live=True), headers=headers)
        except UserError as error:  # a file is being written, or is damaged
            return HTMLResponse(str(error), 503, headers={**headers, "Refresh": "3", "Content-Type": "text/plain"})

    @app.get("/version", response_class=PlainTextResponse)
    def version() -> PlainTextResponse:
        files = [folder / name for folder in folders for name in WATCHED]
        stats = [file.stat() for file in files if file.exists()]
        text = "-".join(f"{stat.st_mtime_ns:x}.{stat.st_size:x}" for stat in stats)
        return PlainTextResponse(text, headers={"Cache-Control": "no-store"})

    return app
