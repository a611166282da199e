"""The forked ``python`` that other tests start: it must end, speak and be stopped as an interpreter is."""

import os
import signal
import subprocess
import sys
import time

import pytest
from processes import BARE


def python(*words, **options):
    return subprocess.run([BARE, *words], capture_output=True, text=True, timeout=120, check=False, **options)


def test_words_folder_environment_and_streams(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(sys.argv[1:], os.getcwd(), os.environ.get('A'), sys.stdin.read())")
    (tmp_path / "beside.py").write_text("print(__name__)")
    env = {**os.environ, "A": "b"}
    done = python(str(script), "x", "-c", cwd=tmp_path, env=env, input="typed")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"['x', '-c'] {tmp_path} b typed\n", "")
    assert python("-m", "beside", cwd=tmp_path).stdout == "__main__\n"
    assert python("-c", "import beside", env={**env, "PYTHONPATH": str(tmp_path)}).stdout == "beside\n"


@pytest.mark.parametrize(
    ("code", "status", "err"),
    [
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import atexit, os; atexit.register(os._exit, 5)", 5, ""),
        ("import threading, time, os; threading.Thread(target=lambda: (time.sleep(.2), os._exit(6))).start()", 6, ""),
    ],
)
def test_its_end(code, status, err):
    done = python("-c", code)
    assert done.returncode == status
    assert done.stderr.endswith(err)
    assert done.stderr == "" or err


def is_gone(pid):
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_the_fork(number):
    code = "import os, time; print(os.getpid()); time.sleep(60)"
    with subprocess.Popen(
        [BARE, "-u", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        fork = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(30) == -number
        assert ("KeyboardInterrupt" in process.stderr.read()) == (number == signal.SIGINT)
    assert is_gone(fork)


def test_what_it_starts_is_forked_too_and_ends_with_its_group():
    inner = "import os, time; print(os.getpid(), os.getppid()); time.sleep(60)"
    code = f"import os, subprocess, sys; print(os.getpid()); subprocess.run([sys.executable, '-u', '-c', {inner!r}])"
    process = subprocess.Popen([BARE, "-u", "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    with process:
        fork = int(process.stdout.readline())
        child, parent = map(int, process.stdout.readline().split())
        assert parent == fork
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
    assert is_gone(fork)
    assert is_gone(child)


def test_an_interpreters_own_options_are_not_understood():
    assert "use sys.executable" in python("-X", "importtime").stderr
    assert sys.executable != BARE
