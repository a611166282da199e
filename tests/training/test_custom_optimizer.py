"""Any optimizer and any schedule of torch's, from a recipe and from Python."""

import math
from functools import partial

import lightning as L
import pytest
import torch
from commands import check
from helpers import make_data, make_module, make_trainer, same, weights
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.cli import ReduceLROnPlateau
from lightning.pytorch.loggers import CSVLogger
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

from lit_vgrpo import OptimizerConfig
from lit_vgrpo.launch.build import build
from lit_vgrpo.training.loggers import read_table

pytestmark = pytest.mark.slow

WEIGHTS = [torch.nn.Parameter(torch.zeros(2, 2))]
SGD = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
COSINE = partial(CosineAnnealingLR, T_max=8)
ONE_CYCLE = partial(OneCycleLR, max_lr=1e-2, total_steps=8)
CASES = {
    "NAdam, one cycle": {"optimizer": partial(torch.optim.NAdam, lr=1e-3), "lr_scheduler": ONE_CYCLE},
    "our AdamW, steps": {"lr_scheduler": partial(StepLR, step_size=3, gamma=0.1)},
    "RMSprop alone": {"optimizer": partial(torch.optim.RMSprop, lr=1e-4)},
}


def train(folder, tmp_path, iterations, ckpt=None, **options):
    module = make_module(folder, evaluate_at_start=False, **options)
    trainer = make_trainer(tmp_path, iterations)
    trainer.fit(module, datamodule=make_data(heldout=None, updates_per_iteration=2), ckpt_path=ckpt)
    return module, trainer


def rate(trainer):
    return trainer.optimizers[0].param_groups[0]["lr"]


@pytest.mark.parametrize("case", CASES)
def test_two_and_two_iterations_are_four(tiny_sd3, tmp_path, case):
    whole, trainer = train(tiny_sd3, tmp_path, 4, **CASES[case])
    _, half = train(tiny_sd3, tmp_path, 2, **CASES[case])
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, again = train(tiny_sd3, tmp_path, 4, tmp_path / "half.ckpt", **CASES[case])
    assert rate(again) == rate(trainer)
    assert same(weights(resumed), weights(whole))
    assert not same(weights(whole), whole.reference.state_dict())


def test_the_schedule_is_stepped_with_every_update_and_shown(tiny_sd3, tmp_path):
    class Rates(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            used.append(optimizer.param_groups[0]["lr"])

    module, used = make_module(tiny_sd3, optimizer=SGD, lr_scheduler=COSINE), []
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    trainer = make_trainer(tmp_path, 2, [LearningRateMonitor("step"), Rates()], logger=logger)
    trainer.fit(module, datamodule=make_data(updates_per_iteration=2, micro_batch_size=2))
    assert used == pytest.approx([0.5e-2 * (1 + math.cos(math.pi * n / 8)) for n in range(4)])
    assert rate(trainer) == pytest.approx(0.5e-2)
    _, rows = read_table(tmp_path / "lightning_logs" / "version_0" / "metrics.csv")
    shown = {int(row["step"]): float(row["lr-SGD"]) for row in rows if row["lr-SGD"]}
    assert shown == pytest.approx({1: used[0], 3: used[2]})  # the first rate of an iteration, with its metrics


@pytest.mark.parametrize(("every", "iterations"), [(1, 3), (2, 6)])
def test_a_plateau_is_looked_for_after_every_evaluation(tiny_sd3, tmp_path, every, iterations):
    plateau = partial(ReduceLROnPlateau, monitor="heldout/reward", mode="max", patience=0, threshold=1e9, factor=0.5)
    module = make_module(tiny_sd3, lr_scheduler=plateau)
    trainer = make_trainer(tmp_path, iterations, check_val_every_n_epoch=every)
    trainer.fit(module, datamodule=make_data(updates_per_iteration=2))
    assert rate(trainer) == pytest.approx(1e-2 / 4)  # the first evaluation is the best so far


def test_a_lower_rate_and_another_schedule_count_after_a_resume(tiny_sd3, tmp_path):
    _, trainer = train(tiny_sd3, tmp_path, 1, optimizer=SGD, lr_scheduler=COSINE)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    slower = {"optimizer": partial(torch.optim.SGD, lr=1e-3, momentum=0.5), "lr_scheduler": COSINE}
    _, resumed = train(tiny_sd3, tmp_path, 2, tmp_path / "one.ckpt", **slower)
    assert rate(resumed) == pytest.approx(0.5e-3)
    assert resumed.optimizers[0].param_groups[0]["momentum"] == 0.5
    longer = {"optimizer": SGD, "lr_scheduler": partial(CosineAnnealingLR, T_max=80)}
    _, resumed = train(tiny_sd3, tmp_path, 2, tmp_path / "one.ckpt", **longer)
    _, fresh = train(tiny_sd3, tmp_path, 2, **longer)
    assert rate(resumed) == rate(fresh)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"optimizer": partial(torch.optim.SGD, lr=-1)}, "model.optimizer cannot be built: Invalid learning rate: -1"),
        ({"lr_scheduler": CosineAnnealingLR}, "model.lr_scheduler cannot be built: .*T_max"),
        ({"optimizer": OptimizerConfig(warmup_steps=5), "lr_scheduler": COSINE}, "warmup_steps=5 and model.lr_sch"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(tiny_sd3, tmp_path, options, error):
    module = make_module(tiny_sd3, **options)
    with pytest.raises(ValueError, match=error) as refused:
        make_trainer(tmp_path, 1).fit(module, datamodule=make_data())
    assert "\n" not in str(refused.value)


RECIPE = """
  optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.01, momentum: 0.9}}
  lr_scheduler: {class_path: torch.optim.lr_scheduler.CosineAnnealingLR, init_args: {T_max: 8}}
data:"""


def test_a_recipe_names_them_by_class_path(tiny_recipe):
    tiny_recipe.write_text(tiny_recipe.read_text().replace("\ndata:", RECIPE))
    cli = build([str(tiny_recipe)])
    optimizer = cli.model.optimization.optimizer.build(WEIGHTS)
    assert isinstance(optimizer, torch.optim.SGD)
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.01, 0.9)
    assert isinstance(cli.model.optimization.make_schedule(optimizer), CosineAnnealingLR)
    assert cli.plain_recipe()["model"]["optimizer"]["class_path"] == "torch.optim.SGD"
    other = "model.optimizer={class_path: torch.optim.RMSprop, init_args: {lr: 0.02}}"
    for settings in (str(tiny_recipe), "tiny_shapes"):  # which has AdamW's
        changed = build([settings, other], make_folder=False).model.optimization.optimizer.build(WEIGHTS)
        assert isinstance(changed, torch.optim.RMSprop)
        assert changed.defaults["lr"] == 0.02
    cli.give_back()
    assert check([str(tiny_recipe)]) == 0
