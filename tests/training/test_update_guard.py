import math
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from helpers import make_data, make_module, make_trainer, repeating, same, weights

from lit_vgrpo import VGRPO, RolloutSpec
from lit_vgrpo.callbacks import EMA, RewardLogger
from lit_vgrpo.module import VGRPOModule
from lit_vgrpo.training import update_guard
from lit_vgrpo.training.checkpoint import RunCheckpoint
from lit_vgrpo.training.update_guard import MOST_IN_A_ROW, UpdateGuard

GOOD, BAD = torch.tensor([1.0, -2.0]), torch.tensor([1.0, math.inf])


def beside_a_rank_with(loss, gradient):
    return lambda values, every_process: torch.cat([values, torch.tensor([[loss, gradient]])])


alone = update_guard.all_gather


@pytest.mark.parametrize(
    ("loss", "gradient", "others", "message"),
    [
        (math.nan, GOOD, alone, "The loss is not finite, in update 1."),
        (0.0, BAD, alone, "The gradient is not finite, in update 1."),
        (0.0, GOOD, beside_a_rank_with(1, 1), "The loss is not finite on rank 1 of 2, in update 1."),
        (0.0, GOOD, beside_a_rank_with(0, 1), "The gradient is not finite on rank 1 of 2, in update 1."),
    ],
)
def test_stop_says_what_where_and_what_to_do(monkeypatch, loss, gradient, others, message):
    monkeypatch.setattr(update_guard, "all_gather", others)
    guard = UpdateGuard()
    guard.watch(torch.tensor(1.0))
    guard.watch(torch.tensor(loss))
    with pytest.raises(FloatingPointError, match="model.non_finite=skip") as stopped:
        guard.refuses([GOOD, gradient], "in update 1")
    assert str(stopped.value).startswith(message)


def test_skip_counts_and_gives_up_at_last():
    guard = UpdateGuard("skip")
    assert guard.refuses([BAD], "now")
    assert not guard.refuses([GOOD], "now")
    for _ in range(MOST_IN_A_ROW - 1):
        assert guard.refuses([BAD], "now")
    assert guard.skipped == MOST_IN_A_ROW
    with pytest.raises(FloatingPointError, match=f"for {MOST_IN_A_ROW} updates in a row"):
        guard.refuses([BAD], "now")


def test_a_finite_norm_is_enough_and_any_other_is_looked_into():
    def untouched():
        raise AssertionError("every gradient was looked at")
        yield

    guard, infinite = UpdateGuard("skip"), torch.tensor(math.inf)
    guard.watch(torch.tensor(1.0))
    assert not guard.refuses(untouched(), "now", norm=torch.tensor(2.0))
    large = torch.tensor([3e38, -3e38])  # its squares overflow
    assert not guard.refuses([large], "now", norm=large.square().sum().sqrt())
    assert guard.refuses([GOOD, BAD], "now", norm=infinite)
    guard.watch(torch.tensor(math.nan))
    assert guard.refuses([GOOD], "now", norm=torch.tensor(2.0))


def scaled_updates(gradient, count, scale=65536.0):
    """Whether each update took a step, by a scaler's skips; ``gradient`` is that at a loss scale of 1."""
    guard, scaler, weight = UpdateGuard(), torch.amp.GradScaler("cpu", init_scale=scale), torch.nn.Linear(1, 1)
    trainer = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=scaler), strategy=None)
    optimizer, took = torch.optim.SGD(weight.parameters(), lr=1e-9), []
    for number in range(count):
        scaled = (scaler.scale(torch.tensor(1.0)) * gradient).half().float()  # infinite above 65,504
        for parameter in weight.parameters():
            parameter.grad = scaled.expand_as(parameter).clone()
        guard.check(trainer, weight, f"in update {number}")
        scaler.step(optimizer)
        scaler.update()
        took.append(guard.took_step(trainer))
    return took


def test_a_scaler_may_search_for_its_scale_but_not_without_end():
    assert scaled_updates(60_000.0, 20) == [False] * 16 + [True] * 4
    for scale, updates in ((65536.0, 16 + MOST_IN_A_ROW), (0.0, MOST_IN_A_ROW)):
        assert scaled_updates(math.nan, updates, scale) == [False] * updates
        with pytest.raises(FloatingPointError, match=f"not finite at any loss scale, .* in update {updates}. The w"):
            scaled_updates(math.nan, updates + 1, scale)


class Once(VGRPO):
    """A loss that is no number in the second update, in one of its micro-batches."""

    started = 0

    def before_update(self, policy, micros, ledger=None):
        self.started, self.left = self.started + 1, len(micros)

    def loss(self, policy, micro):
        loss, metrics = super().loss(policy, micro)
        self.left -= 1
        return loss * (math.nan if self.started == 2 and self.left == 1 else 1), metrics


def train_skipping(folder, tmp_path, iterations):
    module, ema = make_module(folder, Once(RolloutSpec(steps=2)), non_finite="skip"), EMA(0.5)
    trainer = make_trainer(tmp_path, iterations, [ema])
    trainer.fit(module, datamodule=make_data(heldout_limit=1, micro_batch_size=2))
    return module, trainer, ema


def test_a_refused_update_leaves_weights_moments_and_clocks(tiny_sd3, tmp_path):
    before, first, first_ema = train_skipping(tiny_sd3, tmp_path, 1)
    after, trainer, ema = train_skipping(tiny_sd3, tmp_path, 2)
    assert same(weights(after), weights(before))
    assert (after.objective.num_updates, ema.num_updates, after.guard.skipped) == (1, 1, 1)
    assert same(ema.average.tensors, first_ema.average.tensors)
    states = [fit.optimizers[0].state_dict()["state"] for fit in (first, trainer)]
    assert all(same(states[1][index], state) for index, state in states[0].items())
    module = make_module(tiny_sd3, Once(RolloutSpec(steps=2)))  # by default it stops
    trainer = make_trainer(tmp_path, 3, [RunCheckpoint()], enable_checkpointing=True)
    with pytest.raises(FloatingPointError, match="The loss is not finite, in update 1 of iteration 2. The weights"):
        trainer.fit(module, datamodule=make_data(heldout_limit=1, micro_batch_size=2))
    assert same(weights(module), weights(before))
    saved = torch.load(tmp_path / "checkpoints" / "interrupted.ckpt", weights_only=False)
    assert (saved["global_step"], saved["lit_vgrpo"]["iteration"]["updates_done"]) == (1, 0)


CLIPS = [{}, {"gradient_clip_algorithm": "value"}]


class ByLightning(VGRPOModule):
    """Clips as Lightning does, which computes the norm again."""

    def configure_gradient_clipping(self, *args, **kwargs):
        return L.LightningModule.configure_gradient_clipping(self, *args, **kwargs)


@pytest.mark.parametrize("options", repeating(CLIPS, slow=CLIPS[1:]), ids=["norm", "value"])
def test_one_norm_is_checked_logged_and_clipped_by(tiny_sd3, tmp_path, monkeypatch, options):
    taken, norm = [], torch.nn.utils.get_total_norm
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda *a, **k: taken.append(norm(*a, **k)) or taken[-1])
    made = []
    clip = {"gradient_clip_val": 0.01, **options}
    for cls, chosen in ((VGRPOModule, clip), (ByLightning, clip), (VGRPOModule, {})):
        module = make_module(tiny_sd3, VGRPO(RolloutSpec(steps=2)), **chosen)
        module.__class__ = cls
        trainer = make_trainer(tmp_path, 2, [RewardLogger()])
        trainer.fit(module, datamodule=make_data(heldout_limit=1, micro_batch_size=2))
        made.append((weights(module), trainer.callback_metrics["policy/grad_norm"]))
    (own, logged), (lightnings, _), (unclipped, _) = made
    assert same(own, lightnings)
    assert not same(own, unclipped)
    assert len(taken) == 6  # one an update
    assert logged == taken[1] > 0.01
