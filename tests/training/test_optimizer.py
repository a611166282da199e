import re
import sys
import warnings
from functools import partial

import pytest
import torch
from lightning.pytorch.cli import ReduceLROnPlateau
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.optim.lr_scheduler import StepLR

from lit_vgrpo import OptimizerConfig, SD3Policy
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.training.optimizer import CustomOptimizer, Optimization, as_optimizer
from lit_vgrpo.training.sharded import common_step
from lit_vgrpo.training.strategies import FSDP2, ZeRO, strategy_errors

KINDS = ["adamw", "adamw8bit"]
EIGHT_BIT_FROM = 4096  # elements; smaller parameters keep their moments in float32


@pytest.fixture(autouse=True)
def _needed(request):
    if "adamw8bit" in request.node.name:
        pytest.importorskip("bitsandbytes", reason="needs the extra memory")


def trained(config, steps=3, state=None):
    """An optimizer and its schedule after some steps, perhaps from the state of others."""
    torch.manual_seed(0)
    parameter, optimization = nn.Parameter(torch.ones(EIGHT_BIT_FROM)), Optimization(config, None)
    built = optimization.build([parameter])
    optimizer, warmup = (
        (built, None) if not config.warmup_steps else (built["optimizer"], built["lr_scheduler"]["scheduler"])
    )
    if state is not None:
        optimizer.load_state_dict(state[0])
        if warmup is not None:
            warmup.load_state_dict(state[1])
        optimization.resume([] if warmup is None else [LRSchedulerConfig(warmup)])
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


@pytest.mark.parametrize("done", [2, 9])
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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (partial(torch.optim.SGD, lr=1e-3, momentum=0.9), OptimizerConfig()),
        (OptimizerConfig(), partial(torch.optim.SGD, lr=1e-3, momentum=0.9)),
        (OptimizerConfig(), partial(torch.optim.RMSprop, lr=1e-3)),
        pytest.param(OptimizerConfig(), OptimizerConfig(kind="adamw8bit"), id="to adamw8bit"),
        pytest.param(OptimizerConfig(kind="adamw8bit"), OptimizerConfig(), id="from adamw8bit"),
    ],
)
def test_another_optimizer_starts_anew_and_says_so(before, after):
    def built(config):
        parameter = nn.Parameter(torch.ones(EIGHT_BIT_FROM))
        parameter.grad = torch.ones(EIGHT_BIT_FROM)
        return as_optimizer(config).build([parameter])

    old, new, fresh = built(before), built(after), built(after)
    old.step()
    with pytest.warns(UserWarning, match="The checkpoint has the state of another optimizer .* starts at zero"):
        new.load_state_dict(old.state_dict())
    for optimizer in (new, fresh):
        optimizer.param_groups[0]["lr"] = 1e-3
        optimizer.step()
    assert torch.equal(new.param_groups[0]["params"][0], fresh.param_groups[0]["params"][0])


def test_adamw8bit_leaves_a_weight_without_gradient_as_it_is():
    parameters = [nn.Parameter(torch.ones(EIGHT_BIT_FROM)) for _ in range(2)]
    optimizer = OptimizerConfig(lr=1e-2, kind="adamw8bit").build(parameters)
    parameters[0].grad = torch.ones(EIGHT_BIT_FROM)
    optimizer.step()
    assert not torch.equal(parameters[0], torch.ones(EIGHT_BIT_FROM))
    assert torch.equal(parameters[1], torch.ones(EIGHT_BIT_FROM))


@pytest.mark.parametrize(
    ("optimizer", "refusing"),
    [
        (OptimizerConfig(), []),
        (OptimizerConfig(kind="adamw8bit"), [ZeRO, FSDP2]),
        (CustomOptimizer(partial(torch.optim.AdamW, lr=1e-3)), []),
        (CustomOptimizer(torch.optim.SGD), [ZeRO]),
        (CustomOptimizer(torch.optim.Adafactor), [ZeRO, FSDP2]),
    ],
)
def test_sharded_states_that_no_checkpoint_can_hold_are_refused(optimizer, refusing):
    for strategy in (ZeRO, FSDP2, DDPStrategy):
        errors = [*strategy_errors(strategy(), SD3Policy("any"), optimizer, Sizes(1, 2))]
        why = f"keeps state that {strategy.__name__} cannot put into a checkpoint. Use torch's"
        assert [why in error for error in errors] == [True] * (strategy in refusing)


def test_zero_resumes_only_weights_that_took_the_same_number_of_steps():
    same = {index: {"step": torch.tensor(3.0)} for index in range(2)}
    assert (common_step(same, 2), common_step({}, 2)) == (3, None)
    for weights, state, least in ((3, same, 0), (2, {**same, 1: {"step": torch.tensor(1.0)}}, 1)):
        with pytest.raises(RuntimeError, match=f"took from {least} to 3 steps"):
            common_step(state, weights)


def test_a_missing_package_is_one_line_with_its_command(monkeypatch):
    for name in ("bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, name, None)
    config = OptimizerConfig(kind="adamw8bit")
    with pytest.raises(ModuleNotFoundError, match=r'^.*needs bitsandbytes. Run: pip install "lit-vgrpo\[memory\]"$'):
        config.build([nn.Parameter(torch.ones(2))])


class NeedsLoss(torch.optim.SGD):
    def step(self, closure=None, *, loss):
        return super().step(closure)


class LooksTwice(torch.optim.SGD):
    def step(self, closure=None):
        return closure() + closure()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            partial(LooksTwice, lr=1),
            "model.optimizer=LooksTwice cannot take a step: it needs the loss several times. Use AdamW",
        ),
        (torch.optim.SparseAdam, "model.optimizer=SparseAdam cannot take a step: SparseAdam does not support dense "),
        (partial(NeedsLoss, lr=1), "model.optimizer=NeedsLoss cannot take a step: .* missing 1 required keyword-only"),
        (torch.optim.LBFGS, "model.optimizer=LBFGS cannot take a step: it needs the loss"),
        (lambda weights: print(end=""), "model.optimizer=NoneType is not an optimizer"),
        (partial(torch.optim.SGD, lr=-1), None),  # build() has its message
        (partial(torch.optim.Adam, capturable=True), None),  # on a GPU only
        *((partial(kind, lr=1e-3), None) for kind in (torch.optim.Rprop, torch.optim.Adafactor, torch.optim.Muon)),
        (OptimizerConfig, None),
    ],
)
def test_an_optimizer_that_cannot_train_is_found_before_weights_are_loaded(make, said):
    errors = Optimization(make, None).check()
    assert len(errors) == (said is not None)
    assert said is None or re.match(said, errors[0])


@pytest.mark.parametrize(("reward", "mode", "warns"), [(-1.0, "rel", True), (-1.0, "abs", False), (1.0, "rel", False)])
def test_a_relative_threshold_of_a_negative_reward_is_reported(reward, mode, warns):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    plateau = ReduceLROnPlateau(optimizer, "reward", mode="max", patience=0, threshold_mode=mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            Optimization.end_epoch([LRSchedulerConfig(plateau)], 1, {"reward": torch.tensor(reward)}, True)
    assert (optimizer.param_groups[0]["lr"] == 1.0) == warns  # torch takes an equal reward for better
    assert any("slightly worse reward" in str(warning.message) for warning in caught) == warns


def test_a_subclass_may_have_several_schedules_of_updates_and_of_iterations():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    made = [
        LRSchedulerConfig(StepLR(optimizer, 1, gamma), interval=interval)
        for gamma, interval in ((0.5, "step"), (0.1, "epoch"))
    ]
    for update in (1, 2):
        Optimization.step(made, update)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.25)
    Optimization.end_epoch(made, 1, {}, False)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    for one in made:
        one.frequency = 3
    for number in (3, 4):  # only the third counts
        Optimization.step(made, number)
        Optimization.end_epoch(made, number, {}, False)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025 * 0.5 * 0.1)
    with pytest.raises(ValueError, match="ReduceLROnPlateau watches no metric"):
        Optimization.refuse_unwatched([LRSchedulerConfig(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))])


def test_a_held_out_plateau_waits_for_evaluations_and_a_wrong_name_does_not():
    optimizer, known = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), {"heldout/reward": 1.0}
    plateau = ReduceLROnPlateau(optimizer, "heldout/reward", mode="max", patience=0, threshold_mode="abs")
    for metrics, is_evaluated in (({}, False), (known, False), (known, True), (known, False)):
        Optimization.end_epoch([LRSchedulerConfig(plateau)], 1, metrics, is_evaluated)
        assert optimizer.param_groups[0]["lr"] == 1.0
    Optimization.end_epoch([LRSchedulerConfig(plateau)], 1, known, True)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    plateau.monitor = "heldout/rewrd"
    with pytest.raises(RuntimeError, match="rewrd: this metric has not been logged. .*heldout/reward"):
        Optimization.end_epoch([LRSchedulerConfig(plateau)], 1, known, False)
