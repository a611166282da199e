"""Finished values in Lightning's metrics: the same rows, monitors and times as with ``self.log``."""

import csv

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lit_vgrpo.training.trainer_internals import log_at_epoch_end

EPOCHS, STEPS = 6, 2


class Own(L.LightningModule):
    """Fits a number, and logs ``score`` at the end of each epoch, either way."""

    def __init__(self, plain):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.plain, self.seen = plain, []

    def training_step(self, batch, batch_idx):
        self.log("beside", 0.5, on_step=False, on_epoch=True, batch_size=1)
        return (self.weight - 1) ** 2

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx < STEPS - 1:
            return
        values = {"score": [0.1, 0.7, 0.3, 0.2, 0.1, 0.1][self.current_epoch]}
        if self.plain:
            log_at_epoch_end(self.trainer, {name: torch.tensor(value) for name, value in values.items()})
        else:
            self.log_dict(values, on_step=False, on_epoch=True, batch_size=1)

    def on_train_epoch_end(self):
        self.seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(folder, plain):
    module, loggers = Own(plain), [CSVLogger(folder, name, "") for name in ("one", "two")]
    best = ModelCheckpoint(folder / "best", "{epoch}", monitor="score", mode="max")
    trainer = L.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", logger=loggers, enable_progress_bar=False, enable_model_summary=False,
        log_every_n_steps=1, callbacks=[best, EarlyStopping("score", mode="max", patience=2)],
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(range(STEPS)))
    rows = [list(csv.DictReader((folder / name / "metrics.csv").open())) for name in ("one", "two")]
    return module.seen, rows, best.best_model_path.rsplit("/", 1)[1], float(best.best_model_score), trainer


def test_they_are_logged_as_by_self_log(tmp_path):
    plain, logged = fitted(tmp_path / "plain", True), fitted(tmp_path / "logged", False)
    assert plain[:4] == logged[:4]
    seen, (rows, others), best, score, trainer = plain
    assert rows == others
    assert [float(row["score"]) for row in rows] == pytest.approx([0.1, 0.7, 0.3, 0.2])
    assert [row["step"] for row in rows] == ["1", "3", "5", "7"]  # one row an iteration, with everything in it
    assert [(row["beside"], row["epoch"]) for row in rows] == [("0.5", str(epoch)) for epoch in range(4)]
    assert best == "epoch=1.ckpt"
    assert score == pytest.approx(0.7)
    assert trainer.current_epoch == 4  # stopped early
    assert seen[1] == pytest.approx({"score": 0.7, "beside": 0.5})


def test_a_value_of_one_epoch_is_not_in_the_next_row(tmp_path):
    class Once(Own):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.current_epoch == 0:
                super().on_train_batch_end(outputs, batch, batch_idx)

    logger, module = CSVLogger(tmp_path, "one", ""), Once(True)
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", logger=logger, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(range(STEPS)))
    rows = list(csv.DictReader((tmp_path / "one" / "metrics.csv").open()))
    assert [bool(row["score"]) for row in rows] == [True, False]
