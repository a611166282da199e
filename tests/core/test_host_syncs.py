"""Number of times the host waits for a GPU, counted on the pretended one."""

import pytest
import torch
from support.host_syncs import HostSyncs
from support.pretended_gpu import pretended_gpu

from lit_vgrpo import DGPO, RolloutSpec, SD3Policy, UNetPolicy
from lit_vgrpo.core.sampling import roll_out
from lit_vgrpo.core.types import RolloutRequest
from lit_vgrpo.objectives.base import PrepareContext

SOLVERS = {
    "sd3": [RolloutSpec("euler", 3), RolloutSpec("dpm++", 3), RolloutSpec("flow_sde", 3), RolloutSpec("cps", 3)],
    "unet": [RolloutSpec("ddim", 3), RolloutSpec("dpm++", 3), RolloutSpec("ddim_sde", 3)],
}
TAIL = RolloutSpec("flow_sde", 6, window=(0, 2), tail=0.5)
CASES = [(family, spec) for family, specs in SOLVERS.items() for spec in specs] + [("sd3", TAIL)]


@pytest.fixture(scope="module")
def folders(tiny_sd3, tiny_unet):
    return {"sd3": (SD3Policy, tiny_sd3), "unet": (UNetPolicy, tiny_unet)}


def waits(policy, spec, images=2):
    request = RolloutRequest(["a"], [{}], [0], images, 0, 0, None, batch_size=2)
    with HostSyncs() as counted:
        roll_out(policy, request, spec)
    return counted.counts


@pytest.mark.parametrize(("family", "spec"), CASES, ids=lambda value: getattr(value, "solver", value))
def test_no_step_waits_and_a_batch_copies_only_its_inputs(folders, family, spec):
    cls, folder = folders[family]
    options = {"max_sequence_length": 1} if family == "sd3" else {}
    with pretended_gpu():
        policy = cls(str(folder), **options).load().to("cuda")
        assert policy.device == torch.device("cuda", 0)
        waits(policy, spec)  # what is copied once a run
        short = waits(policy, spec)
        longer = RolloutSpec(**{**vars(spec), "steps": 2 * spec.steps})
        assert waits(policy, longer) == short
        of_batch = waits(policy, spec, 4) - short
    # One copy of the schedule; the noise of all images goes over at once, before.
    assert of_batch.total() <= 1, of_batch


def test_an_update_of_dgpo_waits_once_for_all_its_micro_batches(folders):
    """To see whether their groups are whole."""
    cls, folder = folders["sd3"]
    objective, found = DGPO(num_times=2, noisiest=None), []
    with pretended_gpu():
        policy = cls(str(folder), max_sequence_length=1).load().to("cuda")
        objective.setup(policy)
        rollout = roll_out(
            policy, RolloutRequest(["a"], [{}], [0], 4, 0, 0, None, batch_size=4), RolloutSpec("euler", 3)
        )
        advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
        experience = objective.prepare(PrepareContext(policy, rollout, advantages, micro_batch_size=4))
        for micros in ([experience], [experience, experience]):
            with HostSyncs() as waits:
                objective.before_update(policy, micros)
                for micro in micros:
                    objective.loss(policy, micro)[0].backward()
            found.append(waits.counts)
    assert found[0] == found[1] == {"__bool__": 1}
