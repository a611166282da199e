"""An iteration is run whole, whatever limits the trainer has."""

from datetime import timedelta

import lightning as L
import pytest
from all_methods import REUSED
from helpers import make_data, make_module, make_trainer, weights
from lightning.pytorch import callbacks

from lit_vgrpo import OptimizerConfig, SD3Policy
from lit_vgrpo.callbacks import RunSummary
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.training.settings import graph_error, limit_error
from lit_vgrpo.training.sharded import FSDP2, ZeRO
from lit_vgrpo.training.strategies import strategy_errors


class Ends(L.Callback):
    """Asks for the end within the first iteration, as ``max_time`` does."""

    def on_after_backward(self, trainer, pl_module):
        trainer.should_stop = True


def test_a_run_that_max_time_ended_says_how_to_continue(tiny_sd3, tmp_path, capsys):
    limits, summary, module = callbacks.Timer({"milliseconds": 1}), RunSummary(), make_module(tiny_sd3)
    trainer = make_trainer(tmp_path, iterations=3, callbacks=[limits, summary])
    trainer.fit(module, datamodule=make_data())
    summary.finish(trainer, module, completed=True)
    said = capsys.readouterr().out
    assert "trainer.max_time is used up after 1 iteration. Continue: lightning run " in said
    assert said.endswith("config.yaml --resume trainer.max_time=null\n")


def counting(module):
    """Counts the calls that belong to an iteration's two ends."""
    calls = {"rollout_batches": 0, "after_iteration": 0}

    def counted(name, call):
        def count(*args, **kwargs):
            calls[name] += 1
            return call(*args, **kwargs)

        return count

    for name in calls:
        setattr(module.objective, name, counted(name, getattr(module.objective, name)))
    return calls


@pytest.mark.parametrize(
    ("limit", "error"),
    [
        ({"limit_train_batches": 0.5}, "limit_train_batches=0.5 is less than an iteration. Leave it out; use fewer"),
        ({"limit_train_batches": 9}, "limit_train_batches=9 has no effect: .* set trainer.max_epochs=9."),
        (
            {"gradient_clip_val": 1.0},
            r"trainer.gradient_clip_val is now an option of the model. .*model.gradient_clip_val=1.0 \(in Python: V",
        ),
        (
            {"gradient_clip_val": 2, "gradient_clip_algorithm": "value"},
            r"VGRPOModule\(gradient_clip_val=2, gradient_clip_algorithm='value'\)",
        ),
        ({"overfit_batches": 1}, "overfit_batches=1 would drop images"),
        ({"overfit_batches": 1, "fast_dev_run": True}, "overfit_batches=1 would drop images"),
        ({"limit_val_batches": 0}, "limit_val_batches=0 disables data.heldout. Set data.heldout=null"),
        ({"min_epochs": 3}, "trainer.min_epochs=3 has no effect with max_epochs=1. Set max_epochs to at least 3."),
        ({"accumulate_grad_batches": 3}, "accumulate_grad_batches=3 is set by the sizes. Leave it out; use micro"),
        ({"max_steps": 3}, "max_steps=3 ends within an iteration .* multiple of 2, such as 4."),
    ],
)
def test_a_limit_that_cuts_an_iteration_is_refused(tiny_sd3, tmp_path, limit, error):
    module = make_module(tiny_sd3)
    with pytest.raises(ValueError, match=error) as refused:
        make_trainer(tmp_path, 1, **limit).fit(module, datamodule=make_data(updates_per_iteration=2))
    assert "\n" not in str(refused.value)
    assert not module.policy.loaded


@pytest.mark.parametrize(
    ("callback", "error"),
    [
        (callbacks.GradientAccumulationScheduler({0: 2}), "does not work with iterations. .* data.micro_batch_size."),
        (
            callbacks.ModelCheckpoint(train_time_interval=timedelta(1)),
            "time_interval would never save. Use every_n_epo",
        ),
        (callbacks.BackboneFinetuning(), "does not work with iterations. .* train_only."),
        (callbacks.BatchSizeFinder(), "An iteration has no batch size. Use data.micro_batch_size=auto."),
        (callbacks.EMAWeightAveraging(), "EMAWeightAveraging .* Use lit_vgrpo.callbacks.EMA."),
    ],
)
def test_a_callback_of_lightnings_that_does_not_fit_is_refused(tiny_sd3, tmp_path, callback, error):
    module = make_module(tiny_sd3)
    with pytest.raises(ValueError, match=f"trainer.callbacks: .*{error}"):
        make_trainer(tmp_path, 1, [callback], enable_checkpointing=None).fit(module, datamodule=make_data())
    assert not module.policy.loaded


@pytest.mark.parametrize("limit", [{}, {"limit_train_batches": 1}, {"limit_train_batches": 1.0}, {"max_steps": 4}])
def test_a_limit_that_cuts_none_is_kept(tiny_sd3, tmp_path, limit):
    sizes = Sizes(2, 4, updates_per_iteration=2, micro_batch_size=4)
    trainer = make_trainer(tmp_path, 1, **limit)
    assert limit_error(make_module(tiny_sd3), trainer, sizes, has_heldout=True) is None


def test_a_graph_of_several_batches_or_of_sharded_weights_is_refused(tiny_sd3, tmp_path):
    def error(micro_batch_size, batch, strategy="auto"):
        module = make_module(tiny_sd3, REUSED["Flow-GRPO, reused"][0](), rollout_batch_size=batch)
        trainer = make_trainer(tmp_path, devices=1, strategy=strategy)
        return graph_error(module, trainer, Sizes(2, 4, micro_batch_size=micro_batch_size)) or ""

    assert error(8, None) + error(16, 8) == ""
    for micro_batch_size, batch in [(4, 8), ("auto", 8), (8, 4)]:
        end = f"data.micro_batch_size={micro_batch_size} and model.rollout_batch_size={batch}. Set them to 8 and null"
        assert end in error(micro_batch_size, batch)
    assert "untested under FSDP2. Use trainer.strategy=ddp" in error(8, 8, FSDP2())


@pytest.mark.slow
def test_fast_dev_run_is_that_many_whole_small_iterations(tiny_sd3, tmp_path):
    module = make_module(tiny_sd3)
    data = make_data(prompts_per_iteration=8, updates_per_iteration=2, micro_batch_size=2)
    calls = counting(module)
    trainer = make_trainer(tmp_path, 5, fast_dev_run=2)
    trainer.fit(module, datamodule=data)
    assert calls == {"rollout_batches": 2, "after_iteration": 2}
    assert (trainer.global_step, trainer.current_epoch) == (4, 2)
    assert module.record.images == 4  # a prompt
    assert data.sizes == Sizes(1, 4, 2, 2)
    # What comes after a try has the sizes that were asked for.
    trainer = make_trainer(tmp_path, 1)
    trainer.fit(module, datamodule=data)
    assert module.record.images == 32


def test_a_run_whose_time_is_over_finishes_its_iteration(tiny_sd3, tmp_path):
    module, whole = make_module(tiny_sd3), make_module(tiny_sd3)
    calls = counting(module)
    trainer = make_trainer(tmp_path, 3, [Ends()])
    trainer.fit(module, datamodule=make_data(updates_per_iteration=2))
    assert calls == {"rollout_batches": 1, "after_iteration": 1}
    assert (trainer.global_step, trainer.current_epoch) == (2, 1)
    assert "policy/loss" in trainer.callback_metrics
    make_trainer(tmp_path, 1).fit(whole, datamodule=make_data(updates_per_iteration=2))
    assert all((weights(module)[name] == value).all() for name, value in weights(whole).items())


def test_zero_clips_by_norm_alone():
    policy, rest = SD3Policy("any"), (OptimizerConfig(), Sizes(1, 2))
    (error,) = strategy_errors(ZeRO(2), policy, *rest, "value")
    assert "model.gradient_clip_algorithm=value does not work under ZeRO" in error
    assert [*strategy_errors(ZeRO(2), policy, *rest, "norm"), *strategy_errors(FSDP2(), policy, *rest, "value")] == []
