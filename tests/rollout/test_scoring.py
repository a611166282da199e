import json
import math
import threading

import pytest
import torch
from helpers import Brightness, make_data, make_module, make_trainer, read_csv, same, weights
from lightning.pytorch.loggers import CSVLogger

from lit_vgrpo import MixGRPO, OptimizerConfig, RolloutSpec
from lit_vgrpo.callbacks import RewardLogger, RunSummary
from lit_vgrpo.launch.build import build
from lit_vgrpo.launch.train import rehearse
from lit_vgrpo.rewards import JPEGCompressibility, Reward, RewardError, Scores, ShapesReward, Weighted
from lit_vgrpo.rollout.scores import gathered, statistics
from lit_vgrpo.training.settings import HELD_OUT, UnscorablePrompts


class Threaded(Brightness):
    """Brightness in a thread; every ``fails``-th image fails."""

    name = "threaded"
    concurrent = True

    def __init__(self, fails=0):
        self.fails = fails
        self.threads = set()
        self.prompts = []
        self.seen = 0

    def __call__(self, images, prompts, rows):
        self.threads.add(threading.current_thread().name)
        self.prompts += zip(prompts, [row["prompt"] for row in rows], strict=True)
        scores = super().__call__(images, prompts, rows)
        for i in range(len(scores)):
            self.seen += 1
            if self.fails and self.seen % self.fails == 0:
                scores[i] = math.nan
        return scores

    def take_counts(self):
        return {"asked": 1}


def rows_of(folder):
    return read_csv(next(folder.rglob("metrics.csv")))


def train(module, folder, data=None, iterations=2, **options):
    callbacks = [RewardLogger(), RunSummary()]
    trainer = make_trainer(folder, iterations, callbacks, logger=CSVLogger(folder), **options)
    trainer.fit(module, datamodule=data or make_data())
    return module


def test_overlap_changes_nothing_but_the_thread(tiny_sd3, tmp_path):
    def run(name, overlap):
        reward = Threaded()
        # 3 does not divide the 8 images of an iteration, nor does 2 the 3
        weighted = Weighted([reward], overlap=overlap)
        module = make_module(tiny_sd3, reward=weighted, rollout_batch_size=3, policy_options={"decode_batch_size": 2})
        return train(module, tmp_path / name), reward

    (plain, alone), (overlapped, threaded) = run("plain", False), run("overlapped", True)
    assert alone.threads == {threading.current_thread().name}
    assert {name.partition("_")[0] for name in threaded.threads} == {"reward-threaded"}
    assert same(weights(plain), weights(overlapped))
    assert torch.equal(plain.record.rewards, overlapped.record.rewards)
    assert plain.evaluator.latest == overlapped.evaluator.latest


def test_images_are_scored_in_the_order_of_the_rollout(tiny_sd3, tmp_path):
    whole = make_module(tiny_sd3, MixGRPO(RolloutSpec("flow_sde", steps=5)), Threaded())
    parts = make_module(tiny_sd3, MixGRPO(RolloutSpec("flow_sde", steps=5)), Threaded(), rollout_batch_size=3)
    for name, module in (("whole", whole), ("parts", parts)):
        train(module, tmp_path / name, iterations=1)
    torch.testing.assert_close(whole.record.rewards, parts.record.rewards, atol=1e-5, rtol=0)
    assert whole.reward.rewards[0].prompts == parts.reward.rewards[0].prompts
    assert whole.record.rewards.std() > 1e-4  # another order would show


def test_every_part_is_logged_with_what_it_did(tiny_sd3, tmp_path):
    module = make_module(tiny_sd3, reward=Weighted([Threaded(fails=4), JPEGCompressibility()]))
    with pytest.warns(UserWarning, match='Reward "threaded" failed for 2 of 8 images of iteration 1: '):
        train(module, tmp_path)
    row = [row for row in rows_of(tmp_path) if row.get("reward/mean")][-1]
    assert float(row["reward/threaded/failed"]) == float(row["reward/failed"]) == 2
    assert module.record.rewards.isnan().nonzero().flatten().tolist() == [3, 7]
    assert all(value.isfinite().all() for value in weights(module).values())
    assert float(row["reward/jpeg/failed"]) == 0
    assert float(row["reward/threaded/asked"]) >= 1
    for name in ("threaded", "jpeg"):
        assert float(row[f"reward/{name}/std"]) > 0
        assert float(row[f"reward/{name}/no_spread"]) == 0
        assert float(row[f"reward/{name}/seconds_per_image"]) > 0
    assert math.isfinite(float(row["time/reward_overlapped_s"]))
    assert float(row["time/rollout_s"]) > 0


def test_failed_images_can_stop_the_run(tiny_sd3, tmp_path):
    module = make_module(tiny_sd3, reward=Threaded(fails=7), failed_images="stop")
    with pytest.raises(RewardError, match="1 of 8 images of iteration 1 failed, and model.failed_images=stop"):
        train(module, tmp_path)


@pytest.mark.slow
def test_a_held_out_reward_is_looked_at_and_never_trained_on(tiny_sd3, tmp_path):
    class Untrained(Brightness):
        name, calls = "darkness", 0

        def __call__(self, images, prompts, rows):
            Untrained.calls += 1
            return -super().__call__(images, prompts, rows)

    module = train(make_module(tiny_sd3, untrained_reward=Untrained()), tmp_path / "with")
    assert Untrained.calls == len(module.evaluator.history) == 3
    assert module.evaluator.latest["heldout/untrained_reward"] == module.evaluator.latest["heldout/darkness"]
    assert module.evaluator.latest["heldout/darkness"] == pytest.approx(-module.evaluator.latest["heldout/brightness"])
    assert module.evaluator.latest["heldout/failed"] == 0
    plain = train(make_module(tiny_sd3), tmp_path / "without")
    assert "heldout/untrained_reward" not in plain.evaluator.latest
    assert same(weights(plain), weights(module))
    summary = json.loads((tmp_path / "with" / "summary.json").read_text())
    assert summary["heldout_metrics_end"]["darkness"] == pytest.approx(-summary["reward_parts_end"]["brightness"])


def test_a_mixed_task(tiny_sd3, tmp_path):
    line = {"prompt": "a red circle on the left", "rewards": "shapes"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "right.txt").write_text("a blue square on the right\n")
    sources = [
        str(tmp_path / "rows.jsonl"),
        {"path": str(tmp_path / "right.txt"), "rewards": ["jpeg"], "name": "other"},
    ]
    reward = Weighted([ShapesReward(), JPEGCompressibility()], [1.0, 1.0])
    module = make_module(tiny_sd3, reward=reward, advantage_std="source")
    train(module, tmp_path, make_data(train=sources, heldout=sources))
    row = [row for row in rows_of(tmp_path) if row.get("reward/mean")][-1]
    for source, name in (("rows", "shapes"), ("other", "jpeg")):
        assert float(row[f"source/{source}"]) == pytest.approx(float(row[f"reward/{name}"]))
        assert float(row[f"source/{source}/std"]) == pytest.approx(float(row[f"reward/{name}/std"]))
        latest = module.evaluator.latest
        assert latest[f"heldout/source/{source}"] == pytest.approx(latest[f"heldout/{name}"])
    parts = module.record.parts
    assert parts["shapes"]["failed"] == parts["jpeg"]["failed"] == 0
    assert not module.record.rewards.isnan().any()
    of_jpeg = module.record.rewards < 0
    assert of_jpeg.sum() == 4
    assert len(module.record.group_ids[of_jpeg].unique()) == 1


def test_advantages_are_those_of_the_scores_as_they_are_cut(tiny_sd3, tmp_path):
    reward = Weighted([Brightness()], clips=[(2.0, 3.0)])  # every picture is darker
    options = {"advantage_aggregate": "advantages", "optimizer": OptimizerConfig(lr=1e-2, weight_decay=0.0)}
    module = make_module(tiny_sd3, reward=reward, **options)
    with pytest.warns(UserWarning, match="no reward spread"):
        train(module, tmp_path, iterations=1)
    assert module.record.parts["brightness"]["std"] > 0
    assert same(weights(module), module.reference.state_dict())


def test_small_rewards_are_reported_once(tiny_sd3, tmp_path):
    small = Weighted([Brightness()], weights=[1e-3])
    with pytest.warns(UserWarning, match="rewards of the first iteration differ by .* Multiply the reward") as warned:
        train(make_module(tiny_sd3, reward=small), tmp_path, iterations=2)
    assert sum("Multiply the reward" in str(one.message) for one in warned) == 1


def test_statistics_are_those_of_the_images_that_a_reward_applies_to():
    nan = math.nan
    own = Scores(
        total=torch.tensor([1.0, 2.0, nan, 4.0, 5.0, 6.0]),
        parts={
            "a": torch.tensor([1.0, 3.0, nan, nan, nan, nan]),
            "b": torch.tensor([nan, nan, 5.0, 5.0, 4.0, 6.0]),
        },
        ok=torch.tensor([True, True, False, True, True, True]),
        applies={"a": torch.tensor([True] * 3 + [False] * 3), "b": torch.tensor([False] * 2 + [True] * 4)},
        seconds={"a": 6.0, "b": 1.0},
        counts={"a": {"retried": 3}},
        errors={"a": "why"},
    )
    scores = gathered(own)
    metrics = statistics(scores, torch.tensor([0, 0, 1, 1, 2, 2]))
    assert metrics["a"] == {
        "mean": 2, "std": 1, "no_spread": 0.5, "failed": 1, "seconds_per_image": 2, "retried": 3,
    }  # fmt: skip
    assert metrics["b"]["no_spread"] == 0.5
    assert metrics["b"]["failed"] == 0
    assert scores.errors == {"a": "why"}


def test_prompts_that_a_reward_cannot_score_are_counted_before_anything_is_loaded():
    reward = Weighted([ShapesReward("colour"), JPEGCompressibility()])
    rows = [{"prompt": "a red circle on the left"}, {"prompt": "a cat"}, {"prompt": "a dog", "rewards": "jpeg"}]
    found = UnscorablePrompts.of(reward, rows)
    assert found.lines() == [
        'Reward "colour" cannot score 1 of 3 prompts. The first: '
        "Prompt \"a cat\" must name one colour. Write prompts such as 'a red circle on the left'."
    ]
    assert found.refused(any_failure=False) == []
    assert found.refused(any_failure=True) == found.lines()
    hopeless = UnscorablePrompts.of(reward, rows[1:2])
    assert hopeless.refused(any_failure=False) == hopeless.lines()
    held_out = UnscorablePrompts.of(reward, rows, HELD_OUT)
    assert (held_out.refused(any_failure=True), len(held_out.lines())) == ([], 1)
    logged = UnscorablePrompts.of(Weighted([ShapesReward("colour"), JPEGCompressibility()], [0.0, 1.0]), rows[1:2])
    assert (logged.refused(any_failure=True), len(logged.lines())) == ([], 1)
    (line,) = UnscorablePrompts.of(reward, [{"prompt": "a cat", "rewards": ["jpg"]}]).unknown
    assert line.endswith("Did you mean jpeg?")


@pytest.mark.parametrize(
    ("given", "stops", "said"),
    [
        ({"train": ["a cat", "a red dog"]}, True, 'cannot score 1 of 2 prompts. The first: Prompt "a cat" must'),
        ({"train": ["a red circle"], "heldout": ["a cat here"]}, False, "1 of 1 held-out prompts. The first: Prompt"),
    ],
)
def test_fit_refuses_such_prompts_before_weights_are_loaded(tiny_sd3, tmp_path, given, stops, said):
    options = {"failed_images": "stop"} if stops else {}
    module = make_module(tiny_sd3, reward=ShapesReward("colour"), **options)
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            make_trainer(tmp_path).fit(module, datamodule=make_data(**{"heldout": None, **given}))
    assert not module.policy.loaded


def test_a_command_checks_each_prompt_once(tiny_recipe, monkeypatch):
    (tiny_recipe.parent / "some.txt").write_text("a cat\na red circle\n")
    words = [str(tiny_recipe), "model.reward=ShapesReward", "model.reward.check=colour", "data.heldout=null"]
    cli, checked, check = build([*words, "data.train=some.txt"], make_folder=False), [], Weighted.errors_of_prompt
    monkeypatch.setattr(Weighted, "errors_of_prompt", lambda *given: checked.append(given[1]) or check(*given))
    assert cli.errors() == []
    with pytest.warns(UserWarning, match='"colour" cannot score 1 of 2 prompts. The first: Prompt "a cat"'):
        rehearse(cli)
    assert checked == ["a cat", "a red circle"]


def test_a_reward_is_told_to_give_up_when_the_rollout_breaks_off(tiny_sd3, tmp_path):
    class Closed(Reward):
        name = "closed"
        concurrent = True
        is_closed = False

        def __call__(self, images, prompts, rows):
            return images.mean((1, 2, 3))

        def close(self):
            self.is_closed = True

    reward = Closed()
    module = make_module(tiny_sd3, reward=reward, rollout_batch_size=4, evaluate_at_start=False)
    decode, calls = module.policy.decode, []

    def interrupted(latents):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return decode(latents)

    module.policy.decode = interrupted
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        train(module, tmp_path)
    assert reward.is_closed
