"""The voting page in headless Chromium."""

import csv
import json
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from processes import PYTHON
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


def is_over(job):
    """True once nothing more is asked: a prompt may occur twice in an iteration, whose number of votes then differs."""
    return job.poll() is not None or ((RUN / "report.html").exists() and rows() >= 60)


def rows():
    table = RUN / "metrics.csv"
    return sum(bool(row.get("reward/votes")) for row in csv.DictReader(table.open())) if table.exists() else 0


@pytest.mark.slow
@pytest.mark.skipif(NO_BROWSER is not None, reason=f"the voting page {NO_BROWSER}")
def test_a_voter_who_is_right_in_four_of_five_trains_tiny_shapes_through_the_page(tmp_path, monkeypatch):
    from playwright.sync_api import Error

    monkeypatch.chdir(tmp_path)
    address = "http://127.0.0.1:8019/"
    words = ["vote", "tiny_shapes", *SETTINGS, "--port=8019", "seed_everything=0"]
    with subprocess.Popen([PYTHON, "-m", "lit_vgrpo", *words], stdout=subprocess.DEVNULL, stderr=-1, text=True) as job:
        wait_for(address, job)
        with browser(viewport={"width": 1280, "height": 800}) as (page, complaints):
            enter(page, address, "simulated")
            voter = NoisyVoter(0)
            while not is_over(job):
                try:
                    if not voter.vote(page):
                        page.wait_for_timeout(100)
                except Error:  # the run may end, and its page with it, while the voter looks
                    job.wait(60)
            assert [line for line in complaints if "ERR_CONNECTION" not in line] == []  # the page ends with the run
        _, err = job.communicate(timeout=600)
    assert job.returncode == 0, err
    summary = json.loads((RUN / "summary.json").read_text())
    assert summary["heldout_reward_start"] == pytest.approx(0.48, abs=0.03)
    assert summary["heldout_reward_end"] >= 0.75
