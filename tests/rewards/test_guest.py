"""A user's code is a guest: the settings that it changes are restored, and a process that it forks ends in it."""

import os
import signal
import sys
import time
import warnings

import pytest
import torch
from torch.backends import cuda, cudnn, mkldnn

from lit_vgrpo.rewards import PythonReward, ScoreQueue, Weighted
from lit_vgrpo.rewards.base import PROCESS_SETTINGS, THREAD_SETTINGS, guest
from lit_vgrpo.system.signals import StopRequests

IMAGES, PROMPTS, ROWS = torch.rand(2, 3, 4, 4), ["a", "b"], [{}, {}]
CHANGES = [
    lambda: torch.set_default_dtype(torch.float64),
    lambda: torch.set_default_device("meta"),
    lambda: torch.set_grad_enabled(False),
    lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    lambda: torch.set_float32_matmul_precision("medium"),
    lambda: setattr(cudnn, "benchmark", not cudnn.benchmark),
    lambda: setattr(cudnn, "enabled", False),
    lambda: setattr(cudnn.conv, "fp32_precision", "ieee") if hasattr(cudnn, "conv") else None,
    lambda: setattr(cuda.matmul, "fp32_precision", "tf32") if hasattr(cudnn, "conv") else None,
    lambda: setattr(cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    lambda: setattr(mkldnn, "enabled", False),
    lambda: cuda.enable_flash_sdp(False),
    lambda: torch.autograd.set_detect_anomaly(True),
    lambda: warnings.simplefilter("error"),
    lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
]


def settings():
    own = [get() for get, _ in (*THREAD_SETTINGS, *PROCESS_SETTINGS)]
    switches = [cudnn.enabled, cudnn.benchmark, mkldnn.enabled, cuda.flash_sdp_enabled(), torch.is_anomaly_enabled()]
    precisions = [cuda.matmul.allow_bf16_reduced_precision_reduction, cuda.matmul.allow_tf32, cudnn.allow_tf32]
    return [*own, *switches, *precisions, [one for one in warnings.filters if one[0] == "error"]]


def reward_that(act, **options):
    def mean(images, prompts):
        scores = images.mean((1, 2, 3))
        act()
        return scores

    return PythonReward(mean, **options)


def fail_after(act):
    def both():
        act()
        raise OSError("lost")

    return both


@pytest.mark.parametrize("step", ["score", "fail", "load", "with_gradient"])
def test_settings_are_those_of_before(step):
    def change():
        for one in CHANGES:
            one()

    before = settings()
    reward = reward_that(fail_after(change) if step == "fail" else change, differentiable=True)
    if step == "load":
        reward.load = change
    try:
        if step == "with_gradient":
            Weighted([reward]).with_gradient(IMAGES.clone().requires_grad_(), PROMPTS, ROWS).sum().backward()
        found = Weighted([reward]).score(IMAGES, PROMPTS, ROWS)
        assert settings() == before
        assert found.total.dtype == torch.float32
        assert found.ok.all() == (step != "fail")
    finally:
        for (_, put), value in zip((*THREAD_SETTINGS, *PROCESS_SETTINGS), before, strict=False):
            put(value)


def test_what_another_guest_changes_for_a_moment_is_not_kept():
    """As two rewards in threads may overlap."""
    brief, longer = guest(), guest()
    brief.__enter__()
    torch.set_default_dtype(torch.float64)
    longer.__enter__()
    torch.set_default_dtype(torch.float32)
    for one in (longer, brief):
        one.__exit__(None, None, None)
        assert torch.get_default_dtype() == torch.float32


def fork_and(leave):
    def act():
        if (child := os.fork()) == 0:
            leave()
            return
        for _ in range(100):
            time.sleep(0.1)
            if (found := os.waitpid(child, os.WNOHANG))[0]:
                statuses.append(os.waitstatus_to_exitcode(found[1]))
                return
        os.kill(child, signal.SIGKILL)

    statuses = []
    return act, statuses


@pytest.mark.parametrize(
    ("leave", "status"),
    [(lambda: None, 0), (sys.exit, 0), (lambda: sys.exit(3), 3), (lambda: sys.exit("bye"), 1), (fail_after(list), 1)],
)
def test_a_forked_process_ends_where_it_leaves_the_users_code(leave, status):
    process, (act, statuses) = os.getpid(), fork_and(leave)
    try:
        queue = ScoreQueue(Weighted([reward_that(act, concurrent=status != 0)]))
        queue.put(IMAGES, PROMPTS, ROWS)
        assert queue.take().ok.all()
    finally:
        if os.getpid() != process:
            os._exit(77)  # not a second run of the tests
    assert statuses == [status]


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_process_that_a_reward_forks_can_be_ended(concurrent):
    """Lightning's handler of SIGTERM, which it would inherit, ends nothing; other forks keep it."""

    def forks():
        if (child := os.fork()) == 0:
            time.sleep(5)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    statuses = []
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        queue = ScoreQueue(Weighted([reward_that(forks, concurrent=concurrent)]))
        queue.put(IMAGES, PROMPTS, ROWS)
        queue.take()
        if (child := os.fork()) == 0:
            os._exit(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
        assert (statuses, os.waitpid(child, 0)[1]) == ([-signal.SIGTERM], 0)
    finally:
        signal.signal(signal.SIGTERM, before)


class Requests(StopRequests):
    """As of a run, for which the first signal is already urgent."""

    def can_wait(self):
        return False

    def answer(self, signum):
        raise AssertionError

    def obey(self, signum):
        raise SystemExit(128 + signum)

    end = answer


def test_a_signal_to_the_run_stops_it_and_an_interrupt_of_the_codes_own_fails_its_images():
    def interrupts():
        raise KeyboardInterrupt

    with Requests().listening():
        found = Weighted([reward_that(interrupts)]).score(IMAGES, PROMPTS, ROWS)
        assert not found.ok.any()
        assert found.errors["mean_2"].endswith(": KeyboardInterrupt.")
        with pytest.raises(SystemExit, match="143"):
            Weighted([reward_that(lambda: signal.raise_signal(signal.SIGTERM))]).score(IMAGES, PROMPTS, ROWS)
