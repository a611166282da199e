"""An event loop in a thread of its own, and the HTTP client that lives there."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

STOP_S = 5.0


class LinkClosed(RuntimeError):
    """Nothing can be started any more."""


class Link:
    """Runs coroutines for threads that may have a loop of their own, such as a notebook's.

    Args:
        client: closed with the link.
        max_connections: for the semaphore ``slots``, which is shared by all that runs here.
    """

    def __init__(self, client: httpx.AsyncClient, max_connections: int) -> None:
        self.client = client
        self.slots = asyncio.Semaphore(max_connections)
        self.probing = asyncio.Lock()
        self.process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="reward-link", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin some work; its future is cancelled when the link closes.

        Raises:
            LinkClosed: it is closed already.
        """
        with self._lock:
            if self._is_closed:
                work.close()
                raise LinkClosed
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel what is under way and close the connections; from any thread, any number of times."""
        if self.process != os.getpid():
            return  # a fork has the memory of the thread, but not the thread
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:  # where the last reference to a reward is dropped there
            self._thread.join(STOP_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self.client.aclose())
        self._loop.close()
