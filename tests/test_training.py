"""The LightningModule in a real Trainer, on a small real pipeline."""

import warnings
from functools import partial

import pytest
import torch
from helpers import Brightness, fit, make_data, make_module, make_trainer, read_csv, same, weights
from lightning.pytorch.loggers import CSVLogger

from lit_vgrpo import OptimizerConfig, VGRPOModule
from lit_vgrpo.callbacks import RewardLogger, SurrogateDiagnostics
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.training.checkpoint_file import read


def test_the_gradient_is_that_of_the_whole_iteration(tiny_sd3, tmp_path):
    """Micro-batches only cut memory: the step is that of one large batch.

    By plain SGD, since Adam makes a whole step of a gradient that is only rounding. Passes of other sizes round
    otherwise: 1e-4 of the largest entry is a hundred times what float32 loses.
    """
    plain = {"optimizer": partial(torch.optim.SGD, lr=1.0)}
    small, _ = fit(tiny_sd3, tmp_path, iterations=1, data={"micro_batch_size": 2}, **plain)
    large, _ = fit(tiny_sd3, tmp_path, iterations=1, data={"micro_batch_size": 8}, **plain)
    start = large.reference.tensors
    step = max(float((value - start[name]).abs().max()) for name, value in weights(large).items())
    assert step > 1e-4
    for name, value in weights(small).items():
        torch.testing.assert_close(value, weights(large)[name], rtol=0, atol=1e-4 * step)


def test_same_seed_same_run_other_seed_other_run(tiny_sd3, tmp_path):
    first, again, other = (weights(fit(tiny_sd3, tmp_path, iterations=2, seed=seed)[0]) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_a_checkpoint_holds_no_frozen_tensor_and_loads_weights_only(tiny_sd3, tmp_path):
    module, trainer = fit(tiny_sd3, tmp_path, iterations=2, policy_options={"lora_rank": 2})
    trainer.save_checkpoint(tmp_path / "lora.ckpt")
    checkpoint = torch.load(tmp_path / "lora.ckpt", weights_only=True)
    assert {name.removeprefix("policy.") for name in checkpoint["state_dict"]} == set(weights(module))
    trained = sum(value.numel() for value in weights(module).values()) * 4
    size = (tmp_path / "lora.ckpt").stat().st_size
    assert size < 3 * trained + 200_000  # weights and Adam's two moments, plus names
    with pytest.raises(RuntimeError, match="lacks .* trained tensors"):  # from another recipe
        fit(tiny_sd3, tmp_path, ckpt=tmp_path / "lora.ckpt")
    scaled, said = {"lora_rank": 2, "lora_alpha": 8}, "trained with lora_alpha=2, but the policy has 8"
    with pytest.raises(RuntimeError, match=said):
        fit(tiny_sd3, tmp_path, policy_options=scaled, ckpt=tmp_path / "lora.ckpt")
    with pytest.raises(LoadError, match=said):
        fit(tiny_sd3, tmp_path, policy_options={**scaled, "start_from": str(tmp_path / "lora.ckpt")})


def test_load_from_checkpoint_names_the_parts_that_it_needs(tiny_sd3, tmp_path):
    module, trainer = fit(tiny_sd3, tmp_path, iterations=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(TypeError, match=r"VGRPOModule.load_from_checkpoint\(path, policy=..., reward=...\)$"):
        VGRPOModule.load_from_checkpoint(tmp_path / "one.ckpt", objective=module.objective)
    fresh = make_module(tiny_sd3)
    parts = {"policy": fresh.policy, "objective": fresh.objective, "reward": fresh.reward}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*not in the checkpoint")  # frozen weights never are
        loaded = VGRPOModule.load_from_checkpoint(tmp_path / "one.ckpt", **parts)
    assert same(weights(loaded), weights(module))


class SavingAll(VGRPOModule):
    def __init__(self, policy, objective, reward, extra, **options):
        super().__init__(policy, objective, reward, **options)
        self.save_hyperparameters()


def test_hyperparameters_that_a_checkpoint_cannot_hold_are_left_out(tiny_sd3, tmp_path):
    fresh, data, trainer = make_module(tiny_sd3), make_data(), make_trainer(tmp_path, 1)
    parts = {"policy": fresh.policy, "objective": fresh.objective, "reward": Brightness()}
    module = SavingAll(**parts, extra=3, optimizer=OptimizerConfig(lr=1e-2))
    data.save_hyperparameters({"train": tmp_path, "sizes": [1, {"a": None}]})
    trainer.fit(module, datamodule=data)
    with pytest.warns(UserWarning, match="not plain values: policy, objective, reward, optimizer. Pass them to load_"):
        trainer.save_checkpoint(tmp_path / "one.ckpt")
    content = read(tmp_path / "one.ckpt")
    assert content["hyper_parameters"] == {"extra": 3}
    assert content["datamodule_hyper_parameters"] == {"sizes": [1, {"a": None}]}
    with pytest.raises(TypeError, match=r"SavingAll.load_from_checkpoint\(path, policy=..., objective=..., "):
        SavingAll.load_from_checkpoint(tmp_path / "one.ckpt")
    loaded = SavingAll.load_from_checkpoint(tmp_path / "one.ckpt", **parts)
    assert (loaded.hparams.extra, same(weights(loaded), weights(module))) == (3, True)


def test_a_fit_in_python_ends_with_its_result(tiny_sd3, tmp_path, caplog):
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        module, _ = fit(tiny_sd3, tmp_path, iterations=1)
    start, end = module.evaluator.history
    said = f"Held-out reward {start.reward:.3f} before, {end.reward:.3f} after 1 iteration."
    assert [message for message in caplog.messages if "Held-out" in message] == [said]


def test_metrics_have_one_row_an_iteration(tiny_sd3, tmp_path):
    callbacks = [RewardLogger(), SurrogateDiagnostics(every_n_iterations=2)]
    options = {"logger": CSVLogger(tmp_path, name="", version=""), "check_val_every_n_epoch": 2}
    module, trainer = fit(tiny_sd3, tmp_path, callbacks, trainer=options)
    rows = read_csv(tmp_path / "metrics.csv")
    trained = [row for row in rows if row["reward/mean"]]
    assert [row["epoch"] for row in trained] == ["0", "1", "2"]
    assert [bool(row["surrogate/cv"]) for row in trained] == [True, False, True]
    assert sum(bool(row["heldout/reward"]) for row in rows) == 2  # at the start, and after two iterations
    logged = trainer.callback_metrics
    record = module.record
    assert logged["reward/mean"] == pytest.approx(record.rewards.mean().item())
    assert logged["reward/brightness"] == pytest.approx(record.rewards.mean().item())
    assert logged["reward/std"] == pytest.approx(record.rewards.std(correction=0).item())
    assert logged["policy/ratio_deviation"] == 0
    assert logged["policy/grad_norm"] > 0
    assert logged["cost/passes_per_image"] == 4  # 2 steps and 2 pairs
    assert logged["cost/images_per_second_per_device"] == logged["cost/images_per_second"] > 0
    assert {f"memory/{phase}_gb" for phase in ("rollout", "decode", "reward", "prepare", "update")} <= set(logged)
    assert logged["surrogate/cv"] > 0
    assert logged["surrogate/cv_within"] > 0
    assert {"heldout/reward", "heldout/brightness", "reward/no_spread", "policy/clip_fraction"} <= logged.keys()
