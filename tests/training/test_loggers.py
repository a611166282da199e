"""The table of a run that goes on holds what came before, once; another file of its name is moved aside."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import yaml
from commands import run
from jsonargparse import Namespace
from lightning.pytorch.loggers import CometLogger, CSVLogger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_vgrpo.errors import UserError
from lit_vgrpo.launch.recipe_cli import run_loggers
from lit_vgrpo.training.loggers import (
    WATCHED,
    MetricsTable,
    TensorBoard,
    continue_trackers,
    log_picture,
    log_recipe,
    read_table,
    rows_up_to,
)
from lit_vgrpo.training.resume import Progress


def log(logger, *rows):
    for row in rows:
        logger.log_metrics(row, step=int(row.get("epoch", 0)) * 2)


def test_rows_go_on_after_the_checkpoint_and_new_columns_join(tmp_path):
    log(MetricsTable(tmp_path), {"heldout/fingerprint": 5}, *({"a": float(n + 1), "epoch": n} for n in range(3)))
    again = MetricsTable(tmp_path, rows_up_to(Progress(iterations=2, optimizer_steps=4, images=8, logged=2)))
    log(again, {"a": 4.0, "epoch": 2}, {"b": 5.0, "epoch": 3})
    columns, rows = read_table(tmp_path / "metrics.csv")
    assert columns == ["iteration", "step", "a", "b", "epoch", "heldout/fingerprint"]
    assert [(row["epoch"], row["a"], row["b"], row["heldout/fingerprint"]) for row in rows] == [
        ("", "", "", "5"),
        ("0", "1.0", "", ""),
        ("1", "2.0", "", ""),
        ("2", "4.0", "", ""),
        ("3", "", "5.0", ""),
    ]


def test_an_iteration_is_one_row(tmp_path):
    """Other callbacks log before it without its number; a resumed run may evaluate other prompts after it."""
    table, mark = MetricsTable(tmp_path), "heldout/fingerprint"
    table.log_metrics({"size": 4.0}, 0)
    table.log_metrics({mark: 5}, 0)
    for epoch in range(2):
        table.log_metrics({"lr": 0.5}, epoch)
        table.log_metrics({"a": 1.0, "epoch": epoch}, epoch)
        table.log_metrics({mark: torch.tensor(5.0), "epoch": epoch}, epoch)
    table = MetricsTable(tmp_path, lambda row: True)
    table.log_metrics({"late": 1.0}, 1)
    table.log_metrics({mark: 7, "epoch": 1}, 1)
    columns, rows = read_table(tmp_path / "metrics.csv")
    assert columns == ["iteration", "step", "a", "epoch", mark, "late", "lr", "size"]
    assert [[row[name] for name in columns] for row in rows] == [
        ["0", "0", "", "", "5", "", "", "4.0"],
        ["1", "0", "1.0", "0", "5", "", "0.5", ""],
        ["2", "1", "1.0", "1", "5", "1.0", "0.5", ""],
        ["2", "1", "", "1", "7", "", "", ""],
    ]


def test_a_new_run_starts_a_new_table(tmp_path):
    log(MetricsTable(tmp_path), {"a": 1.0})
    log(MetricsTable(tmp_path), {"b": 2.0})
    assert read_table(tmp_path / "metrics.csv") == (["step", "b"], [{"b": "2.0", "step": "0"}])


def test_nothing_is_lost_while_the_header_changes(tmp_path, monkeypatch):
    logger = MetricsTable(tmp_path)
    log(logger, {"a": 1.0, "epoch": 0})
    before = (tmp_path / "metrics.csv").read_text()

    def fail(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="metrics.csv: No space left on device. "):
        patch.setattr("lit_vgrpo.system.paths.os.replace", fail)
        log(logger, {"b": 2.0, "epoch": 1})
    assert (tmp_path / "metrics.csv").read_text() == before
    log(logger, {"b": 3.0, "epoch": 2})
    assert [row["b"] for row in read_table(tmp_path / "metrics.csv")[1]] == ["", "2.0", "3.0"]


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        *((lambda last, cut=cut: last[:-cut], ["0"]) for cut in (1, 4, 7)),  # it was being written
        (lambda last: b"5.0,4\r\n" + last, ["0", "1"]),  # as a full disk leaves it in the middle
        (lambda last: b"\0\0\0\0\0\0\0\0\r\n" + last, ["0", "1"]),  # what a power cut leaves of a row
        (lambda last: b"5.0,\xff\xfe,8\r\n" + last, ["0", "1"]),
        (lambda last: last.replace(b"2.25", b"x" * 131_073), ["0", "1"]),  # more than csv's limit of a cell
    ],
)
def test_a_damaged_row_costs_no_other(tmp_path, damage, left):
    log(MetricsTable(tmp_path), {"a": 1.25, "epoch": 0}, {"a": 2.25, "epoch": 1})
    path = tmp_path / "metrics.csv"
    *lines, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, damage(last)]))
    log(MetricsTable(tmp_path, rows_up_to(Progress(2, 4, images=8, logged=2))), {"a": 3.0, "epoch": 2})
    assert [row["epoch"] for row in read_table(path)[1]] == [*left, "2"]


def test_an_empty_table_is_begun_anew(tmp_path):
    (tmp_path / "metrics.csv").write_text("")
    log(MetricsTable(tmp_path, rows_up_to(Progress(1, 2, 4, 1))), {"a": 1.0, "epoch": 1})
    assert read_table(tmp_path / "metrics.csv")[1] == [{"iteration": "2", "a": "1.0", "epoch": "1", "step": "2"}]


class Tracker(DummyLogger):
    """A tracker with the methods of W&B's logger."""

    def log_image(self, key, images, step):
        self.shown = key, [image.size for image in images], step


class Captioned(DummyLogger):
    def log_image(self, key, images, step, **options):
        self.caption = options["caption"]


def test_trackers_get_pictures(tmp_path):
    tracker, board = Tracker(), TensorBoard(tmp_path / "ours", "", "")
    plain = TensorBoardLogger(tmp_path / "plain", "", "")
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    own, caption = CSVLogger(tmp_path), "a red circle: held-out reward 0.7"
    log_picture([tracker, board, plain, own, captioned := Captioned()], "samples", Image.fromarray(pixels), 3, caption)
    assert tracker.shown == ("samples", [(4, 2)], 2)  # as Lightning counts the step of the metrics
    assert captioned.caption == [caption]
    assert "samples/caption/text_summary" in EventAccumulator(board.log_dir).Reload().Tags()["tensors"]
    assert isinstance(run_loggers(own, tmp_path, None)[0], MetricsTable)  # which a user's table does not replace
    for logger in (board, plain):
        logger.experiment.flush()
        (image,) = EventAccumulator(logger.log_dir).Reload().Images("samples")
        assert (image.step, image.width, image.height) == (3 if logger is board else 2, 4, 2)


def test_tensorboard_draws_no_curve_of_the_epoch_or_the_fingerprint(tmp_path):
    board = TensorBoard(tmp_path, "", "")
    log(board, {"heldout/reward": 0.5, "heldout/fingerprint": 5}, {"heldout/reward": 0.75, "epoch": 1})
    board.experiment.flush()
    written = EventAccumulator(board.log_dir).Reload()
    assert written.Tags()["scalars"] == ["heldout/reward"]
    assert [(row.step, row.value) for row in written.Scalars("heldout/reward")] == [(0, 0.5), (3, 0.75)]


def test_columns_of_the_rewards_come_first(tmp_path):
    row = {"b": 1.0, "heldout/reward": 0.5, "a": 1.0, "reward/mean": 0.25, "epoch": 0}
    log(MetricsTable(tmp_path), row)
    first = ["iteration", "step", "reward/mean", "heldout/reward"]
    assert read_table(tmp_path / "metrics.csv")[0] == [*first, "a", "b", "epoch"]


def test_mlflow_and_comet_get_pictures(monkeypatch):
    """With the clients' own signatures: mlflow 3.17, comet-ml 3.57."""
    shown = []

    def mlflow(run_id, image, artifact_file=None, key=None, step=None, timestamp=None, synchronous=None):
        shown.append(("mlflow", run_id, image.size, key, step))

    def comet(image_data, name=None, overwrite=False, image_format="png", step=None):
        shown.append(("comet", image_data.size, name, step))

    trackers = []
    for kind, log_image in ((MLFlowLogger, mlflow), (CometLogger, comet)):
        monkeypatch.setattr(kind, "experiment", SimpleNamespace(log_image=log_image))
        trackers.append(kind.__new__(kind))
    monkeypatch.setattr(MLFlowLogger, "run_id", "r1")
    log_picture(trackers, "samples", Image.new("RGB", (4, 2)), 3)
    assert shown == [("mlflow", "r1", (4, 2), "samples", 2), ("comet", (4, 2), "samples", 2)]


def test_a_tracker_that_cannot_start_is_one_line(tmp_path):
    def refuse(params):
        raise RuntimeError("No API key configured.\nUse a key.")

    said = "^trainer.logger=SimpleNamespace cannot start: No API key configured. Use a key.$"
    with pytest.raises(UserError, match=said):
        log_recipe([SimpleNamespace(log_hyperparams=refuse)], {}, tmp_path)


def test_a_resumed_run_continues_its_trackers_runs(tmp_path):
    """A stand-in for MLflow, which the extras do not install: its recipe may not change."""

    class MLFlowLogger(DummyLogger):
        experiment, version = None, "a1"
        log_hyperparams = MagicMock()

    log_recipe([MLFlowLogger(), DummyLogger()], {}, tmp_path)
    setting = Namespace(class_path="lightning.pytorch.loggers.MLFlowLogger", init_args=Namespace(run_id=None))
    other = Namespace(class_path="CSVLogger", init_args=Namespace())
    assert continue_trackers([other, setting], tmp_path) == ["MLFlowLogger continues its run a1."]
    assert setting.init_args.run_id == "a1"
    assert continue_trackers([setting], tmp_path) == []  # it names one
    log_recipe([MLFlowLogger()], {"changed": 1}, tmp_path)
    MLFlowLogger.log_hyperparams.assert_called_once_with({})
    MLFlowLogger.version = "b2"
    log_recipe([MLFlowLogger()], {"changed": 1}, tmp_path)
    MLFlowLogger.log_hyperparams.assert_called_with({"changed": 1})


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_has_one_run_of_a_resumed_run(tiny_recipe, capfd):
    from mlflow.tracking import MlflowClient

    words = ["trainer.logger={class_path: MLFlowLogger, init_args: {tracking_uri: 'sqlite:///mlflow.db'}}"]
    assert run([str(tiny_recipe), *words, "trainer.max_epochs=1"]) == 0
    assert run(["runs/tiny", "--resume", "trainer.max_epochs=2"]) == 0
    client = MlflowClient("sqlite:///mlflow.db")
    (one,) = client.search_runs([client.get_experiment_by_name("lightning_logs").experiment_id])
    steps = [metric.step for metric in client.get_metric_history(one.info.run_id, "reward/mean")]
    assert len(steps) == len(set(steps)) == 2
    assert f"MLFlowLogger continues its run {one.info.run_id}." in capfd.readouterr().out
    assert "run_id: null" in Path("runs/tiny/config.yaml").read_text()


def test_a_missing_tracker_is_one_line_with_the_command(tiny_recipe, capsys, monkeypatch):
    for package in ("wandb", "mlflow", "litlogger"):
        monkeypatch.setitem(sys.modules, package, None)
    assert run([str(tiny_recipe), "trainer.logger=[wandb, csv, {class_path: MLFlowLogger}, LitLogger]"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "trainer.logger=WandbLogger: wandb is not installed. Run: pip install wandb" in lines
    assert "trainer.logger=MLFlowLogger: mlflow is not installed. Run: pip install mlflow" in lines
    assert "trainer.logger=LitLogger: litlogger is not installed. Run: pip install litlogger" in lines
    assert run([str(tiny_recipe), "trainer.logger=WandbLogger", "trainer.logger.projct=x"]) == 2
    missing, misspelt = capsys.readouterr().err.splitlines()
    assert missing == lines[0]
    assert misspelt == "trainer.logger.projct is not an option of WandbLogger. Did you mean project?"


@pytest.mark.slow
def test_litlogger_needs_a_login_and_gets_metrics_recipe_and_grids(tiny_recipe, monkeypatch, capsys):
    tracker, auth = MagicMock(), SimpleNamespace(api_key=None, auth_token=None, load=lambda: False)
    tracker.__spec__ = "installed"
    monkeypatch.setitem(sys.modules, "litlogger", tracker)
    monkeypatch.setitem(sys.modules, "lightning_sdk.lightning_cloud.login", SimpleNamespace(Auth=lambda: auth))
    logger = "trainer.logger={class_path: LitLogger, init_args: {name: x}}"
    words = [str(tiny_recipe), logger, "trainer.callbacks=[SampleGrid]"]
    assert run(words) == 2
    assert "LitLogger cannot start: not logged in. Run lightning-sdk login" in capsys.readouterr().err
    auth.api_key = "key"
    assert run(words) == 0
    experiment = tracker.Experiment.return_value
    assert not tracker.Experiment.call_args.kwargs["save_logs"]  # it would run the command again
    assert "SD3Policy" in dict(call.args for call in experiment.__setitem__.call_args_list)["model"]
    assert {"samples", "reward/mean"} <= {call.args[0] for call in experiment.__getitem__.call_args_list}
    assert isinstance(tracker.Image.call_args.args[0], Image.Image)


@pytest.mark.parametrize("damage", ["deleted", "full"])
def test_tensorboard_stops_with_a_line_when_its_thread_cannot_write(tmp_path, capfd, damage):
    board = TensorBoard(tmp_path, "", "")
    log(board, {"a": 0.0})
    board.experiment.flush()
    (file,) = tmp_path.glob("events*")
    file.unlink()
    if damage == "deleted":
        tmp_path.rmdir()
    else:
        file.symlink_to("/dev/full")
    with pytest.warns(UserWarning, match="TensorBoard logging has stopped: No s") as warned:
        for epoch in range(1, 30):
            log(board, {"a": 1.0, "epoch": epoch})
            board.save()
        board.finalize("success")
    assert len(warned) == 1
    assert capfd.readouterr().err == ""


def test_another_logger_leaves_tensorboard(tmp_path):
    def kinds(setting):
        return [type(logger) for logger in run_loggers(setting, tmp_path, None)]

    assert kinds(Tracker()) == [MetricsTable, Tracker, TensorBoard]
    assert kinds([TensorBoardLogger(tmp_path)]) == [MetricsTable, TensorBoardLogger]
    assert kinds(False) == [MetricsTable]


@pytest.mark.slow
def test_a_run_gives_tensorboard_its_recipe_and_grids(tiny_recipe, monkeypatch):
    monkeypatch.setenv("SECRET", "first.txt")
    (tiny_recipe.parent / "first.txt").write_text("a red circle\n")
    grid = "trainer.callbacks=[{class_path: SampleGrid, init_args: {every_n_iterations: 1, num_prompts: 1}}]"
    words = ["data.heldout=${oc.env:SECRET}", "trainer.max_epochs=2", "trainer.check_val_every_n_epoch=1", grid]
    assert run([str(tiny_recipe), *words]) == 0
    events = EventAccumulator("runs/tiny/tensorboard", size_guidance={"images": 0}).Reload()
    assert [image.step for image in events.Images("samples")] == [0, 1, 2]
    (text,) = events.Tensors("recipe/text_summary")
    recipe = yaml.safe_load(text.tensor_proto.string_val[0].decode().removeprefix("```yaml\n").removesuffix("```"))
    assert recipe["trainer"]["max_epochs"] == 2
    assert yaml.safe_load(Path("runs/tiny/tensorboard/hparams.yaml").read_text()) == recipe
    assert recipe["data"]["heldout"] == "${oc.env:SECRET}"
    (charts,) = events.Tensors("custom_scalars__config__")
    assert b"heldout/reward$" in charts.tensor_proto.string_val[0]
    assert {*WATCHED["Reward"], *WATCHED["Seconds per iteration"]} <= {*events.Tags()["scalars"]}
    assert run(["runs/tiny/config.yaml", "--resume", "trainer.max_epochs=3"]) == 0
    events = EventAccumulator("runs/tiny/tensorboard", size_guidance={"images": 0}).Reload()
    assert [image.step for image in events.Images("samples")] == [0, 1, 2, 3]
    assert [row.step for row in events.Scalars("heldout/reward")] == [0, 1, 2, 3]
    assert [row.step for row in events.Scalars("reward/mean")] == [1, 2, 3]
