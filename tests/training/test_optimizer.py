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
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from lit_vgrpo import OptimizerConfig, SD3Policy
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.training.optimizer import CustomOptimizer, Optimization
from lit_vgrpo.training.sharded import common_step
from lit_vgrpo.training.strategies import FSDP2, ZeRO, strategy_errors

KINDS = ["adamw", "adamw8bit"]
EIGHT_BIT_FROM = 4096  # elements; smaller parameters keep their moments in float32


@pytest.fixture(autouse=True)
def _needed(request):
    if "adamw8bit" in request.node.name:
        pytest.importorskip("bitsandbytes", reason="needs the extra memory")


def trained(config, steps=3, state=None, make=None):
    """An optimizer and its schedule after some steps, perhaps from the state of others."""
    torch.manual_seed(0)
    parameter, optimization = nn.Parameter(torch.ones(64, EIGHT_BIT_FROM // 64)), Optimization(config, make)
    built = optimization.build([parameter])
    optimizer, schedule = (
        (built["optimizer"], built["lr_scheduler"]["scheduler"]) if type(built) is dict else (built, None)
    )
    optimization.keep([optimizer], [{"scheduler": schedule, "monitor": None}] if schedule else [])
    if state is not None:
        optimizer.load_state_dict(state[0])
        if schedule is not None:
            schedule.load_state_dict(dict(state[1]))  # CyclicLR takes entries out
    optimization.start([LRSchedulerConfig(schedule)] if schedule else [], state is not None)
    for _ in range(steps):
        parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        if isinstance(schedule, ReduceLROnPlateau):
            schedule.step(0.0)
        elif schedule is not None:
            schedule.step()
    return optimizer, schedule


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


def sequence(optimizer):
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=2), constant(optimizer)], milestones=[2])


def constant(optimizer):
    return LambdaLR(optimizer, lambda step: 1.0)


def chain(gamma):
    return lambda optimizer: ChainedScheduler([LinearLR(optimizer), ExponentialLR(optimizer, gamma)])


def adam(**options):
    return partial(torch.optim.AdamW, **{"lr": 1e-3, **options})


ONE_CYCLE, CYCLE = partial(OneCycleLR, max_lr=1e-3), partial(CyclicLR, base_lr=1e-4, step_size_up=4)
RESTARTS = partial(CosineAnnealingWarmRestarts, T_mult=2)
CHANGES = {
    "its highest rate": (
        adam(),
        partial(ONE_CYCLE, total_steps=12),
        adam(),
        partial(OneCycleLR, max_lr=1e-5, total_steps=12),
    ),
    "its length": (adam(), partial(ONE_CYCLE, total_steps=4), adam(), partial(ONE_CYCLE, total_steps=12)),
    "its momentum": (
        *(adam(), partial(ONE_CYCLE, total_steps=12)),
        *(adam(), partial(ONE_CYCLE, total_steps=12, base_momentum=0.5)),
    ),
    "the top of cycles": (adam(), partial(CYCLE, max_lr=1e-3), adam(), partial(CYCLE, max_lr=2e-4)),
    "the rate of a sequence": (adam(), sequence, adam(lr=1e-5), sequence),
    "a chain": (adam(), chain(0.9), adam(), chain(0.5)),
    "steps": (adam(), partial(StepLR, step_size=1), adam(lr=1e-2), partial(StepLR, step_size=2)),
    "milestones": (adam(), partial(MultiStepLR, milestones=[1]), adam(), partial(MultiStepLR, milestones=[2, 4])),
    "restarts": (adam(), partial(RESTARTS, T_0=9), adam(), partial(RESTARTS, T_0=2)),
    "the warm-up": (OptimizerConfig(warmup_steps=9), None, OptimizerConfig(warmup_steps=5), None),
    "its class": (adam(), partial(StepLR, step_size=1), adam(), partial(CosineAnnealingLR, T_max=8)),
    "its end": (adam(), partial(StepLR, step_size=1), adam(), None),
}


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_schedule_goes_on_as_if_it_had_been_so_from_the_start(what, is_old):
    before, schedule, after, other = CHANGES[what]
    state = states(trained(before, 3, make=schedule))
    for part in (state[0]["param_groups"][0], state[1]) if is_old else ():
        part.pop("asked")  # in checkpoints of earlier versions
    for more in range(3):
        (resumed, _), (fresh, _) = trained(after, more, state, other), trained(after, 3 + more, make=other)
        for name in ("lr", "betas"):
            assert resumed.param_groups[0][name] == fresh.param_groups[0][name]


def test_a_plateau_keeps_its_counters_and_takes_its_new_settings():
    def plateau(**options):
        return partial(ReduceLROnPlateau, monitor="reward", **options)

    state = states(trained(adam(), 3, make=plateau(patience=1)))
    assert (state[0]["param_groups"][0]["lr"], state[1]["num_bad_epochs"]) == (1e-4, 0)
    optimizer, schedule = trained(adam(lr=1e-2), 1, state, plateau(patience=0, factor=0.5))
    assert (schedule.best, schedule.last_epoch) == (0.0, 4)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.1 * 0.5)


@pytest.mark.parametrize("make", [None, partial(StepLR, step_size=2), partial(ONE_CYCLE, total_steps=12)])
def test_what_else_set_the_rate_is_kept_without_a_change(make):
    optimizer, schedule = trained(adam(), 3, make=make)
    optimizer.param_groups[0]["lr"] = 0.7e-3  # as a callback may
    resumed, _ = trained(adam(), 0, states((optimizer, schedule)), make)
    assert resumed.param_groups == [{**optimizer.param_groups[0], "params": resumed.param_groups[0]["params"]}]


class Counts(torch.optim.SGD):
    """Counts its steps in the parameter group, as Prodigy and schedule-free optimizers do."""

    def __init__(self, params, lr, power=1):
        super().__init__(params, lr)
        self.param_groups[0].update(k=0, power=power)

    def step(self, closure=None):
        self.param_groups[0]["k"] += 1
        super().step(closure)


@pytest.mark.parametrize(
    ("make", "changes", "kept"),
    [
        (torch.optim.Adafactor, {"lr": 1e-5, "beta2_decay": -0.5, "d": 2.0}, {}),
        (torch.optim.Rprop, {"etas": (0.1, 1.1), "step_sizes": (1e-8, 1e-5)}, {}),
        (torch.optim.Adagrad, {"lr_decay": 0.9}, {}),
        (torch.optim.RMSprop, {"alpha": 0.5, "weight_decay": 0.1}, {}),
        (Counts, {"lr": 1e-5, "power": 2}, {"k": 3}),
        *(("bitsandbytes", {"name": name, "lr": 1e-5, "weight_decay": 0.5}, {}) for name in ("AdamW8bit", "Lion8bit")),
    ],
)
def test_every_optimizer_takes_its_new_settings_and_keeps_what_it_counts(make, changes, kept):
    if make == "bitsandbytes":
        changes = dict(changes)
        make = getattr(pytest.importorskip("bitsandbytes.optim"), changes.pop("name"))
    state = states(trained(partial(make, lr=1e-3)))
    optimizer, _ = trained(partial(make, **{"lr": 1e-3, **changes}), 0, state)
    assert {name: optimizer.param_groups[0][name] for name in changes | kept} == changes | kept
    trained(partial(make, **{"lr": 1e-3, **changes}), 1, state)


@pytest.mark.parametrize(
    ("make", "bytes_per_weight"),
    [(adam(), 8), (adam(amsgrad=True), 12), (partial(torch.optim.SGD, lr=1), 0), (torch.optim.Adafactor, 0.125)],
)
def test_the_state_is_measured(make, bytes_per_weight):
    found = CustomOptimizer(make).state_bytes([torch.zeros(100, 100)])
    assert found == pytest.approx(1e4 * bytes_per_weight, rel=0.01)


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
        optimization = Optimization(config, None)
        optimizer = optimization.build([parameter])
        optimization.keep([optimizer], [])
        return optimizer

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
