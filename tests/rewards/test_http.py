import asyncio
import gzip
import math
import os
import random
import re
import socket
import threading
from functools import partial
from types import SimpleNamespace

import fault_server as errors
import httpx
import numpy as np
import pytest
import torch
from fault_server import FaultServer, answering, choosing, saying
from helpers import free_port, repeating

from lit_vgrpo.rewards import Connection, HTTPReward, QuestionScore, RewardOutage, ScoreQueue, VLMJudge, Weighted
from lit_vgrpo.rewards.connection import proxy_of
from lit_vgrpo.rewards.http import LARGEST_ANSWER, LONGEST_PAUSE_S, SENDS_SPACES, ScoreRequest, score_request
from lit_vgrpo.rewards.servers import RequestError


def patient(**options):
    """No pauses between attempts."""
    return Connection(**{"timeout_s": 20, "backoff_s": 0.0, "retries": 2, "give_up_after": 100, **options})


def patience(cause):
    """Seconds until a server that hangs is left; far more than one needs that does not."""
    return 0.7 if cause == "timeout" else 20


def make_images(count, seed=0):
    pixels = torch.randint(0, 256, (count, 3, 6, 5), generator=torch.Generator().manual_seed(seed))
    prompts = [f"prompt {n}" for n in range(count)]
    return pixels.float() / 255, prompts, [{"prompt": prompt} for prompt in prompts]


def means(images):
    return images.double().mean((1, 2, 3)).float()


def test_scores_come_back_in_order_over_few_connections_used_at_once():
    batch, together = make_images(10), threading.Barrier(3)

    def wait_for_the_others(handler):
        together.wait(10)
        errors.scores(handler)

    with FaultServer([wait_for_the_others] * 3) as server:
        reward = HTTPReward(server.url, batch_size=1, connection=patient(max_connections=3))
        torch.testing.assert_close(reward(*batch), means(batch[0]), rtol=0, atol=1e-6)
        assert len(server.requests) == 10
        assert server.connections == server.most_at_once == 3, "connections are not reused"
    assert reward.failure is None
    assert reward.take_counts() == {}


FAULTS = {
    "hang": (errors.hang, "timeout"),
    "drip": (errors.drip, "timeout"),
    "reset": (errors.reset, "unreachable"),
    "close_midway": (errors.close_midway, "unreachable"),
    "no_http": (errors.no_http, "unreachable"),
    "status_500": (answering(b"boom", 500), "status_500"),
    "status_429": (answering(b"", 429, Retry_After="soon"), "status_429"),
    "deep": (answering(b"[" * 100_000), "invalid"),
    "string": (answering({"scores": ["0.5", "0.5", "0.5"]}), "invalid"),
    "other_version": (answering({"version": 2, "scores": [1, 2, 3]}), "invalid"),
    "too_few": (answering({"scores": [0.5]}), "invalid"),
    "errors": (answering({"scores": [1, 2, 3], "errors": ["a"]}), "invalid"),
    "page": (answering(b"<html>log in</html>", Content_Type="text/html"), "invalid"),
    "no_list": (answering({"scores": "x"}), "invalid"),
    "nested": (answering({"scores": [[1, 2, 3]]}), "invalid"),
    "truth": (answering({"scores": [True, False, True]}), "invalid"),
    "too_many": (answering({"scores": [1] * 1000}), "invalid"),
    "packed": (answering(b'{"scores": [1, 2, 3]}', Content_Encoding="gzip"), "unreachable"),
}


@pytest.mark.parametrize("fault", repeating(FAULTS, slow=["drip"]))
def test_a_fault_costs_a_counted_retry_and_one_that_stays_its_images_alone(fault):
    behave, cause = FAULTS[fault]
    images, prompts, rows = make_images(6)
    connection = patient(retries=1, max_connections=1, timeout_s=patience(cause))
    with FaultServer([behave] * 3) as server:
        reward = HTTPReward(server.url, batch_size=3, connection=connection)
        scores = reward(images, prompts, rows)
    assert scores[:3].isnan().all(), "a failure became a score"
    torch.testing.assert_close(scores[3:], means(images[3:]), rtol=0, atol=1e-6)
    assert reward.take_counts() == {cause: 3, "retried": 2, "gave_up": 1}
    assert reward.take_counts() == {}
    assert reward.failure.startswith(server.url)
    assert reward.failure.isprintable()
    assert len(reward.failure) < 500


@pytest.mark.parametrize("status", [307, 404])
def test_a_permanent_error_is_not_retried(status):
    with FaultServer([answering({"detail": "no\nsuch thing"}, status)]) as server:
        reward = HTTPReward(server.url, connection=patient())
        assert reward(*make_images(2)).isnan().all()
    assert reward.take_counts() == {f"status_{status}": 1, "gave_up": 1}
    assert f"status {status}" in reward.failure
    assert "such thing" in reward.failure


def test_null_and_numbers_that_are_not_finite_fail_their_image_alone():
    body = b'{"scores": [0.25, null, NaN, 1e999, -Infinity, 1e300], "errors": [null, "dark", null, null, null, null]}'
    with FaultServer([answering(body), answering({"scores": [None], "errors": ["too dark"]})]) as server:
        reward = HTTPReward(server.url, name="remote", connection=patient())
        scores = reward(*make_images(6))
        assert scores.isfinite().tolist() == [True, *[False] * 5]
        assert Weighted([reward]).score(*make_images(1)).errors == {"remote": "too dark"}


def test_an_error_fails_its_image_whatever_the_score():
    with FaultServer([answering({"scores": [0.1, 0.2, 0.3], "errors": ["out of memory", None, ""]})]) as server:
        reward = HTTPReward(server.url, connection=patient())
        assert reward(*make_images(3)).isfinite().tolist() == [False, True, True]
        assert reward.failure == "out of memory"


def test_the_pause_grows_within_limits_and_honours_the_server():
    reward = HTTPReward("http://127.0.0.1:1", connection=Connection(backoff_s=0.5))

    for attempt, most in {1: 0.5, 2: 1.0, 4: 4.0, 900: LONGEST_PAUSE_S}.items():
        pauses = [reward._pause_s(SimpleNamespace(outcome=None, attempt_number=attempt)) for _ in range(300)]
        assert 0 <= min(pauses) < 0.1 * most
        assert 0.9 * most < max(pauses) <= most
    for asked, expected in ((7.0, 7.0), (1e6, LONGEST_PAUSE_S)):
        outcome = SimpleNamespace(exception=partial(RequestError, "", retry_after_s=asked))
        assert reward._pause_s(SimpleNamespace(outcome=outcome, attempt_number=1)) == expected


def test_retries_leave_the_runs_random_numbers_alone():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with FaultServer([answering(b"", 500)] * 2) as server:
        reward = HTTPReward(server.url, connection=patient(backoff_s=1e-3))
        reward(*make_images(2))
    assert reward.take_counts() == {"retried": 2, "status_500": 2}
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_the_token_comes_from_the_environment_and_is_sent(monkeypatch):
    reward = HTTPReward("http://127.0.0.1:1/score", connection=Connection(token_env="REWARD_TOKEN"))
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    assert "REWARD_TOKEN is not in the environment" in reward.check()[0]
    monkeypatch.setenv("REWARD_TOKEN", " s3cret\n")
    with FaultServer() as server:
        reward = HTTPReward(server.url, connection=patient(token_env="REWARD_TOKEN"))
        reward(*make_images(2))
        assert [headers["Authorization"] for headers, _ in server.requests] == ["Bearer s3cret"]


def test_a_row_that_json_cannot_hold_fails_its_image_alone():
    pixels, prompts, rows = make_images(3)
    with FaultServer() as server:
        weighted = Weighted([HTTPReward(server.url, connection=patient())])
        batch = weighted.score(pixels, prompts, [rows[0], {"prompt": "a", "x": object()}, rows[2]])
    assert batch.ok.tolist() == [True, False, True]


def test_numbers_that_are_not_finite_arrive_in_the_rows_as_they_are():
    row = {"prompt": "a", "least": math.nan, "range": [-math.inf, math.inf]}
    body = score_request(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), ["a"], [row])
    (received,) = ScoreRequest.model_validate_json(body).rows
    assert math.isnan(received.pop("least"))
    assert received == {"prompt": "a", "range": [-math.inf, math.inf]}


def without_end(handler):
    """Send zeros until the client hangs up."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    handler.close_connection = True
    while not handler.server.owner.closing.is_set():
        handler.wfile.write(bytes(100_000))


@pytest.mark.parametrize(
    "behave",
    [without_end, answering(gzip.compress(bytes(2 * LARGEST_ANSWER)), Content_Encoding="gzip")],
    ids=["long", "bomb"],
)
def test_an_answer_is_read_only_up_to_the_limit(behave):
    with FaultServer([behave]) as server:
        reward = HTTPReward(server.url, connection=patient(retries=0))
        assert reward(*make_images(2)).isnan().all()
    assert reward.failure == f"{server.url} returned an invalid response: it is larger than 10 MB"


CLIENTS = [HTTPReward, lambda url, **o: VLMJudge(url, "m", **o), lambda url, **o: QuestionScore(url, "m", **o)]
BAD_ADDRESSES = """ftp://x/y http:// http://127.0.0.1:99999/score http://127.0.0.1:0 http://127.0.0.1:-1 http://127.0.0.1:x
    127.0.0.1:8000/score localhost:8000 http:/127.0.0.1:8000 //127.0.0.1 https://$HOST/score
    http://<host>:8000 http://{host}:8000 http://256.1.1.1 http://[::1 http://x:80:80
    http://me:hunter2@127.0.0.1:99999 http://me:hunter2/3@127.0.0.1 me:hunter2@127.0.0.1:80 ftp://x?key=hunter2"""


@pytest.mark.parametrize("make", CLIENTS)
def test_an_address_to_which_nothing_can_be_sent_is_one_line_of_the_check_and_of_the_call(make):
    for url in (*BAD_ADDRESSES.split(), "", "http://a b", " http://a", "http://a\nb"):
        reward = make(url, connection=patient())
        (line,) = reward.check()
        assert line.startswith(f"{type(reward).__name__}.url=")
        assert "hunter2" not in line
        assert "hunter2" in url or url in line
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        reward(*make_images(2))


@pytest.mark.parametrize("address", ["HTTP://{}/a%20b/\u00e9", "http://me:pass%20word@{}/../x/?key=a/b#c"])
def test_an_address_that_the_check_accepts_is_asked(address):
    with FaultServer() as server:
        reward = HTTPReward(address.format(server.address.removeprefix("http://")), connection=patient())
        assert reward.check() == []
        assert reward(*make_images(1)).isfinite().all()


@pytest.fixture
def environment(monkeypatch):
    """Sets variables in an environment without proxies."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    return lambda **variables: [monkeypatch.setenv(*item) for item in variables.items()]


HOSTS = "10.1.2.3 11.1.2.3 [fd00::1] [fd12::3] example.com a.example.com badexample.com EXAMPLE.com."
DOMAIN = "example.com a.example.com EXAMPLE.com."


@pytest.mark.parametrize(
    ("no_proxy", "exempt"),
    {
        ", ,": "",
        "localhost,fd00::/8": "[fd00::1] [fd12::3]",
        "[FD00::1] 10.0.0.0/255.0.0.0": "10.1.2.3 [fd00::1]",
        "x, Example.com": DOMAIN,
        ".example.com": DOMAIN,
        "*.example.com": DOMAIN,
        "example.com:8000,10.1.2.3:80": DOMAIN,
        "a,*": HOSTS,
        "<local>;10.*,*ple.com #x": "10.1.2.3 example.com a.example.com badexample.com EXAMPLE.com.",
        "10.0.0.0/33 fd00::/200 http://example.com example.com: example.com:80 [fd00::1]:80 ::1:: 169.254/16": "",
    }.items(),
)
def test_no_proxy_has_hosts_domains_patterns_ports_addresses_and_ranges(environment, no_proxy, exempt):
    environment(HTTP_PROXY="proxy:3128", NO_PROXY=no_proxy)
    proxies = {host: proxy_of(httpx.URL(f"http://{host}:8000/score")) for host in HOSTS.split()}
    assert proxies == {host: None if host in exempt.split() else "http://proxy:3128" for host in HOSTS.split()}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"http_proxy": "socks5://p"}, "http_proxy=socks5://p needs socksio. Run: pip install"),
        ({"HTTP_PROXY": "ftp://p"}, "http_proxy=ftp://p is no address"),
        ({"all_proxy": "http://me:hunter2@p:99999"}, "all_proxy=http://(hidden)@p:99999 is no address"),
        ({"ALL_PROXY": "http://a hunter2@p"}, "all_proxy=(hidden) is no address"),
        ({"SSL_CERT_FILE": "/does/not/exist.pem"}, "SSL_CERT_FILE=/does/not/exist.pem cannot be read"),
        ({"TOKEN": ""}, "connection.token_env=TOKEN is not in the environment"),
        ({"TOKEN": "hunter\n2"}, "connection.token_env=TOKEN is not in the environment, or is no token"),
        ({"TOKEN": "hunter2\u00e9"}, "connection.token_env=TOKEN is not in the environment, or is no token"),
        ({"https_proxy": "ftp://p"}, None),
        ({"http_proxy": "", "HTTP_PROXY": "ftp://p"}, None),
    ],
)
def test_a_variable_that_cannot_be_used_is_one_line_of_the_check_and_of_the_call(environment, variables, said):
    environment(**{"TOKEN": "t", **variables})
    reward = HTTPReward("http://gpu.example:8000", connection=patient(token_env="TOKEN"))
    if said is None:
        assert reward.check() == []
        return
    (line,) = reward.check()
    assert said in line
    assert "hunter" not in line
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        reward(*make_images(1))


@pytest.mark.parametrize("make", CLIENTS)
def test_every_client_asks_a_server_through_the_proxy_and_names_it_if_that_fails(environment, make):
    answers = {"HTTPReward": errors.scores, "VLMJudge": saying("Final Score: 3"), "QuestionScore": choosing(yes=0.5)}
    reward = make("http://gpu.example:8000/v1", connection=patient(retries=0))
    models = {"http://gpu.example:8000/v1/models": (200, b"{}")}
    with FaultServer(then=answers[type(reward).__name__], pages=models) as proxy:
        environment(http_proxy=proxy.address.removeprefix("http://"), no_proxy="localhost,fd00::/8")
        assert reward.check() == []
        reward.load()
        assert reward(*make_images(1)).isfinite().all()
        assert [headers["Host"] for headers, body in proxy.requests if body] == ["gpu.example:8000"]
    assert reward(*make_images(1)).isnan().all()
    assert f"(through the proxy {proxy.address}) cannot be reached" in reward.failure


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(environment):
    environment(**dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY"), "http://127.0.0.1:9"))
    with FaultServer() as server:
        reward = HTTPReward(server.url, connection=patient(retries=0))
        assert reward(*make_images(2)).isfinite().all()


def test_it_works_where_a_loop_runs_already_as_in_a_notebook():
    batch = make_images(10)

    async def cell(reward):
        return reward(*batch)

    with FaultServer() as server:
        reward = HTTPReward(server.url, connection=patient())
        torch.testing.assert_close(asyncio.run(cell(reward)), means(batch[0]), rtol=0, atol=1e-6)


def single(url, **options):
    options = {"timeout_s": 20, "retries": 1, "backoff_s": 0.0, "max_connections": 2, "give_up_after": 3, **options}
    return HTTPReward(url, name="remote", batch_size=1, connection=Connection(**options))


def test_a_server_that_is_down_stops_the_run_after_a_bounded_number_of_requests():
    with FaultServer(then=answering(b"out of memory", 500)) as server:
        reward = single(server.url, max_connections=1)
        with pytest.raises(RewardOutage, match=f"^{server.url}.*status 500: out of memory.*$"):
            Weighted([reward]).score(*make_images(40))
        assert reward.take_counts() == {"status_500": 6, "retried": 3, "gave_up": 3, "skipped": 37}
        server.then = errors.scores
        assert reward(*make_images(10)).isfinite().all(), "the server is back, and is not used"


def test_errors_that_are_not_in_a_row_stop_nothing():
    boom = answering(b"", 500)
    with FaultServer([boom, boom, errors.scores] * 6) as server:
        reward = single(server.url, max_connections=1, retries=0)
        scores = reward(*make_images(18))
    assert scores.isnan().tolist() == [True, True, False] * 6
    assert reward.take_counts() == {"status_500": 12, "gave_up": 12}


def test_a_server_that_cannot_be_reached_is_a_clear_line_without_its_key():
    reward = single(f"http://me:hunter2@127.0.0.1:{free_port()}/score?key=hunter2")
    with pytest.raises(RewardOutage, match=r"^.*cannot be reached .* or HTTPReward.url.*$") as raised:
        reward(*make_images(4))
    assert "hunter2" not in f"{raised.value} {reward.failure}"


@pytest.mark.parametrize("behave", [errors.hang, answering(b"", 503, Retry_After="25")])
def test_closing_ends_what_is_under_way(behave):
    seen = threading.Event()

    def tell_and(handler):
        seen.set()
        behave(handler)

    with FaultServer(then=tell_and) as server:
        reward = single(server.url, retries=5)
        results = []
        scoring = threading.Thread(target=lambda: results.append(reward(*make_images(5))))
        scoring.start()
        assert seen.wait(20)
        threading.Event().wait(0.2)
        assert len(server.requests) <= 2
        reward.close()
        scoring.join(10)
        assert not scoring.is_alive(), "a request outlived close()"
        assert results[0].isnan().all()
        assert reward.failure is not None
        server.then = errors.scores
        assert reward(*make_images(5)).isfinite().all(), "it cannot be used again"


def of_server(counts, server, event="requests"):
    return counts.get(f"{server.address.removeprefix('http://')}/{event}", 0)


def test_several_servers_share_the_batches_of_a_call_and_the_log_has_each():
    batch = make_images(12)
    with FaultServer() as one, FaultServer() as other:
        reward = HTTPReward([one.url, other.url], batch_size=1, connection=patient(max_connections=1))
        torch.testing.assert_close(reward(*batch), means(batch[0]), rtol=0, atol=1e-6)
        counts = reward.take_counts()
    for server in (one, other):
        assert len(server.requests) == of_server(counts, server) >= 3
        assert server.most_at_once == 1
        assert of_server(counts, server, "seconds") > 0
    assert {name.rpartition("/")[2] for name, number in counts.items() if number} == {"requests", "seconds"}


@pytest.mark.parametrize("number", [1, 2])
def test_several_calls_are_scored_at_once(number):
    together = threading.Barrier(2)

    def wait_for_the_other(handler):
        together.wait(10)
        errors.scores(handler)

    images, prompts, rows = make_images(4)
    with FaultServer(then=wait_for_the_other) as one, FaultServer(then=wait_for_the_other) as other:
        url = one.url if number == 1 else [one.url, other.url]
        connection = patient(max_connections=2 // number, retries=0)
        queue = ScoreQueue(Weighted([HTTPReward(url, connection=connection)]))
        for n in range(4):
            queue.put(images[n : n + 1], prompts[n : n + 1], rows[n : n + 1])
        torch.testing.assert_close(queue.take().total, means(images), rtol=0, atol=1e-6)
        queue.close()


def test_a_request_that_waits_for_a_retry_keeps_its_connection_from_other_calls():
    images, prompts, rows = make_images(6)
    connection = patient(max_connections=1, retries=3, backoff_s=0.2)
    with FaultServer([answering(b"slow down", 429)] * 3) as server:
        queue = ScoreQueue(Weighted([HTTPReward(server.url, connection=connection)]))
        for n in range(6):
            queue.put(images[n : n + 1], prompts[n : n + 1], rows[n : n + 1])
        torch.testing.assert_close(queue.take().total, means(images), rtol=0, atol=1e-6)
        queue.close()
    first, *others = [body for _, body in server.requests]
    assert others[:3] == [first] * 3
    assert len(others) == 3 + 5


BROKEN = {
    "refuses": (None, "unreachable"),
    "resets": (errors.reset, "unreachable"),
    "no_such_page": (answering(b"", 404), "status_404"),
    "garbage": (answering(b"<html>"), "invalid"),
    "status_503": (answering(b"", 503, Retry_After="25"), "status_503"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_server_is_left_out_and_its_batches_go_elsewhere(fault):
    behave, cause = BROKEN[fault]
    batch = make_images(40)
    with FaultServer(then=behave) as broken, FaultServer() as fine:
        url = broken.url if behave else f"http://127.0.0.1:{free_port()}/score"
        reward = HTTPReward([url, fine.url], batch_size=1, connection=patient(backoff_s=30.0))
        torch.testing.assert_close(reward(*batch), means(batch[0]), rtol=0, atol=1e-6)
    counts = reward.take_counts()
    assert 1 <= counts[cause] == counts["retried"] <= 4, "it was asked again although another is fine"
    assert of_server(counts, fine) == 40


@pytest.mark.parametrize("make", CLIENTS)
def test_every_client_takes_addresses_and_starts_with_one_that_answers(make):
    answers = {"HTTPReward": errors.scores, "VLMJudge": saying("Final Score: 3"), "QuestionScore": choosing(yes=0.5)}
    kind = type(make("http://x")).__name__
    with FaultServer(then=answers[kind], pages={"/v1/models": (200, b"{}")}) as server:
        urls = [f"http://127.0.0.1:{free_port()}/v1", f"{server.address}/v1"]
        reward = make(urls, connection=patient())
        assert reward.check() == []
        if kind != "HTTPReward":  # which asks nothing before the first batch
            with pytest.warns(UserWarning, match=f"^{kind}.url={urls[0]} does not answer .* It is left out"):
                reward.load()
        assert reward(*make_images(6)).isfinite().all()


@pytest.mark.parametrize("answers", [6, 0])  # with 0, it hangs before it is known how long an answer takes
def test_a_server_that_hangs_is_left_out_long_before_the_timeout(answers):
    batch = make_images(40)
    with FaultServer([errors.scores] * answers, then=errors.hang) as hung, FaultServer() as fine:
        reward = HTTPReward([hung.url, fine.url], batch_size=1, connection=patient(timeout_s=300))
        torch.testing.assert_close(reward(*batch), means(batch[0]), rtol=0, atol=1e-6)
    counts = reward.take_counts()
    assert 1 <= counts["late"] == counts["retried"] <= 4
    assert len(fine.requests) + len(hung.requests) == 40 + counts["late"], "a batch was sent elsewhere twice"


def test_spaces_of_a_server_that_scores_others_first_start_the_timeout_again():
    def wait_in_line(handler):
        handler.wfile.write(f"HTTP/1.1 200 OK\r\n{SENDS_SPACES}: 1\r\nConnection: close\r\n\r\n".encode())
        for _ in range(5):
            handler.server.owner.closing.wait(0.3)
            handler.wfile.write(b" ")
        handler.wfile.write(b'{"scores": [0.5]}')
        handler.close_connection = True

    with FaultServer(then=wait_in_line) as server:
        reward = HTTPReward([server.url], batch_size=1, connection=patient(timeout_s=1.0))
        assert reward(*make_images(2)).tolist() == [0.5, 0.5]
    assert of_server(reward.take_counts(), server) == 2
    assert reward._servers.all[0].back_at == 0, "a server whose others come first is left out"


def test_a_server_that_was_left_out_is_asked_again():
    with FaultServer([answering(b"", 500)]) as one, FaultServer() as other:
        reward = HTTPReward([one.url, other.url], batch_size=1, connection=patient(max_connections=1, backoff_s=0.2))
        reward(*make_images(4))
        assert len(one.requests) == 1
        threading.Event().wait(0.3)
        assert reward(*make_images(8)).isfinite().all()
        assert len(one.requests) >= 3


def test_a_run_ends_when_all_servers_are_down():
    with FaultServer(then=answering(b"", 500)) as one, FaultServer(then=answering(b"", 500)) as other:
        reward = single([one.url, other.url])
        with pytest.raises(RewardOutage, match="requests in a row failed. Fix the server or HTTPReward.url"):
            reward(*make_images(40))
        assert reward.take_counts()["skipped"] >= 30


def test_a_name_in_a_list_is_all_of_its_addresses(monkeypatch):
    with FaultServer() as one:
        port = one.server.server_address[1]
        with FaultServer(at=("127.0.0.2", port)) as other:
            known = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{n}", port)) for n in (1, 2)]
            monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: known if host == "judges" else 1 / 0)
            monkeypatch.setenv("no_proxy", "*")
            reward = HTTPReward([f"http://judges:{port}/score"], batch_size=1, connection=patient())
            assert reward(*make_images(10)).isfinite().all()
    assert {headers["Host"] for headers, _ in one.requests + other.requests} == {f"judges:{port}"}
    assert min(len(one.requests), len(other.requests)) > 2


@pytest.mark.parametrize("urls", [[], ["http://me:hunter2@a/score", "http://me:hunter2@a/score"]])
def test_a_list_needs_an_address_and_none_twice(urls):
    with pytest.raises(ValueError, match="list at least one address, and each once") as raised:
        HTTPReward(urls)
    assert "hunter2" not in str(raised.value)
