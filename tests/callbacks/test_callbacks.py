import json
import re
from types import SimpleNamespace

import pytest
import torch
from helpers import SaveAt, fit, make_data, make_module, make_trainer, same, weights
from lightning.pytorch.strategies import SingleDeviceStrategy
from PIL import Image

from lit_vgrpo import SD3Policy
from lit_vgrpo.callbacks import EMA, Export, RunSummary, SampleGrid
from lit_vgrpo.system.paths import DRAFT_PREFIX
from lit_vgrpo.training.checkpoint import TRAINED, RunCheckpoint
from lit_vgrpo.training.checkpoint_file import PortableCheckpoints
from lit_vgrpo.training.loggers import MetricsTable, read_table


def test_ema_equals_the_recursion_in_optimizer_steps(tiny_sd3, tmp_path):
    """Four micro-batches an update, two updates an iteration: the average moves six times, not 24."""
    ema, history = EMA(0.8, warmup=False), []

    class Watch(EMA):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            assert trainer.global_step == len(history) + 1
            history.append(weights(pl_module))

        def on_validation_start(self, *args):
            pass

    module = make_module(tiny_sd3)
    module.configure_model()
    expected = {name: value.double() for name, value in weights(module).items()}
    trainer = make_trainer(tmp_path, 3, [Watch(), ema])
    trainer.fit(module, datamodule=make_data(micro_batch_size=2, updates_per_iteration=2))
    assert ema.num_updates == 6 == len(history)
    for step in history:
        expected = {name: 0.8 * value + 0.2 * step[name].double() for name, value in expected.items()}
    for name, value in expected.items():
        torch.testing.assert_close(ema.average.tensors["policy." + name].double(), value, rtol=1e-5, atol=1e-6)


def test_the_average_goes_on_with_the_trainer_and_starts_over_with_another(tiny_sd3, tmp_path):
    ema, module, data = EMA(0.9), make_module(tiny_sd3), make_data()
    trainer = make_trainer(tmp_path, 2, [ema])
    trainer.fit(module, datamodule=data)
    before = ema.average.state_dict()
    trainer.fit(module, datamodule=data)  # nothing is left to train
    assert same(before, ema.average.state_dict())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, datamodule=data)
    assert ema.num_updates == 3
    make_trainer(tmp_path, 1, [ema]).fit(module, datamodule=data)
    assert ema.num_updates == 1


class Portable(PortableCheckpoints, SingleDeviceStrategy):
    """Loads weights as the strategies that shard them do, without the module's load_state_dict."""


def score(module, data, trainer, **options):
    (found,) = trainer.validate(module, datamodule=data, verbose=False, **options)
    return found["heldout/reward"]


def test_an_average_is_used_only_for_the_weights_that_it_is_of(tiny_sd3, tmp_path):
    ema, module, data, plain = EMA(0.5), make_module(tiny_sd3), make_data(), make_trainer(tmp_path)
    trainer = make_trainer(tmp_path, 2, [ema], strategy=Portable(device=plain.strategy.root_device))
    trainer.fit(module, datamodule=data)
    average, trained = score(module, data, trainer), score(module, data, plain)
    other = make_module(tiny_sd3)
    start = score(other, data, plain)
    assert len({average, trained, start}) == 3
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    without = make_trainer(tmp_path)
    without.fit(make_module(tiny_sd3), datamodule=data)
    without.save_checkpoint(tmp_path / "without.ckpt")
    # Another module, in the same trainer and with the same callback in another.
    assert score(other, data, trainer) == score(other, data, make_trainer(tmp_path, callbacks=[ema])) == start
    assert ema.state_dict() == {}
    assert score(module, data, trainer) == average
    assert ema.state_dict() != {}
    # Other weights of the same module.
    for name in ("weights", "without"):
        file = {"ckpt_path": tmp_path / f"{name}.ckpt", "weights_only": True}
        assert score(module, data, trainer, **file) == score(module, data, plain)
        assert ema.state_dict() == {}
        assert score(module, data, trainer, **file | {"ckpt_path": tmp_path / "whole.ckpt"}) == average
    module.load_state_dict(torch.load(tmp_path / "weights.ckpt", weights_only=True)["state_dict"], strict=False)
    assert score(module, data, trainer) == trained


def test_a_checkpoint_that_could_not_be_evaluated_leaves_no_average(tiny_sd3, tmp_path):
    trainer = make_trainer(tmp_path, 1, [EMA(0.5)])
    trainer.fit(make_module(tiny_sd3), datamodule=make_data())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    module, data, trainer = make_module(tiny_sd3), make_data(), make_trainer(tmp_path, callbacks=[EMA(0.5)])
    with pytest.raises(ValueError, match="needs held-out prompts"):
        score(module, make_data(heldout=None), trainer, ckpt_path=tmp_path / "end.ckpt", weights_only=True)
    other = make_module(tiny_sd3)
    assert score(other, data, trainer) == score(other, data, make_trainer(tmp_path))


def test_a_fit_that_continues_evaluates_the_average_first(tiny_sd3, tmp_path):
    module, trainer = fit(tiny_sd3, tmp_path, [EMA(0.9)], iterations=2)
    last = module.evaluator.history[-1]
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, datamodule=make_data())
    (again,) = (one for one in module.evaluator.history if one.iteration == 2 and one is not last)
    assert again.reward == last.reward


def test_the_last_words_count_images_that_could_not_be_scored(tiny_sd3, tmp_path, capsys):
    def half(images, prompts):
        return [None if number % 2 else float(image.mean()) for number, image in enumerate(images)]

    summary = RunSummary()
    module, trainer = fit(tiny_sd3, tmp_path, [summary], iterations=1, reward=half)
    summary.finish(trainer, module, completed=True)
    out = " ".join(capsys.readouterr().out.split())  # wrapped
    assert re.search(r"after 1 iteration: \S0\.\d{3} \(trained weights; 1 image could not be scored\)\.", out)
    assert out.endswith(" 4 training images of 8 could not be scored.")
    found = json.loads((tmp_path / "summary.json").read_text())
    assert (found["alarms"], found["unscored_images"]) == ([], {"training": 4, "heldout": 1})


def test_the_last_words_say_how_many_images_the_trainers_limit_leaves(tiny_sd3, tmp_path, capsys):
    summary, limit = RunSummary(), {"limit_val_batches": 1}
    module, trainer = fit(tiny_sd3, tmp_path, [summary], iterations=1, data={"eval_batch_size": 1}, trainer=limit)
    summary.finish(trainer, module, completed=True)
    assert "(trained weights; 1 of 2 held-out images)." in " ".join(capsys.readouterr().out.split())


def test_evaluation_sees_the_average_and_training_goes_on_from_the_weights(tiny_sd3, tmp_path):
    seen = []

    class Peek(EMA):
        def on_validation_end(self, trainer, pl_module):
            for _ in range(2):
                own = dict(pl_module.policy.named_parameters())
                seen.append([torch.equal(p, self.average.tensors["policy." + name]) for name, p in own.items()])
                super().on_validation_end(trainer, pl_module)

    fit(tiny_sd3, tmp_path, [Peek(0.9)], iterations=1)
    during, after = seen
    assert all(during)
    assert not all(after)


def test_weights_come_back_when_evaluation_throws(tiny_sd3, tmp_path):
    ema = EMA(0.9)
    module = make_module(tiny_sd3)
    trainer = make_trainer(tmp_path, 2, [ema])
    at_failure = {}

    def fail(batch, batch_idx):
        at_failure.update(weights(module))
        raise KeyError("evaluation")

    module.evaluate_at_start = False
    module.validation_step = fail
    with pytest.raises(KeyError):
        trainer.fit(module, datamodule=make_data())
    assert any(not torch.equal(value, at_failure[name]) for name, value in weights(module).items())
    assert all(torch.equal(at_failure[name], ema.average.tensors["policy." + name]) for name in at_failure)


def test_sample_grid(tiny_sd3, tmp_path):
    grid = SampleGrid(num_prompts=2, images_per_prompt=2, every_n_iterations=1)
    module, _ = fit(tiny_sd3, tmp_path, [grid])
    pictures = {path.stem: Image.open(path) for path in (tmp_path / "samples").glob("*.png")}
    assert set(pictures) == {"before", "iteration_00001", "iteration_00002", "after"}
    assert {picture.size for picture in pictures.values()} == {pictures["after"].size}

    def column(name, number):
        left = 4 + number * 100 + (8 if number else 0)
        return pictures[name].crop((left, 36, left + 96, 36 + 96)).tobytes()

    # Before training the policy is the reference, on the same noise; afterwards only the reference is unchanged.
    assert column("before", 0) == column("before", 1)
    assert column("before", 0) == column("after", 0)
    assert column("after", 1) != column("before", 1)
    assert "samples" in module.ledger.counts


def test_rows_have_the_rewards_of_their_images(tiny_sd3, tmp_path):
    """Of the third and the fourth image, as trainer.limit_val_batches leaves them to a second rank."""
    module, data, grid = make_module(tiny_sd3), make_data(heldout_limit=4, eval_batch_size=2), SampleGrid(4)
    module.trainer = make_trainer(tmp_path)
    module.configure_model()
    grid._rows = data.heldout_samples(4)
    module.evaluator.add(data.val_dataloader().dataset[1])
    module.evaluator.finish(module)
    module.evaluator.step = 0
    rewards = grid._rewards(SimpleNamespace(datamodule=data, global_step=0), module)
    assert rewards == [None, None, *module.evaluator.per_image("heldout/reward").tolist()]


def test_a_run_that_continues_its_first_iteration_keeps_the_grid_of_the_start(tiny_sd3, tmp_path):
    saved, options = tmp_path / "x.ckpt", {"iterations": 1, "data": {"updates_per_iteration": 2}}
    fit(tiny_sd3, tmp_path, [SampleGrid(1, 1), SaveAt(saved, 0, 2)], **options)
    first = (tmp_path / "samples/before.png").read_bytes()
    fit(tiny_sd3, tmp_path, [SampleGrid(1, 1)], ckpt=saved, **options)
    assert torch.load(saved, weights_only=True)["global_step"] == 1
    assert (tmp_path / "samples/before.png").read_bytes() == first


@pytest.mark.slow
def test_sample_grid_on_resume_still_shows_the_start_as_reference(tiny_sd3, tmp_path):
    _, trainer = fit(tiny_sd3, tmp_path, [SampleGrid(2, 2)])
    first = (tmp_path / "samples" / "before.png").read_bytes()
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    again = SampleGrid(2, 2)
    fit(tiny_sd3, tmp_path, [again], iterations=4, ckpt=tmp_path / "x.ckpt")
    assert (tmp_path / "samples" / "before.png").read_bytes() == first
    plain = make_module(tiny_sd3)
    plain.configure_model()
    prompts = [row["prompt"] for row in make_data().heldout_samples(2)]
    torch.testing.assert_close(again._reference, plain.evaluator.generate(prompts, [0, 2]))


def test_summary(tiny_sd3, tmp_path):
    data, limit = {"heldout_images_per_prompt": 2}, {"max_steps": 3, "check_val_every_n_epoch": 2}
    limit["logger"] = MetricsTable(tmp_path)
    module, _ = fit(tiny_sd3, tmp_path, [RunSummary(), EMA(0.5)], iterations=4, data=data, trainer=limit, seed=5)
    summary = json.loads((tmp_path / "summary.json").read_text())
    expected = {"outcome": "finished", "iterations": 3, "optimizer_steps": 3, "images": 24, "seed": 5}
    assert expected.items() <= summary.items()
    rows = read_table(tmp_path / "metrics.csv")[1]  # the last evaluation is not Lightning's
    steps = {name: [(row["epoch"], row["step"]) for row in rows if row[name]] for name in ("time/iteration_s", TRAINED)}
    assert steps[TRAINED] == [("", "0"), *steps["time/iteration_s"][1:]]
    plain = make_module(tiny_sd3, seed=5)
    plain.configure_model()
    prompts = [row["prompt"] for row in make_data().heldout_samples(2) for _ in range(2)]
    scores = plain.reward.score(plain.evaluator.generate(prompts, [0, 1, 2, 3]), prompts, [{}] * 4)
    assert summary["heldout_reward_start"] == pytest.approx(scores.total.mean().item(), abs=1e-5)
    assert summary["heldout_reward_end"] == pytest.approx(module.evaluator.latest["heldout/reward"], abs=1e-6)
    assert summary["reward_parts_end"].keys() == {"brightness"}
    assert summary["heldout_prompts"] == module.evaluator.contents["prompts"]
    assert summary["network_passes"]["update"] == {"with_grad": 48, "without_grad": 0}
    assert summary["network_passes"]["rollout"] == {"with_grad": 0, "without_grad": 48}
    assert summary["train_seconds"] > 0
    assert summary["peak_memory_bytes"] > 1e7
    assert {"torch", "lightning", "diffusers", "lit-vgrpo", "python"} <= summary["versions"].keys()


@pytest.mark.parametrize(("fall", "outcome"), [(2.0, "diverged"), (0.5, "finished")])
def test_a_run_that_ends_far_below_its_start_has_diverged(tiny_sd3, tmp_path, fall, outcome):
    class Fallen(RunSummary):
        def on_train_end(self, trainer, pl_module):
            start = pl_module.evaluator.history[0].metrics
            start["reward"] = pl_module.evaluate()["heldout/reward"] + fall * start["reward_std"]
            super().on_train_end(trainer, pl_module)

    fit(tiny_sd3, tmp_path, [Fallen()], data={"heldout_images_per_prompt": 2}, iterations=1)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["outcome"] == outcome
    reason = summary.get("reason", "")
    assert reason.startswith("Diverged: heldout/reward fell from ") == (outcome == "diverged")
    assert ("2.0 times the standard deviation of the first evaluation's rewards." in reason) == (outcome == "diverged")


def test_a_run_whose_last_weights_could_not_be_saved_is_not_finished(tiny_sd3, tmp_path, monkeypatch):
    monkeypatch.setattr(RunCheckpoint, "_write", lambda *args: "Cannot save.")
    fit(tiny_sd3, tmp_path, [RunSummary(), RunCheckpoint()], 1, trainer={"enable_checkpointing": True})
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "unsaved"


def test_a_failed_run_leaves_a_summary(tiny_sd3, tmp_path):
    module = make_module(tiny_sd3)
    module.collect = None
    with pytest.raises(TypeError):
        make_trainer(tmp_path, 1, [RunSummary()]).fit(module, datamodule=make_data())
    found = json.loads((tmp_path / "summary.json").read_text())
    assert (found["outcome"], found["reason"]) == ("failed", "TypeError: 'NoneType' object is not callable")


@pytest.mark.slow
def test_export_is_the_average_and_replaces_the_last_one_alone(tiny_sd3, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/model_index.json").write_text("of before")
    (tmp_path / "out/notes.txt").write_text("mine")
    ema = EMA(0.9)
    module, _ = fit(tiny_sd3, tmp_path, [ema, Export("out")])
    saved = SD3Policy(str(tmp_path / "out"), max_sequence_length=1).load()
    for name, value in saved.named_parameters():
        assert torch.equal(value.detach(), ema.average.tensors["policy." + name])
    assert any(not torch.equal(v, ema.average.tensors["policy." + n]) for n, v in weights(module).items())
    assert (tmp_path / "out/notes.txt").read_text() == "mine"
    assert not list(tmp_path.rglob(f"{DRAFT_PREFIX}*"))


@pytest.mark.slow
def test_an_export_that_cannot_be_written_costs_no_checkpoint(tiny_sd3, tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.warns(UserWarning, match=r"No export\. Cannot write .*taken/out: .*lightning export"):
        fit(tiny_sd3, tmp_path, [Export("taken/out"), RunCheckpoint()], trainer={"enable_checkpointing": True})
    assert (tmp_path / "checkpoints/last.ckpt").is_file()
