"""Requests to stop: what counts as one, and the end of a process whose main thread cannot react."""

import os
import signal
import threading
import time

import pytest

from lit_vgrpo.system import signals
from lit_vgrpo.system.signals import StopRequests


class Requests(StopRequests):
    def __init__(self):
        super().__init__()
        self.obeyed, self.answered, self.ended, self.answering = [], [], [], set()

    def can_wait(self):
        return True

    def answer(self, signum):
        self.answered.append(signum)
        self.answering.add(threading.current_thread().name)

    def obey(self, signum):
        self.obeyed.append(signum)
        if self.is_urgent:
            raise KeyboardInterrupt

    def end(self, signum, reason):
        self.ended.append((signum, reason))
        self._done.set()  # a real one does not return


def send(*names):
    for name in names:
        os.kill(os.getpid(), signal.Signals[name])


def ends(requests):
    end = time.monotonic() + 20
    while not requests.ended and time.monotonic() < end:
        time.sleep(0.01)
    return requests.ended


def test_signals_are_put_back():
    before = list(map(signal.getsignal, signals.STOP_SIGNALS))
    with Requests().listening():
        assert signal.getsignal(signal.SIGTERM) != before[1]
        wakeup = signal.set_wakeup_fd(-1)
        assert wakeup >= 0
    assert list(map(signal.getsignal, signals.STOP_SIGNALS)) == before
    assert signal.set_wakeup_fd(-1) == -1
    assert "stop-requests" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    ("names", "counted"),
    [
        (["SIGHUP", "SIGHUP", "SIGTERM"], ["SIGHUP"]),  # a session that ends
        (["SIGINT", "SIGTERM"], ["SIGINT"]),
        (["SIGTERM", "SIGINT"], ["SIGTERM", "SIGINT"]),
        (["SIGINT"] * 5, ["SIGINT"] * 2),  # somebody impatient, whose checkpoint is being written
    ],
)
def test_what_comes_at_once_is_one_request_but_two_of_ctrl_c(names, counted):
    requests = Requests()
    with requests.listening():
        requests.hold()
        send(*names)
    assert [signal.Signals(number).name for number in requests.signals] == counted
    assert requests.answered == requests.signals[:1]
    assert requests.answering == {"stop-requests"}  # a handler may interrupt a bar, whose lines it would mix up


def test_a_request_in_a_block_that_is_held_is_obeyed_after_it():
    requests = Requests()
    with requests.listening():
        with requests.held():
            send("SIGINT")
            assert requests.obeyed == []
        assert requests.obeyed == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt), requests.held():  # noqa: PT012
            send("SIGINT")
            done = True
        assert done


def test_a_third_request_ends_the_process_whatever_the_main_thread_does(monkeypatch):
    monkeypatch.setattr(signals, "REPEAT_S", 0.0)
    requests = Requests()
    with requests.listening():
        requests.hold()  # as in a collective: no handler of Python's does anything
        send("SIGTERM", "SIGINT")
        time.sleep(2 * signals.POLL_S)
        assert requests.ended == []
        send("SIGINT")
        assert ends(requests) == [(signal.SIGTERM, "It was asked to stop three times.")]


def test_a_forked_process_has_its_own_signals():
    """Also if it is ended before it runs."""
    requests = Requests()
    with requests.listening():
        child = os.fork()
        if child == 0:
            time.sleep(10)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert requests.signals == []


def test_the_wait_that_a_request_ends_is_known():
    requests = Requests()
    with requests.listening():
        with signals.waiting_for("the votes"):
            send("SIGINT")
        assert requests.ended_wait == "the votes"
    later = Requests()
    with later.listening():
        send("SIGINT")
    assert later.ended_wait is None
