"""The parts in user code: a plain Trainer, a plain LightningCLI, a custom objective."""

import re
import warnings
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from helpers import Brightness, make_data, make_module, make_trainer, weights
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lit_vgrpo import VGRPO, PromptDataModule, RolloutSpec, SD3Policy, VGRPOModule
from lit_vgrpo.callbacks import EMA, Report, RewardLogger, RunSummary, reward_logger
from lit_vgrpo.cli.main import main
from lit_vgrpo.training import settings
from lit_vgrpo.training.evaluation import Evaluator
from lit_vgrpo.training.loggers import read_table
from lit_vgrpo.training.saved_weights import TRAINED, SavedWeights

EXTENDING = Path(__file__).parents[1].joinpath("docs", "extending.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", EXTENDING, flags=re.DOTALL)


def raises(settings):
    raise RuntimeError("another value")


def test_a_plain_trainer_with_its_own_callbacks(tiny_sd3, tmp_path, monkeypatch):
    stopper = L.pytorch.callbacks.EarlyStopping("reward/mean", patience=50, mode="max")
    keeper = L.pytorch.callbacks.ModelCheckpoint(tmp_path, monitor="heldout/reward", mode="max", filename="best")
    callbacks = [stopper, keeper, RunSummary(), Report()]
    logger = CSVLogger(tmp_path, name="", version="")
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", logger=logger, callbacks=callbacks, default_root_dir=tmp_path)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        trainer.fit(make_module(tiny_sd3), datamodule=make_data())
    assert not [str(one.message) for one in shown if "report" in str(one.message) or "interval" in str(one.message)]
    page = (tmp_path / "report.html").read_text()
    assert "<dt>Iterations</dt><dd>2</dd>" in page
    assert "<dt>Images</dt><dd>16</dd>" in page
    assert "it has no <code>config.yaml</code>" in page
    assert main(["report", str(tmp_path), f"--out={tmp_path / 'again.html'}"]) == 0
    assert "<dt>Iterations</dt><dd>2</dd>" in (tmp_path / "again.html").read_text()
    assert trainer.global_step == 2
    assert (tmp_path / "best.ckpt").is_file()
    assert {"reward", "held-out"} <= trainer.progress_bar_metrics.keys()  # of Lightning's own bar
    assert {"reward/mean", "reward/failed", "policy/loss", "heldout/reward"} <= trainer.callback_metrics.keys()
    table = Path(trainer.logger.log_dir, "metrics.csv").read_text().splitlines()
    settings = yaml.safe_load(Path(trainer.logger.log_dir, "hparams.yaml").read_text())
    assert settings["model"]["policy"]["checkpoint"] == str(tiny_sd3)
    assert settings["rewards"] == {"brightness": 1.0}
    assert settings["model"]["policy"]["decode_dtype"] == "torch.float32"
    assert settings["model"]["objective"]["num_mc_samples"] == 2
    assert (settings["optimizer"]["lr"], settings["sizes"]["group_size"]) == (1e-2, 4)
    assert {"reward/brightness", "policy/grad_norm", "cost/images", "time/iteration_s"} <= set(table[0].split(","))
    # Another fit of the same trainer, or one that was given a logger of rewards, has one all the same.
    trainer.fit_loop.max_epochs = 3
    monkeypatch.setattr(logger, "log_hyperparams", raises)  # as MLflow's, for other values
    with pytest.warns(UserWarning, match="CSVLogger did not take the run's settings: another value"):
        trainer.fit(module := make_module(tiny_sd3), datamodule=make_data())
    assert sum(isinstance(callback, RewardLogger) for callback in trainer.callbacks) == 1
    trainer.fit_loop.max_epochs = 4
    with pytest.warns(UserWarning, match=r"continues after 3 optimizer steps, but .* pass ckpt_path to fit\.$"):
        trainer.fit(module, datamodule=make_data())


def test_another_default_type_of_torch_is_named_before_anything_is_loaded(tiny_sd3, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    with pytest.raises(ValueError, match=r"torch's default type is torch.float64\."):
        make_trainer(tmp_path).fit(make_module(tiny_sd3), datamodule=make_data())


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_a_precision_that_casts_weights_is_named_before_anything_is_loaded(tiny_sd3, tmp_path, verb):
    for precision in ("bf16-true", "16-true", "64-true"):
        with pytest.raises(ValueError, match=f"^trainer.precision={precision} would cast the trained weights."):
            getattr(make_trainer(tmp_path, precision=precision), verb)(make_module(tiny_sd3), datamodule=make_data())


def test_our_warnings_are_one_line_and_others_keep_theirs():
    for module in (settings, reward_logger):
        assert warnings.formatwarning("a\nb", UserWarning, module.__file__, 1) == "Warning: a b\n"
    assert warnings.formatwarning("a", UserWarning, __file__, 1).startswith(f"{__file__}:1: UserWarning: a\n")


def test_a_wrong_object_is_named_with_what_to_pass(tiny_sd3, tmp_path):
    with pytest.raises(RuntimeError, match="datamodule=PromptDataModule"):
        make_trainer(tmp_path).fit(make_module(tiny_sd3), DataLoader([1]))
    with pytest.raises(ValueError, match=r"torch.compile\(module\) would compile the iteration. Pass the module, and"):
        make_trainer(tmp_path).fit(torch.compile(make_module(tiny_sd3)), datamodule=make_data())
    rows = [{"prompt": "a cat", "rewards": ["brigthness"]}]
    with pytest.raises(ValueError, match='"a cat" names the reward brigthness .* Did you mean brightness?'):
        make_trainer(tmp_path).fit(make_module(tiny_sd3), datamodule=make_data(train=rows))
    for policy in ("hub/name", SD3Policy):
        with pytest.raises(TypeError, match=r"policy=.*: Use an instance of Policy\. Wrap .*AutoPolicy\("):
            VGRPOModule(policy, VGRPO(), Brightness())
    for swapped in (VGRPO(), Brightness()):
        shown = f"policy={type(swapped).__name__}: .* an instance of Policy. The order is policy, objective, reward."
        with pytest.raises(TypeError, match=shown):
            VGRPOModule(swapped, VGRPO(), Brightness())
    with pytest.raises(TypeError, match=r"objective='VGRPO': .* an instance of Objective\. Pass .*objective=VGRPO\(\)"):
        VGRPOModule(SD3Policy(str(tiny_sd3)), "VGRPO", Brightness())
    with pytest.raises(TypeError, match=r"SGD\(...\) is already built. Pass a function that builds it"):
        make_module(tiny_sd3, optimizer=torch.optim.SGD([torch.zeros(1)], lr=1))
    for options, kind, line in (
        (
            {"optimizer": 1e-4},
            TypeError,
            r"^optimizer=0.0001 builds nothing. Pass OptimizerConfig\(lr=0.0001\), or a class with its options",
        ),
        (
            {"lr_scheduler": "cosine"},
            TypeError,
            "^lr_scheduler='cosine' builds nothing. Pass a class .*CosineAnnealingLR",
        ),
        ({"lr": 1e-3}, TypeError, r"^lr is not an option of VGRPOModule. Pass optimizer=OptimizerConfig\(lr=...\).$"),
        ({"evaluation": 5}, TypeError, "^evaluation=5: Use an instance of RolloutSpec"),
        ({"untrained_reward": []}, ValueError, r"^rewards=\[\] is empty. Name at least one reward"),
    ):
        with pytest.raises(kind, match=line):
            make_module(tiny_sd3, **options)
    with pytest.raises(RuntimeError, match=r"SD3Policy is not loaded and has no network. Call policy.load\(\) first."):
        SD3Policy(str(tiny_sd3)).encode(["a cat"])


def test_what_a_recipe_takes_python_takes(tiny_sd3):
    options = {"evaluation": {"steps": 3, "height": 64}, "optimizer": {"lr": 1e-4}}
    module = make_module(tiny_sd3, VGRPO({"steps": 2}), [Brightness(), Brightness()], **options)
    assert (module.evaluation.steps, module.evaluator.sides) == (3, (64, None))
    assert module.optimization.optimizer.lr == 1e-4
    assert module.reward.weight_of == {"brightness": 0.5, "brightness_2": 0.5}
    assert make_module(tiny_sd3, evaluation=RolloutSpec(steps=4)).evaluator.spec.steps == 4


def test_the_seed_is_that_of_seed_everything_unless_it_is_given(tiny_sd3):
    def seeds(**options):
        module, data = make_module(tiny_sd3, **options), make_data(**options)
        return {module.seed, module.evaluator.seed, Evaluator(module.policy, Brightness(), **options).seed, data.seed}

    assert seeds() == {0}
    L.seed_everything(5)
    assert seeds() == {5}
    assert seeds(seed=0) == {0}


class Heads(VGRPOModule):
    """Trains a head besides the policy, with a schedule that waits for a metric; ``others`` replaces both."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.head, self.others = torch.nn.Linear(2, 2), None

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        if self.others is not None:
            return self.others(optimizer)
        optimizer.add_param_group({"params": list(self.head.parameters())})
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", threshold=9.0, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "reward/mean"}}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("prompts", float(len(batch.prompts)), on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        for weight in self.head.parameters():
            weight.grad = torch.ones_like(weight)


def with_heads(folder, others=None):
    module = make_module(folder)
    module = Heads(module.policy, module.objective, module.reward)
    module.others = others
    return module


def test_weights_and_schedules_of_a_subclass_are_kept(tiny_sd3, tmp_path, recwarn):
    module, trainer = with_heads(tiny_sd3), make_trainer(tmp_path)
    start = module.head.weight.detach().clone()
    trainer.fit(module, datamodule=make_data())
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(3e-5)
    assert trainer.callback_metrics["prompts_epoch"] == trainer.datamodule.sizes.prompts_per_iteration
    assert not [one for one in recwarn if "keys will be ignored" in str(one.message)]
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = with_heads(tiny_sd3)
    make_trainer(tmp_path).fit(again, datamodule=make_data(), ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(again.head.weight, module.head.weight)
    assert not torch.equal(again.head.weight, start)
    assert SavedWeights.read(tmp_path / "last.ckpt").difference(TRAINED, module.policy) is None


def test_a_hook_without_super_is_refused_where_it_is_written():
    def forgets(self, optimizer):
        self.log("norm", 1.0)

    def calls(self, optimizer):
        VGRPOModule.on_before_optimizer_step(self, optimizer)

    type("Calls", (VGRPOModule,), {"on_before_optimizer_step": calls, "on_train_end": forgets})
    mixin = type("Mixin", (), {"on_before_optimizer_step": forgets})
    with pytest.raises(TypeError, match=r"Mixin.on_before_optimizer_step replaces .* Call super\(\).on_before_optimi"):
        type("Forgets", (mixin, VGRPOModule), {})


def test_optimizers_that_cannot_be_used_are_refused_before_training(tiny_sd3, tmp_path):
    def lone(optimizer):
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1)), *optimizer.param_groups[0]["params"]])

    for others, error in (
        (lambda optimizer: [optimizer, optimizer], "returned 2 optimizers, but an update is a step of one. Return one"),
        (lone, "trains 1 tensor that no checkpoint would have. Make each an attribute of the module"),
    ):
        with pytest.raises(ValueError, match=error):
            make_trainer(tmp_path).fit(with_heads(tiny_sd3, others), datamodule=make_data())
    with pytest.raises(RuntimeError, match="VGRPOModule works only as the trainer's module. Subclass it"):
        make_module(tiny_sd3).configure_optimizers()


@pytest.mark.slow
def test_a_loader_is_no_data_module(tiny_sd3, tmp_path):
    with pytest.raises(TypeError, match="datamodule=DataLoader is not a data module. Pass datamodule=PromptDataModule"):
        make_trainer(tmp_path).fit(make_module(tiny_sd3), datamodule=DataLoader(["a cat"]))
    for verb in ("validate", "test"):
        with pytest.raises(TypeError, match=r"of type list, not a PromptBatch. Pass datamodule=PromptDataModule\("):
            getattr(make_trainer(tmp_path), verb)(make_module(tiny_sd3), DataLoader(["a cat"]))


@pytest.mark.slow
def test_a_pipeline_that_is_already_in_memory_and_a_second_fit(tiny_sd3):
    pipeline = SD3Policy(str(tiny_sd3)).load().pipeline
    policy = SD3Policy("my pipeline", max_sequence_length=1).adopt(pipeline)
    objective = VGRPO(RolloutSpec(steps=2), num_mc_samples=2, anchor_weight=1.0, anchor_decay=0.3)
    module = VGRPOModule(policy, objective, Brightness())
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    for _ in range(2):
        trainer = L.Trainer(max_epochs=1, **options)
        trainer.fit(module, datamodule=make_data())
        assert trainer.global_step == 1
        assert module.ledger.counts["anchor"]["without_grad"] == 16  # of this fit
    assert module.reference is not None


@pytest.mark.slow
def test_a_plain_lightning_cli(tiny_sd3, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        f"""
model:
  policy: {{class_path: lit_vgrpo.SD3Policy, init_args: {{checkpoint: {tiny_sd3}, max_sequence_length: 1}}}}
  objective: {{class_path: lit_vgrpo.VGRPO, init_args: {{rollout: {{steps: 2}}, num_mc_samples: 2}}}}
  reward: {{class_path: helpers.Brightness}}
data: {{train: "shipped:prompts/shapes_train.jsonl", prompts_per_iteration: 2, group_size: 2, micro_batch_size: 2}}
trainer: {{max_epochs: 1, accelerator: cpu, logger: false, enable_checkpointing: false, enable_progress_bar: false}}
"""
    )
    words = ["fit", f"--config={config}", "--seed_everything=3"]
    cli = LightningCLI(VGRPOModule, PromptDataModule, save_config_callback=None, args=words)
    assert (cli.trainer.global_step, cli.model.seed, cli.datamodule.seed) == (1, 3, 3)
    assert isinstance(cli.model.reward.rewards[0], Brightness)


@pytest.mark.slow
def test_fit_test_the_best_and_go_on(tiny_sd3, tmp_path):
    """Do what a training script of lightning-hydra-template does, in its order."""
    documented = re.search(r"^ModelCheckpoint\(.*?^\)", EXTENDING, re.M | re.S)

    def parts(epochs):
        callbacks = [eval(documented[0], {"ModelCheckpoint": ModelCheckpoint}), EMA(0.5)]
        trainer = make_trainer(tmp_path, epochs, callbacks, enable_checkpointing=True, logger=CSVLogger(tmp_path))
        return make_module(tiny_sd3), make_data(), trainer

    module, data, trainer = parts(2)
    trainer.fit(model=module, datamodule=data)
    best = Path(trainer.checkpoint_callback.best_model_path)
    assert best.parent.name == "checkpoints"  # a metric's slash makes no folder
    (found,) = trainer.test(model=module, datamodule=data, ckpt_path="best")
    assert found["test/reward"] == pytest.approx(float(trainer.checkpoint_callback.best_model_score), abs=1e-6)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    module, data, trainer = parts(3)
    trainer.fit(model=module, datamodule=data, ckpt_path=tmp_path / "last.ckpt")
    assert (trainer.global_step, trainer.current_epoch, module.record.iteration) == (3, 3, 2)


class Hooks(L.Callback):
    """Writes down the hooks of an iteration, each with the optimizer steps taken by then."""

    def __init__(self):
        self.calls = []
        for row in re.findall(r"^\| (`on_.*?) \|", EXTENDING, flags=re.MULTILINE):
            for name in re.findall(r"`(\w+)`", row):
                setattr(self, name, partial(self.note, name))

    def note(self, name, trainer, *args):
        self.calls.append((name, trainer.global_step))


def test_lightnings_callbacks_work_and_hooks_fire_as_documented(tiny_sd3, tmp_path):
    hooks, lightnings = Hooks(), L.pytorch.callbacks
    by_steps = ModelCheckpoint(tmp_path / "steps", every_n_train_steps=4, save_top_k=-1, filename="{step}")
    callbacks = [hooks, lightnings.LearningRateMonitor(), by_steps, lightnings.Timer("00:01:00:00", interval="step")]
    callbacks += [lightnings.ThroughputMonitor(lambda batch: batch.images, window_size=2)]
    callbacks += [lightnings.DeviceStatsMonitor(cpu_stats=True)]
    options = {"profiler": "simple", "enable_checkpointing": True, "log_every_n_steps": 2}
    trainer = make_trainer(tmp_path, 4, callbacks, logger=CSVLogger(tmp_path), **options)
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    module = make_module(tiny_sd3, lr_scheduler=schedule, evaluate_at_start=False)
    trainer.fit(module, datamodule=make_data(updates_per_iteration=2, heldout_limit=1))
    passes = [("on_before_backward", 0), ("on_after_backward", 0)] * 2  # of two micro-batches
    update = [*passes, ("on_before_optimizer_step", 0), ("on_before_zero_grad", 1)]
    second = [(name, step + 1) for name, step in update]
    ends = [("on_train_batch_end", 2), ("on_train_epoch_end", 2)]
    assert hooks.calls[:16] == [("on_train_epoch_start", 0), ("on_train_batch_start", 0), *update, *second, *ends]
    assert len(hooks.calls) == 4 * 16
    assert {path.name for path in (tmp_path / "steps").iterdir()} == {"step=4.ckpt", "step=8.ckpt"}
    _, rows = read_table(next(tmp_path.rglob("metrics.csv")))
    rates = {int(row["step"]): float(row["lr-AdamW"]) for row in rows if row["lr-AdamW"]}
    assert rates == {step: 1e-2 * 0.5 ** (step // 2) for step in (1, 3, 5, 7)}
    assert {int(row["step"]) for row in rows if row["policy/loss"]} == {1, 3, 5, 7}
    assert any("samples_per_sec" in name for name in rows[0])
    assert any("cpu_percent" in name for name in rows[0])
    assert "optimizer_step" in trainer.profiler.summary()


@pytest.mark.slow
def test_the_documented_objective_trains_and_costs_what_it_says(tiny_sd3, tmp_path):
    (code,) = [block for block in BLOCKS if "(PairObjective)" in block]
    names: dict = {}
    exec(code, names)
    objective = names["SmoothRatio"](RolloutSpec(steps=2), bound=0.5)
    module, data = make_module(tiny_sd3, objective, policy_options={"lora_rank": 2}), make_data()
    module.configure_model()
    before = weights(module)
    make_trainer(tmp_path, 1).fit(module, datamodule=data)
    assert any(not value.equal(before[name]) for name, value in weights(module).items())
    assert module.ledger.counts["update"]["with_grad"] == 2 * 8
    expected = objective.passes_per_image(data.sizes)
    assert module.ledger.training_passes() == pytest.approx(sum(expected.values()) * 8)


def test_the_example_of_the_readme_runs_as_it_is(here):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    code, with_report = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[:2]
    found = {}
    for block in (code, with_report):
        assert "max_epochs=20" in block
        exec(block.replace("max_epochs=20", "max_epochs=1"), found)
    assert found["model"].evaluator.history[-1].reward >= 0
    found["trainer"].fit(found["model"], datamodule=found["data"])
    assert Path("my_run/report.html").is_file()
