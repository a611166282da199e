"""What an iteration trains on: the order of its images, its micro-batches, and the previous iteration's images."""

import pytest
import torch
from policy_copies import load_copy

from lit_vgrpo.core.records import IterationRecord, PassLedger
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.objectives import VGRPO, RewardGradient
from lit_vgrpo.policies import SD3Policy
from lit_vgrpo.rewards import PythonReward, Weighted
from lit_vgrpo.rollout.iteration import Iteration, Replay

PROMPTS = ["a red circle", "a blue square", "a green triangle", "a red square", "a blue circle", "a green square"]
GROUP, IMAGES, MICRO = 4, 8, 2
SPLIT = [1, 6, 3, 4, 5, 0, 7, 2]
"""The images of two updates, four each."""
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def policy(tiny_sd3):
    return load_copy(SD3Policy, tiny_sd3, max_sequence_length=1)


def batch_of(iteration, order=SPLIT):
    prompts = PROMPTS[2 * iteration : 2 * iteration + 2]
    return PromptBatch(
        *(iteration, prompts, [{"prompt": prompt} for prompt in prompts]),
        slots=[0, 1],
        group_size=GROUP,
        images=IMAGES,
        members=list(range(GROUP)),
        updates=2,
        order=order,
        micro_batch_size=MICRO,
    )


class Run:
    """Iterations on one rank, whose advantages count on from one to the next."""

    def __init__(self, policy, order=SPLIT):
        self.policy, self.order, self.replay = policy, order, Replay()
        self.objective = VGRPO(RolloutSpec(steps=2), 2, replay=True, clip=0.1)
        self.objective.setup(policy)
        self.latents, self.tokens = [], []

    def take(self, iteration, has_advantage=True, failed=()):
        batch = batch_of(iteration, self.order)
        rollout = self.objective.roll_out(self.policy, batch.request(0, None))
        self.latents.append(rollout.latents)
        self.tokens.append(self.policy.encode(batch.prompts).tensors["tokens"].repeat_interleave(GROUP, dim=0))
        groups, rewards = rollout.group_ids, torch.zeros(IMAGES)
        rewards[[*failed]] = rollout.latents[[*failed]] = torch.nan
        record = IterationRecord(iteration, rewards, groups, {}, {}, groups, IMAGES, has_advantage=has_advantage)
        return Iteration.prepared(
            *(self.objective, self.policy, rollout, self.advantages(iteration), record, batch, PassLedger()),
            self.replay,
        )

    def advantages(self, iteration):
        return torch.arange(1.0, IMAGES + 1) + 10 * iteration

    def assert_trains_on(self, found, iterations, order):
        """Check that the experience has the images of the iterations, numbered one after the other, in an order."""
        images, experience = torch.tensor(order), found.experience
        assert found.image_ids.tolist() == order
        assert found.record.local_group_ids.tolist() == [number // GROUP for number in order]
        assert torch.equal(experience.latents, torch.cat([self.latents[i] for i in iterations])[images])
        assert torch.equal(experience.advantages, torch.cat([self.advantages(i) for i in iterations])[images])
        tokens = torch.cat([self.tokens[i] for i in iterations])[images]
        assert torch.equal(experience.conditioning.select(experience.rows).tensors["tokens"], tokens)
        noise = experience.pairs.of_images()[1].flatten(1)[:, 0].tolist()
        assert len(set(noise)) == len(set(found.record.local_group_ids.tolist()))  # one set of pairs per group
        assert len({*zip(noise, found.record.local_group_ids.tolist(), strict=True)}) == len(set(noise))


TWO_OF_EACH = [i + IMAGES * again for k in range(0, IMAGES, MICRO) for again in (0, 1) for i in SPLIT[k : k + MICRO]]
WHOLE = [i + IMAGES * again for k in range(0, IMAGES, MICRO) for again in (0, 1) for i in range(k, k + MICRO)]


@pytest.mark.parametrize(("order", "expected"), [(SPLIT, TWO_OF_EACH), (None, WHOLE)], ids=["split", "whole"])
def test_replay_trains_on_the_previous_images_with_their_own_advantages(policy, order, expected):
    run = Run(policy, order)
    run.assert_trains_on(run.take(0), [0], order or list(range(IMAGES)))
    for iteration in (1, 2):
        found = run.take(iteration)
        run.assert_trains_on(found, [iteration, iteration - 1], expected)
        assert [len(micro) for micro in found.micros] == [2 * MICRO] * 4
        again = Iteration.restored(found.state_dict(), batch_of(iteration, order), CPU)
        run.assert_trains_on(again, [iteration, iteration - 1], expected)
        assert [len(micro) for micro in again.micros] == [2 * MICRO] * 4


def test_the_first_update_of_a_share_needs_no_old_passes_of_replayed_images(policy):
    run = Run(policy)
    run.take(0)
    old = run.take(1).experience.kept["elbo"]
    assert old[:IMAGES].isnan().all()
    assert old[IMAGES:].isfinite().all()


def test_replay_goes_on_from_a_checkpoint_and_skips_an_iteration_without_advantages(policy):
    run = Run(policy)
    run.take(0)
    saved = run.replay.state_dict()
    run.replay = Replay()
    run.replay.load_state_dict(saved)
    run.assert_trains_on(run.take(1), [1, 0], TWO_OF_EACH)
    assert len(run.take(2, has_advantage=False).experience) == IMAGES


def test_failed_images_have_no_weight_also_when_they_are_trained_on_again(policy):
    run = Run(policy, order=None)
    assert run.take(0).experience.weights is None
    found = run.take(1, failed=[3, 6])
    assert all(run.objective.loss(policy, micro)[0].isfinite() for micro in found.micros)
    weights = found.experience.weights.unflatten(0, (-1, 2, MICRO)).transpose(0, 1)
    torch.testing.assert_close(weights.flatten(1), torch.tensor([[1, 1, 1, 0, 1, 1, 0, 1], [0.75] * 8]) / 0.75)
    saved = run.replay.state_dict()
    run.replay = Replay()
    run.replay.load_state_dict(saved)
    again = run.take(2)
    old = [float(again.experience.weights[again.image_ids == IMAGES + image]) for image in (3, 4)]
    assert old == pytest.approx([0, 8 / 6])


def test_a_method_without_advantages_gets_each_images_own_prompt_and_row(policy):
    asked, batch = [], batch_of(1)
    batch.slots = [4, 2]

    def grey(images, prompts, rows):
        asked.extend(zip(prompts, (row["prompt"] for row in rows), strict=True))
        return images.mean((1, 2, 3))

    objective, reward = (
        RewardGradient(RolloutSpec(steps=2), num_steps=1),
        Weighted([PythonReward(grey, differentiable=True)]),
    )
    objective.setup(policy)
    rollout, groups = objective.roll_out(policy, batch.request(0, None)), torch.tensor([4] * 4 + [2] * 4)
    record = IterationRecord(1, torch.zeros(IMAGES), groups, {}, {}, groups, IMAGES, has_advantage=False)
    given = (objective, policy, rollout, torch.zeros(IMAGES), record, batch, PassLedger(), Replay(), reward)
    assert Iteration.prepared(*given).record.has_advantage
    assert asked == [(prompt, prompt) for prompt in batch.prompts for _ in range(GROUP)]


@pytest.mark.parametrize("order", [SPLIT, None], ids=["split", "whole"])
def test_an_update_has_its_share_or_all_micro_batches(policy, order):
    iteration = Run(policy, order).take(0)
    shares = [[0, 1], [2, 3]] if order else [[0, 1, 2, 3]] * 2

    def remaining(iteration):
        for micros in iteration.remaining_updates():
            yield [next(n for n, one in enumerate(iteration.micros) if one is micro) for micro in micros]
            iteration.end_update(took_step=True)

    assert list(remaining(iteration)) == shares
    iteration.updates_done = 1
    restored = Iteration.restored(iteration.state_dict(), batch_of(0, order), CPU)
    assert list(remaining(restored)) == shares[1:]
