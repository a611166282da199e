"""``lightning vote``: the page's server, beside a run and with a recipe."""

import json
import re
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest
from commands import run, vote
from fastapi.testclient import TestClient
from helpers import free_port, read_csv
from processes import run_command, started
from saved_runs import assert_one_line

from lit_vgrpo.apps.vote.app import make_app
from lit_vgrpo.apps.vote.command import _page, has_ended
from lit_vgrpo.options import Vote
from lit_vgrpo.rewards.vote_store import FILE_NAME, VoteStore
from lit_vgrpo.system.sockets import listening_socket
from lit_vgrpo.training.resume import how_to_resume

RUN = Path("runs/tiny")
PAUSE_S = 25
SHORT_TIMEOUT = f"""
import datetime, lightning, torch
class ShortTimeout(lightning.Callback):
    def on_train_start(self, *args):
        torch.distributed.set_timeout(datetime.timedelta(seconds={PAUSE_S - 5}))
"""
SETTINGS = ["model.reward=VoteReward", "model.untrained_reward=JPEGCompressibility"]


@pytest.fixture
def store(tmp_path):
    found = VoteStore(tmp_path / FILE_NAME)
    found.publish([("<b>a cat</b>", {f"a{number}": b"png" for number in range(4)})])
    return found


def client_of(store, raises=True, **settings):
    app = make_app(store, **settings)
    return TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=raises)


def vote_over_http(port, done, name="ann", pause_s=0):
    """Vote for the first image that is shown, until ``done`` is set; returns the thread and the comparisons.

    Args:
        pause_s: after the first vote.
    """
    voted = []

    def work():
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as page:
            while not done.is_set():
                try:
                    seen = page.get("/next", params={"voter": name}).json()["comparison"]
                    if seen is None:
                        time.sleep(0.05)
                        continue
                    assert page.get(f"/image/{seen['images'][0]}").content.startswith(b"\x89PNG")
                    sent = {"voter": name, "comparison": seen["id"], "image": seen["images"][0]}
                    assert page.post("/vote", json=sent).status_code == 200
                    voted.append(seen["prompt"])
                    done.wait(pause_s if len(voted) == 1 else 0)
                except httpx.TransportError:
                    time.sleep(0.05)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, voted


def voted_rows():
    return [row for row in read_csv(RUN / "metrics.csv") if row.get("reward/votes/given")]


# --- the server ------------------------------------------------------------------------------------------------------


def test_votes_are_stored_skipped_and_undone(store):
    client = client_of(store)
    first = client.get("/next", params={"voter": "ann"}).json()
    assert first["comparison"]["prompt"] == "<b>a cat</b>"
    assert first["progress"]["given"] == 0
    number, images = first["comparison"]["id"], first["comparison"]["images"]
    after = client.post("/vote", json={"voter": "ann", "comparison": number, "image": images[1]}).json()
    assert after["comparison"] is None
    assert after["progress"]["given"] == 1
    assert store.scores([1])[0][images[1]] > 0
    back = client.post("/undo", json={"voter": "ann"}).json()
    assert back["comparison"] == first["comparison"]
    skip = {"voter": "ann", "comparison": number, "image": None}
    assert client.post("/vote", json=skip).json()["progress"]["skipped"]
    wrong = client.post("/vote", json={"voter": "bob", "comparison": 99, "image": images[0]})
    assert (wrong.status_code, wrong.json()) == (409, {"detail": "These images do not exist. The vote was not stored."})
    for bad in ({"voter": " ", "comparison": 1, "image": "a"}, {"voter": "a" * 41, "comparison": 1, "image": "a"}, {}):
        assert client.post("/vote", json=bad).status_code == 422
    assert client.get("/image/none").status_code == 404


def test_no_body_is_a_server_error(store):
    client = client_of(store, raises=False)
    vote = {"voter": "ann", "comparison": 1, "image": None}
    wrong = {
        "voter": [5, None, ["a"], {}, " ", "\ud800"],
        "comparison": [None, "x", 1.5, -1, 2**63, [1]],
        "image": [5, {}, ["a0"], "\0", "\ud800", "a9"],
    }
    bodies = [json.dumps({**vote, key: value}).encode() for key, values in wrong.items() for value in values]
    bodies += [b"", b"5", b"null", b"[]", b"{", b"[" * 9_000, b'{"comparison":' + b"9" * 5_000 + b"}", b"\xff\xfe"]
    for path in ("/vote", "/undo"):
        for body in bodies:
            answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code in (400, 409, 422), (path, body[:80], answer.text)
            assert len(answer.text) < 400
            assert not answer.json()["detail"].startswith(":")
    assert client.post("/vote", json=vote).status_code == 200


def test_each_voter_sees_another_order_which_repeats(store):
    client = client_of(store)

    def orders():
        return [client.get("/next", params={"voter": f"v{n}"}).json()["comparison"]["images"] for n in range(8)]

    assert orders() == orders()
    assert len({tuple(order) for order in orders()}) > 3


def test_other_sites_other_hosts_and_strangers_are_refused(store):
    sent = {"voter": "ann", "comparison": 1, "image": None}
    client = client_of(store)
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 400
    for headers in ({"Content-Type": "text/plain"}, {}):  # all that another site can send without asking
        assert client.post("/undo", content='{"voter": "ann"}', headers=headers).status_code == 422
    assert client.post("/undo", json=sent).status_code == 409  # taken, no vote
    assert client.post("/undo", json={"voter": "a" * 20_000}).status_code == 413
    shared = client_of(store, token="secret")
    assert shared.get("/next", params={"voter": "ann"}).status_code == 401
    assert shared.get("/?token=wrong").status_code == 401
    assert shared.get("/?token=secret").url.path == "/"
    assert shared.get("/next", params={"voter": "ann"}).status_code == 200


def test_the_page_names_no_other_host_and_a_damaged_file_is_reported(store):
    client = client_of(store)
    for address in ("/", "/script.js", "/style.css", "/report.css"):
        answer = client.get(address)
        assert answer.status_code == 200
        assert "://" not in answer.text
    store.path.write_bytes(b"damage" * 1000)
    answer = client.get("/next", params={"voter": "ann"})
    assert answer.status_code == 503
    assert "cannot be used" in answer.json()["detail"]


# --- the command -----------------------------------------------------------------------------------------------------


def accepts(port):
    """The process that is killed is forked by another, and may end a moment later."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", int(port))) == 0


@pytest.mark.slow
def test_a_recipe_is_trained_on_votes_and_a_killed_one_asks_only_for_the_rest(tiny_recipe, capsys):
    port = free_port()
    words = ["vote", "tiny.yaml", *SETTINGS, f"--port={port}", "data.group_size=4"]
    with started(*words) as first:
        page = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        seen = None
        while seen is None:
            try:
                seen = page.get("/next", params={"voter": "ann"}).json()["comparison"]
            except httpx.TransportError:
                assert first.poll() is None
            time.sleep(0.05)
        page.post("/vote", json={"voter": "ann", "comparison": seen["id"], "image": seen["images"][2]})
        first.kill()
    while accepts(port):
        time.sleep(0.05)
    done = threading.Event()
    thread, voted = vote_over_http(port, done)
    try:
        assert vote([str(RUN / "config.yaml"), "--resume", f"--port={port}"]) == 0
    finally:
        done.set()
        thread.join()
    assert len(voted) == 3  # of 2 iterations with 2 groups
    assert seen["prompt"] not in voted[:1]
    with sqlite3.connect(RUN / FILE_NAME) as db:
        images = db.execute("SELECT image, png FROM votes JOIN images ON images.id = image").fetchall()
    assert len(images) == 4
    assert images[0][0] == seen["images"][2]
    assert {png for _, png in images} == {None}
    rows = voted_rows()
    assert [float(row["reward/votes/given"]) for row in rows] == [2, 2]
    assert float(rows[0]["reward/votes/std"]) > 0
    assert "heldout/JPEGCompressibility" not in rows[0]
    out, err = capsys.readouterr()
    assert f"Vote at http://127.0.0.1:{port}/ on this machine only. Ctrl-C stops it." in out
    assert re.search(r"^iteration 2/2, votes 2, images/s", err, re.MULTILINE)  # the reward's mean is 0


def test_a_run_has_ended_by_its_summary_unless_it_asks_again(store):
    folder = store.path.parent
    summary = folder / "summary.json"
    assert not has_ended(folder, store)
    for outcome, is_over in (("finished", True), ("collapsed", True), ("interrupted", False), ("failed", False)):
        summary.write_text(f'{{"outcome": "{outcome}"}}')
        assert has_ended(folder, VoteStore(store.path)) == is_over, outcome
    summary.write_text('{"outcome": "finished"}')
    time.sleep(0.02)  # a file system's clock
    store.publish([("a dog", {f"b{number}": b"png" for number in range(4)})])
    assert not has_ended(folder, store)


def test_a_run_that_serves_the_page_continues_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr("lit_vgrpo.apps.vote.command.LAST_LOOK_S", 0)
    with listening_socket("127.0.0.1", 0) as listener, _page(Vote(words=[]), listener, tmp_path):
        assert how_to_resume(tmp_path) == f"Continue: lightning vote {tmp_path}/config.yaml --resume"
    assert "lightning run" in how_to_resume(tmp_path)


@pytest.mark.slow
def test_two_ranks_ask_on_one_page_and_wait_for_each_others_votes(tiny_recipe):
    port, done = free_port(), threading.Event()
    thread, voted = vote_over_http(port, done, pause_s=PAUSE_S)
    Path("short.py").write_text(SHORT_TIMEOUT)  # once both ranks have started, however long that takes
    ranks = ["trainer.devices=2", "trainer.strategy=ddp", "trainer.callbacks+=short.ShortTimeout"]
    words = ["vote", "tiny.yaml", *SETTINGS, f"--port={port}", *ranks]
    job = run_command(*words)
    done.set()
    thread.join()
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("Vote at http") == job.stdout.count("Waiting for ") == 1
    assert "Open the voting page" not in job.stdout  # which this command serves
    waiting = rf"^Waiting for \d votes \(about \d+ s at 5 s per vote\) at http://127.0.0.1:{port}/$"
    assert re.search(waiting, job.stdout, re.MULTILINE)
    assert len(voted) == 4
    assert [path.name for path in RUN.parent.iterdir()] == [RUN.name]
    assert json.loads((RUN / "summary.json").read_text())["world_size"] == 2
    assert (RUN / "checkpoints" / "last.ckpt").is_file()
    with sqlite3.connect(RUN / FILE_NAME) as db:
        groups = db.execute("SELECT owner, is_open, count(*) FROM groups GROUP BY 1, 2 ORDER BY 1").fetchall()
    assert groups == [(0, 0, 2), (1, 0, 2)]
    assert [float(row["reward/votes/given"]) for row in voted_rows()] == [2, 2]


@pytest.mark.slow
def test_a_run_is_attached_to_and_ctrl_c_ends_both(tiny_recipe):
    with started("run", "tiny.yaml", *SETTINGS, stderr=subprocess.PIPE) as job:
        line = ""
        while "Waiting for 2 votes (about 10 s at 5 s per vote)." not in line:
            line = job.stdout.readline()
            assert line, job.stderr.read()
        with started("vote", str(RUN), "--port=0", stderr=subprocess.PIPE) as page:
            address = page.stdout.readline().split()[2]
            seen = httpx.get(f"{address}next", params={"voter": "ann"}).json()
            assert seen["progress"]["needed"] == 2
            httpx.post(f"{address}vote", json={"voter": "ann", "comparison": seen["comparison"]["id"], "image": None})
            page.send_signal(signal.SIGINT)
            out, err = page.communicate(timeout=60)
        assert (page.returncode, err) == (0, "")
        assert out == f"Stopped. Every vote is in {RUN / FILE_NAME}; still needed: 1.\n"
        with started("vote", str(RUN), "--port=0") as page:
            assert page.stdout.readline().startswith("Vote at ")
            page.terminate()  # at once
            assert page.wait(timeout=60) == 0
        job.send_signal(signal.SIGINT)
        out, err = job.communicate(timeout=60)
    assert job.returncode == 130
    assert "Saving without waiting for the votes." in err
    assert "Finishing" not in err
    assert "interrupted.ckpt is saved." in err
    assert re.search(r"Next:\n  lightning run \S+ --resume  # Continue the run\n", out)
    assert "Traceback" not in err


@pytest.mark.slow
def test_what_cannot_be_voted_on_is_said_in_one_line(tiny_recipe, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    for words, line in [
        (["empty"], "empty is not a run folder: it has no config.yaml."),
        (
            ["tiny.yaml"],
            f"The reward of tiny.yaml does not ask people. Run: lightning vote tiny.yaml {' '.join(SETTINGS)}",
        ),
        (["tiny.yaml", SETTINGS[0]], "model.reward compares images of a group and scores no held-out images."),
    ]:
        assert_one_line(vote, words, capsys, line)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = f"Cannot listen on 127.0.0.1:{port}: Address already in use."
        assert_one_line(vote, ["tiny.yaml", *SETTINGS, f"--port={port}"], capsys, line)
    assert not RUN.exists()
    assert run(["tiny.yaml", "trainer.max_epochs=1"]) == 0
    capsys.readouterr()
    assert_one_line(vote, ["runs/tinny"], capsys, "runs/tinny is not a run. Did you mean runs/tiny?")
    assert_one_line(vote, [str(RUN), "--port=0"], capsys, "runs/tiny has no votes.sqlite3. It has not started")
    assert_one_line(vote, [str(RUN), "trainer.max_epochs=3"], capsys, "runs/tiny is a run folder and takes no settings")
    tokens = []
    monkeypatch.setattr(
        "lit_vgrpo.apps.vote.command.train_recipe", lambda command, page: tokens.append(page.args[0].token) or 0
    )
    assert vote(["tiny.yaml", "--host=0.0.0.0", "--port=0"]) == 0
    assert len(tokens[0]) > 15
