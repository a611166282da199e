"""A small web server that misbehaves on request, over real sockets."""

import base64
import io
import json
import math
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def get_request(self):
        self.owner.connections += 1
        return super().get_request()

    def handle_error(self, request, client_address):
        pass  # a client that hangs up is what most of these tests are about


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def do_GET(self):
        owner = self.server.owner
        if self.headers.get("Authorization") is not None:
            owner.requests.append((dict(self.headers), None))
        page = owner.pages.get(self.path, (404, b"no such page"))
        page(self) if callable(page) else self.answer(page[1], page[0])

    def do_POST(self):
        owner = self.server.owner
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with owner.lock:
            owner.requests.append((dict(self.headers), body))
            behave = owner.plan.pop(0) if owner.plan else owner.then
            owner.at_once += 1
            owner.most_at_once = max(owner.most_at_once, owner.at_once)
        try:
            self.body = body
            behave(self)
        finally:
            with owner.lock:
                owner.at_once -= 1

    def answer(self, body, status=200, headers=()):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class FaultServer:
    """Answers each POST with the next entry of ``plan``, and with ``then`` after the last one.

    Args:
        plan: answers to the next requests, functions of the handler such as those below.
        pages: answers to GET by path: a status and a body, or a function of the handler.
        then: answer to all other requests; None answers with the mean pixel of each image.
    """

    handler = Handler

    def __init__(self, plan=(), pages=None, then=None, at=("127.0.0.1", 0)):
        self.plan = list(plan)
        self.pages = pages or {}
        self.then = then or scores
        self.requests = []
        self.connections = 0
        self.at_once = 0
        self.most_at_once = 0
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.server = _Server(at, self.handler)
        self.server.owner = self
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def url(self):
        return f"{self.address}/score"

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()


def pixel_means(body):
    """Return the mean pixel of each image of a request in [0, 1], without the package under test."""
    files = [base64.b64decode(text) for text in json.loads(body)["images"]]
    return [float(np.asarray(Image.open(io.BytesIO(data))).astype(np.float64).mean() / 255) for data in files]


def scores(handler):
    means = pixel_means(handler.body)
    handler.answer({"version": 1, "scores": means, "errors": [None] * len(means)})


def answering(body, status=200, **headers):
    return lambda handler: handler.answer(body, status, {k.replace("_", "-"): v for k, v in headers.items()})


def saying(text, finish="stop"):
    """A chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return answering({"id": "1", "object": "chat.completion", "choices": [choice]})


def choosing(**tokens):
    """An answer whose first token has these probabilities."""
    listed = [{"token": token.replace("_", " "), "logprob": math.log(p)} for token, p in tokens.items()]
    return answering({"choices": [{"logprobs": {"content": [{"top_logprobs": listed}]}}]})


def hang(handler):
    handler.server.owner.closing.wait(60)
    handler.close_connection = True


def _for_seconds(handler, piece):
    for _ in range(250):
        if not handler.server.owner.closing.wait(0.02):
            handler.wfile.write(piece)
    handler.close_connection = True


def drip(handler):
    """Send a byte now and then, so that no single read takes long."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    _for_seconds(handler, b" ")


def reset(handler):
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.close_connection = True


def close_midway(handler):
    handler.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"version": 1, ')
    handler.close_connection = True


def no_http(handler):
    handler.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    handler.close_connection = True
