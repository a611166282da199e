import pytest
import torch
from helpers import make_data, make_module, make_trainer, weights
from torch import nn

from lit_vgrpo import OptimizerConfig


def trained(config, steps=3, state=None):
    """An optimizer and its schedule after some steps, perhaps from the state of others."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.ones(4))
    built = config.build([parameter])
    optimizer, warmup = (
        (built, None) if not config.warmup_steps else (built["optimizer"], built["lr_scheduler"]["scheduler"])
    )
    if state is not None:
        optimizer.load_state_dict(state[0])
        if warmup is not None:
            warmup.load_state_dict(state[1])
    for _ in range(steps):
        parameter.grad = torch.randn(4)
        optimizer.step()
        if warmup is not None:
            warmup.step()
    return optimizer, warmup


def states(parts):
    return [None if part is None else part.state_dict() for part in parts]


def test_another_learning_rate_counts_from_the_first_step_on():
    before = states(trained(OptimizerConfig(lr=1e-2)))
    (group,) = trained(OptimizerConfig(lr=1e-4, weight_decay=0.5, betas=(0.8, 0.9)), 0, before)[0].param_groups
    assert group["lr"] == 1e-4
    assert (group["weight_decay"], group["betas"]) == (0.5, (0.8, 0.9))


@pytest.mark.parametrize("done", [2, 3, 9])
def test_a_warm_up_goes_on_where_it_was_towards_the_new_rate(done):
    before = states(trained(OptimizerConfig(lr=1e-2, warmup_steps=8), done))
    optimizer, _ = trained(OptimizerConfig(lr=1e-3, warmup_steps=8), 0, before)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * min(1, (done + 1) / 8))
    optimizer, _ = trained(OptimizerConfig(lr=1e-3, warmup_steps=8), 1, before)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * min(1, (done + 2) / 8))


@pytest.mark.parametrize("warmup", [0, 8])
def test_the_same_settings_change_no_bit(warmup):
    config = OptimizerConfig(lr=1e-3 / 3, warmup_steps=warmup)
    before = states(trained(config))
    optimizer, _ = trained(config, 0, before)
    assert optimizer.state_dict()["param_groups"] == before[0]["param_groups"]
    assert all(torch.equal(optimizer.state_dict()["state"][0][k], v) for k, v in before[0]["state"][0].items())


def test_a_run_that_goes_on_with_a_lower_rate_moves_less(tiny_sd3, tmp_path):
    first = make_module(tiny_sd3)
    trainer = make_trainer(tmp_path, 1)
    trainer.fit(first, datamodule=make_data())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    moved = {}
    for lr in (1e-2, 1e-4):
        module = make_module(tiny_sd3, optimizer=OptimizerConfig(lr=lr))
        make_trainer(tmp_path, 2).fit(
            module, datamodule=make_data(), ckpt_path=tmp_path / "one.ckpt", weights_only=True
        )
        moved[lr] = max(float((now - weights(first)[name]).abs().max()) for name, now in weights(module).items())
    assert moved[1e-4] < 0.1 * moved[1e-2]
