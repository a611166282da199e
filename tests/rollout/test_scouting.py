"""Scouts in a real run: what is trained on, what fails, what is counted, and when the log warns."""

import math

import pytest
import torch
from helpers import Brightness, make_data, make_module, make_trainer

from lit_vgrpo import VGRPO, FlowGRPO, RolloutSpec, SD3Policy, UNetPolicy
from lit_vgrpo.callbacks import RewardLogger
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.types import Rollout, ScoutSpec
from lit_vgrpo.objectives import Denoising
from lit_vgrpo.rewards import RewardError
from lit_vgrpo.training.settings import module_errors

FACTOR, SCOUT_STEPS, STEPS = 3, 2, 4


def scouting():
    return VGRPO(RolloutSpec(steps=STEPS, scouts=ScoutSpec(FACTOR, SCOUT_STEPS)))


class Recorder:
    """Keeps what an objective's calls return."""

    def __init__(self, objective):
        self.objective, self.kept = objective, {}
        self._batches, objective.rollout_batches = objective.rollout_batches, self._keeping

    def _keeping(self, policy, request, spec=None):
        batches = []
        for batch in self._batches(policy, request, spec):
            batches.append(batch)
            yield batch
        name = "images" if spec is None else "scouts"
        self.kept.setdefault(name, []).append(Rollout.joined(batches))


class Failing(Brightness):
    """The calls of this batch size and number fail: the scouts come first."""

    def __init__(self, fails):
        self.fails, self.calls = fails, 0

    def __call__(self, images, prompts, rows):
        scores = super().__call__(images, prompts, rows)
        self.calls += 1
        return torch.where(torch.tensor([self.fails(self.calls, i) for i in range(len(scores))]), math.nan, scores)


def train(folder, tmp_path, module, iterations=1, **data):
    trainer = make_trainer(tmp_path, iterations, [RewardLogger()])
    trainer.fit(module, datamodule=make_data(heldout_limit=1, **data))
    return trainer


@pytest.mark.slow
def test_what_is_trained_on_is_what_the_noise_gives_without_scouts(tiny_sd3, tmp_path):
    module, plain = make_module(tiny_sd3, scouting()), make_module(tiny_sd3, VGRPO(RolloutSpec(steps=STEPS)))
    with_scouts, without = Recorder(module.objective), Recorder(plain.objective)
    train(tiny_sd3, tmp_path, module)
    train(tiny_sd3, tmp_path, plain, group_size=4 * FACTOR)
    (scouts,), (images,), (every,) = (
        with_scouts.kept["scouts"],
        *(r.kept["images"] for r in (with_scouts, without)),
    )
    assert torch.equal(scouts.image_ids, every.image_ids)
    same = [[torch.equal(image, other) for other in every.latents] for image in images.latents]
    chosen = torch.tensor(same).nonzero()[:, 1]
    assert len(chosen) == 8
    assert torch.equal(every.group_ids[chosen], images.group_ids)
    assert images.image_ids.tolist() == list(range(8))
    rewards = Brightness()(module.policy.decode(scouts.latents), [], [])
    for slot in (0, 1):
        own = rewards[scouts.group_ids == slot].argsort().tolist()
        assert set((chosen[images.group_ids == slot] - slot * 12).tolist()) == {*own[:2], *own[-2:]}


def test_passes_and_times_are_counted_apart(tiny_sd3, tmp_path):
    module = make_module(tiny_sd3, scouting())
    trainer = train(tiny_sd3, tmp_path, module, 2)
    planned = module.objective.passes_per_image(trainer.datamodule.sizes)
    assert planned["scouts"] == FACTOR * SCOUT_STEPS
    counts = module.ledger.training_counts()
    assert {phase: sum(count.values()) for phase, count in counts.items()} == {k: 16 * v for k, v in planned.items()}
    logged = trainer.callback_metrics
    assert logged["passes/scouts_without_grad"] == 16 * FACTOR * SCOUT_STEPS
    assert logged["cost/images"] == 16
    assert -1 <= logged["scouts/rank_correlation"] <= 1
    assert logged["scouts/failed"] == 0
    assert logged["scouts/reward_std"] > 0
    assert {"time/scouts_rollout_s", "time/scouts_decode_s", "time/scouts_reward_s"} <= logged.keys()
    guided = VGRPO(RolloutSpec(steps=4, guidance=3.0, scouts=ScoutSpec(2, 3)))
    assert guided.passes_per_image(Sizes(2, 4))["scouts"] == 2 * 2 * 3


@pytest.mark.slow
def test_rewards_in_threads_choose_the_same(tiny_sd3, tmp_path):
    class Threaded(Brightness):
        concurrent = True

    found = [make_module(tiny_sd3, scouting(), reward) for reward in (Brightness(), Threaded())]
    for module in found:
        train(tiny_sd3, tmp_path, module)
    plain, threaded = (module.record for module in found)
    assert torch.equal(plain.rewards, threaded.rewards)
    assert plain.scouts == threaded.scouts


def test_failed_scouts_are_not_chosen_and_named(tiny_sd3, tmp_path):
    # two of every batch of eight scouts, of which there are three
    reward = Failing(lambda call, i: call <= 3 and i < 2)
    module = make_module(tiny_sd3, scouting(), reward, evaluate_at_start=False)
    recorder = Recorder(module.objective)
    with pytest.warns(UserWarning, match='Reward "brightness" failed for some scouts of iteration 1'):
        trainer = train(tiny_sd3, tmp_path, module)
    assert trainer.callback_metrics["scouts/failed"] == 6
    assert trainer.callback_metrics["reward/failed"] == 0
    assert len(recorder.kept["images"][0]) == 8


@pytest.mark.parametrize(
    ("fails", "failed_images", "words"),
    [
        (lambda call, i: call == 1 and i == 0, "stop", "1 of 24 scouts of iteration 1 failed, and model.failed_images"),
        (lambda call, i: True, "leave_out", "24 of 24 scouts of iteration 1 failed, so there is nothing to learn"),
    ],
)
def test_failed_scouts_can_stop_the_run(tiny_sd3, tmp_path, fails, failed_images, words):
    options = {"failed_images": failed_images, "evaluate_at_start": False}
    module = make_module(tiny_sd3, scouting(), Failing(fails), **options)
    with pytest.raises(RewardError, match=words):
        train(tiny_sd3, tmp_path, module)


def test_scouts_are_sampled_with_their_own_settings():
    assert RolloutSpec("euler", STEPS, 3.0, scouts=ScoutSpec(2, 2, "unipc")).of_scouts == RolloutSpec("unipc", 2, 3.0)
    assert RolloutSpec(steps=STEPS, scouts=ScoutSpec(2, 2)).of_scouts == RolloutSpec(steps=2)


def test_settings_that_make_no_sense_are_refused(tiny_sd3):
    def errors(objective, **options):
        return module_errors(make_module(tiny_sd3, objective, **options), Sizes(2, 4))

    of_sde = RolloutSpec("flow_sde", STEPS, scouts=ScoutSpec(steps=2))
    assert errors(FlowGRPO(of_sde)) == of_sde.errors()
    assert "scouts requires an ODE: with flow_sde" in of_sde.errors()[0]
    ddim = VGRPO(RolloutSpec(steps=STEPS, scouts=ScoutSpec(2, 2, "ddim")))
    (line,) = ddim.policy_errors(SD3Policy)
    assert "rollout.scouts.solver=ddim is not a solver of SD3Policy" in line
    assert "solver=euler" in ddim.policy_errors(UNetPolicy)[0]
    without_reward = Denoising(lambda *args: None, RolloutSpec(scouts=ScoutSpec()))
    (line,) = without_reward.check(Sizes(2, 4))
    assert "scouts: Denoising has no reward to select with" in line
    assert scouting().rollout_spec(0).as_ode().scouts is None
