"""The thread that owns the reward and scores the requests of several clients together."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lit_vgrpo.errors import counted, one_line
from lit_vgrpo.rewards import Weighted
from lit_vgrpo.rewards.protocol import MEGAPIXEL, EncodedRequest, ScoreRequest

MOST_WAITING_IMAGES = 1024
MOST_WAITING_PIXELS = 256 * MEGAPIXEL
"""1,024 images of 512 px; decoded, they take 805 MB."""
BATCH_PIXELS = 32 * MEGAPIXEL
"""32 images of 1,024 px; in float32 they take 403 MB on the reward's device."""


class Busy(RuntimeError):
    """There is no room for another request now."""


class Stopping(RuntimeError):
    """The server is shutting down."""


@dataclass
class _Answer:
    """The scores of a request's images, in order.

    Args:
        total: shape ``(B,)``, float32, NaN where an image failed.
        errors: why an image failed; None elsewhere.
        parts: scores of each reward by name, ``(B,)``.
    """

    total: Tensor
    errors: list[str | None]
    parts: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class _Job:
    request: ScoreRequest
    done: Future[_Answer] = field(default_factory=Future)


class Worker:
    """Scores requests in order of arrival, several in one call of the reward where they arrive together.

    The images of a call have the same size and at most ``BATCH_PIXELS``, unless a single image has more. A request
    with images of several sizes takes several calls.

    Args:
        reward: called only from the worker's thread.
        batch_size: images per call.
        max_wait_ms: how long the first request of a call waits for others.
        device: device of the images.
    """

    def __init__(self, reward: Weighted, batch_size: int, max_wait_ms: int, device: torch.device) -> None:
        self.reward = reward
        self.batch_size = batch_size
        self.max_wait_s = max_wait_ms / 1000
        self.device = device
        self.scored_images = 0
        self.calls = 0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._waiting = 0
        self._pixels = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="reward-worker", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Images that are not scored yet, including those being decoded."""
        return self._waiting

    @contextmanager
    def room_for(self, request: EncodedRequest) -> Iterator[None]:
        """Count a request's images as waiting while the block runs: from before decoding until they are scored.

        Raises:
            Busy: too much is waiting.
            Stopping: the worker was closed.
        """
        images, pixels = len(request.files), request.pixels
        with self._lock:
            if self._is_closed:
                raise Stopping("the server is shutting down")
            is_much = self._waiting + images > MOST_WAITING_IMAGES or self._pixels + pixels > MOST_WAITING_PIXELS
            if self._waiting and is_much:
                raise Busy(
                    f"{counted(self._waiting, 'image')} of {self._pixels / MEGAPIXEL:.1f} megapixels already waiting"
                )
            self._waiting += images
            self._pixels += pixels
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= images
                self._pixels -= pixels

    def submit(self, request: ScoreRequest) -> Future[_Answer]:
        """Queue a request and return the future of its scores; raise Stopping if the worker was closed."""
        job = _Job(request)
        with self._lock:
            if self._is_closed:
                raise Stopping("the server is shutting down")
            self._jobs.put(job)
        return job.done

    def close(self, timeout_s: float = 5.0) -> None:
        """Refuse waiting requests and give the current one ``timeout_s`` to finish."""
        with self._lock:
            self._is_closed = True
        self._jobs.put(None)
        self.reward.close()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (first := self._jobs.get()) is not None:
            taken = [first, *self._others(len(first.request.images))]
            jobs = [job for job in taken if job.done.set_running_or_notify_cancel()]  # nobody waits for the others
            try:
                if self._is_closed:
                    raise Stopping("the server is shutting down")
                scores = self._score([job.request for job in jobs])
            except BaseException as error:
                # whatever the reward raises, exit() too, is an answer to its requests and not the end of the thread
                raised = error if isinstance(error, Exception) else RuntimeError(f"the reward raised {error!r}")
                for job in jobs:
                    job.done.set_exception(raised)
            else:
                for job, own in zip(jobs, scores, strict=True):
                    job.done.set_result(own)

    def _others(self, images: int) -> list[_Job]:
        """Return the requests that arrive within the wait, until a batch is full."""
        found: list[_Job] = []
        until = time.monotonic() + self.max_wait_s
        while images < self.batch_size:
            try:
                job = self._jobs.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if job is None:
                self._jobs.put(None)  # the end, for the loop outside
                break
            found.append(job)
            images += len(job.request.images)
        return found

    def _score(self, requests: list[ScoreRequest]) -> list[_Answer]:
        images = [image for request in requests for image in request.images]
        prompts = [prompt for request in requests for prompt in request.prompts]
        rows = [row for request in requests for row in request.rows]
        total = torch.full((len(images),), math.nan)
        parts = {name: torch.full((len(images),), math.nan) for name in self.reward.part_names}
        errors: list[str | None] = [None] * len(images)
        by_size: dict[torch.Size, list[int]] = defaultdict(list)
        for place, image in enumerate(images):
            by_size[image.shape].append(place)
        for (_, height, width), places in by_size.items():
            size = max(1, min(self.batch_size, BATCH_PIXELS // (height * width)))
            for start in range(0, len(places), size):
                chosen = places[start : start + size]
                pixels = torch.stack([images[place] for place in chosen]).to(self.device).float().div_(255)
                batch = self.reward.score(pixels, [prompts[i] for i in chosen], [rows[i] for i in chosen])
                self.calls += 1
                total[chosen] = batch.total.cpu()
                for name, scores in batch.parts.items():
                    parts[name][chosen] = scores.cpu()
                why = "; ".join(f"{name}: {one_line(error)}" for name, error in batch.errors.items()) or "no score"
                for place, is_ok in zip(chosen, batch.ok.tolist(), strict=True):
                    errors[place] = None if is_ok else why
        self.scored_images += len(images)
        split, start = [], 0
        for request in requests:
            own = slice(start, start + len(request.images))
            split.append(_Answer(total[own], errors[own], {name: part[own] for name, part in parts.items()}))
            start = own.stop
        return split
