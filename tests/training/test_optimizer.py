import sys

import pytest
import torch
from commands import check
from helpers import make_data, make_module, make_trainer, weights
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lit_vgrpo import OptimizerConfig
from lit_vgrpo.training.strategies import FSDP2, ZeRO, keeps_plain_weights, optimizer_error

KINDS = ["adamw", "adamw8bit"]
EIGHT_BIT_FROM = 4096  # elements; smaller parameters keep their moments in float32


@pytest.fixture(autouse=True)
def _needed(request):
    if "adamw8bit" in request.node.name:
        pytest.importorskip("bitsandbytes", reason="needs the extra memory")


def trained(config, steps=3, state=None):
    """An optimizer and its schedule after some steps, perhaps from the state of others."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.ones(EIGHT_BIT_FROM))
    built = config.build([parameter])
    optimizer, warmup = (
        (built, None) if not config.warmup_steps else (built["optimizer"], built["lr_scheduler"]["scheduler"])
    )
    if state is not None:
        optimizer.load_state_dict(state[0])
        if warmup is not None:
            warmup.load_state_dict(state[1])
    for _ in range(steps):
        parameter.grad = torch.randn(EIGHT_BIT_FROM)
        optimizer.step()
        if warmup is not None:
            warmup.step()
    return optimizer, warmup


def states(parts):
    return [None if part is None else part.state_dict() for part in parts]


def tensors(values):
    """The tensors of a parameter's state by name, also those that bitsandbytes puts a level deeper."""
    found = {}
    for name, value in values.items():
        found |= tensors(value) if isinstance(value, dict) else {name: torch.as_tensor(value)}
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_another_learning_rate_counts_from_the_first_step_on(kind):
    before = states(trained(OptimizerConfig(lr=1e-2, kind=kind)))
    changed = OptimizerConfig(lr=1e-4, weight_decay=0.5, betas=(0.8, 0.9), kind=kind)
    (group,) = trained(changed, 0, before)[0].param_groups
    assert group["lr"] == 1e-4
    assert (group["weight_decay"], group["betas"]) == (0.5, (0.8, 0.9))


@pytest.mark.parametrize("done", [2, 3, 9])
def test_a_warm_up_goes_on_where_it_was_towards_the_new_rate(done):
    before = states(trained(OptimizerConfig(lr=1e-2, warmup_steps=8), done))
    optimizer, _ = trained(OptimizerConfig(lr=1e-3, warmup_steps=8), 0, before)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * min(1, (done + 1) / 8))
    optimizer, _ = trained(OptimizerConfig(lr=1e-3, warmup_steps=8), 1, before)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * min(1, (done + 2) / 8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup", [0, 8])
def test_the_same_settings_change_no_bit(warmup, kind):
    config = OptimizerConfig(lr=1e-3 / 3, warmup_steps=warmup, kind=kind)
    before = states(trained(config))
    optimizer, _ = trained(config, 0, before)
    assert optimizer.state_dict()["param_groups"] == before[0]["param_groups"]
    now, then = (tensors(state["state"][0]) for state in (optimizer.state_dict(), before[0]))
    assert now.keys() == then.keys()
    assert all(torch.equal(now[name], value) for name, value in then.items())


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_the_other_kind_is_refused_with_the_way_out(kind):
    pytest.importorskip("bitsandbytes", reason="needs the extra memory")
    other = next(name for name in KINDS if name != kind)
    before = states(trained(OptimizerConfig(kind=other)))
    with pytest.raises(ValueError, match=f"the moments of a different optimizer. Set model.optimizer.kind={other}."):
        trained(OptimizerConfig(kind=kind), 0, before)


# --- 8 bits -----------------------------------------------------------------------------------------------------------


def test_adamw8bit_moves_weights_as_adamw_does_with_a_quarter_of_its_memory():
    after, size = {}, {}
    for kind in KINDS:
        optimizer, _ = trained(OptimizerConfig(lr=1e-2, weight_decay=0.1, kind=kind), 20)
        (group,) = optimizer.param_groups
        (parameter,) = group["params"]
        after[kind] = parameter.detach()
        size[kind] = sum(value.nbytes for value in tensors(optimizer.state[parameter]).values() if value.ndim)
    difference = (after["adamw8bit"] - after["adamw"]).abs().mean()
    assert 0 < difference < 0.03 * (after["adamw"] - 1).abs().mean()
    tables = 2 * 256 * 4  # of the values that 8 bits stand for; one pair for all parameters
    assert size["adamw8bit"] - tables < 0.26 * size["adamw"]


def test_adamw8bit_leaves_a_weight_without_gradient_as_it_is():
    parameters = [nn.Parameter(torch.ones(EIGHT_BIT_FROM)) for _ in range(2)]
    optimizer = OptimizerConfig(lr=1e-2, kind="adamw8bit").build(parameters)
    parameters[0].grad = torch.ones(EIGHT_BIT_FROM)
    optimizer.step()
    assert not torch.equal(parameters[0], torch.ones(EIGHT_BIT_FROM))
    assert torch.equal(parameters[1], torch.ones(EIGHT_BIT_FROM))


def test_one_and_one_iterations_are_two_with_adamw8bit(tiny_sd3, tmp_path):
    config = OptimizerConfig(lr=1e-3, warmup_steps=4, kind="adamw8bit")
    whole = make_module(tiny_sd3, optimizer=config)
    make_trainer(tmp_path, 2).fit(whole, datamodule=make_data())
    trainer = make_trainer(tmp_path, 1)
    trainer.fit(make_module(tiny_sd3, optimizer=config), datamodule=make_data())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    assert torch.uint8 in {value.dtype for values in saved.values() for value in tensors(values).values()}
    resumed = make_module(tiny_sd3, optimizer=config)
    make_trainer(tmp_path, 2).fit(resumed, datamodule=make_data(), ckpt_path=tmp_path / "one.ckpt", weights_only=True)
    before, after = weights(whole), weights(resumed)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(("strategy", "name"), [(ZeRO, "ZeRO"), (FSDP2, "FSDP2")])
def test_8_bits_are_refused_where_weights_or_moments_are_sharded(strategy, name):
    error = optimizer_error(strategy(), OptimizerConfig(kind="adamw8bit"))
    assert f"kind=adamw8bit works on whole weights, and {name} shards" in error
    assert "\n" not in error
    assert optimizer_error(strategy(), OptimizerConfig()) is None
    assert optimizer_error(DDPStrategy(), OptimizerConfig(kind="adamw8bit")) is None


def test_the_command_refuses_8_bits_under_a_sharding_strategy(tiny_recipe, capsys):
    overrides = ["model.optimizer.kind=adamw8bit", "trainer.strategy=fsdp2"]
    assert check([str(tiny_recipe), *overrides]) == 2
    assert "model.optimizer.kind=adamw8bit works on whole weights" in capsys.readouterr().err


def test_a_missing_package_is_one_line_with_its_command(monkeypatch, tiny_sd3, tmp_path):
    for name in ("bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "lit_vgrpo.training.adamw8bit", raising=False)
    config = OptimizerConfig(kind="adamw8bit")
    with pytest.raises(ModuleNotFoundError, match=r'^.*needs bitsandbytes. Run: pip install "lit-vgrpo\[memory\]"$'):
        config.build([nn.Parameter(torch.ones(2))])
    module = make_module(tiny_sd3, optimizer=config)
    with pytest.raises(ValueError, match="needs bitsandbytes"):
        make_trainer(tmp_path, 1).fit(module, datamodule=make_data())
    assert not module.policy.loaded
    assert OptimizerConfig().check() == []


def stepped(fused, state=None, steps=3):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(40, 30)), nn.Parameter(torch.randn(7))]
    optimizer = OptimizerConfig(lr=1e-2).build(parameters, fused)
    if state is not None:
        optimizer.load_state_dict(state)
    for step in range(steps):
        torch.manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer, parameters


def test_the_fused_kernel_takes_the_same_steps():
    """Up to rounding: it multiplies in another order."""
    (fused, found), (_, expected) = stepped(True), stepped(False)
    assert fused.param_groups[0]["fused"]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_a_state_is_continued_by_the_other_kernel(fused):
    """A checkpoint does not say which kernel wrote it, since its reader may not have that one."""
    saved = stepped(not fused)[0].state_dict()
    assert saved["param_groups"][0]["fused"] is None
    optimizer, _ = stepped(fused, saved)
    assert optimizer.param_groups[0]["fused"] == (fused or None)
    assert {float(state["step"]) for state in optimizer.state.values()} == {6}


@pytest.mark.parametrize(
    ("options", "is_fused"), [({}, True), ({"precision": "bf16-mixed"}, False)], ids=["plain", "autocast"]
)
def test_a_run_takes_the_fused_kernel_where_lightning_can_clip(tiny_sd3, tmp_path, options, is_fused):
    trainer = make_trainer(tmp_path, 1, gradient_clip_val=1.0, **options)
    trainer.fit(make_module(tiny_sd3), datamodule=make_data(heldout_limit=1))
    assert bool(trainer.optimizers[0].param_groups[0]["fused"]) == is_fused


def test_weights_that_a_strategy_splits_are_not_stepped_by_it():
    assert keeps_plain_weights(DDPStrategy())
    assert not any(keeps_plain_weights(strategy) for strategy in (FSDP2(), ZeRO(1), ZeRO(3)))
