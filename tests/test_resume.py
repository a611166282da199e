"""A run that goes on from a checkpoint ends where the undisturbed run does, bit for bit."""

import itertools
import math
from functools import cache, partial

import lightning as L
import pytest
import torch
from all_methods import METHODS, REPLAYED, REUSED
from helpers import SaveAt, fit, make_data, make_module, make_trainer, repeating, same, weights
from lightning.pytorch.cli import ReduceLROnPlateau

from lit_vgrpo import VGRPO, RolloutSpec
from lit_vgrpo.callbacks import EMA, SurrogateDiagnostics
from lit_vgrpo.training.checkpoint import RunCheckpoint
from lit_vgrpo.training.saved_weights import SavedWeights


class Counting:
    """Counts the rollouts of a module's objective."""

    def __init__(self, objective):
        self.calls, self._batches = 0, objective.rollout_batches
        objective.rollout_batches = self

    def __call__(self, policy, request):
        self.calls += 1
        return self._batches(policy, request)


class Rows(L.Callback):
    """The rows of metrics by iteration, without costs and times."""

    def __init__(self):
        self.rows = {}

    def on_train_epoch_end(self, trainer, pl_module):
        row = pl_module.record.logged
        self.rows[trainer.current_epoch] = {n: v for n, v in row.items() if n.startswith(("policy/", "surrogate/"))}


def run(folder, tmp_path, make, iterations, callbacks=(), ckpt=None, trainer=None, **data):
    ema = EMA(0.5)
    module = make_module(folder, make())
    rollouts = Counting(module.objective)
    trainer = make_trainer(tmp_path, iterations, [ema, *callbacks], **(trainer or {}))
    trainer.fit(module, datamodule=make_data(heldout_limit=1, updates_per_iteration=2, **data), ckpt_path=ckpt)
    return module, trainer, ema, rollouts.calls


# With 8 images: two micro-batches an update, or four.
WHOLE_UPDATE = {"micro_batch_size": 4}
MIDDLE = {"micro_batch_size": 2}


NOTHING_MORE = ("V-GRPO, one step", "V-GRPO, pure noise", "DiffusionNFT, on-policy", "DGPO, no guidance")
NOTHING_MORE += ("Flow-GRPO, fast", "Flow-GRPO, cps", "Flow-GRPO, guard", "MixGRPO, Flash", "ReFL")
NOTHING_MORE += ("DRaFT-K", "PEPG, on-policy", "RAM, pure noise", "CRD, pure noise")
"""Methods that save nothing beyond what another method of their class saves."""
SAVED = [name for name in METHODS | REPLAYED if name not in NOTHING_MORE]


# V-GRPO with replay remembers an anchor and the last groups; test_before_any_pass stops between its passes.
@pytest.mark.parametrize("name", repeating(SAVED, slow={*SAVED} - {"V-GRPO, replay"}))
def test_in_the_middle_of_an_iteration(tiny_sd3, tmp_path, name):
    make, _, _ = (METHODS | REPLAYED)[name]
    split = "V-GRPO" not in name
    steps = 1 if split else 2  # of one update
    saver, seen, seen_again = SaveAt(tmp_path / "middle.ckpt", 1, steps), Rows(), Rows()
    sizes = {**WHOLE_UPDATE, "split_updates": split}
    if split:  # groups 0 and 2 to the first update, 1 and 3 to the second: another order than that of the rollout
        sizes |= {"prompts_per_iteration": 4, "group_size": 2}
    iterations = 3 if name in REPLAYED else 2
    callbacks = [saver, SurrogateDiagnostics(), seen]
    whole, trainer, average, rollouts = run(tiny_sd3, tmp_path, make, iterations, callbacks, **sizes)
    assert rollouts == iterations
    callbacks, middle = [SurrogateDiagnostics(), seen_again], tmp_path / "middle.ckpt"
    resumed, again, average_again, rollouts = run(tiny_sd3, tmp_path, make, iterations, callbacks, middle, **sizes)
    assert rollouts == iterations - 2  # the checkpoint has the interrupted iteration's images
    assert {"policy/loss", "policy/grad_norm"} < seen.rows.pop(0).keys()
    assert seen_again.rows == seen.rows
    assert again.global_step == trainer.global_step == 2 * iterations
    assert same(weights(resumed), weights(whole))
    assert same(average_again.average.tensors, average.average.tensors)
    assert average_again.num_updates == average.num_updates
    for copy, snapshot in whole.objective.copies.items():
        assert same(resumed.objective.copies[copy].tensors, snapshot.tensors)
    assert resumed.objective.num_updates == whole.objective.num_updates == 2 * iterations
    assert resumed.ledger.counts == whole.ledger.counts
    assert resumed.ledger.images == whole.ledger.images


@pytest.fixture(scope="module")
def undisturbed(tiny_sd3, tmp_path_factory):
    """``undisturbed(name)``: a run's last weights and its rows, and its checkpoint before each pass of iteration 0."""

    @cache
    def made(name):
        folder = tmp_path_factory.mktemp("undisturbed")
        checkpoints = [folder / f"{passes}.ckpt" for passes in range(8)]
        savers = [SaveAt(path, 0, passes) for passes, path in enumerate(checkpoints)]
        seen = Rows()
        whole, *_ = run(tiny_sd3, folder, METHODS[name][0], 2, [*savers, SurrogateDiagnostics(), seen], **MIDDLE)
        return weights(whole), seen.rows, checkpoints

    return made


PASSES = [*itertools.product(["V-GRPO, three steps", "DGPO, moving"], range(8))]
SHOWN = [("V-GRPO, three steps", 1), ("V-GRPO, three steps", 7)]


@pytest.mark.parametrize(("name", "passes"), repeating(PASSES, slow={*PASSES} - {*SHOWN}))
def test_before_any_pass(tiny_sd3, tmp_path, undisturbed, name, passes):
    """Gradients that were not yet used are computed again, with what the update needs of the weights before it."""
    make, callbacks = METHODS[name][0], [SurrogateDiagnostics(), seen := Rows()]
    expected, rows, checkpoints = undisturbed(name)
    resumed, trainer, _, rollouts = run(tiny_sd3, tmp_path, make, 2, callbacks, checkpoints[passes], **MIDDLE)
    assert trainer.global_step == trainer.fit_loop.epoch_loop._batches_that_stepped == 4  # the loggers' step
    assert rollouts == 1
    assert same(weights(resumed), expected)
    assert seen.rows == rows


def test_an_earlier_versions_checkpoint_has_no_metrics_of_its_updates(tiny_sd3, tmp_path, undisturbed):
    make, callbacks, file = METHODS["V-GRPO, three steps"][0], [SurrogateDiagnostics(), seen := Rows()], tmp_path / "a"
    expected, rows, checkpoints = undisturbed("V-GRPO, three steps")
    saved = torch.load(checkpoints[7], weights_only=True)
    iteration = saved["lit_vgrpo"]["iteration"]
    del iteration["metrics"], iteration["unmoved"], iteration["record"]["diagnostics"]
    torch.save(saved, file)
    resumed, *_ = run(tiny_sd3, tmp_path, make, 2, callbacks, file, **MIDDLE)
    assert same(weights(resumed), expected)
    missing = {"policy/ratio_deviation_before_update", "surrogate/cv", "surrogate/cv_within"}
    assert rows[0].keys() - seen.rows[0].keys() == missing
    assert seen.rows[1] == rows[1]


def test_before_the_backward_pass_of_the_rollouts_graph(tiny_sd3, tmp_path):
    """The checkpoint has no graph, so the passes are made again, in the same batches."""
    make, data = REUSED["Flow-GRPO, reused"][0], {"micro_batch_size": 8, "heldout_limit": 1}
    middle = SaveAt(tmp_path / "middle.ckpt", 1, 0)
    whole, trainer = fit(tiny_sd3, tmp_path, [middle], 2, data, objective=make())
    counts, images = whole.ledger.training_counts(), whole.ledger.images
    assert counts == {"rollout": {"with_grad": 5 * images, "without_grad": images}}
    assert whole.objective.passes_per_image(trainer.datamodule.sizes) == {"rollout": 6}
    resumed, _ = fit(tiny_sd3, tmp_path, (), 2, data, ckpt=middle.path, objective=make())
    assert resumed.ledger.training_counts()["update"] == {"with_grad": 5 * images / 2, "without_grad": 0}
    assert same(weights(resumed), weights(whole))


class SaveAfter(L.Callback):
    """Saves in a hook of Lightning's, in one iteration."""

    def __init__(self, path, hook, iteration):
        self.path, self.iteration = path, iteration
        setattr(self, hook, self.save)

    def save(self, trainer, pl_module, *args):
        if pl_module.record.iteration == self.iteration and not self.path.exists():
            trainer.save_checkpoint(self.path)


HOOKS = ["on_before_zero_grad", "on_train_batch_end", "on_train_epoch_end"]


@pytest.mark.parametrize("hook", repeating(HOOKS, slow=HOOKS[2:]))
def test_after_an_update_and_after_an_iteration(tiny_sd3, tmp_path, hook):
    """Also from a checkpoint of the resumed run, saved after its iteration."""
    make, first, second = METHODS["V-GRPO, three steps"][0], tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    whole, trainer, average, _ = run(tiny_sd3, tmp_path, make, 3, [SaveAfter(first, hook, 0)], **MIDDLE)
    saver = SaveAfter(second, "on_train_epoch_end", 1)
    again, *_ = run(tiny_sd3, tmp_path, make, 3, [saver], ckpt=first, **MIDDLE)
    last, resumed, average_again, rollouts = run(tiny_sd3, tmp_path, make, 3, ckpt=second, **MIDDLE)
    assert rollouts == 1
    assert resumed.global_step == resumed.fit_loop.epoch_loop._batches_that_stepped == trainer.global_step == 6
    assert resumed.current_epoch == trainer.current_epoch == 3
    assert same(weights(again), weights(whole))
    assert same(weights(last), weights(whole))
    assert same(average_again.average.tensors, average.average.tensors)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end"])
def test_the_end_of_an_iteration_is_made_up_for(tiny_sd3, tmp_path, hook):
    """Its evaluation and the step of a schedule that waits for a metric are not skipped, and not repeated."""

    def run(callbacks=(), ckpt=None):
        lr = partial(ReduceLROnPlateau, monitor=metric, mode="max", patience=0, threshold=9.0, threshold_mode="abs")
        data = {"updates_per_iteration": 2}
        return fit(tiny_sd3, tmp_path, callbacks, 2, data, ckpt=ckpt, lr_scheduler=lr)

    for metric in ("reward/mean", "heldout/reward"):
        saved = tmp_path / f"{metric[:4]}.ckpt"
        whole, trainer = run([SaveAfter(saved, hook, 0)])
        resumed, again = run(ckpt=saved)
        evaluations = [[one.iteration for one in module.evaluator.history] for module in (whole, resumed)]
        assert evaluations == [[0, 1, 2], [0, 1, 2]]
        rates = [one.optimizers[0].param_groups[0]["lr"] for one in (trainer, again)]
        assert rates == [pytest.approx(1e-3)] * 2
        assert same(weights(resumed), weights(whole))
    assert SavedWeights.read(saved).progress.iterations == (hook == "on_train_batch_end")


def test_before_the_first_step_and_after_the_last_one_of_an_iteration(tiny_sd3, tmp_path):
    """Copies that follow iterations move once, and a resumed run that saves at once keeps the unfinished iteration."""

    class Saves(L.Callback):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            if pl_module.record.iteration == 0 and pl_module.iteration.is_over:
                trainer.save_checkpoint(tmp_path / "over.ckpt")

        def on_train_start(self, trainer, pl_module):
            if trainer.global_step:
                trainer.save_checkpoint(tmp_path / "started.ckpt")

    make, middle = METHODS["DiffusionNFT"][0], tmp_path / "middle.ckpt"
    whole, *_ = run(tiny_sd3, tmp_path, make, 2, [SaveAt(middle, 1, 2), Saves()], **MIDDLE)
    over, *_ = run(tiny_sd3, tmp_path, make, 2, ckpt=tmp_path / "over.ckpt", **MIDDLE)
    run(tiny_sd3, tmp_path, make, 2, [Saves()], ckpt=middle, **MIDDLE)
    started, _, _, rollouts = run(tiny_sd3, tmp_path, make, 2, ckpt=tmp_path / "started.ckpt", **MIDDLE)
    assert rollouts == 0
    for resumed in (over, started):
        assert same(weights(resumed), weights(whole))
        assert same(resumed.objective.copies["old"].tensors, whole.objective.copies["old"].tensors)


@pytest.mark.slow
def test_the_middle_of_an_iteration_goes_on_with_other_micro_batches(tiny_sd3, tmp_path):
    make, _, _ = METHODS["V-GRPO, three steps"]
    whole, *_ = run(tiny_sd3, tmp_path, make, 2, [SaveAt(tmp_path / "middle.ckpt", 1, 2)], micro_batch_size=4)
    resumed, trainer, *_ = run(tiny_sd3, tmp_path, make, 2, ckpt=tmp_path / "middle.ckpt", micro_batch_size=2)
    assert trainer.global_step == 4
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(resumed)[name], value, rtol=1e-3, atol=1e-4)


class OneUpdate(VGRPO):
    """From the second update on the loss is not a number, so that one update is taken and the others are left out."""

    def loss(self, policy, micro):
        loss, metrics = super().loss(policy, micro)
        return loss * (1 if self.num_updates == 0 else math.nan), metrics


@pytest.mark.slow
def test_copies_that_follow_iterations_remember_the_update_before_the_stop(tiny_sd3, tmp_path):
    def run(callbacks, ckpt=None):
        objective = OneUpdate(RolloutSpec(steps=2), num_mc_samples=2, anchor_weight=1.0, anchor_decay=0.3)
        module = make_module(tiny_sd3, objective, non_finite="skip")
        data = make_data(heldout_limit=1, updates_per_iteration=2, **WHOLE_UPDATE)
        make_trainer(tmp_path, 1, callbacks).fit(module, datamodule=data, ckpt_path=ckpt)
        assert (objective.num_updates, module.guard.skipped) == (1, 1)
        return module

    whole = run([SaveAt(tmp_path / "middle.ckpt", 0, 2)])
    resumed = run([], tmp_path / "middle.ckpt")
    anchor = whole.objective.copies["anchor"].tensors
    assert not same(anchor, whole.reference.tensors)
    assert same(resumed.objective.copies["anchor"].tensors, anchor)


@pytest.mark.slow
def test_images_of_other_sizes_are_refused(tiny_sd3, tmp_path):
    make, _, _ = METHODS["AWM"]
    saver = SaveAt(tmp_path / "middle.ckpt", 1, 2)
    run(tiny_sd3, tmp_path, make, 2, [saver], micro_batch_size=4)
    with pytest.raises(RuntimeError, match="during iteration 2, with different prompts or sizes"):
        run(tiny_sd3, tmp_path, make, 2, ckpt=tmp_path / "middle.ckpt", micro_batch_size=4, group_size=8)


class Fails(L.Callback):
    """Raises once in iteration 1: in the rollout, before the updates, in the second update, or as its step ends."""

    def __init__(self, where):
        self.where, self.passes = where, 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        part, name = {"rollout": (pl_module.scores, "result"), "prepare": (pl_module.objective, "prepare")}.get(
            self.where, (self, "fail")
        )
        if batch.iteration == 1:
            setattr(part, name, self.fail)

    def on_after_backward(self, trainer, pl_module):
        self.passes += pl_module.record.iteration
        if self.where == "update" and self.passes == 3:
            self.fail()

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        if self.where == "step" and pl_module.record.iteration == 1:
            self.fail()

    def fail(self, *args):
        raise OSError("gone")


@pytest.mark.parametrize("where", ["rollout", "prepare", "update", "step"])
def test_an_error_loses_no_iteration(tiny_sd3, tmp_path, where):
    """Up to an optimizer step, and between two, the run saves; within one it does not."""
    make = REPLAYED["V-GRPO, replay"][0]
    keeper = RunCheckpoint(every_n_iterations=10, best=None)
    with pytest.raises(OSError, match="gone"):
        run(tiny_sd3, tmp_path, make, 3, [Fails(where), keeper], trainer={"enable_checkpointing": True}, **MIDDLE)
    saved = tmp_path / "checkpoints" / "interrupted.ckpt"
    assert saved.exists() == (where != "step")
    if saved.exists():
        whole, *_ = run(tiny_sd3, tmp_path, make, 3, **MIDDLE)
        resumed, trainer, _, rollouts = run(tiny_sd3, tmp_path, make, 3, ckpt=saved, **MIDDLE)
        assert (trainer.global_step, rollouts) == (6, 1 + (where != "update"))
        assert same(weights(resumed), weights(whole))
