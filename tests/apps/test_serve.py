import base64
import gc
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest
import torch
from commands import serve_options
from helpers import Brightness, free_port
from processes import PYTHON
from starlette.requests import Request

from lit_vgrpo import __version__
from lit_vgrpo.apps.serve import app as app_module
from lit_vgrpo.apps.serve import connections
from lit_vgrpo.apps.serve import worker as worker_module
from lit_vgrpo.apps.serve.app import make_app
from lit_vgrpo.apps.serve.command import opening
from lit_vgrpo.apps.serve.listening import listening_socket
from lit_vgrpo.apps.serve.page import bounded_server
from lit_vgrpo.apps.serve.worker import Worker
from lit_vgrpo.cli.main import main
from lit_vgrpo.rewards import JPEGCompressibility, Reward, RewardError, Weighted, protocol
from lit_vgrpo.rewards.connection import Connection
from lit_vgrpo.rewards.http import HTTPReward
from lit_vgrpo.rewards.protocol import Limits, ScoreRequest, encode_png, json_request

TOKEN = "t0ken"
COMMAND = (
    "serve-reward JPEGCompressibility quality=80 --port 0 --token-env SERVE_TOKEN --max-request-mb 1 --max-images 8"
)


def make_images(count, side=16, seed=0):
    pixels = torch.randint(0, 256, (count, 3, side, side), generator=torch.Generator().manual_seed(seed))
    return (
        pixels.float() / 255,
        [f"prompt {n}" for n in range(count)],
        [{"prompt": f"prompt {n}"} for n in range(count)],
    )


def body_of(images, prompts=None):
    pixels = (images * 255).round().to(torch.uint8)
    prompts = prompts or ["a"] * len(pixels)
    return json_request(pixels, prompts, [{"prompt": prompt} for prompt in prompts])


def request_for(prompt):
    return ScoreRequest([torch.zeros(3, 2, 2, dtype=torch.uint8)], [prompt], [{"prompt": prompt}])


@pytest.fixture(scope="module")
def command():
    """The command as it is typed, in a process of its own; gives its address."""
    environment = {**os.environ, "SERVE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [PYTHON, "-m", "lit_vgrpo", *COMMAND.split()],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("Serving jpeg on c"), line
        yield re.search(r"http\S+(?=/score)", line).group()
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=30)[0]
        assert process.returncode == 0
        assert re.fullmatch(r"Stopped after \d+ images\.\n", rest), "Ctrl-C is not clean"
    finally:
        process.kill()


@pytest.fixture
def ask(command):
    with httpx.Client(base_url=command, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30) as client:
        yield client


@pytest.mark.parametrize("encoding", ["json", "multipart"])
def test_a_served_reward_scores_as_it_does_at_home(command, monkeypatch, encoding):
    monkeypatch.setenv("SERVE_TOKEN", TOKEN)
    batch = make_images(20)
    connection = Connection(token_env="SERVE_TOKEN", timeout_s=30)
    remote = HTTPReward(f"{command}/score", encoding=encoding, connection=connection)
    assert torch.equal(remote(*batch), JPEGCompressibility(quality=80)(*batch))
    assert remote.take_counts() == {}
    remote.close()


def test_who_has_no_token_gets_in_nowhere_but_health(command, monkeypatch):
    body = body_of(make_images(1)[0])
    for headers in (
        {},
        {"Authorization": "Bearer t0keN"},
        {"Authorization": "Bearer \u00fc"},
        {"Authorization": TOKEN},
    ):
        headers = {name: value.encode() for name, value in headers.items()}
        assert httpx.post(f"{command}/score", content=body, headers=headers).status_code == 401
        assert httpx.get(f"{command}/version", headers=headers).status_code == 401
    assert httpx.get(f"{command}/health").json() == {"status": "ok", "waiting": 0}
    with pytest.raises(RewardError, match="401. Set HTTPReward.connection.token_env"):
        HTTPReward(f"{command}/score").load()


def test_version_says_what_is_served(ask):
    assert ask.get("/version").json() == {"protocol": 1, "name": "jpeg", "lit_vgrpo": __version__}


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"\x80\x04\x95", 422, "not JSON"),
        (b"", 422, "not JSON: nothing"),
        (b'{"images": ["YWJj"], "prompts": ["a"]}', 422, "images[0]: its 3 bytes are not a PNG file"),
        (b'{"images": [], "prompts": []}', 422, "no images"),
        (body_of(make_images(9)[0]), 413, "9 images exceed the limit of 8"),
        (bytes(1_000_001), 413, "larger than 1000000 bytes"),
        (b'{"rows": [' + b"{}," * 8000, 413, "more than 8000 values"),
    ],
)
def test_a_bad_request_gets_its_reason_in_a_line(ask, body, status, said):
    answer = ask.post("/score", content=body)
    assert answer.status_code == status
    assert said in answer.json()["detail"]


def test_a_bad_form_gets_its_reason_in_a_line(ask):
    picture = encode_png(torch.zeros(3, 4, 4, dtype=torch.uint8))
    files = [("images", ("0.png", picture, "image/png"))]
    assert ask.post("/score", files=files).json()["detail"] == "the field request is missing"
    answer = ask.post("/score", files=[*files, *files], data={"request": json.dumps({"prompts": ["a"]})})
    assert "2 images, 1 prompt" in answer.json()["detail"]
    answer = ask.post("/score", files=files * 12, data={"request": "{}"})
    assert answer.status_code in (400, 413)


def test_a_request_that_grows_too_large_is_not_read_to_its_end(command):
    connection = http.client.HTTPConnection(command.removeprefix("http://"), timeout=30)
    connection.putrequest("POST", "/score")
    connection.putheader("Authorization", f"Bearer {TOKEN}")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    sent, piece = 0, b"186a0\r\n" + bytes(100_000) + b"\r\n"
    try:
        while sent < 200_000_000:
            connection.sock.sendall(piece)
            sent += len(piece)
    except OSError:
        pass
    connection.close()
    assert sent < 50_000_000


class Recorded(Reward):
    """Mean brightness; notes what it is called with, and waits where it is told to."""

    name = "recorded"

    def __init__(self):
        self.calls = []
        self.started = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, images, prompts, rows):
        self.calls.append(prompts)
        self.started.set()
        self.go_on.wait(20)
        if "bad" in prompts:
            raise ValueError("two\nlines")
        if "exit" in prompts:
            raise SystemExit(3)
        return Brightness()(images, prompts, rows)


class Serving:
    """The application in a thread, for rewards that a test has a hand in."""

    def __init__(self, reward, batch_size=8, max_wait_ms=0):
        self.worker = Worker(Weighted([reward]), batch_size, max_wait_ms, torch.device("cpu"))
        app = make_app(self.worker, "test", None, 10_000_000, Limits())
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


def post_in_threads(url, bodies):
    answers = [None] * len(bodies)

    def post(number):
        answers[number] = httpx.post(url, content=bodies[number], timeout=30)

    threads = [threading.Thread(target=post, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    return threads, answers


def wait_until(condition):
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.02)
    raise AssertionError("it never happened")


def test_requests_that_come_together_are_scored_together_and_answered_apart():
    reward = Recorded()
    images = make_images(9)[0]
    parts = [images[1:2], images[2:4], images[4:7], images[7:]]
    with Serving(reward, batch_size=8) as serving:
        reward.go_on.clear()
        first, _ = post_in_threads(serving.url, [body_of(images[:1])])
        assert reward.started.wait(20)
        rest, answers = post_in_threads(serving.url, [body_of(part) for part in parts])
        wait_until(lambda: serving.worker._jobs.qsize() == 4)
        assert serving.worker.waiting == 9
        reward.go_on.set()
        for thread in (*first, *rest):
            thread.join(20)
    assert [len(call) for call in reward.calls] == [1, 8]
    for part, answer in zip(parts, answers, strict=True):
        assert torch.equal(torch.tensor(answer.json()["scores"]), Brightness()(part, [], []))


def test_pictures_of_several_sizes_keep_their_places():
    sides = [4, 8, 4, 16, 8, 4]
    pictures = [make_images(1, side, seed)[0] for seed, side in enumerate(sides)]
    files = [base64.b64encode(encode_png((picture[0] * 255).round().to(torch.uint8))).decode() for picture in pictures]
    reward = Recorded()
    with Serving(reward, batch_size=2) as serving:
        body = {"images": files, "prompts": [str(n) for n in range(6)]}
        answer = httpx.post(serving.url, json=body, timeout=30).json()
    assert reward.calls == [["0", "2"], ["5"], ["1", "4"], ["3"]]
    expected = torch.cat([Brightness()(picture, [], []) for picture in pictures])
    assert torch.equal(torch.tensor(answer["scores"]), expected)
    assert answer["errors"] == [None] * 6


def test_an_image_that_cannot_be_scored_gets_null_and_the_reason():
    with Serving(Recorded()) as serving:
        answer = httpx.post(serving.url, content=body_of(make_images(3)[0], ["a", "bad", "b"]), timeout=30).json()
    assert [score is None for score in answer["scores"]] == [False, True, False]
    assert answer["errors"] == [None, "recorded: ValueError: two lines", None]


class Wrong(Reward):
    name = "wrong"

    def __call__(self, images, prompts, rows):
        return torch.zeros(7)


def test_a_reward_that_breaks_its_contract_is_an_error_and_not_a_score():
    with Serving(Wrong()) as serving:
        answer = httpx.post(serving.url, content=body_of(make_images(2)[0]), timeout=30)
        assert answer.status_code == 500
        assert "Return one score per image" in answer.json()["detail"]
        assert httpx.get(serving.url.replace("score", "health")).json()["waiting"] == 0


def test_a_reward_that_wants_to_exit_ends_its_request_and_not_the_server():
    with Serving(Recorded()) as serving:
        assert httpx.post(serving.url, content=body_of(make_images(1)[0], ["exit"]), timeout=10).status_code == 500
        assert httpx.post(serving.url, content=body_of(make_images(1)[0], ["a"]), timeout=30).status_code == 200


def test_a_request_that_nobody_waits_for_is_not_scored():
    reward = Recorded()
    worker = Worker(Weighted([reward]), 1, 0, torch.device("cpu"))
    reward.go_on.clear()
    futures = [worker.submit(request_for(prompt)) for prompt in ("first", "given up", "last")]
    assert reward.started.wait(20)
    assert not futures[0].cancel(), "what is being scored cannot be taken back"
    assert futures[1].cancel()
    reward.go_on.set()
    assert futures[2].result(20).errors == [None]
    assert reward.calls == [["first"], ["last"]]
    worker.close()
    assert worker.waiting == 0


def test_a_server_with_too_much_to_do_says_when_to_come_again(monkeypatch):
    monkeypatch.setattr(worker_module, "MOST_WAITING_IMAGES", 2)
    reward = Recorded()
    with Serving(reward) as serving:
        reward.go_on.clear()
        threads, answers = post_in_threads(serving.url, [body_of(make_images(2)[0])])
        assert reward.started.wait(20)
        refused = httpx.post(serving.url, content=body_of(make_images(1)[0]), timeout=30)
        reward.go_on.set()
        threads[0].join(20)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert answers[0].status_code == 200


def test_pixels_that_wait_are_bounded_before_they_are_decoded(monkeypatch):
    monkeypatch.setattr(worker_module, "MOST_WAITING_PIXELS", 16 * 16 + 8 * 8)
    reward = Recorded()
    with Serving(reward) as serving:
        reward.go_on.clear()
        threads, answers = post_in_threads(serving.url, [body_of(make_images(1, side=16)[0])])
        assert reward.started.wait(20)
        monkeypatch.setattr(protocol, "decode_png", lambda *_: pytest.fail("the picture was decoded"))
        refused = httpx.post(serving.url, content=body_of(make_images(2, side=8)[0]), timeout=30)
        monkeypatch.undo()
        reward.go_on.set()
        threads[0].join(20)
        assert refused.status_code == 503
        assert "1 image of 0.0 megapixels already waiting" in refused.json()["detail"]
        assert answers[0].status_code == 200
        assert httpx.get(serving.url.replace("score", "health")).json()["waiting"] == 0


def test_a_call_of_the_reward_gets_so_many_pixels_at_most(monkeypatch):
    monkeypatch.setattr(worker_module, "BATCH_PIXELS", 3 * 8 * 8)
    reward = Recorded()
    with Serving(reward) as serving:
        httpx.post(serving.url, content=body_of(make_images(7, side=8)[0]), timeout=30)
        httpx.post(serving.url, content=body_of(make_images(2, side=16)[0]), timeout=30)
    assert [len(call) for call in reward.calls] == [3, 3, 1, 1, 1]


def test_bodies_that_are_held_are_bounded_together(monkeypatch):
    monkeypatch.setattr(app_module, "BODIES", 0.001)  # of 10 MB
    with Serving(Recorded()) as serving:
        refused = httpx.post(serving.url, content=bytes(20_000), timeout=30)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        for _ in range(5):  # what was held has been given back
            assert httpx.post(serving.url, content=body_of(make_images(2)[0]), timeout=30).status_code == 200


def test_a_body_is_let_go_before_its_images_are_scored():
    reward = Recorded()
    with Serving(reward) as serving:
        reward.go_on.clear()
        threads, answers = post_in_threads(serving.url, [body_of(make_images(2)[0])])
        assert reward.started.wait(20)
        held = [item for item in gc.get_objects() if type(item) is Request and hasattr(item, "_body")]
        reward.go_on.set()
        threads[0].join(20)
    assert answers[0].status_code == 200
    assert not held


HEAD = b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n"


@pytest.mark.parametrize(("sent", "within"), [(HEAD, b"0.2"), (HEAD + b"\r\n" + bytes(10), b"0.4")])
def test_a_request_that_is_slow_in_coming_is_given_up(monkeypatch, sent, within):
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    monkeypatch.setattr(connections, "BODY_S", 0.4)
    with Serving(Recorded()) as serving, socket.create_connection(serving.listener.getsockname()) as client:
        client.sendall(sent)
        client.settimeout(0.05)
        answer = b""
        for _ in range(200):  # a byte now and then is no reason to wait on
            try:
                piece = client.recv(1000)
            except TimeoutError:
                client.sendall(b"x")
                continue
            except ConnectionError:
                break
            if not piece:
                break
            answer += piece
        else:
            raise AssertionError("it was never given up")
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"did not arrive within %s s" % within in answer


def test_scoring_may_take_longer_than_a_request_may_take_to_come(monkeypatch):
    reward = Recorded()
    with Serving(reward) as serving:
        monkeypatch.setattr(connections, "HEAD_S", 0.2)
        monkeypatch.setattr(connections, "BODY_S", 0.3)
        reward.go_on.clear()
        threads, answers = post_in_threads(serving.url, [body_of(make_images(1)[0])])
        assert reward.started.wait(20)
        threading.Event().wait(0.6)
        reward.go_on.set()
        threads[0].join(20)
    assert answers[0].status_code == 200


def test_a_connection_that_says_nothing_is_closed_and_one_between_requests_is_kept(monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", 0.1)
    with (
        Serving(Recorded()) as serving,
        socket.create_connection(serving.listener.getsockname(), timeout=20) as silent,
        httpx.Client() as client,
    ):
        health = serving.url.replace("score", "health")
        assert client.get(health).status_code == 200
        (before,) = [line.client for line in serving.server.server_state.connections if line.cycle is not None]
        while silent.recv(1000):
            pass
        assert client.get(health).status_code == 200
        assert before in [line.client for line in serving.server.server_state.connections]


def test_connections_are_bounded(monkeypatch):
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 2)
    with Serving(Recorded()) as serving:
        lines = [socket.create_connection(serving.listener.getsockname(), timeout=20) for _ in range(2)]
        wait_until(lambda: len(serving.server.server_state.connections) == 2)
        with pytest.raises(httpx.TransportError):
            httpx.get(serving.url.replace("score", "health"))
        for line in lines:
            line.close()
        wait_until(lambda: not serving.server.server_state.connections)
        assert httpx.get(serving.url.replace("score", "health")).status_code == 200


def test_a_client_that_goes_away_is_no_server_error(logged):
    with Serving(Recorded()) as serving:
        with socket.create_connection(serving.listener.getsockname()) as client:
            client.sendall(HEAD + b"\r\n" + bytes(10))
            wait_until(lambda: serving.server.server_state.tasks)
        wait_until(lambda: not serving.server.server_state.tasks)
    assert not logged


def test_what_waits_when_the_server_goes_down_is_refused():
    reward = Recorded()
    worker = Worker(Weighted([reward]), 1, 0, torch.device("cpu"))
    reward.go_on.clear()
    first = worker.submit(request_for("a"))
    assert reward.started.wait(20)
    second = worker.submit(request_for("a"))
    threading.Timer(0.05, reward.go_on.set).start()
    worker.close()
    assert first.result(20).errors == [None]
    with pytest.raises(worker_module.Stopping):
        second.result(20)
    with pytest.raises(worker_module.Stopping):
        worker.submit(request_for("a"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("JPEGCompressibility --port abc", "--port abc is not a whole number"),
        ("JPEGCompressibility --port 70000", "--port 70000 is too large. Use 65535 or less."),
        ("JPEGCompressibility --max-megapixels 100", "--max-megapixels 100 is too large. Use 85 or less."),
        ("JPEGCompressibility --batch-size 0", "--batch-size 0 is too small"),
        ("JPEGCompressibility --prt 1", "Did you mean port?"),
        ("JPEGCompressibility --token-env NOT_SET_ANYWHERE", "export NOT_SET_ANYWHERE="),
        ("JPEGCompressibility --port 0 --host 203.0.113.77", "203.0.113.77"),
        ("JPEGCompressibility --port 0 --device gpu9", "--device gpu9 cannot be used"),
        ("JPEGCompressibility --port 0 quality=200", "quality=200 is too large. Use 1 to 95."),
        ("JPEGCompresibility --port 0", "Did you mean JPEGCompressibility?"),
        ("--port 0", "No reward given"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(capsys, words, said):
    assert main(["serve-reward", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert len(err.splitlines()) == 1
    assert out == ""


def test_a_port_that_is_taken_is_one_line(capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["serve-reward", "JPEGCompressibility", "--port", str(port)]) == 2
    assert f"Cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_a_missing_package_is_one_line(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve-reward", "JPEGCompressibility", "--port", "0"]) == 2
    assert 'uvicorn is not installed. Run: pip install "lit-vgrpo[serve]"' in capsys.readouterr().err


def test_a_reward_that_cannot_be_loaded_is_one_line(capsys):
    url = f"http://127.0.0.1:{free_port()}/score"
    words = ["lit_vgrpo.rewards.http.HTTPReward", f"url={url}", "connection.retries=0", "--port", "0"]
    assert main(["serve-reward", *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be reached" in line


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
