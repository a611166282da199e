import os
import re
import signal
import socket
import subprocess
import threading
from contextlib import ExitStack, suppress

import httpx
import pytest
import torch
from commands import serve_options
from fastapi.testclient import TestClient
from helpers import Brightness
from processes import started
from saved_runs import assert_one_line

from lit_vgrpo.apps.serve.app import REQUESTS, Worker, make_app
from lit_vgrpo.apps.serve.command import opening
from lit_vgrpo.cli.main import main
from lit_vgrpo.rewards import Connection, HTTPReward, JPEGCompressibility, Reward, RewardOutage, Weighted
from lit_vgrpo.rewards.http import ScoreRequest, score_request
from lit_vgrpo.system.server import bounded_server
from lit_vgrpo.system.sockets import listening_socket

pytestmark = pytest.mark.slow  # it serves

TOKEN = "t0ken"
COMMAND = (
    "serve-reward JPEGCompressibility quality=80 --port 0 --token-env SERVE_TOKEN --max-request-mb 1 --max-images 8"
)


def make_images(count, side=16, seed=0):
    pixels = torch.randint(0, 256, (count, 3, side, side), generator=torch.Generator().manual_seed(seed))
    prompts = [f"prompt {number}" for number in range(count)]
    return pixels.float() / 255, prompts, [{"prompt": prompt} for prompt in prompts]


def body_of(images, prompts=None):
    pixels = (images * 255).round().to(torch.uint8)
    prompts = prompts or ["a"] * len(pixels)
    return score_request(pixels, prompts, [{"prompt": prompt} for prompt in prompts])


@pytest.fixture(scope="module")
def command():
    """The command as it is typed, in a process of its own; gives its address."""
    environment = {**os.environ, "SERVE_TOKEN": TOKEN}
    with started(*COMMAND.split(), env=environment, stderr=subprocess.STDOUT) as process:
        line = process.stdout.readline()
        assert line.startswith("Serving jpeg on c"), line
        yield re.search(r"http\S+(?=/score)", line).group()
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=30)[0]
        assert process.returncode == 0
        assert re.fullmatch(r"Stopped after \d+ images\.\n", rest), "Ctrl-C is not clean"


def test_a_served_reward_scores_as_it_does_at_home(command, monkeypatch):
    monkeypatch.setenv("SERVE_TOKEN", TOKEN)
    batch = make_images(20)
    connection = Connection(token_env="SERVE_TOKEN", timeout_s=30)
    remote = HTTPReward(f"{command}/score", connection=connection)
    assert torch.equal(remote(*batch), JPEGCompressibility(quality=80)(*batch))
    assert remote.take_counts() == {}


def test_who_has_no_token_gets_in_nowhere_but_health(command):
    body = body_of(make_images(1)[0])
    for given in (None, "Bearer t0keN", "Bearer \u00fc", TOKEN):
        headers = {} if given is None else {"Authorization": given.encode()}
        assert httpx.post(f"{command}/score", content=body, headers=headers).status_code == 401
    assert httpx.get(f"{command}/health").json()["status"] == "ok"
    remote = HTTPReward(f"{command}/score", connection=Connection(give_up_after=1))
    with pytest.raises(RewardOutage, match="status 401: .*token is missing or wrong"):
        remote(*make_images(1))


def test_a_request_that_grows_too_large_is_refused_while_it_is_sent(command):
    with socket.create_connection(("127.0.0.1", int(command.rpartition(":")[2])), timeout=30) as client:
        head = f"POST /score HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.sendall(head.encode())
        for _ in range(20):
            client.sendall(b"186a0\r\n" + bytes(100_000) + b"\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 413")


class Recorded(Reward):
    """Mean brightness; records its calls and waits for ``gate``."""

    name = "recorded"

    def __init__(self):
        self.calls = []
        self.started = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, images, prompts, rows):
        self.calls.append(prompts)
        self.started.set()
        self.gate.wait(20)
        if "bad" in prompts:
            raise ValueError("two\nlines")
        if "exit" in prompts:
            raise SystemExit(3)
        if "wrong" in prompts:
            return torch.zeros(7)
        return Brightness()(images, prompts, rows)


class Serving:
    """The application in a thread, for a reward of the test."""

    def __init__(self, reward, batch_size=8):
        self.worker = Worker(Weighted([reward]), batch_size, torch.device("cpu"))
        app = make_app(self.worker, "test", None, 10_000_000, 256, 2**22, False)
        self.server = bounded_server(app, shutdown_s=1)
        self.listener = listening_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/score"
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]}, daemon=True)

    def __enter__(self):
        self.listener.listen(64)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(20)
        self.worker.close()
        self.listener.close()


def post(url, body):
    return httpx.post(url, content=body, headers={"Content-Type": "application/json"}, timeout=30)


def wait_until(condition):
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.02)
    raise AssertionError("it never happened")


def post_in_threads(url, count):
    answers, body = [], body_of(make_images(1)[0])
    for _ in range(count):
        threading.Thread(target=lambda: answers.append(post(url, body).status_code), daemon=True).start()
    return answers


@pytest.mark.parametrize(("limit", "waiting"), [(1, 0), (16, 2)])
def test_requests_beyond_the_limit_wait_unread(monkeypatch, limit, waiting):
    monkeypatch.setattr("lit_vgrpo.apps.serve.app.REQUESTS", limit)
    reward = Recorded()
    reward.gate.clear()
    with Serving(reward) as serving:
        answers = post_in_threads(serving.url, 3)
        assert reward.started.wait(20)
        threading.Event().wait(0.3)
        assert serving.worker._thread._work_queue.qsize() == waiting
        reward.gate.set()
        wait_until(lambda: len(answers) == 3)
    assert answers == [200] * 3


def test_requests_are_scored_in_batches_and_those_that_wait_are_cancelled_at_the_end():
    reward = Recorded()
    with Serving(reward, batch_size=2) as serving:
        assert post(serving.url, body_of(make_images(5)[0])).json()["errors"] == [None] * 5
        assert [len(call) for call in reward.calls] == [2, 2, 1]
        reward.started.clear()
        reward.gate.clear()
        answers = post_in_threads(serving.url, 2)
        assert reward.started.wait(20)
        wait_until(lambda: serving.worker._thread._work_queue.qsize() == 1)
        serving.worker.close()
        reward.gate.set()
        wait_until(lambda: answers)
    assert len(reward.calls) == 4


def test_an_image_that_cannot_be_scored_gets_null_and_the_reason():
    with Serving(Recorded()) as serving:
        exited = post(serving.url, body_of(make_images(1)[0], ["exit"])).json()
        answer = post(serving.url, body_of(make_images(3)[0], ["a", "bad", "b"])).json()
        wrong = post(serving.url, body_of(make_images(2)[0], ["wrong", "a"]))
    assert wrong.status_code == 500, "a reward that breaks its contract gives no score"
    assert "Return a float32 tensor of shape (2,)" in wrong.json()["detail"]
    assert exited["errors"][0].endswith(": SystemExit: 3.")  # and did not end the server
    assert [score is None for score in answer["scores"]] == [False, True, False]
    assert re.fullmatch(r"recorded: \S+test_serve.py:\d+: ValueError: two lines\.", answer["errors"].pop(1))
    assert answer["errors"] == [None, None]


def test_many_small_values_are_refused_unparsed_and_other_host_names_on_this_machine(monkeypatch):
    app = make_app(Worker(Weighted([Recorded()]), 8, torch.device("cpu")), "t", None, 2_000_000, 4, 2**22, True)
    client, headers = TestClient(app, base_url="http://[::1]"), {"Content-Type": "application/json"}
    body = body_of(make_images(1)[0])
    assert client.post("/score", content=body, headers=headers).status_code == 200
    assert client.post("/score", content=body, headers={**headers, "Host": "evil.example"}).status_code == 400
    assert client.post("/score", content=body, headers={"Content-Type": "text/plain"}).status_code == 422
    monkeypatch.setattr(ScoreRequest, "model_validate_json", lambda body: pytest.fail("parsed"))
    for values in (b"{}," * 5000 + b"{}", b"[" * 5000):
        answer = client.post("/score", content=body.replace(b'"rows":[', b'"rows":[' + values), headers=headers)
        assert (answer.status_code, answer.json()) == (413, {"detail": "more than 1000 JSON values per image"})


HEAD = b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n"


def test_a_client_that_goes_away_is_no_server_error(logged, capfd):
    with Serving(Recorded()) as serving:
        with socket.create_connection(serving.listener.getsockname()) as client:
            client.sendall(HEAD + b"\r\n" + bytes(10))
            wait_until(lambda: serving.server.server_state.tasks)
        wait_until(lambda: not serving.server.server_state.tasks)
    assert not logged
    assert capfd.readouterr().err == "", "uvicorn writes past the loggers that the test watches"


class Slow(Recorded):
    """Takes 0.3 s per call."""

    def __call__(self, *batch):
        threading.Event().wait(0.3)
        return super().__call__(*batch)


def test_requests_that_wait_longer_than_the_timeout_are_scored_once_and_an_error_keeps_its_status():
    images, prompts, rows = make_images(12)
    prompts[6] = "wrong"
    connection = Connection(timeout_s=2.0, retries=1, backoff_s=0.0, max_connections=12)
    reward = Slow()
    with Serving(reward) as serving:
        remote = HTTPReward(serving.url, batch_size=1, connection=connection)
        scores = remote(images, prompts, rows)
    assert scores.isnan().nonzero().flatten().tolist() == [6]
    assert sorted(prompt for (prompt,) in reward.calls) == sorted([*prompts, "wrong"])
    assert remote.take_counts() == {"gave_up": 1, "retried": 1, "status_500": 2}
    assert "Return a float32 tensor of shape (1,)" in remote.failure


def test_a_request_whose_client_left_is_not_scored():
    reward = Recorded()
    reward.gate.clear()
    body = body_of(make_images(1)[0], ["left"])
    head = f"POST /score HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with Serving(reward) as serving:
        answers, tasks = post_in_threads(serving.url, 1), serving.server.server_state.tasks
        assert reward.started.wait(20)
        with socket.create_connection(serving.listener.getsockname()) as client:
            client.sendall(head.encode() + body)
            wait_until(lambda: serving.worker._thread._work_queue.qsize() == 1)
        wait_until(lambda: len(tasks) == 1)
        reward.gate.set()
        wait_until(lambda: answers and serving.worker._thread._work_queue.empty())
    assert reward.calls == [["a"]]


@pytest.mark.parametrize("drips", [False, True])
def test_clients_that_stall_in_a_request_keep_others_out_for_a_moment_only(monkeypatch, drips):
    monkeypatch.setattr("lit_vgrpo.apps.serve.app.PATIENCE_S", 1.0)
    monkeypatch.setattr("lit_vgrpo.apps.serve.app.SLOWEST", 10_000)
    body = body_of(make_images(1)[0])
    with ExitStack() as stack, Serving(Recorded()) as serving:
        address, done = serving.listener.getsockname(), threading.Event()
        stalled = [stack.enter_context(socket.create_connection(address, timeout=20)) for _ in range(REQUESTS)]
        for client in stalled:
            client.sendall(HEAD + b"\r\n" + bytes(10))

        def drip():
            for client in stalled * (60 if drips else 0):
                with suppress(OSError):  # it was sent away
                    client.send(b" ")
                if done.wait(0.2 / len(stalled)):
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        assert post(serving.url, body).status_code == 200
        for client in stalled:
            said = b""
            with suppress(ConnectionResetError):  # a drip came after the answer
                while block := client.recv(1000):
                    said += block
            assert said.startswith(b"HTTP/1.1 408"), said
        done.set()
        dripping.join()


def test_a_slow_request_that_goes_on_is_scored(monkeypatch):
    monkeypatch.setattr("lit_vgrpo.apps.serve.app.PATIENCE_S", 1.0)
    body = body_of(make_images(1)[0])
    head = f"POST /score HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {250_000 + len(body)}"
    with Serving(Recorded()) as serving, socket.create_connection(serving.listener.getsockname(), timeout=20) as client:
        client.sendall(head.encode() + b"\r\n\r\n")
        for _ in range(5):
            client.sendall(b" " * 50_000)
            threading.Event().wait(0.4)
        client.sendall(body)
        assert client.recv(1000).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port=70000"], "--port: Use 65535 or less"),
        (["--max-megapixels=100"], "--max-megapixels: Use 85 or less"),
        (["--token-env=NOT_SET_ANYWHERE"], "export NOT_SET_ANYWHERE="),
        (["--port=0", "--host=203.0.113.77"], "203.0.113.77"),
        (["--port=0", "--device=gpu9"], "gpu9"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(capsys, words, said):
    assert_one_line(main, ["serve-reward", "JPEGCompressibility", *words], capsys, said)


def test_it_listens_on_this_machine_unless_told_otherwise_and_warns_then(monkeypatch):
    monkeypatch.setenv("SERVE_TOKEN", TOKEN)
    for words, warned in {
        ("X",): False,
        ("X", "--host", "localhost"): False,
        ("X", "--host", "0.0.0.0"): True,
        ("X", "--host", "0.0.0.0", "--token-env", "SERVE_TOKEN"): False,
    }.items():
        options = serve_options([*words, "--port", "0"])
        with listening_socket(options.host, options.port) as listener:
            lines = opening("x", listener, options, "cpu")
        assert ("Warning" in "".join(lines)) is warned
        assert TOKEN not in "".join(lines)
    assert serve_options(["X"]).host == "127.0.0.1"
