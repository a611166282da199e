import asyncio
import copy
import datetime
import multiprocessing
import pickle
import random
import sys

import fault_server as errors
import numpy as np
import pytest
import torch
from fault_server import FaultServer, answering

from lit_vgrpo.rewards import RewardError, Weighted, http
from lit_vgrpo.rewards.connection import Connection
from lit_vgrpo.rewards.http import HTTPReward
from lit_vgrpo.rewards.link import seconds_of
from lit_vgrpo.rewards.protocol import json_request
from lit_vgrpo.rewards.remote import LONGEST_PAUSE_S, Transport


def patient(**options):
    """No pauses between tries."""
    return Connection(**{"timeout_s": 20, "backoff_s": 0.0, "retries": 2, "give_up_after": 100, **options})


def patience(cause):
    """Seconds until a server that hangs is left; far more than one needs that does not."""
    return 0.7 if cause == "timeout" else 20


def make_images(count, seed=0):
    pixels = torch.randint(0, 256, (count, 3, 6, 5), generator=torch.Generator().manual_seed(seed))
    return (
        pixels.float() / 255,
        [f"prompt {n}" for n in range(count)],
        [{"prompt": f"prompt {n}"} for n in range(count)],
    )


def means(images):
    return images.double().mean((1, 2, 3)).float()


@pytest.fixture
def batch():
    return make_images(10)


@pytest.mark.parametrize("encoding", ["json", "multipart"])
def test_scores_come_back_in_order_over_few_connections(batch, encoding):
    with FaultServer() as server:
        reward = HTTPReward(server.url, batch_size=1, encoding=encoding, connection=patient(max_connections=3))
        for _ in range(2):
            torch.testing.assert_close(reward(*batch), means(batch[0]), rtol=0, atol=1e-6)
        reward.close()
        assert len(server.requests) == 20
        assert server.connections <= 3 + 1, "connections are not used again"  # the question for /version closes its own
        assert server.most_at_once <= 3
    assert reward.failure is None
    assert reward.take_counts() == {}


def test_several_requests_are_under_way_at_once(batch):
    with FaultServer() as server:
        together = errors.threading.Barrier(4)

        def wait_for_the_others(handler):
            together.wait(10)
            errors.scores(handler)

        server.plan = [wait_for_the_others] * 4
        reward = HTTPReward(server.url, batch_size=1, connection=patient(max_connections=4))
        torch.testing.assert_close(reward(*batch), means(batch[0]), rtol=0, atol=1e-6)
        reward.close()


def test_a_body_is_made_when_its_turn_comes(batch, monkeypatch):
    made, answered, held = [], [], []

    def make(*request):
        made.append(request)
        return json_request(*request)

    def behave(handler):
        held.append(len(made) - len(answered))
        answered.append(handler)
        errors.scores(handler)

    monkeypatch.setattr(http, "json_request", make)
    with FaultServer(then=behave) as server:
        reward = HTTPReward(server.url, batch_size=1, connection=patient(max_connections=2))
        assert reward(*batch).isfinite().all()
        reward.close()
    assert len(made) == 10
    assert max(held) <= 2


ERRORS = {
    "hang": (errors.hang, "timeout"),
    "drip": (errors.drip, "timeout"),
    "drip_headers": (errors.drip_headers, "timeout"),
    "close": (errors.close, "reset"),
    "reset": (errors.reset, "reset"),
    "close_midway": (errors.close_midway, "reset"),
    "no_http": (errors.no_http, "garbage"),
    "status_500": (answering(b"boom", 500), "status_500"),
    "status_503": (answering(b"", 503), "status_503"),
    "html": (answering(b"<html>welcome to the proxy</html>"), "garbage"),
    "empty": (answering(b""), "garbage"),
    "bytes": (answering(bytes(range(256))), "garbage"),
    "deep": (answering(b"[" * 100_000), "garbage"),
    "string": (answering({"scores": ["0.5", "0.5", "0.5"]}), "garbage"),
    "bool": (answering({"scores": [True, 0.5, 0.5]}), "garbage"),
    "no_scores": (answering({"score": [0.5, 0.5, 0.5]}), "garbage"),
    "other_version": (answering({"version": 2, "scores": [1, 2, 3]}), "garbage"),
    "too_few": (answering({"scores": [0.5]}), "wrong_number"),
    "too_many": (answering({"scores": [0.5] * 4}), "wrong_number"),
    "large": (errors.hundred_megabytes, "too_large"),
    "moved": (answering(b"", 307, Location="/elsewhere"), None),
}


@pytest.mark.parametrize("error", [name for name, (_, cause) in ERRORS.items() if cause])
def test_an_error_that_passes_costs_a_counted_retry(error):
    behave, cause = ERRORS[error]
    images, prompts, rows = make_images(3)
    with FaultServer([behave]) as server:
        reward = HTTPReward(server.url, connection=patient(timeout_s=patience(cause)))
        torch.testing.assert_close(reward(images, prompts, rows), means(images), rtol=0, atol=1e-6)
        reward.close()
        assert server.sent_bytes < 20_000_000, "an answer without end was read on"
    assert reward.take_counts() == {cause: 1, "retried": 1}
    assert reward.take_counts() == {}
    assert reward.failure is None


@pytest.mark.parametrize("error", [name for name in ERRORS if not name.startswith("drip")])
def test_an_error_that_stays_fails_its_own_images_alone(error):
    behave, cause = ERRORS[error]
    images, prompts, rows = make_images(6)
    connection = patient(retries=1, max_connections=1, timeout_s=patience(cause))
    with FaultServer([behave, *[behave] * (cause is not None)]) as server:
        reward = HTTPReward(server.url, batch_size=3, connection=connection)
        scores = reward(images, prompts, rows)
        reward.close()
    assert scores[:3].isnan().all(), "a failure became a score"
    torch.testing.assert_close(scores[3:], means(images[3:]), rtol=0, atol=1e-6)
    expected = {cause: 2, "retried": 1, "gave_up": 1} if cause else {"status_307": 1, "gave_up": 1}
    assert reward.take_counts() == expected
    assert reward.failure.startswith(server.url)
    assert "\n" not in reward.failure
    assert len(reward.failure) < 500


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_what_another_try_cannot_cure_is_not_tried_again(status):
    with FaultServer([answering({"detail": "no\nsuch thing"}, status)]) as server:
        reward = HTTPReward(server.url, connection=patient())
        assert reward(*make_images(2)).isnan().all()
        reward.close()
    assert reward.take_counts() == {f"status_{status}": 1, "gave_up": 1}
    assert f"status {status}" in reward.failure
    assert "such thing" in reward.failure


def test_null_and_numbers_that_are_none_fail_their_image_alone():
    body = (
        b'{"scores": [0.25, null, NaN, 1e999, -Infinity, 1e300], "errors": [null, "too dark", null, null, null, null]}'
    )
    with FaultServer([answering(body)]) as server:
        reward = HTTPReward(server.url, connection=patient())
        scores = reward(*make_images(6))
        reward.close()
    assert scores[0] == 0.25
    assert scores[1:].isnan().all()
    assert reward.take_counts() == {"non_finite": 4}
    assert reward.failure is not None


def test_the_reason_of_the_server_is_passed_on():
    with FaultServer([answering({"scores": [None], "errors": ["it is too dark"]})]) as server:
        weighted = Weighted([HTTPReward(server.url, name="remote", connection=patient())])
        batch = weighted.score(*make_images(1))
        weighted.close()
    assert batch.errors == {"remote": "it is too dark"}
    assert batch.total.isnan().all()


def test_the_servers_wish_to_be_left_alone_is_honoured_within_limits():
    assert seconds_of("3") == 3.0
    assert seconds_of("-3") == 0.0
    assert seconds_of("nan") == 0.0
    assert seconds_of("soon") == 0.0
    assert seconds_of(None) == 0.0
    later = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=100)
    assert 90 < seconds_of(later.strftime("%a, %d %b %Y %H:%M:%S GMT")) <= 100
    transport = Transport("http://127.0.0.1:1", Connection(backoff_s=0.5))
    assert transport._pause_s(0, 7.0) == 7.0
    assert transport._pause_s(0, 1e6) == LONGEST_PAUSE_S
    for attempt, most in {0: 0.5, 1: 1.0, 3: 4.0, 20: LONGEST_PAUSE_S}.items():
        pauses = [transport._pause_s(attempt, 0.0) for _ in range(300)]
        assert 0 <= min(pauses) < 0.1 * most
        assert 0.9 * most < max(pauses) <= most


def test_a_server_too_busy_is_asked_again():
    with FaultServer([answering(b"", 429, Retry_After="0.01")]) as server:
        reward = HTTPReward(server.url, connection=patient())
        assert reward(*make_images(2)).isfinite().all()
        reward.close()
    assert reward.take_counts() == {"status_429": 1, "retried": 1}


def test_retries_leave_the_runs_random_numbers_alone():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with FaultServer([answering(b"", 500)] * 2) as server:
        reward = HTTPReward(server.url, connection=patient(backoff_s=1e-3))
        reward(*make_images(2))
        reward.close()
    assert reward.take_counts() == {"retried": 2, "status_500": 2}
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_the_token_comes_from_the_environment_and_is_sent(monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", " s3cret\n")
    with FaultServer() as server:
        reward = HTTPReward(server.url, connection=patient(token_env="REWARD_TOKEN"))
        reward(*make_images(2))
        reward.close()
        assert [headers["Authorization"] for headers, _ in server.requests] == ["Bearer s3cret"] * 2


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8000/score", "is not a web address"),
        ("ftp://host/score", "is not a web address"),
        ("http:///score", "is not a web address"),
        ("http://host:99999/score", "is not an address"),
        ("http://user:pw@host/score", "token_env"),
    ],
)
def test_a_wrong_address_is_found_without_asking_anybody(url, said):
    (error,) = HTTPReward(url).check()
    assert said in error
    assert "pw" not in error
    with pytest.raises(RewardError, match="HTTP|url"):
        HTTPReward(url).load()


def test_a_missing_token_or_package_is_found_before_anything_starts(monkeypatch):
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    reward = HTTPReward("http://127.0.0.1:1/score", connection=Connection(token_env="REWARD_TOKEN"))
    assert "REWARD_TOKEN is not in the environment" in reward.check()[0]
    monkeypatch.setenv("REWARD_TOKEN", "two words")
    assert "REWARD_TOKEN is not a valid token" in reward.check()[0]
    assert "words" not in reward.check()[0]
    monkeypatch.setitem(sys.modules, "httpx", None)
    reward = HTTPReward("http://127.0.0.1:1/score")
    assert reward.check() == ['httpx is not installed. Run: pip install "lit-vgrpo[http]"']
    with pytest.raises(ModuleNotFoundError, match=r"lit-vgrpo\[http\]"):
        reward.load()


@pytest.mark.parametrize(("option", "value"), [("batch_size", 0), ("encoding", "pickle")])
def test_arguments_are_checked(option, value):
    with pytest.raises(ValueError, match=f"^{option}="):
        HTTPReward("http://127.0.0.1:1/score", **{option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("timeout_s", 0),
        ("connect_timeout_s", float("inf")),
        ("retries", -1),
        ("max_connections", 0),
        ("backoff_s", -1.0),
        ("max_response_bytes", 0),
        ("give_up_after", 0),
        ("on_outage", "zero"),
    ],
)
def test_the_connections_numbers_are_checked(option, value):
    with pytest.raises(ValueError, match=rf"^{option}="):
        Connection(**{option: value})


def test_a_row_that_json_cannot_hold_is_found_before_the_run():
    reward = HTTPReward("http://127.0.0.1:1/score")
    assert reward.prompt_error("a", {"prompt": "a", "include": [{"class": "cat", "count": 1}]}) is None
    assert '"when"' in reward.prompt_error("a", {"prompt": "a", "when": datetime.date(2020, 1, 1)})
    assert '"x"' in reward.prompt_error("a", {"prompt": "a", "x": float("nan")})


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with FaultServer() as server:
        reward = HTTPReward(server.url, connection=patient(retries=0))
        assert reward(*make_images(2)).isfinite().all()
        reward.close()


def test_it_works_where_a_loop_runs_already_as_in_a_notebook(batch):
    async def cell(reward):
        return reward(*batch)

    with FaultServer() as server:
        reward = HTTPReward(server.url, connection=patient())
        torch.testing.assert_close(asyncio.run(cell(reward)), means(batch[0]), rtol=0, atol=1e-6)
        reward.close()


def _score_into(queue, reward, batch):
    queue.put(reward(*batch).tolist())


def test_a_copy_connects_for_itself(batch):
    with FaultServer() as server:
        reward = HTTPReward(server.url, connection=patient())
        expected = reward(*batch).tolist()
        for copied in (pickle.loads(pickle.dumps(reward)), copy.deepcopy(reward)):
            assert copied(*batch).tolist() == expected
            copied.close()
        assert reward(*batch).tolist() == expected
        reward.close()


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_it_works_after_a_fork(batch):
    with FaultServer() as server:
        reward = HTTPReward(server.url, connection=patient())
        expected = reward(*batch).tolist()
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=_score_into, args=(queue, reward, batch), daemon=True)
        child.start()
        assert queue.get(timeout=20) == expected
        child.join(20)
        assert child.exitcode == 0
        assert reward(*batch).tolist() == expected
        reward.close()
