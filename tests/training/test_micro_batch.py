"""``data.micro_batch_size: auto``: the largest that fits, found without a trace."""

from dataclasses import replace

import pytest
import torch
from all_methods import METHODS
from helpers import SaveAt, make_data, make_module, make_trainer, same, weights
from hypothesis import given
from hypothesis import strategies as st
from support.pretended_gpu import pretended_gpu

from lit_vgrpo import VGRPO, DiffusionNFT, OptimizerConfig, RolloutSpec, SD3Policy
from lit_vgrpo.callbacks import EMA
from lit_vgrpo.core.sizes import Sizes, divisors
from lit_vgrpo.rewards import CLIPScore
from lit_vgrpo.training.micro_batch import TOO_MUCH, Trial, largest_that_fits, shown
from lit_vgrpo.training.sharded import ZeRO
from lit_vgrpo.training.strategies import strategy_errors


def fit(folder, tmp_path, make, micro_batch_size, iterations=1, ckpt=None, callbacks=(), **options):
    module = make_module(folder, make(), **options)
    data = make_data(micro_batch_size=micro_batch_size, heldout_limit=1, updates_per_iteration=2)
    trainer = make_trainer(tmp_path, iterations, [EMA(0.5), *callbacks])
    trainer.fit(module, datamodule=data, ckpt_path=ckpt)
    return module, trainer, data


@pytest.mark.slow
@pytest.mark.parametrize("name", ["V-GRPO, three steps", "Flow-GRPO, guidance, KL", "DGPO, no guidance"])
def test_a_run_is_the_one_with_the_size_that_was_chosen(tiny_sd3, tmp_path, capsys, name):
    """Bit for bit, whatever the method keeps: the trials leave no trace."""
    make, _, _ = METHODS[name]
    found, _, data = fit(tiny_sd3, tmp_path, make, "auto")
    assert data.sizes.micro_batch_size == 8
    assert "micro_batch_size: 8 of 8 images per update fit: " in capsys.readouterr().out
    given_size, *_ = fit(tiny_sd3, tmp_path, make, 8)
    assert same(weights(found), weights(given_size))
    assert found.ledger.counts == given_size.ledger.counts
    assert found.objective.num_updates == given_size.objective.num_updates
    for copy, snapshot in given_size.objective.copies.items():
        assert same(found.objective.copies[copy].tensors, snapshot.tensors)


@pytest.mark.slow
def test_rewards_models_take_their_room_first(tiny_sd3, tmp_path, monkeypatch, tiny_clip):
    """Training will find that much less."""
    there, room = [], Trial.room

    def looked(trial):
        there.append([reward._model is not None for reward in trial.module.evaluator.observed.rewards])
        return room(trial)

    monkeypatch.setattr(Trial, "room", looked)
    make, _, _ = METHODS["V-GRPO, three steps"]
    fit(tiny_sd3, tmp_path, make, "auto", reward=CLIPScore(str(tiny_clip)), evaluate_at_start=False)
    assert there == [[True]]


@pytest.mark.slow
def test_less_memory_makes_smaller_micro_batches(tiny_sd3, tmp_path, capsys, monkeypatch):
    """The size that is chosen was tried and fits, the next one does not; a run goes on within an iteration with it."""
    make, _, _ = METHODS["V-GRPO, three steps"]
    tried = {}
    taken = Trial.taken

    def remembered(trial, images):
        tried[images] = taken(trial, images)
        return tried[images]

    monkeypatch.setattr(Trial, "taken", remembered)
    monkeypatch.setattr("lit_vgrpo.training.micro_batch.available_bytes", lambda: 4 * 2**20)
    saver = SaveAt(tmp_path / "middle.ckpt", 0, 2)
    module, trainer, data = fit(tiny_sd3, tmp_path, make, "auto", 2, callbacks=[saver])
    size = data.sizes.micro_batch_size
    assert size in (2, 4)
    assert len(module.record.metrics["loss"]) == 2 * 8 // size
    said = capsys.readouterr().out
    assert f"micro_batch_size: {size} of 8 images per update fit: {shown(tried[size])} of " in said
    room = float(said.partition(" of ")[2].partition(" of ")[2].split()[0]) * 2**20
    rounding = 0.05 * 2**20  # MiB are printed with one digit
    assert tried[size] - rounding <= room < 2 * tried[size] + rounding
    resumed, again, data = fit(tiny_sd3, tmp_path, make, "auto", 2, ckpt=tmp_path / "middle.ckpt")
    assert data.sizes.micro_batch_size == size
    assert again.global_step == trainer.global_step
    assert same(weights(resumed), weights(module))


def test_room_is_without_copies_and_gradients(tiny_sd3, tmp_path, monkeypatch):
    """The method's copies are on the GPU by then; an update's gradients are kept if it has several micro-batches."""
    seen, room = [], Trial.room

    def looked(trial):
        copies = [tensor for copy in trial.module.objective.copies.values() for tensor in copy.tensors.values()]
        several, plan = room(trial), trial.plan
        trial.plan = replace(plan, micro_batch_size=plan.micro_batches_per_update, micro_batches_per_update=1)
        gradients = 4 * sum(weight.numel() for weight in trial.weights)
        seen.extend([{tensor.is_cuda for tensor in copies}, room(trial) - several - gradients])
        raise InterruptedError

    monkeypatch.setattr(Trial, "room", looked)
    monkeypatch.setenv("PRETEND_GPU", "1")  # make_trainer reads it
    with pretended_gpu(), pytest.raises(InterruptedError):
        fit(tiny_sd3, tmp_path, lambda: DiffusionNFT(RolloutSpec(steps=2), kl_weight=0.1), "auto")
    assert seen == [{True}, 0]


class TooLarge(VGRPO):
    """Its passes never fit into memory."""

    def forward(self, policy, micro, guidance):
        if isinstance(policy, SD3Policy):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(policy, micro, guidance)


def test_an_image_that_does_not_fit_is_an_error_of_all_ranks(tiny_sd3, tmp_path):
    with pytest.raises(RuntimeError, match="not even one image fits into .* Set model.policy.gradient_checkpointing"):
        fit(tiny_sd3, tmp_path, lambda: TooLarge(RolloutSpec(steps=2), 2), "auto")


LINES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 500)), min_size=1)


@given(st.integers(1, 200), LINES, st.integers(1, 9000))
def test_it_is_the_largest_divisor_that_fits(share, lines, room):
    """Whatever lines the need is the largest of; one that fails beyond some size is never chosen either."""

    def need(size):
        return max(slope * size + start for slope, start in lines)

    fitting = [size for size in divisors(share) if need(size) <= room]
    for taken in (need, lambda size: need(size) if need(size) <= room else TOO_MUCH):
        if fitting:
            assert largest_that_fits(divisors(share), room, taken) == (fitting[-1], need(fitting[-1]))
        else:
            with pytest.raises(RuntimeError, match="not even one image fits into .* Set model.policy.gradient_checkp"):
                largest_that_fits(divisors(share), room, taken)


def test_zero_is_refused():
    assert [*strategy_errors(ZeRO(2), SD3Policy("any"), OptimizerConfig(), Sizes(2, 4, 1, 4))] == []
    (error,) = strategy_errors(ZeRO(2), SD3Policy("any"), OptimizerConfig(), Sizes(2, 4, 1, "auto"))
    assert error.endswith("Set a number, or use trainer.strategy=ddp or fsdp2.")
