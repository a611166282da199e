"""Scoring in threads while the next images are sampled."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lit_vgrpo.rewards.base import RewardError
from lit_vgrpo.rewards.combine import Weighted
from lit_vgrpo.rewards.scores import ImageBatch, Scores, image_batch

MOST_WAITING = 4
"""Batches that wait per thread; more would only use memory."""


@dataclass
class _Pending:
    """A batch and its scores so far; its images are kept for rewards that ask people."""

    batch: ImageBatch
    scores: dict[str, Future[Scores]]


class ScoreQueue:
    """A queue that scores batches of images in order.

    Each ``concurrent`` reward scores in its thread while the caller continues; the others score immediately. Each
    reward sees the same batches in the same order as without threads. A reward that asks people gets all images at
    once, when the scores are taken.

    Args:
        reward: the rewards; with ``overlap=False`` all of them score immediately.
        beside: another queue with rewards of the same names, whose threads are reused.
    """

    def __init__(self, reward: Weighted, beside: ScoreQueue | None = None) -> None:
        self.reward = reward
        self._pending: list[_Pending] = []
        self._threads: dict[str, ThreadPoolExecutor] = {} if beside is None else beside._threads
        self._is_loaded = False

    def __len__(self) -> int:
        """Return the number of batches put in and not yet taken."""
        return len(self._pending)

    def put(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> None:
        """Score a batch, now or in threads; arguments and errors as in :meth:`Weighted.score`."""
        if not self._is_loaded:
            self.reward.load()
            self._is_loaded = True
        batch = image_batch(images, prompts, rows)
        asking = [part for part in self.reward.parts if part.reward.asks_people]
        threaded = [part for part in self.reward.parts if self.reward.overlap and part.reward.concurrent]
        on_cpu = replace(batch, images=batch.images.cpu()) if threaded or asking else batch
        scores: dict[str, Future[Scores]] = {}
        for part in threaded:
            running = [entry.scores[part.name] for entry in self._pending if not entry.scores[part.name].done()]
            if len(running) >= MOST_WAITING:
                running[0].exception()  # waits; take() raises errors
            if part.name not in self._threads:
                self._threads[part.name] = ThreadPoolExecutor(1, thread_name_prefix=f"reward-{part.name}")
            scores[part.name] = self._threads[part.name].submit(self.reward.score_part, part, on_cpu)
        for part in self.reward.parts:
            if part not in threaded and part not in asking:
                scores[part.name] = Future()
                scores[part.name].set_result(self.reward.score_part(part, batch))
        kept = on_cpu if asking else replace(on_cpu, images=on_cpu.images[:0])
        self._pending.append(_Pending(kept, scores))

    def take(self) -> Scores:
        """Wait for the threads and return the scores of everything put in, in order, as one batch.

        Raises:
            RewardError: a reward broke its contract or cannot continue, or nothing was put in.
        """
        pending, self._pending = self._pending, []
        if not pending:
            raise RewardError("No images were put into the queue.")
        whole = ImageBatch.joined([entry.batch for entry in pending])
        parts = {
            part.name: self.reward.score_part(part, whole)
            if part.reward.asks_people
            else Scores.joined([entry.scores[part.name].result() for entry in pending])
            for part in self.reward.parts
        }
        return self.reward.summed(parts, whole.rows)

    def close(self) -> None:
        """Drop waiting batches and cancel the rewards' pending work; the queue stays usable."""
        for entry in self._pending:
            for score in entry.scores.values():
                score.cancel()
        self._pending = []
        self.reward.close()
        while self._threads:
            self._threads.popitem()[1].shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the queue if the block fails, so that no scoring continues after the run."""
        try:
            yield
        except BaseException:
            self.close()
            raise
