"""The queue that scores batches of images, some rewards in threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_vgrpo.rewards.base import ImageBatch, RewardError, Scores
from lit_vgrpo.rewards.combine import Weighted


class ScoreQueue:
    """A queue that scores batches of images in order.

    Each ``concurrent`` reward scores in its thread while the caller continues; the others score immediately. Each
    reward sees the same batches in the same order as without threads, several at once if it has several servers. A
    reward that compares gets all images at once, when the scores are taken.

    Args:
        reward: The rewards; with ``overlap=False`` all of them score immediately.
        other: A queue with rewards of the same names, whose threads are reused.
    """

    def __init__(self, reward: Weighted, other: ScoreQueue | None = None) -> None:
        self.reward = reward
        self._pending: list[tuple[ImageBatch, dict[str, Future[Scores]]]] = []
        self._threads: dict[str, ThreadPoolExecutor] = {} if other is None else other._threads
        self._is_loaded = False

    def __len__(self) -> int:
        return len(self._pending)

    def put(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> None:
        """Score a batch, now or in threads; arguments and errors as in :meth:`Weighted.score`."""
        if not self._is_loaded:
            self.reward.load()
            self._is_loaded = True
        batch = ImageBatch.rounded(images, prompts, rows)
        at_once = [part for part in self.reward.parts if not part.reward.compares]
        threaded = [part for part in at_once if self.reward.overlap and part.reward.concurrent]
        is_kept = self.reward.compares
        on_cpu = replace(batch, images=batch.images.cpu()) if threaded or is_kept else batch
        scores: dict[str, Future[Scores]] = {}
        for part in threaded:
            if part.name not in self._threads:
                threads = ThreadPoolExecutor(part.reward.calls_at_once, thread_name_prefix=f"reward-{part.name}")
                self._threads[part.name] = threads
            scores[part.name] = self._threads[part.name].submit(self.reward.score_part, part, on_cpu)
        for part in at_once:
            if part not in threaded:
                scores[part.name] = Future()
                scores[part.name].set_result(self.reward.score_part(part, batch))
        kept = on_cpu if is_kept else replace(on_cpu, images=on_cpu.images[:0].clone())  # not a view
        self._pending.append((kept, scores))

    def take(self) -> Scores:
        """Wait for the threads and return the scores of everything put in, in order, as one batch.

        Raises:
            RewardError: A reward broke its contract or cannot continue, or nothing was put in.
        """
        pending, self._pending = self._pending, []
        if not pending:
            raise RewardError("No images were put into the queue.")
        batches = [batch for batch, _ in pending]
        whole = ImageBatch(
            torch.cat([batch.images for batch in batches]),
            torch.cat([batch.is_finite for batch in batches]),
            [prompt for batch in batches for prompt in batch.prompts],
            [row for batch in batches for row in batch.rows],
        )
        parts = {
            part.name: self.reward.score_part(part, whole)
            if part.reward.compares
            else Scores.joined([scores[part.name].result() for _, scores in pending])
            for part in self.reward.parts
        }
        return self.reward.summed(parts, whole.rows)

    def close(self) -> None:
        """Drop waiting batches and cancel the rewards' pending work; the queue stays usable."""
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
