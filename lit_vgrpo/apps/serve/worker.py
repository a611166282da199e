"""The thread that owns the reward and scores the requests of several clients together."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lit_vgrpo.rewards import Scores, Weighted

BATCH_PIXELS = 32 * 2**20
"""32 images of 1,024 px; in float32 they take 403 MB on the reward's device."""


class Stopping(RuntimeError):
    """The server is shutting down."""


@dataclass
class _Job:
    """Images to score: uint8, ``(3, H, W)`` each, perhaps of several sizes, with a prompt and a row per image."""

    images: list[Tensor]
    prompts: list[str]
    rows: list[dict[str, Any]]
    done: Future[Scores] = field(default_factory=Future)


class Worker:
    """Scores requests in order of arrival, several in one call of the reward where they arrive together.

    The images of a call have the same size and at most ``BATCH_PIXELS``, unless a single image has more. A request
    with images of several sizes takes several calls.

    Args:
        reward: called only from the worker's thread.
        batch_size: images per call.
        max_wait_ms: how long the first request of a call waits for others.
        device: device of the images.

    Attributes:
        scored_images: images scored so far.
    """

    def __init__(self, reward: Weighted, batch_size: int, max_wait_ms: int, device: torch.device) -> None:
        self.reward = reward
        self.batch_size = batch_size
        self.max_wait_s = max_wait_ms / 1000
        self.device = device
        self.scored_images = 0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._is_closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="reward-worker", daemon=True)
        self._thread.start()

    def submit(self, images: list[Tensor], prompts: list[str], rows: list[dict[str, Any]]) -> Future[Scores]:
        """Queue a request and return the future of its scores; raise Stopping if the worker was closed.

        Args:
            images: uint8, shape ``(3, H, W)`` each; sizes may differ.
            prompts: one per image.
            rows: one per image.
        """
        job = _Job(images, prompts, rows)
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
            arrived = [first, *self._others(len(first.images))]
            jobs = [job for job in arrived if job.done.set_running_or_notify_cancel()]  # nobody waits for the others
            try:
                if self._is_closed:
                    raise Stopping("the server is shutting down")
                scores = self._score(jobs) if jobs else []
            except BaseException as error:  # the thread must survive whatever the reward raises
                for job in jobs:
                    job.done.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            else:
                for job, of_job in zip(jobs, scores, strict=True):
                    job.done.set_result(of_job)

    def _others(self, images: int) -> list[_Job]:
        """Return the requests that arrive within the wait, until a batch is full."""
        found: list[_Job] = []
        if images < self.batch_size:
            time.sleep(self.max_wait_s)
        while images < self.batch_size and not self._jobs.empty():  # this thread alone takes jobs
            job = self._jobs.get()
            if job is None:
                self._jobs.put(None)  # the end, for the loop outside
                break
            found.append(job)
            images += len(job.images)
        return found

    def _score(self, jobs: list[_Job]) -> list[Scores]:
        images = [image for job in jobs for image in job.images]
        prompts = [prompt for job in jobs for prompt in job.prompts]
        rows = [row for job in jobs for row in job.rows]
        by_size: dict[torch.Size, list[int]] = defaultdict(list)
        for index, image in enumerate(images):
            by_size[image.shape].append(index)
        calls: list[Scores] = []
        order: list[int] = []
        for (_, height, width), indices in by_size.items():
            size = max(1, min(self.batch_size, BATCH_PIXELS // (height * width)))
            for start in range(0, len(indices), size):
                chosen = indices[start : start + size]
                pixels = torch.stack([images[i] for i in chosen]).to(self.device).float().div_(255)
                calls.append(self.reward.score(pixels, [prompts[i] for i in chosen], [rows[i] for i in chosen]))
                order += chosen
        self.scored_images += len(images)
        scores = Scores.joined(calls).select(torch.tensor(order).argsort())
        return [scores.select(part) for part in torch.arange(len(images)).split([len(job.images) for job in jobs])]
