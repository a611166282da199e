"""The voting page in headless Chromium.

pytest -m slow -s tests/apps/test_vote_browser.py prints what each seed reaches.
"""

import json
import sqlite3
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from helpers import free_port
from processes import started
from voting import NO_BROWSER, NoisyVoter, browser, enter

SETTINGS = ["model.reward=VoteReward", "model.heldout_reward=ShapesReward"]
RUN = Path("runs/tiny_shapes")


def wait_for(address, job):
    while True:
        try:
            return httpx.get(address)
        except httpx.TransportError:
            assert job.poll() is None
            time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # 60 iterations of clicks: seven minutes beside another test
@pytest.mark.skipif(NO_BROWSER is not None, reason=f"the voting page {NO_BROWSER}")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_voter_who_is_right_in_four_of_five_trains_tiny_shapes_through_the_page(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    port = free_port()
    address = f"http://127.0.0.1:{port}/"
    words = ["vote", "tiny_shapes", *SETTINGS, f"--port={port}", f"seed_everything={seed}"]
    with started(*words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as job:
        wait_for(address, job)
        with browser(viewport={"width": 1280, "height": 800}) as (page, complaints):
            enter(page, address, "simulated")
            voter = NoisyVoter(seed)
            while page.is_hidden("#over"):
                assert job.poll() is None
                if not voter.vote(page):
                    page.wait_for_timeout(100)
            assert page.inner_text("#over h1") == "Training has ended"
            assert complaints == []
        _, err = job.communicate(timeout=600)
    assert job.returncode == 0, err
    summary = json.loads((RUN / "summary.json").read_text())
    start, end = summary["heldout_reward_start"], summary["heldout_reward_end"]
    with sqlite3.connect(RUN / "votes.sqlite3") as db:
        votes = db.execute("SELECT count(*) FROM votes").fetchone()[0]
    print(f"\nseed {seed}: {start:.3f} -> {end:.3f}, {votes} votes, {summary['cpu_seconds']:.0f} CPU s of training")
    assert start == pytest.approx(0.48, abs=0.03)
    assert end >= 0.75
