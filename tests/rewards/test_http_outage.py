"""Rewards whose server cannot be reached, or goes away."""

import asyncio
import threading

import fault_server as errors
import pytest
import torch
from fault_server import FaultServer, answering
from helpers import free_port

from lit_vgrpo.rewards import RewardError, RewardOutage, Weighted
from lit_vgrpo.rewards.connection import Connection
from lit_vgrpo.rewards.http import HTTPReward
from lit_vgrpo.rewards.link import Link, LinkClosed


def images(count):
    return torch.full((count, 3, 4, 4), 0.2), ["a"] * count, [{"prompt": "a"}] * count


def http(url, **options):
    options = {"timeout_s": 20, "retries": 1, "backoff_s": 0.0, "max_connections": 2, "give_up_after": 3, **options}
    return HTTPReward(url, name="remote", batch_size=1, connection=Connection(**options))


def test_a_wrong_path_is_said_to_be_one():
    with FaultServer(then=answering(b"Not Found", 404)) as server:
        reward = http(server.url)
        with pytest.raises(RewardOutage, match="Set HTTPReward.url to its scoring address.* ends in /score"):
            reward(*images(8))
        reward.close()


def test_a_server_that_is_down_stops_the_run_after_a_bounded_number_of_requests():
    with FaultServer(then=answering(b"out of memory", 500)) as server:
        weighted = Weighted([http(server.url)])
        with pytest.raises(RewardOutage) as raised:
            weighted.score(*images(40))
        assert len(server.requests) <= 2 * (3 + 1), "the batch went on although the server was down"
        weighted.close()
    message = str(raised.value)
    assert message.startswith(server.url)
    assert "status 500: out of memory" in message
    assert "connection.on_outage=nan" in message
    assert "\n" not in message


def test_errors_that_are_not_in_a_row_stop_nothing():
    boom = answering(b"", 500)
    with FaultServer([boom, boom, errors.scores] * 6) as server:
        reward = http(server.url, max_connections=1, retries=0)
        scores = reward(*images(18))
        reward.close()
    assert scores.isnan().tolist() == [True, True, False] * 6
    assert reward.take_counts() == {"status_500": 12, "gave_up": 12}


def test_a_server_that_is_down_is_asked_once_a_batch_where_the_recipe_goes_on_without_scores():
    with FaultServer(then=answering(b"", 500)) as server:
        reward = http(server.url, on_outage="nan", max_connections=1)
        assert reward(*images(10)).isnan().all()
        counts = reward.take_counts()
        # three requests with their retries, then one that finds the server still down
        assert counts == {"status_500": 7, "retried": 3, "gave_up": 4, "skipped": 6}
        assert len(server.requests) == 7
        assert "500" in reward.failure or "down" in reward.failure

        assert reward(*images(10)).isnan().all()
        assert reward.take_counts() == {"status_500": 1, "gave_up": 1, "skipped": 9}

        server.then = errors.scores
        assert reward(*images(10)).isfinite().all(), "the server is back, and its scores are not taken"
        assert reward.take_counts() == {}
        assert reward.failure is None
        reward.close()


def test_what_is_being_retried_gives_up_too_once_the_server_counts_as_down():
    together = threading.Barrier(2)

    def both_here(status):
        def behave(handler):
            together.wait(20)
            answering(b"", status)(handler)

        return behave

    with FaultServer([both_here(404), both_here(500)], then=answering(b"", 500)) as server:
        reward = http(server.url, on_outage="nan", give_up_after=1, retries=200)
        assert reward(*images(2)).isnan().all()
        reward.close()
        assert len(server.requests) < 100
    assert reward.take_counts()["gave_up"] == 2


def test_a_server_that_hangs_costs_a_bounded_number_of_waits():
    with FaultServer(then=errors.hang) as server:
        reward = http(server.url, on_outage="nan", timeout_s=0.1, retries=0)
        assert reward(*images(30)).isnan().all()
        reward.close()
        counts = reward.take_counts()
    assert counts["timeout"] == counts["gave_up"] <= 5
    assert counts["gave_up"] + counts["skipped"] == 30


def test_no_server_is_a_clear_line_before_anything_starts():
    url = f"http://127.0.0.1:{free_port()}/score"
    reward = http(url)
    assert reward.check() == []
    with pytest.raises(RewardError, match=r"cannot be reached .* Start the server, or set url") as raised:
        reward.load()
    assert "\n" not in str(raised.value)
    reward.close()


def test_a_server_that_hangs_is_a_clear_line_before_anything_starts():
    with FaultServer(pages={"/version": errors.hang}) as server:
        reward = http(server.url, connect_timeout_s=0.1)
        with pytest.raises(RewardError, match="gave no answer within 0.2 s"):
            reward.load()
        reward.close()


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ((401, b"{}"), "status 401. Set HTTPReward.connection.token_env"),
        ((403, b"{}"), "status 403. Set HTTPReward.connection.token_env"),
        ((200, b'{"protocol": 7}'), "uses version 7"),
        ((200, b'{"protocol": "\\u001b[2J\\n"}'), r"uses version \?\[2J of"),
        ((404, b""), None),
        ((500, b""), None),
        ((200, b"v1.2"), None),
        ((200, b"[]"), None),
    ],
)
def test_the_server_is_asked_once_whether_it_is_the_right_one(page, said):
    with FaultServer(pages={"/version": page}) as server:
        reward = http(server.url)
        if said is None:
            reward.load()
            server.pages["/version"] = (401, b"")
            reward.load()
            assert reward(*images(1)).isfinite().all()
        else:
            with pytest.raises(RewardError, match=said):
                reward.load()
        reward.close()


@pytest.mark.parametrize("behave", [errors.hang, answering(b"", 503, Retry_After="25")])
def test_closing_ends_what_is_under_way(behave):
    seen = threading.Event()

    def tell_and(handler):
        seen.set()
        behave(handler)

    with FaultServer(then=tell_and) as server:
        reward = http(server.url, retries=5)
        results = []
        scoring = threading.Thread(target=lambda: results.append(reward(*images(5))))
        scoring.start()
        assert seen.wait(20)
        threading.Event().wait(0.2)
        assert len(server.requests) <= 2, "a server that asked to be left alone was not"
        reward.close()
        scoring.join(10)
        assert not scoring.is_alive(), "a request outlived close()"
        assert results[0].isnan().all()
        assert reward.failure is not None
        reward.close()

        server.then = errors.scores
        assert reward(*images(5)).isfinite().all(), "it cannot be used again"
        reward.close()


def test_nothing_starts_on_a_link_that_is_closed():
    link = Link("http://127.0.0.1:1/score", Connection())
    assert link.run(asyncio.sleep(0, "done")) == "done"
    link.close()
    link.close()
    with pytest.raises(LinkClosed):
        link.run(asyncio.sleep(0))


def test_a_reward_that_nobody_closes_leaves_no_thread():
    before = set(threading.enumerate())  # other tests' rewards may wait to be collected
    with FaultServer() as server:
        reward = http(server.url)
        reward(*images(2))
        assert [thread for thread in set(threading.enumerate()) - before if thread.name == "reward-link"]
        del reward
        assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "reward-link"]


def test_a_request_that_cannot_be_made_fails_its_image_alone():
    pixels, prompts, rows = images(3)
    rows = [rows[0], {"prompt": "a", "set": {1, 2}}, rows[2]]
    with FaultServer() as server:
        weighted = Weighted([http(server.url)])
        batch = weighted.score(pixels, prompts, rows)
        weighted.close()
    assert batch.ok.tolist() == [True, False, True]
    assert "set" in batch.errors["remote"]
