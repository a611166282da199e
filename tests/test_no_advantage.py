"""An iteration in which no image is better than another takes no step."""

import lightning as L
import pytest
import torch
from helpers import Brightness, make_data, make_module, make_trainer, same, weights
from test_methods import Scaled
from test_resume import SaveAfter

from lit_vgrpo import VGRPO, RolloutSpec
from lit_vgrpo.callbacks import EMA
from lit_vgrpo.rewards import Reward


class Constant(Reward):
    name = "constant"

    def __call__(self, images, prompts, rows):
        return torch.full((len(prompts),), 0.5)


class ConstantAt(Brightness):
    """Says nothing in some iterations."""

    def __init__(self, *iterations):
        self.iterations, self.calls = iterations, 0

    def __call__(self, images, prompts, rows):
        scores = super().__call__(images, prompts, rows)
        self.calls += 1
        return scores if self.calls - 1 not in self.iterations else torch.zeros_like(scores)


class Table(L.Callback):
    def __init__(self):
        self.rows = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.rows.append({key: float(value) for key, value in trainer.callback_metrics.items()})


def train(folder, tmp_path, reward, iterations, callbacks=(), ckpt=None, **options):
    ema, table = EMA(0.5), Table()
    objective = VGRPO(RolloutSpec(steps=2), num_mc_samples=2, anchor_weight=1.0, anchor_decay=0.3)
    module = make_module(folder, objective, reward, evaluate_at_start=False)
    trainer = make_trainer(tmp_path, iterations, [ema, table, *callbacks], **options)
    data = make_data(heldout=None, updates_per_iteration=2, micro_batch_size=4)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt)
    return module, trainer, ema, table


@pytest.mark.parametrize("plugins", [None, Scaled()], ids=["alone", "with a gradient scaler"])
def test_a_constant_reward_moves_nothing(tiny_sd3, tmp_path, plugins):
    with pytest.warns(UserWarning, match="no reward spread") as warned:
        module, trainer, ema, table = train(tiny_sd3, tmp_path, Constant(), 3, plugins=plugins)
    first, last = [str(one.message) for one in warned if "no reward spread" in str(one.message)]
    assert "no reward spread at iteration 1, so no step is taken" in first
    assert last == "3 iterations had no reward spread in any group and took no step."
    average = {name.removeprefix("policy."): value for name, value in ema.average.state_dict().items()}
    for now in (module.objective.copies["anchor"].state_dict(), average, weights(module)):
        assert same(now, module.reference.state_dict())
    assert trainer.optimizers[0].state == {}
    assert (module.objective.num_updates, ema.num_updates) == (0, 0)
    # The trainer's own counts go on, as with updates that are left out for another reason.
    assert (trainer.global_step, trainer.current_epoch) == (6, 3)
    assert [row["policy/updates"] for row in table.rows] == [0, 0, 0]
    assert table.rows[-1]["reward/no_spread"] == 1
    assert "update" not in module.ledger.counts


@pytest.mark.slow
def test_the_iterations_beside_it_train_and_it_resumes(tiny_sd3, tmp_path):
    save = SaveAfter(tmp_path / "within.ckpt", "on_before_zero_grad", 1)  # the first update, which is left out
    whole, trainer, ema, table = train(tiny_sd3, tmp_path, ConstantAt(1), 3, [save])
    assert (whole.objective.num_updates, ema.num_updates, trainer.global_step) == (4, 4, 6)
    assert [row["policy/updates"] for row in table.rows] == [2, 0, 2]
    assert trainer.optimizers[0].state_dict()["state"][0]["step"] == 4
    resumed, again, average, table = train(tiny_sd3, tmp_path, Brightness(), 3, ckpt=tmp_path / "within.ckpt")
    assert [row["policy/updates"] for row in table.rows] == [0, 2]
    assert again.global_step == 6
    assert same(weights(whole), weights(resumed))
    assert same(ema.average.state_dict(), average.average.state_dict())
    assert same(whole.objective.copies["anchor"].state_dict(), resumed.objective.copies["anchor"].state_dict())
