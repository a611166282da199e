"""``lightning report --serve``: a page on loopback that follows its run; and the page that a run writes itself."""

import json
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import pytest
from commands import report, run
from conftest import tiny_recipe_of
from fastapi.testclient import TestClient
from processes import PYTHON
from saved_runs import assert_one_line, folder_with, train

from lit_vgrpo.apps.report.command import read_runs
from lit_vgrpo.apps.report.live import LivePage, make_app
from lit_vgrpo.apps.report.selection import choose
from lit_vgrpo.callbacks import Report
from lit_vgrpo.launch.build import build

RUN = Path("runs/tiny")


@pytest.fixture(scope="module")
def ran(tmp_path_factory, tiny_sd3):
    """A folder with a finished run."""
    place = tmp_path_factory.mktemp("live")
    with folder_with(place, tiny_recipe_of(tiny_sd3), tiny_sd3, []):
        train("trainer.max_epochs=3")
    return place


@pytest.fixture
def finished(ran, tmp_path, monkeypatch):
    """A copy of it as the working directory, and its run in there."""
    shutil.copytree(ran, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return RUN


def test_the_page_changes_with_its_run(finished):
    client = TestClient(make_app(LivePage(lambda: read_runs([RUN]), [RUN])), base_url="http://127.0.0.1")
    first, version = client.get("/"), client.get("/version").text
    assert first.status_code == 200
    assert "<body data-live>" in first.text
    assert "after 3\u00a0iterations" in first.text or "after 3 iterations" in first.text
    assert client.get("/version").text == version
    assert client.get("/").text is not None
    table = finished / "metrics.csv"
    rows = table.read_text().splitlines(keepends=True)
    (finished / "summary.json").unlink()
    epoch = rows[0].rstrip("\n").split(",").index("epoch")
    cells = rows[-1].split(",")
    table.write_text("".join([*rows, ",".join([*cells[:epoch], "3", *cells[epoch + 1 :]])]))
    assert client.get("/version").text != version
    assert "after 4 iterations" in client.get("/").text
    table.write_text("damaged")
    assert "after 4 iterations" in client.get("/").text
    assert client.get("/docs").status_code == 404
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 400


def test_it_is_served_on_loopback_until_it_is_stopped(finished):
    command = [PYTHON, "-m", "lit_vgrpo", "report", str(RUN), "--serve", "--port=0"]
    before = (finished / "report.html").read_bytes()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            line = server.stdout.readline()
            assert "Report at http://127.0.0.1:" in line
            address = line.split()[2]
            assert "Held-out reward" in httpx.get(address).text
        finally:
            server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=60)
    assert (server.returncode, out, err) == (0, "Stopped.\n", "")
    assert (finished / "report.html").read_bytes() == before


def test_a_port_in_use_is_refused(finished, capsys):
    capsys.readouterr()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = f"Cannot listen on 127.0.0.1:{port}: Address already in use. Use another --port, or 0 for a free one."
        assert_one_line(report, [str(RUN), "--serve", f"--port={port}"], capsys, line)
    assert_one_line(report, [str(RUN), "--serve", "--out=a.html"], capsys, "--serve writes no file")


# --- the page that a run writes --------------------------------------------------------------------------------------


def test_a_run_refreshes_its_page_and_ends_with_that_of_the_command(tiny_recipe, monkeypatch):
    monkeypatch.setattr("lit_vgrpo.callbacks.report.MOST_SHARE", 1e6)  # however long a page takes
    seen = []
    of_report = Report.on_train_epoch_start

    def watched(self, trainer, module):
        of_report(self, trainer, module)
        seen.append((RUN / "report.html").read_text())

    monkeypatch.setattr(Report, "on_train_epoch_start", watched)
    assert run(["tiny.yaml", "trainer.max_epochs=3"]) == 0
    assert len(seen) == 3
    assert "after 0 iterations" in seen[0]
    assert "so far" in seen[2]
    assert "after 2 iterations" in seen[2]
    own = (RUN / "report.html").read_text()
    assert report([str(RUN)]) == 0
    assert (RUN / "report.html").read_text() == own
    assert "so far" not in own
    assert not list(RUN.glob("*.tmp"))


@pytest.mark.parametrize("when", ["end", "never"])
def test_it_may_be_written_at_the_end_alone_or_never(tiny_recipe, when, monkeypatch):
    written = []
    monkeypatch.setattr("lit_vgrpo.callbacks.report.write_report", lambda *words: written.append(words))
    assert (
        run(["tiny.yaml", f"trainer.callbacks+={{class_path: Report, init_args: {{when: {when}, kept_images: 0}}}}"])
        == 0
    )
    assert len(written) == (when == "end")
    assert (RUN / "report").exists() == (when == "end")
    assert not list(RUN.glob("report/*.png"))


def test_a_page_that_cannot_be_written_only_warns(tiny_recipe, monkeypatch):
    def broken(*words):
        raise RuntimeError("no page today")

    monkeypatch.setattr("lit_vgrpo.callbacks.report.write_report", broken)
    with pytest.warns(UserWarning, match="No report: RuntimeError: no page today. Training is not affected."):
        assert run(["tiny.yaml", "trainer.max_epochs=1"]) == 0
    assert (RUN / "summary.json").exists()


def test_a_run_that_fails_has_a_page_of_how_far_it_came(tiny_recipe, monkeypatch, capsys):
    Path("bad.py").write_text(
        "calls = []\n\ndef score(images, prompts):\n    calls.append(1)\n"
        "    if len(calls) > 3:\n        raise ValueError('out of order')\n"
        "    return [0.1 * number for number in range(len(images))]\n"
    )
    assert run(["tiny.yaml", "model.reward=python:bad:score", "trainer.max_epochs=9"]) == 1
    text = (RUN / "report.html").read_text()
    assert "The run ended: failed." in text


def test_a_resumed_run_keeps_the_scores_of_its_start(tiny_recipe):
    assert run(["tiny.yaml", "trainer.max_epochs=1"]) == 0
    assert run([str(RUN / "config.yaml"), "--resume", "trainer.max_epochs=2"]) == 0
    lines = [json.loads(line) for line in (RUN / "report" / "scores.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    text = (RUN / "report.html").read_text()
    assert "95 % bootstrap intervals" in text
    shutil.rmtree(RUN / "report")


def test_the_report_comes_after_the_callbacks_whose_files_it_shows(tiny_recipe):
    cli = build(["tiny.yaml", "trainer.callbacks=[Report, {class_path: SampleGrid}]"], make_folder=False)
    names = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert names.index("Report") > max(names.index("SampleGrid"), names.index("RunSummary"))
    assert names.count("Report") == 1


# --- the choice of images --------------------------------------------------------------------------------------------


def test_images_are_chosen_by_their_scores():
    nan = float("nan")
    scores = {
        "reward": [0.1, 0.9, nan, 0.5, 0.4, 0.6],
        "a": [0.0, 1.0, 0.5, 0.2, 0.4, 0.6],
        "b": [0.0, 0.1, 0.5, 0.9, nan, 0.6],
    }
    prompts = list("uvwxyz")
    chosen = choose(scores, prompts, range(6), 2)
    reasons = {reason: [c.image for c in chosen if c.reason == reason] for reason in ("best", "worst", "disagreement")}
    assert reasons["best"] == [1, 5]
    assert reasons["worst"] == [0, 4]
    assert set(reasons["disagreement"]) == {1, 3}
    assert {c.image: c.pair for c in chosen if c.pair} == {1: ("a", "b"), 3: ("b", "a")}
    assert [c.image for c in choose(scores, prompts, [0, 3], 1)][:2] == [3, 0]
    assert choose(scores, prompts, [2], 1) == []
    flat = {"reward": [1.0, 2.0], "a": [1.0, 1.0], "b": [0.0, 1.0]}
    assert [c.reason for c in choose(flat, prompts, [0, 1], 1)] == ["best", "worst"]
    # Of equally good images, one of each prompt comes first.
    assert [c.image for c in choose({"reward": [1.0] * 6}, list("uuuuvw"), range(6), 3)][:3] == [0, 4, 5]
