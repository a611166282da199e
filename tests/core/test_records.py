import pytest
import torch

from lit_vgrpo.core.noise import image_generators
from lit_vgrpo.core.records import IterationRecord, PassLedger
from lit_vgrpo.core.sampling import sample
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.policies import SD3Policy


@pytest.fixture
def policy(tiny_sd3):
    return SD3Policy(str(tiny_sd3), max_sequence_length=1).load()


def test_guidance_counts_twice_and_phases_are_kept_apart(policy):
    ledger = PassLedger()
    ledger.attach(policy.network)
    cond, noise = policy.encode(["a red circle on the left"]), policy.prior(image_generators(1, 0, 0, [0, 1, 2]))
    rows = torch.zeros(3, dtype=torch.int64)
    with ledger.phase("rollout"):
        sample(policy, cond, rows, RolloutSpec(steps=4), noise)
        with ledger.phase("evaluation"):
            sample(policy, cond, rows, RolloutSpec(steps=2, guidance=2.0), noise)
    policy(noise, torch.ones(3), cond.select(rows))
    assert ledger.counts == {
        "rollout": {"with_grad": 0, "without_grad": 12},
        "evaluation": {"with_grad": 0, "without_grad": 12},
        "update": {"with_grad": 3, "without_grad": 0},
    }
    assert ledger.training_passes() == 15


def test_phase_is_left_when_the_block_raises():
    ledger = PassLedger()
    with pytest.raises(KeyError), ledger.phase("old"):
        raise KeyError
    assert ledger.current_phase == "update"


def test_values_before_the_first_step_are_those_of_the_policy_that_sampled():
    groups = torch.zeros(4, dtype=torch.int64)
    record = IterationRecord(0, torch.zeros(4), groups, {}, {}, groups, 4)
    for number in range(4):  # two updates of two micro-batches, which train on different images
        record.add(torch.tensor(0.0), {"ratio_deviation": torch.tensor([float(number)])}, images=1)
        record.updates = (number + 1) // 2
    assert record.before_first_step("ratio_deviation").tolist() == [0, 1]
    assert record.first_update("ratio_deviation").tolist() == [0, 1, 2, 3]
    assert record.before_first_step("kl") is None
