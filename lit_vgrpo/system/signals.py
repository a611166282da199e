"""Signals that ask a command to stop."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEAT_S = 1.0
"""Signals this close together are one request: a closing shell sends SIGHUP more than once."""
POLL_S = 0.2


@contextmanager
def handle_stop_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle all stop signals within the context, which must be in the main thread."""
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in _heard()}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _heard() -> list[int]:
    # nohup and a shell's background jobs ignore some signals, which stay ignored
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def how_it_ended(code: int) -> str:
    """Return a description of an exit status; a negative one is minus the number of a signal.

    >>> how_it_ended(-9), how_it_ended(3)
    ('was killed by SIGKILL', 'ended with exit status 3')
    """
    return f"ended with exit status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


class StopRequests(ABC):
    """Counter of stop requests; the third ends the process even if the main thread cannot.

    Python runs no signal handler while the main thread waits in a collective for an unresponsive rank. The interpreter
    therefore also writes each signal's number to a socket, which a thread reads.

    Attributes:
        signals: The requests received. Signals within :data:`REPEAT_S` count as one, except the first two of Ctrl-C.
        is_urgent: True if the main thread must stop immediately.
        ended_wait: What the command waited for when first asked, see :func:`waiting_for`; ``None`` if nothing.
    """

    def __init__(self) -> None:
        self.signals: list[int] = []
        self.is_urgent = False
        self.ended_wait: str | None = None
        self._obeyed = 0
        self._unanswered: list[int] = []
        self._last = -REPEAT_S
        self._is_held = False
        self._counting = threading.RLock()  # a handler may interrupt another one
        self._reader, self._writer = socket.socketpair()
        self._done = threading.Event()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Receive signals within the context, which must be in the main thread."""
        global _listening
        with self._reader, self._writer:
            self._reader.setblocking(False)
            self._writer.setblocking(False)
            wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            thread = threading.Thread(target=self._poll, name="stop-requests", daemon=True)
            before, _listening = _listening, self
            try:
                with handle_stop_signals(self.on_signal):
                    thread.start()
                    yield
            finally:
                _listening = before
                signal.set_wakeup_fd(wakeup)
                self._done.set()
                thread.join()

    @abstractmethod
    def can_wait(self) -> bool:
        """Return True if a first request may wait; any later one is urgent. Called in any thread."""

    @abstractmethod
    def answer(self, signum: int) -> None:
        """Report that a first request was received and waits. Called in the thread, which may print."""

    @abstractmethod
    def obey(self, signum: int) -> None:
        """Carry out a request in the main thread; may raise."""

    @abstractmethod
    def end(self, signum: int, reason: str) -> None:
        """End the process from the thread, even if the main thread hangs."""

    def hear_ctrl_c(self) -> None:
        """Handle Ctrl-C again after a library has ignored it."""
        if self is _listening and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, self.on_signal)

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._count()
        self._obey_pending()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Defer requests to the end of the block."""
        before, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = before
        self._obey_pending()

    def hold(self) -> None:
        """Defer requests until :meth:`release`."""
        self._is_held = True

    def release(self, heed: bool = True) -> None:
        """Stop deferring and carry out pending requests; harmless without :meth:`hold`."""
        self._is_held = False
        if heed:
            self._obey_pending()

    def _obey_pending(self) -> None:
        while not self._is_held and self._obeyed < len(self.signals):
            self._obeyed += 1
            self.obey(self.signals[self._obeyed - 1])

    def _count(self) -> None:
        """Read the signals' numbers from the socket."""
        with self._counting:
            try:
                numbers = self._reader.recv(4096)
            except OSError:
                return
            for number in numbers:
                if number not in STOP_SIGNALS:
                    continue
                since, self._last = time.monotonic() - self._last, time.monotonic()
                if since < REPEAT_S and (number != signal.SIGINT or len(self.signals) > 1):
                    continue
                self.is_urgent = self.is_urgent or bool(self.signals) or not self.can_wait()
                self.ended_wait = self.ended_wait or next(iter(_waits), None)  # before the wait sees the request
                self.signals.append(number)
                if not self.is_urgent:
                    self._unanswered.append(number)

    def _poll(self) -> None:
        while not self._done.is_set():
            select.select([self._reader], [], [], POLL_S)
            self._count()
            while self._unanswered:  # without the lock, since the main thread may hold that of the bars
                self.answer(self._unanswered.pop())
            if len(self.signals) > 2 and not self._done.is_set():
                self.end(self.signals[0], "It was asked to stop three times.")


_listening: StopRequests | None = None


_waits: list[str] = []


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Name what the context waits for, perhaps for hours; it must end when :func:`is_stop_requested`."""
    _waits.append(what)
    try:
        yield
    finally:
        _waits.remove(what)


def is_stop_requested() -> bool:
    """Return True if the running command was asked to stop and has not ended yet."""
    return _listening is not None and bool(_listening.signals)


def is_stop(error: BaseException) -> bool:
    """Return True if an exception was raised to stop the command, not by the code that it interrupted."""
    if isinstance(error, KeyboardInterrupt):  # a reward that waits raises it too, once the run was asked to stop
        return _listening is None or bool(_listening.signals)
    return isinstance(error, SystemExit) and _listening is not None and _listening.is_urgent


guests: list[Any] = []
"""An entry for each call of a user's code; a process forked meanwhile gets the default handlers, so that it can end."""
_fork = threading.local()


def _hold_signals() -> None:
    """Block signals until a forked process has its handlers: those of its parent would count them for the parent."""
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _restore_signals_in_a_fork() -> None:
    if _listening is not None:
        signal.set_wakeup_fd(-1)
    if _listening is not None or guests:
        for number in _heard():
            signal.signal(number, signal.SIG_DFL)
    _release_signals()


os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_restore_signals_in_a_fork)
