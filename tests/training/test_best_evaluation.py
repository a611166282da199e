"""The best checkpoint of a run, and who looks at it."""

import math
import resource
import warnings

import pytest
import torch
from helpers import make_data, make_module, make_trainer, same

from lit_vgrpo.callbacks import RunSummary
from lit_vgrpo.training.checkpoint import BestEvaluation, RunCheckpoint

pytestmark = pytest.mark.slow


class Says:
    """Looks at held-out images and finds what a list says."""

    def __init__(self, name, values):
        self.name, self.values = name, list(values)

    def update(self, images, batch):
        pass

    def compute(self, module):
        return {self.name: self.values.pop(0)}


def train(folder, tmp_path, saver, values, name="heldout/untrained_reward", iterations=4, ckpt=None, **options):
    module = make_module(folder, **options.pop("module", {}))
    module.evaluator.observers.append(Says(name, values))
    callbacks = [RunSummary(), saver]
    trainer = make_trainer(tmp_path, iterations, callbacks, enable_checkpointing=True, **options)
    trainer.fit(module, datamodule=make_data(), ckpt_path=ckpt)
    return trainer


def best_of(folder, name="best.ckpt"):
    """Optimizer steps of a checkpoint, and the best value in its state."""
    saved = torch.load(folder / "checkpoints" / name, weights_only=True)
    states = [state["best"] for state in saved["callbacks"].values() if "best" in state]
    assert len(states) == 1
    return saved["global_step"], states[0]


@pytest.mark.parametrize(
    ("saver", "values", "options", "expected"),
    [
        (RunCheckpoint(), [0.3, 0.1, math.nan, 0.5, 0.4], {}, (3, 0.5, 3)),
        # Three iterations, an evaluation after the second, and one at the end.
        (RunCheckpoint(), [0, 1, 2], {"iterations": 3, "check_val_every_n_epoch": 2}, (3, 2, 3)),
        (RunCheckpoint(0, best="heldout/other"), [0, 3, 2, 1], {"name": "heldout/other", "iterations": 3}, (1, 3, 1)),
    ],
)
def test_the_highest_is_kept_and_nan_never_is(tiny_sd3, tmp_path, saver, values, options, expected):
    train(tiny_sd3, tmp_path, saver, values, **options)
    step, value, iteration = expected
    best = {"name": options.get("name", "heldout/untrained_reward"), "value": value, "iteration": iteration}
    assert best_of(tmp_path) == (step, best)
    assert options or best_of(tmp_path, "last.ckpt")[1] == best


def test_a_run_that_only_gets_worse_keeps_its_start_which_trains_as_before(tiny_sd3, tmp_path):
    trainer = train(tiny_sd3, tmp_path, RunCheckpoint(), [9, 1, 2], iterations=2)
    assert best_of(tmp_path) == (0, {"name": "heldout/untrained_reward", "value": 9, "iteration": 0})
    again = train(tiny_sd3, tmp_path, RunCheckpoint(), [1, 2], iterations=2, ckpt=tmp_path / "checkpoints/best.ckpt")
    assert same(*(fit.lightning_module.policy.network.state_dict() for fit in (trainer, again)))
    assert best_of(tmp_path)[0] == 0


@pytest.mark.parametrize("saver", [RunCheckpoint(best=None), RunCheckpoint(0)])
def test_none_is_kept_where_none_is_wanted_or_another_callback_saves(tiny_sd3, tmp_path, saver):
    train(tiny_sd3, tmp_path, saver, range(9), iterations=1)
    assert not (tmp_path / "checkpoints/best.ckpt").exists()


def test_a_metric_that_is_not_measured_is_said(tiny_sd3, tmp_path):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(tiny_sd3, tmp_path, RunCheckpoint(best="heldout/rewrad"), range(9), iterations=1)
    lines = {str(warning.message) for warning in said if "best=" in str(warning.message)}  # at the start and the end
    assert lines == {
        "No evaluation measured best=heldout/rewrad, so no best.ckpt is kept. Did you mean heldout/reward?"
    }


def test_one_of_few_images_is_not_the_best(tiny_sd3, tmp_path):
    class SaysOfFew(Says):
        def compute(self, module):
            share = 0.2 if self.values[0] == 9 else 0.1
            module.evaluator.failed_shares |= {self.name: share, "heldout/diagnostic": 0.9}
            return super().compute(module)

    module = make_module(tiny_sd3)
    module.evaluator.observers.append(SaysOfFew("heldout/untrained_reward", [0, 9, 1, 0.5]))
    trainer = make_trainer(tmp_path, 3, [RunSummary(), RunCheckpoint()], enable_checkpointing=True)
    trainer.fit(module, datamodule=make_data())
    assert best_of(tmp_path)[1]["value"] == 1


def test_a_distance_is_no_reward():
    with pytest.raises(ValueError, match="best=heldout/fid@64 is better when lower"):
        RunCheckpoint(best="heldout/fid@64")


def test_a_resumed_run_does_not_forget(tiny_sd3, tmp_path):
    train(tiny_sd3, tmp_path, RunCheckpoint(), [0, 5, 1], iterations=2)
    train(tiny_sd3, tmp_path, RunCheckpoint(), [4, 3], iterations=4, ckpt=tmp_path / "checkpoints/last.ckpt")
    assert best_of(tmp_path)[0] == 1


def test_another_metric_starts_over():
    best = BestEvaluation().improved_by({"heldout/reward": 20.0, "heldout/other": 30.0}, 1)
    assert (best.name, best.value) == ("heldout/reward", 20)
    assert best.improved_by({"heldout/reward": 20.0}, 2) is None
    assert best.improved_by({"heldout/reward": 21.0}, 2).value == 21
    assert best.improved_by({"heldout/reward": 1.0, "heldout/untrained_reward": 0.2}, 2).value == 0.2


def test_one_that_cannot_be_written_leaves_the_one_before(tiny_sd3, tmp_path, capfd):
    class Refusing(RunCheckpoint):
        def _write(self, trainer, checkpoint, path):
            if path.name != "best.ckpt" or trainer.current_epoch != 1:
                return super()._write(trainer, checkpoint, path)
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # as a full disk
            try:
                return super()._write(trainer, checkpoint, path)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    saver = Refusing(every_n_iterations=1)
    train(tiny_sd3, tmp_path, saver, [0, 1, 3, 2], iterations=2)
    assert best_of(tmp_path)[0] == 1
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("Cannot save")]
    assert len(said) == 1
    assert said[0].startswith(f"Cannot save {tmp_path}/checkpoints/best.ckpt: File too large (")
    assert saver.best.value == 1
    assert saver.unsaved is None  # the end of the run was
    assert best_of(tmp_path, "last.ckpt")[1]["value"] == 1
