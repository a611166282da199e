"""A command line run in a fork of one process that has loaded the libraries: their import takes 7 s, a fork 20 ms.

``write_python`` makes an executable that takes an interpreter's arguments (``-m MODULE``, ``-c CODE`` or a script, and
``-u`` before them), has the same streams, passes signals on and ends with the same status. Not as in an interpreter:

- Its pid is that of a small process that waits for the fork. A group's SIGKILL reaches the fork, SIGSTOP does not.
- What libraries read from the environment when they are imported is that of the tests.
- ``sys.modules`` is full. What is about that, or about the time that imports take, uses a fresh ``sys.executable``.
"""

import contextlib
import json
import os
import signal
import socket
import stat
import sys
import time

PASSED_ON = [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
POLL_S = 1.0


def write_python(folder, preloaded):
    """Write the executable for forks of a process that has imported these; what it needs ends with this process."""
    folder.mkdir()
    path = folder / "python"
    # -I -S: it imports nothing but the standard library, and starts in 20 ms.
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{__file__}" {os.getpid()} "{folder}" "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    # DeepSpeed reads this when it is imported.
    told = {"preloaded": preloaded, "env": {"DS_ACCELERATOR": "cpu", **os.environ}}
    (folder / "told.json").write_text(json.dumps(told))
    return str(path)


# --- the process that was asked for: it waits for the fork ------------------------------------------------------------


def ask(owner, folder, words):
    """Have the command run in a fork and end as it ended."""
    connection = connect(owner, folder)
    ignored = [number for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN]
    asked = {"words": words, "cwd": os.getcwd(), "env": dict(os.environ), "ignored": ignored}
    asked |= {"python": os.path.join(folder, "python"), "parent": os.getppid(), "leads": os.getpgid(0) == os.getpid()}
    message = json.dumps(asked).encode()
    for number in set(PASSED_ON) - set(ignored):
        signal.signal(number, lambda number, frame: connection.send(bytes([number])))
    socket.send_fds(connection, [len(message).to_bytes(8, "big")], [0, 1, 2])
    connection.sendall(message)
    status = int.from_bytes(connection.recv(4) or sys.exit("The process that forks is gone."), "big", signed=True)
    if status < 0:
        if -status in PASSED_ON:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
        signal.pause()
    os._exit(status)


def connect(owner, folder):
    """Connect to the process that forks; the first who asks starts it."""
    import fcntl
    import subprocess

    address = os.path.join(folder, "socket")
    with open(os.path.join(folder, "told.json")) as file:
        told = json.load(file)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with open(os.path.join(folder, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):
            connection.connect(address)
            return connection
        with open(os.path.join(folder, "log"), "wb") as log:
            subprocess.Popen(
                [sys.executable, __file__, "serve", owner, folder, *told["preloaded"]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=told["env"],
                start_new_session=True,
            )
        while True:
            try:
                connection.connect(address)
                return connection
            except OSError:
                time.sleep(0.01)


# --- the process that forks -------------------------------------------------------------------------------------------


class Forks:
    """The forks that run, and who waits for each."""

    def __init__(self, folder):
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(os.path.join(folder, "socket"))
        self.listener.listen(64)
        self.waiting = {}  # connection: pid, and whether its whole group is killed with it
        self.ended, self.wakeup = socket.socketpair()
        for end in (self.ended, self.wakeup):
            end.setblocking(False)

    def serve(self, owner):
        """Fork until the owner is gone.

        Returns:
            In a fork, what it was asked for; never otherwise.
        """
        import select

        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wakeup.fileno())
        while is_alive(owner):
            ready, _, _ = select.select([self.listener, self.ended, *self.waiting], [], [], POLL_S)
            for each in ready:
                if each is self.listener:
                    asked = self.fork(self.listener.accept()[0])
                    if asked is not None:
                        return asked
                elif each is self.ended:
                    self.ended.recv(4096)
                    self.reap()
                elif each in self.waiting:
                    self.listen(each)
        for connection in list(self.waiting):
            self.kill(connection)
        os._exit(0)

    def fork(self, connection):
        head, streams, _, _ = socket.recv_fds(connection, 8, 3)
        size, message = int.from_bytes(head, "big"), b""
        while len(message) < size:
            message += connection.recv(size - len(message))
        asked = json.loads(message)
        pid = os.fork()
        if pid:
            for stream in streams:
                os.close(stream)
            self.waiting[connection] = pid, asked["leads"]
            return None
        signal.set_wakeup_fd(-1)
        for each in (connection, self.listener, self.ended, self.wakeup, *self.waiting):
            each.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return asked

    def listen(self, connection):
        """Pass a signal on, or kill the fork of one who was killed."""
        try:
            numbers = connection.recv(64)
        except OSError:
            numbers = b""
        if not numbers:
            self.kill(connection)
            return
        for number in numbers:
            os.kill(self.waiting[connection][0], number)

    def kill(self, connection):
        pid, leads = self.waiting.pop(connection)
        connection.close()
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if leads else os.kill)(pid, signal.SIGKILL)

    def reap(self):
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for connection, (other, _) in list(self.waiting.items()):
                if other == pid:
                    del self.waiting[connection]
                    with contextlib.suppress(OSError):
                        connection.send(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
                    connection.close()


def is_alive(pid):
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


def become(words, cwd, env, ignored, python, parent, leads):
    """Run ``python WORDS`` to its end."""
    import faulthandler

    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1)  # where a rank hangs
    sys.executable = python  # what it starts is forked too
    os.getppid = lambda: parent if is_alive(parent) else 1  # a rank that looks whether rank 0 is gone
    unbuffered = bool(env.get("PYTHONUNBUFFERED"))
    while words[0] == "-u":
        unbuffered, words = True, words[1:]
    if unbuffered:
        sys.stdout.reconfigure(write_through=True)
    sys.path[:1] = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    end_after(run, words)


def run(words):
    import runpy

    if words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        assert not words[0].startswith("-"), f"{words[0]}: use sys.executable"
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def end_after(function, *args):
    """Call it and end as the interpreter does, but for the tearing down of all modules, which takes a second."""
    import atexit
    import threading

    status = 0
    try:
        function(*args)
    except SystemExit as ending:
        if ending.code is not None and not isinstance(ending.code, int):
            print(ending.code, file=sys.stderr)
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def serve(owner, folder, *preloaded):
    """Import the libraries and fork; a fork returns from here with what it was asked for."""
    import gc
    from importlib import import_module

    forks = Forks(folder)  # who asks may connect, and waits
    for name in preloaded:
        import_module(name)
    gc.collect()
    gc.freeze()  # forks share what is there
    return forks.serve(owner)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        become(**serve(*sys.argv[2:]))
    else:
        ask(sys.argv[1], sys.argv[2], sys.argv[3:])
