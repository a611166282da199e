"""Throughput of one HTTPReward over 1, 2, 4 and 8 servers, also while one is killed, stopped or ten times slower.

    python benchmarks/judges.py
    python benchmarks/judges.py --nginx    the servers behind one nginx, set up as in docs/reward_server.md

Each server is a process that scores one batch after another and takes 0.2 s for each.
"""

import argparse
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from lit_vgrpo.rewards import Connection, HTTPReward, ScoreQueue, Weighted

PAGE = Path(__file__).parents[1] / "docs/reward_server.md"
SECONDS = 0.2
SERVER = """
import json, signal, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
seconds, one_at_a_time = [float(sys.argv[1])], threading.Lock()
signal.signal(signal.SIGUSR1, lambda *_: seconds.append(10 * seconds[0]))
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    def log_message(self, *_): pass
    def do_POST(self):
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with one_at_a_time:
            time.sleep(seconds[-1])
        body = json.dumps({"scores": [float(row["number"]) for row in sent["rows"]]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
class Server(ThreadingHTTPServer):
    request_queue_size = 256
Server.handle_error = lambda *_: None
server = Server(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


@contextmanager
def judge(seconds=SECONDS):
    """Start a server; yield its process and address. SIGUSR1 makes it ten times slower."""
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(seconds)], stdout=subprocess.PIPE, text=True)
    try:
        yield process, f"http://127.0.0.1:{int(process.stdout.readline())}/score"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def proxy(urls):
    """Start an nginx in front of servers, set up as the page says; yield its address."""
    http = re.search(r"```nginx\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    servers = "".join(f"    server {url[7:-6]};\n" for url in urls)
    http = re.sub(r"( +server [^ ;]+;\n)+", servers, http).replace("listen 8000", f"listen 127.0.0.1:{port}")
    with tempfile.TemporaryDirectory() as folder:
        paths = "".join(f"{kind}_temp_path {folder};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        config = Path(folder, "nginx.conf")
        config.write_text(f"daemon off; pid {folder}/pid; events {{}} http {{ access_log off; {paths}\n{http} }}")
        process = subprocess.Popen(["nginx", "-e", f"{folder}/errors", "-c", config])
        try:
            time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/score"
        finally:
            process.terminate()
            process.wait()


def scored(urls, batches, size=4, per_call=None, **options):
    """Score batches in calls of so many, as a run does; return them, if all are right, and seconds."""
    reward = HTTPReward(urls, batch_size=size, connection=Connection(**options))
    queue, start, done = ScoreQueue(Weighted([reward])), time.perf_counter(), 0
    for first in range(0, batches, per_call or batches):
        rows = [{"number": n} for n in range(first * size, min(batches, first + (per_call or batches)) * size)]
        queue.put(torch.rand(len(rows), 3, 16, 16), ["a"] * len(rows), rows)
        done += len(rows)
    scores = queue.take()
    seconds = time.perf_counter() - start
    queue.close()
    return scores, torch.equal(scores.total, torch.arange(done).float()), seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=60, help="batches per server")
    parser.add_argument("--nginx", action="store_true", help="one address, of an nginx in front of the servers")
    given = parser.parse_args()
    batches = given.batches
    torch.set_num_threads(1)
    base = 0.0
    columns = ["servers", "event", "batches per call", "batches per second", "times one server's", "right"]
    print("", *columns, "requests", "counts", "", sep=" | ")
    for number, event in [(1, ""), (2, ""), (4, ""), (8, ""), (8, "SIGKILL"), (8, "SIGSTOP"), (8, "SIGUSR1")]:
        for per_call in (None, 1) if number > 1 else (None,):
            with ExitStack() as stack:
                judges = [stack.enter_context(judge()) for _ in range(number)]
                if event:
                    later = threading.Timer(3.0, judges[0][0].send_signal, [getattr(signal, event)])
                    later.start()
                    stack.callback(later.cancel)
                urls: list[str] | str = [url for _, url in judges]
                if given.nginx:
                    urls = stack.enter_context(proxy(urls))
                most = 2 * number if given.nginx else 4
                scores, is_right, seconds = scored(urls, batches * number, per_call=per_call, max_connections=most)
            rate = batches * number / seconds
            base = base or rate
            counts = {name: n for name, n in scores.counts.get("http", {}).items() if "/" not in name}
            per_server = [round(scores.counts.get("http", {}).get(f"{url[7:-6]}/requests", 0)) for _, url in judges]
            cells = [number, event or "none", per_call or "all", f"{rate:.1f}", f"{rate / base:.2f}", is_right]
            print("", *cells, per_server, counts, "", sep=" | ", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
