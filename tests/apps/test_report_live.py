"""The page that a run writes itself, and ``lightning report --serve``, which follows it."""

import json
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
from commands import report, run
from fastapi.testclient import TestClient
from processes import started

from lit_vgrpo.apps.report.command import make_app
from lit_vgrpo.callbacks import Report
from lit_vgrpo.callbacks.report import choose

pytestmark = pytest.mark.slow

RUN = Path("runs/tiny")


def test_a_run_refreshes_its_page_and_ends_with_that_of_the_command(tiny_recipe, monkeypatch):
    monkeypatch.setattr("lit_vgrpo.callbacks.report.MOST_SHARE", 1e6)  # however long a page takes
    seen = []
    of_report = Report.on_train_epoch_start

    def watched(self, trainer, module):
        of_report(self, trainer, module)
        seen.append((RUN / "report.html").read_text())

    monkeypatch.setattr(Report, "on_train_epoch_start", watched)
    assert run(["tiny.yaml", "trainer.max_epochs=1"]) == 0
    assert run([str(RUN / "config.yaml"), "--resume", "trainer.max_epochs=3"]) == 0
    assert len(seen) == 3
    iterations = "<dt>Iterations</dt><dd>{}</dd>".format
    assert iterations(0) in seen[0]
    assert "so far" in seen[2]
    assert iterations(2) in seen[2]
    own = (RUN / "report.html").read_text()
    assert report([str(RUN)]) == 0
    assert (RUN / "report.html").read_text() == own
    assert "so far" not in own
    assert "95 % bootstrap intervals" in own
    lines = [json.loads(line) for line in (RUN / "report" / "scores.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0, 1, 2, 3]

    client = TestClient(make_app([RUN]), base_url="http://127.0.0.1")
    first, version = client.get("/"), client.get("/version").text
    assert "<body data-live>" in first.text
    assert iterations(3) in first.text
    assert client.get("/version").text == version
    (RUN / "metrics.csv").write_text("damaged")
    assert client.get("/version").text != version
    assert client.get("/").status_code == 503
    assert client.get("/docs").status_code == 404
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 400


def test_it_is_served_on_loopback_until_it_is_stopped(tiny_recipe):
    assert run(["tiny.yaml", "trainer.max_epochs=1"]) == 0
    with started("report", str(RUN), "--serve", "--port=0", stderr=subprocess.PIPE) as server:
        line = server.stdout.readline()
        assert "Report at http://127.0.0.1:" in line
        assert "Held-out reward" in httpx.get(line.split()[2]).text
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=60)
    assert (server.returncode, out, err) == (0, "Stopped.\n", "")


@pytest.mark.parametrize("when", ["end", "never"])
def test_it_may_be_written_at_the_end_alone_or_never(tiny_recipe, when, monkeypatch):
    written = []
    monkeypatch.setattr("lit_vgrpo.report.page.write_report", lambda *words: written.append(words))
    callback = f"{{class_path: Report, init_args: {{when: {when}, kept_images: 0}}}}"
    assert run(["tiny.yaml", f"trainer.callbacks+={callback}"]) == 0
    assert len(written) == (when == "end")
    assert (RUN / "report").exists() == (when == "end")
    assert not list(RUN.glob("report/*.png"))


def test_a_page_that_cannot_be_written_only_warns(tiny_recipe, monkeypatch):
    def broken(*words):
        raise RuntimeError("no page today")

    monkeypatch.setattr("lit_vgrpo.report.page.write_report", broken)
    with pytest.warns(UserWarning, match="No report: RuntimeError: no page today. Training is not affected."):
        assert run(["tiny.yaml", "trainer.max_epochs=1"]) == 0
    assert (RUN / "summary.json").exists()


def test_a_run_that_fails_has_a_page(tiny_recipe):
    Path("bad.py").write_text(
        "calls = []\n\ndef score(images, prompts):\n    calls.append(1)\n"
        "    if len(calls) > 3:\n        raise ValueError('out of order')\n"
        "    return [0.1 * number for number in range(len(images))]\n"
    )
    assert run(["tiny.yaml", "model.reward=python:bad:score", "trainer.max_epochs=9"]) == 1
    assert "The run ended: failed." in (RUN / "report.html").read_text()


def test_images_are_chosen_by_their_scores():
    nan = float("nan")
    scores = {
        "reward": [0.1, 0.9, nan, 0.5, 0.4, 0.6],
        "a": [0.0, 1.0, 0.5, 0.2, 0.4, 0.6],
        "b": [0.0, 0.1, 0.5, 0.9, nan, 0.6],
    }
    prompts = list("uvwxyz")
    chosen = choose(scores, prompts, range(6), 2)
    assert [(place, reason) for place, reason, _ in chosen[:4]] == [
        (1, "best"),
        (5, "best"),
        (0, "worst"),
        (4, "worst"),
    ]
    assert sorted(chosen[4:]) == [(1, "disagreement", ("a", "b")), (3, "disagreement", ("b", "a"))]
    assert [place for place, _, _ in choose(scores, prompts, [0, 3], 1)][:2] == [3, 0]
    assert choose(scores, prompts, [2], 1) == []
    flat = {"reward": [1.0, 2.0], "a": [1.0, 1.0], "b": [0.0, 1.0]}
    assert [reason for _, reason, _ in choose(flat, prompts, [0, 1], 1)] == ["best", "worst"]
    # Of equally good images, one of each prompt comes first.
    assert [place for place, _, _ in choose({"reward": [1.0] * 6}, list("uuuuvw"), range(6), 3)][:3] == [0, 4, 5]
