import asyncio
import threading

import pytest
import torch

from lit_vgrpo.rewards import PythonReward, Reward, RewardError, RewardOutage, ScoreQueue, Weighted
from lit_vgrpo.training.memory_passes import LiveMemory

PROMPTS = ["a", "b"]


class Mean(Reward):
    """The mean of a picture; it remembers in which thread it worked, and waits for ``gate`` where there is one."""

    def __init__(self, name="mean", concurrent=False, gate=None, trouble=None, compares=False):
        self.name = name
        self.compares = compares
        self.concurrent = concurrent
        self.gate = gate
        self.trouble = trouble
        self.threads = []
        self.idents = set()
        self.seen = []
        self.is_closed = False

    def __call__(self, images, prompts, rows):
        self.threads.append(threading.current_thread().name)
        self.idents.add(threading.get_ident())
        if self.gate is not None:
            assert self.gate.wait(10)
        self.seen.append(float(images.mean()))
        if self.trouble is not None:
            raise self.trouble
        return images.mean((1, 2, 3)) + (1 if torch.is_grad_enabled() else 0)

    def take_counts(self):
        return {"calls": 1}

    def close(self):
        self.is_closed = True


def batches(number=3):
    return [torch.full((2, 3, 4, 4), (index + 1) / 255) for index in range(number)]


def put_all(queue, images):
    for batch in images:
        queue.put(batch, PROMPTS, [{}, {}])


def test_a_concurrent_reward_works_in_a_thread_of_its_own_and_nothing_changes():
    images = batches()
    slow, inline = Mean("slow", concurrent=True), Mean("inline")
    reward = Weighted([inline, slow], [1, 2])
    queue = ScoreQueue(reward)
    put_all(queue, images)
    assert len(queue) == 3
    scores = queue.take()
    alone = [reward.score(batch, PROMPTS, [{}, {}]) for batch in images]
    assert torch.equal(scores.total, torch.cat([batch.total for batch in alone]))
    assert list(scores.parts) == ["inline", "slow"]
    assert scores.counts == {"slow": {"calls": 3}, "inline": {"calls": 3}}
    assert {name.rpartition("_")[0] for name in slow.threads[:3]} == {"reward-slow"}
    assert set(inline.threads[:3]) == {threading.current_thread().name}
    assert len(queue) == 0


def test_the_caller_goes_on_while_the_thread_waits_and_the_order_is_kept():
    gate = threading.Event()
    slow = Mean("slow", concurrent=True, gate=gate)
    queue = ScoreQueue(Weighted([slow]))
    put_all(queue, batches())
    assert slow.seen == []
    gate.set()
    assert queue.take().total.mul(255).round().tolist() == [1, 1, 2, 2, 3, 3]
    assert slow.seen == sorted(slow.seen)


def test_no_pixels_wait_with_the_scores():
    queue = ScoreQueue(Weighted([Mean("inline")], [1]))
    with LiveMemory() as live:
        for _ in range(3):
            queue.put(torch.rand(2, 3, 64, 64), PROMPTS, [{}, {}])
        assert live.live < 2 * 3 * 64 * 64
    assert len(queue.take().total) == 6


@pytest.mark.parametrize("concurrent", [False, True])
def test_an_outage_ends_the_run_where_another_error_fails_the_images(concurrent):
    queue = ScoreQueue(Weighted([Mean("bad", concurrent, trouble=OSError("gone"))]))
    put_all(queue, batches(1))
    assert queue.take().total.isnan().all()
    reward = Mean("bad", concurrent, trouble=RewardOutage("The server is gone."))
    queue = ScoreQueue(Weighted([reward]))

    def score():
        with queue.closed_on_error():
            put_all(queue, batches(1))
            queue.take()

    with pytest.raises(RewardOutage, match="The server is gone"):
        score()
    assert reward.is_closed
    assert len(queue) == 0


def test_closing_drops_what_waits_and_the_queue_works_again():
    gate = threading.Event()
    slow = Mean("slow", concurrent=True, gate=gate)
    queue = ScoreQueue(Weighted([slow]))
    put_all(queue, batches())
    with pytest.raises(KeyboardInterrupt), queue.closed_on_error():
        raise KeyboardInterrupt
    gate.set()
    assert slow.is_closed
    with pytest.raises(RewardError, match="No images were put into the queue"):
        queue.take()
    put_all(queue, batches(1))
    assert len(queue.take()) == 2
    assert len(slow.seen) <= 2  # the one that was under way, and the new one


def test_a_concurrent_reward_that_compares_is_called_once():
    queue = ScoreQueue(Weighted([reward := Mean("both", concurrent=True, compares=True)]))
    put_all(queue, batches())
    queue.take()
    assert (len(reward.seen), queue._threads) == (1, {})


def test_a_queue_uses_the_threads_of_another():
    slow = Mean("slow", concurrent=True)
    first = ScoreQueue(Weighted([slow]))
    second = ScoreQueue(Weighted([slow, Mean("other")]), other=first)
    for queue in (first, second, first):
        put_all(queue, batches(1))
        queue.take()
    assert len(slow.idents) == 1


def test_a_concurrent_reward_may_run_an_event_loop_in_a_notebook():
    def score(images, prompts):
        return asyncio.run(asyncio.sleep(0, [1.0] * len(prompts)))

    async def notebook():
        queue = ScoreQueue(Weighted([PythonReward(score, concurrent=True)]))
        put_all(queue, batches(1))
        return queue.take().total.tolist()

    assert asyncio.run(notebook()) == [1, 1]
