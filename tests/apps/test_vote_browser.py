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
import torch
from helpers import free_port
from processes import started
from voting import IDLE, NO_BROWSER, NoisyVoter, browser, enter

from lit_vgrpo.apps.vote.app import make_app
from lit_vgrpo.core.pixels import encode_png
from lit_vgrpo.rewards.vote_store import FILE_NAME, VoteStore
from lit_vgrpo.system.server import BACKLOG, served_in_thread
from lit_vgrpo.system.sockets import listening_socket

# 2,000 votes: with the recipe's 16 prompts they are half as many, and some seeds end below 0.75.
SETTINGS = ["model.reward=VoteReward", "model.untrained_reward=ShapesReward", "data.prompts_per_iteration=32"]
RUN = Path("runs/tiny_shapes")


def wait_for(address, job):
    while True:
        try:
            return httpx.get(address)
        except httpx.TransportError:
            assert job.poll() is None
            time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.skipif(NO_BROWSER is not None, reason=f"the voting page {NO_BROWSER}")
@pytest.mark.parametrize("width", [390, 1280])
def test_an_image_is_enlarged_by_key_and_by_click(width, tmp_path):
    store = VoteStore(tmp_path / FILE_NAME)
    pngs = [encode_png(torch.full((3, 64, 64), 60 * shade, dtype=torch.uint8)) for shade in range(4)]
    store.publish([("a grey square", {f"a{number}": png for number, png in enumerate(pngs)})])
    with (
        listening_socket("127.0.0.1", 0) as listener,
        browser(viewport={"width": width, "height": 800}) as (page, said),
    ):
        listener.listen(BACKLOG)
        with served_in_thread(make_app(store), listener):
            enter(page, f"http://127.0.0.1:{listener.getsockname()[1]}/", "ann")
            page.wait_for_selector(f"{IDLE} #ballot:not([hidden])")
            assert "the image that shows what the prompt asks for" in page.inner_text("#ballot")
            small = page.eval_on_selector_all("#images img", "images => images.map(image => image.src)")
            large = "#zoom[open] img"
            page.click("#enlarge")
            assert page.get_attribute(large, "src") == small[0]
            assert (
                page.locator(large).bounding_box()["width"] > page.locator("#images img").first.bounding_box()["width"]
            )
            page.keyboard.press("ArrowRight")
            page.click(large)
            assert page.get_attribute(large, "src") == small[2]
            page.keyboard.press("e")
            assert page.is_hidden("#zoom")
            page.keyboard.press("e")
            page.keyboard.press("ArrowLeft")
            assert page.evaluate("document.activeElement.id") == "zoom"  # a held Enter must not choose
            with page.expect_response("**/vote") as answer:
                page.click("#choose") if width == 390 else page.keyboard.press("4")  # a phone has no keys
            assert answer.value.request.post_data_json["image"] == small[3].rpartition("/")[2]
            page.wait_for_selector("#waiting:not([hidden])")
            assert page.is_hidden("#zoom")
            assert said == []


@pytest.mark.slow
@pytest.mark.skipif(NO_BROWSER is not None, reason=f"the voting page {NO_BROWSER}")
def test_a_held_key_and_a_double_click_vote_once(tmp_path):
    store = VoteStore(tmp_path / FILE_NAME)
    png = encode_png(torch.zeros(3, 64, 64, dtype=torch.uint8))
    numbers = store.publish([(f"prompt {group}", {f"{group}-{n}": png for n in range(4)}) for group in range(9)])
    with listening_socket("127.0.0.1", 0) as listener, browser() as (page, said):
        listener.listen(BACKLOG)
        with served_in_thread(make_app(store), listener):
            enter(page, f"http://127.0.0.1:{listener.getsockname()[1]}/", "ann")
            page.wait_for_selector(f"{IDLE} #ballot:not([hidden])")
            page.focus("#images button")
            for _ in range(9):
                page.keyboard.down("Enter")  # without up: it repeats
                page.wait_for_selector(IDLE, state="attached")
            page.keyboard.up("Enter")
            assert store.progress(numbers).given == 1
            page.click("#images button")
            page.wait_for_selector(IDLE, state="attached")
            page.mouse.down(click_count=2)
            page.mouse.up(click_count=2)
            page.wait_for_selector(IDLE, state="attached")
            assert store.progress(numbers).given == 2
    assert said == []


@pytest.mark.slow
@pytest.mark.timeout(2400)  # 60 iterations of clicks: 17 minutes on a busy machine
@pytest.mark.skipif(NO_BROWSER is not None, reason=f"the voting page {NO_BROWSER}")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_voter_who_is_right_in_four_of_five_trains_tiny_shapes_through_the_page(seed, here):
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
