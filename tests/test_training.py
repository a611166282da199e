"""The LightningModule in a real Trainer, on a small real pipeline."""

from functools import partial

import pytest
import torch
from helpers import make_data, make_module, make_trainer, same, weights

from lit_vgrpo import RolloutSpec
from lit_vgrpo.callbacks import RewardLogger, SurrogateDiagnostics
from lit_vgrpo.rewards import Reward, RewardError

STEPS = RolloutSpec(steps=2)


def train(folder, tmp_path, iterations=2, callbacks=(), objective=None, trainer=None, data=None, ckpt=None, **options):
    module = make_module(folder, objective, **options)
    fitter = make_trainer(tmp_path, iterations, callbacks, **(trainer or {}))
    fitter.fit(module, datamodule=make_data(**(data or {})), ckpt_path=ckpt)
    return module, fitter


def test_the_gradient_is_that_of_the_whole_iteration(tiny_sd3, tmp_path):
    """Micro-batches only cut memory: the step is that of one large batch.

    By plain SGD, since Adam makes a whole step of a gradient that is only rounding. Passes of other sizes round
    otherwise: 1e-4 of the largest entry is a hundred times what float32 loses.
    """
    plain = {"optimizer": partial(torch.optim.SGD, lr=1.0)}
    small, _ = train(tiny_sd3, tmp_path, 1, data={"micro_batch_size": 2}, **plain)
    large, _ = train(tiny_sd3, tmp_path, 1, data={"micro_batch_size": 8}, **plain)
    start = large.reference.tensors
    step = max(float((value - start[name]).abs().max()) for name, value in weights(large).items())
    assert step > 1e-4
    for name, value in weights(small).items():
        torch.testing.assert_close(value, weights(large)[name], rtol=0, atol=1e-4 * step)


def test_same_seed_same_run_other_seed_other_run(tiny_sd3, tmp_path):
    first, again, other = (weights(train(tiny_sd3, tmp_path, seed=seed)[0]) for seed in (1, 1, 2))
    assert same(first, again)
    assert not same(first, other)


def test_a_checkpoint_holds_no_frozen_tensor_and_loads_weights_only(tiny_sd3, tmp_path):
    module, trainer = train(tiny_sd3, tmp_path, policy_options={"lora_rank": 2})
    trainer.save_checkpoint(tmp_path / "lora.ckpt")
    checkpoint = torch.load(tmp_path / "lora.ckpt", weights_only=True)
    assert {name.removeprefix("policy.") for name in checkpoint["state_dict"]} == set(weights(module))
    trained = sum(value.numel() for value in weights(module).values()) * 4
    size = (tmp_path / "lora.ckpt").stat().st_size
    assert size < 3 * trained + 200_000  # weights and Adam's two moments, plus names
    with pytest.raises(RuntimeError, match="lacks .* trained tensors"):  # from another recipe
        train(tiny_sd3, tmp_path, 3, ckpt=tmp_path / "lora.ckpt")


class Never(Reward):
    name = "never"

    def __call__(self, images, prompts, rows):
        raise ValueError("the scorer is out of order")


def test_all_failed_stops_with_the_rewards_own_message(tiny_sd3, tmp_path):
    with pytest.raises(RewardError, match="8 of 8 images of iteration 1 failed.*the scorer is out of order"):
        train(tiny_sd3, tmp_path, 1, reward=Never(), evaluate_at_start=False)


def test_metrics(tiny_sd3, tmp_path):
    callbacks = [RewardLogger(), SurrogateDiagnostics()]
    module, trainer = train(tiny_sd3, tmp_path, callbacks=callbacks)
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


def test_without_a_data_module_the_error_says_what_to_do(tiny_sd3, tmp_path):
    loader = torch.utils.data.DataLoader([1])
    with pytest.raises(RuntimeError, match="datamodule=PromptDataModule"):
        make_trainer(tmp_path).fit(make_module(tiny_sd3), loader)
