"""Which held-out evaluations are compared: those of the same images by the same rewards, in the history of one run."""

import json
import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from secrets import token_hex
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from commands import evaluate, run
from helpers import Brightness, make_data, make_module, make_trainer, prompt_file

from lit_vgrpo import VGRPO, EvaluationSpec, RolloutSpec, SD3Policy
from lit_vgrpo.callbacks import EMA, CollapseStop, Report, RewardHackAlarm, RunSummary
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.data import read_prompts
from lit_vgrpo.data.datasets import HeldOutDataset
from lit_vgrpo.errors import RewardError
from lit_vgrpo.report.curves import plots
from lit_vgrpo.report.page import render
from lit_vgrpo.report.run_data import read_run, read_scores
from lit_vgrpo.report.verdict import Verdict
from lit_vgrpo.rewards import (
    Frames,
    HPSv2,
    HTTPReward,
    JPEGCompressibility,
    PickScore,
    PythonReward,
    VLMJudge,
    Weighted,
)
from lit_vgrpo.training.checkpoint import RunCheckpoint
from lit_vgrpo.training.loggers import MetricsTable
from lit_vgrpo.training.resume_guard import ResumeGuard, hashed, row_hash

HELDOUT = {"heldout_limit": 4, "eval_batch_size": 1}
CHANGED = "The held-out evaluation changed"


@pytest.fixture(scope="module")
def policy(tiny_sd3):
    return SD3Policy(str(tiny_sd3), max_sequence_length=1).load()


def held_out_file(path, **changes):
    """Write the held-out prompts as they are, with other values of the last row's fields."""
    rows = [dict(row) for row in read_prompts(prompt_file("shapes_heldout.jsonl"))[:4]]
    rows[-1] |= changes
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {"data": {"heldout": str(path)}}


SAME = {
    "batches": lambda folder: {"data": {"eval_batch_size": 3}},
    "file name": lambda folder: held_out_file(folder / "renamed.jsonl"),
    "spelling": lambda folder: {"evaluation": EvaluationSpec(steps=2, height=32, width=32)},
}
OTHER = {
    "a word": lambda folder: held_out_file(folder / "edited.jsonl", prompt="a red circle"),
    "a field": lambda folder: held_out_file(folder / "edited.jsonl", difficulty=2),
    "images per prompt": lambda folder: {"data": {"heldout_images_per_prompt": 2}},
    "part of the batches": lambda folder: {"trainer": {"limit_val_batches": 1}},
    "share of the batches": lambda folder: {"trainer": {"limit_val_batches": 0.5}, "data": {"heldout_limit": 12}},
    "steps": lambda folder: {"evaluation": EvaluationSpec(steps=3)},
    "size": lambda folder: {"evaluation": EvaluationSpec(steps=2, height=16)},
    "noise": lambda folder: {"seed": 1},
    "untrained reward": lambda folder: {"untrained_reward": JPEGCompressibility()},
    "weight": lambda folder: {"reward": Weighted([Brightness()], [2.0])},
    "clip": lambda folder: {"reward": Weighted([Brightness()], clips=[(0.0, 0.5)])},
    "weights": lambda folder: {"trainer": {"callbacks": [EMA()]}},
}


def test_a_fingerprint_is_of_what_is_evaluated(policy, tmp_path):
    def fingerprint(data=None, trainer=None, **options):
        module = make_module(None, policy=policy, **options)
        trainer = make_trainer(tmp_path, **(trainer or {}))
        (found,) = trainer.validate(module, datamodule=make_data(**{**HELDOUT, "eval_batch_size": 2, **(data or {})}))
        return found["heldout/fingerprint"]

    usual = fingerprint()  # four images in two batches
    assert usual == int(usual) != 0
    found = {name: fingerprint(**make(tmp_path)) for name, make in (SAME | OTHER).items()}
    assert {name for name, number in found.items() if number == usual} == {*SAME}
    assert len({found[name] for name in OTHER}) == len(OTHER)


def test_a_prompt_that_is_repeated_counts_each_time(policy, tmp_path):
    evaluator = make_module(None, policy=policy).evaluator
    evaluated = []
    for prompts, number in (("aab", 1), ("abb", 1), ("aab", 2), ("ab", 3)):
        rows = [{"prompt": prompt} for prompt in prompts]
        batches = HeldOutDataset(rows, number, 2)
        for batch in map(batches.__getitem__, range(len(batches))):
            evaluator._ask(batch)
        contents, fingerprint = evaluator._read_contents(make_trainer(tmp_path))
        assert contents["prompts"] == hashed([row_hash(row) for row in rows])  # as in earlier versions without repeats
        evaluated.append(fingerprint)
        evaluator.start_over()
    assert len({*evaluated}) == 4


def score(images, prompts):
    return images.mean((1, 2, 3))


class Partner(Brightness):
    def __init__(self, twin=None):
        self.partner = self


class Stateful(Brightness):
    """With attributes that are no options, and differ in every process."""

    def __init__(self, words=()):
        self._words, self.started, self.folder = set(words), object(), Path.cwd() / token_hex(8)


def loaded(reward):
    reward._model = torch.nn.Linear(1, 1)
    return reward


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (PickScore("a"), PickScore("a", device="cpu", batch_size=2), True),
        (PickScore("a"), PickScore("b"), False),
        (Frames(PickScore("a")), Frames(PickScore("a", device="cpu")), True),
        (Frames(PickScore("a")), Frames(PickScore("b")), False),
        (HTTPReward("http://a"), HTTPReward("http://b", batch_size=3), True),
        (VLMJudge("http://a", "m"), VLMJudge("http://b", "m"), True),
        (VLMJudge("http://a", "m"), VLMJudge("http://a", "m", extra_body={"temperature": 1.0}), False),
        (PythonReward(score), PythonReward(score, concurrent=True), True),
        (PythonReward(score), PythonReward(score, options={(0, 1): 2, "a": {3}}), False),
        (Weighted([PickScore("a")]), Weighted([PickScore("a")], overlap=False), True),
        (Partner(), Partner(), True),
        (Stateful([0, 8]), Stateful([8, 0]), True),  # sets in different orders
        (Stateful([0, 8]), Stateful([0, 9]), False),
        (HPSv2(), loaded(HPSv2()), True),
    ],
)
def test_a_reward_counts_with_what_changes_its_scores(one, other, is_same):
    assert (hashed(one) == hashed(other)) == is_same


def test_files_count_with_their_content(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "def own(images, prompts):\n    return images.mean((1, 2, 3))\n"

    def hashes(text, weights):
        (tmp_path / "own_heldout.py").write_text(text)
        (tmp_path / weights).write_text("weights")
        sys.modules.pop("own_heldout", None)
        return hashed(PythonReward("own_heldout:own")), hashed(PickScore(str(tmp_path / weights)))

    for name, text in (("m/clip", "one"), ("n/moved", "one"), ("o/clip", "other")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(text)
    folder, moved, other = (hashed(PickScore(str(tmp_path / name))) for name in ("m/clip", "n/moved", "o/clip"))
    assert moved == folder != other
    monkeypatch.chdir(tmp_path / "m")
    assert hashed(PickScore("clip")) == folder

    first, renamed, edited = hashes(code, "a.pt"), hashes(code, "b.pt"), hashes(code.replace("mean", "std"), "a.pt")
    assert renamed == first
    assert [one == two for one, two in zip(edited, first, strict=True)] == [False, True]
    sys.modules.pop("own_heldout", None)

    pictures = [tmp_path / folder / "red.png" for folder in ("a", "b")]
    for picture in pictures:
        picture.parent.mkdir()
        picture.write_bytes(b"red")
        assert row_hash({"prompt": "a", "image": str(picture)}) == row_hash({"prompt": "a", "image": str(pictures[0])})
        assert row_hash({"image": str(picture), "prompt": "a"}) == row_hash({"prompt": "a", "image": str(pictures[0])})
    pictures[1].write_bytes(b"blue")
    assert len({row_hash({"prompt": "a", "image": str(picture)}) for picture in pictures}) == 2


def broken(images, prompts):
    raise OSError("gone")


class ByPrompt(Brightness):
    """Far apart for different prompts, so that a part of them has another mean."""

    def __call__(self, images, prompts, rows):
        return super().__call__(images, prompts, rows) + torch.tensor([float(sum(map(ord, p)) % 50) for p in prompts])


def fit(checkpoint, folder, iterations=1, ckpt=None, callbacks=(), data=None, trainer=None, module=None, **options):
    module = module or make_module(checkpoint, **{"reward": ByPrompt(), **options})
    made = make_trainer(
        folder,
        iterations,
        [CollapseStop(), RewardHackAlarm(), RunSummary(), RunCheckpoint(1), *callbacks],
        enable_checkpointing=True,
        logger=MetricsTable(folder, None if ckpt is None else lambda row: True),
        **(trainer or {}),
    )
    made.fit(module, datamodule=make_data(**{**HELDOUT, **(data or {})}), ckpt_path=ckpt)
    return module.evaluator, json.loads((folder / "summary.json").read_text())


def numbers(evaluator):
    return [one.iteration for one in evaluator.history]


def best_of(folder):
    saved = torch.load(folder / "checkpoints/best.ckpt", weights_only=True)
    return saved["global_step"], next(state["best"] for state in saved["callbacks"].values() if "best" in state)


class Counts:
    """An observer of held-out images."""

    def __init__(self):
        self.updates = self.computed = 0

    def update(self, images, batch):
        self.updates += len(images)

    def compute(self, module):
        self.computed += 1
        return {}


def test_a_sanity_check_leaves_no_trace(tiny_sd3, tmp_path):
    """Lightning's two batches before training are a part of the images."""
    counts = Counts()
    module = make_module(tiny_sd3, reward=ByPrompt())
    module.evaluator.observers.append(counts)
    sanity = {"num_sanity_val_steps": 2}
    evaluator, summary = fit(None, tmp_path, callbacks=[Report(kept_images=0)], trainer=sanity, module=module)
    assert numbers(evaluator) == [0, 1]
    assert len({one.fingerprint for one in evaluator.history}) == 1
    assert (counts.updates, counts.computed) == (2 * 4, 2)
    assert [*read_scores(tmp_path)] == [0, 1]
    assert summary["heldout_reward_start"] == pytest.approx(evaluator.history[0].reward, abs=1e-6)
    assert best_of(tmp_path)[1]["value"] == max(one.reward for one in evaluator.history)


def test_validate_and_test_leave_no_trace(tiny_sd3, tmp_path, trained):
    module, part = make_module(tiny_sd3, evaluate_at_start=False), {"limit_val_batches": 1, "limit_test_batches": 1}
    make_trainer(tmp_path, **part).validate(module, datamodule=make_data(**HELDOUT), verbose=False)
    evaluator, summary = fit(None, tmp_path, callbacks=[Report(kept_images=0)], module=module)
    assert numbers(evaluator) == [1]
    assert best_of(tmp_path)[0] == 1
    assert summary["did_it_cheat"]["words"].startswith("Not checked: that needs an evaluation at the start")
    history, latest, scores = [*evaluator.history], dict(evaluator.latest), read_scores(tmp_path)
    for verb, checkpoint in (("validate", None), ("test", None), ("test", trained / "checkpoints/last.ckpt")):
        given = {"datamodule": make_data(**HELDOUT), "ckpt_path": checkpoint, "verbose": False}
        getattr(make_trainer(tmp_path, **part), verb)(module, **given)
    assert (evaluator.history, evaluator.latest, read_scores(tmp_path)) == (history, latest, scores)
    assert (module.objective.num_updates, module.ledger.images) == (1, 8)


def test_a_second_fit_starts_a_new_history(tiny_sd3, tmp_path):
    module = make_module(tiny_sd3)
    fit(None, tmp_path / "one", module=module)
    fit(None, tmp_path / "one", 2, tmp_path / "one/checkpoints/last.ckpt", module=module)
    evaluator, summary = fit(None, tmp_path / "two", module=module)
    assert numbers(evaluator) == [0, 1]
    assert summary["heldout_metrics_start"]["distance_to_start"] == 0
    assert best_of(tmp_path / "two")[1]["iteration"] in (0, 1)


def test_a_second_fit_starts_the_method_over(tiny_sd3, tmp_path):
    class Looks(L.Callback):
        def on_train_start(self, trainer, pl_module):
            objective, now = pl_module.objective, trainable_parameters(pl_module.policy)
            same = [torch.equal(old, now[name]) for name, old in objective.copies["anchor"].tensors.items()]
            seen.append((objective.num_updates, pl_module.guard.skipped, all(same)))

    objective, seen = VGRPO(RolloutSpec(steps=2), 2, anchor_weight=1.0, anchor_decay=0.5), []
    module = make_module(tiny_sd3, objective=objective)
    for _ in range(2):
        make_trainer(tmp_path, 2, [Looks()]).fit(module, datamodule=make_data())
        module.guard.skipped = 1
    assert seen == [(0, 0, True)] * 2


def test_a_second_fit_trains_on_none_of_the_firsts_images(tiny_sd3, tmp_path):
    class Counts(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            trained.append(len(pl_module.iteration.experience))

    module, trained = make_module(tiny_sd3, objective=VGRPO(RolloutSpec(steps=2), 2, replay=True)), []
    for _ in range(2):
        make_trainer(tmp_path, 2, [Counts()]).fit(module, datamodule=make_data())
    assert trained == [8, 16, 8, 16]


def test_an_interrupted_evaluation_is_forgotten(tiny_sd3, tmp_path):
    class Interrupts(L.Callback):
        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
            if batch_idx == 1:
                raise KeyboardInterrupt

    module, data = make_module(tiny_sd3), make_data(**HELDOUT)
    with pytest.raises(SystemExit):
        fit(None, tmp_path, callbacks=[Interrupts()], module=module)
    make_trainer(tmp_path).validate(module, datamodule=data, verbose=False)
    assert len(module.evaluator.per_image("heldout/reward")) == 4
    with pytest.raises(SystemExit):
        make_trainer(tmp_path, callbacks=[Interrupts()]).validate(module, datamodule=data, verbose=False)
    evaluator, _ = fit(None, tmp_path, module=module)
    assert len(evaluator.history) == 2
    assert len(evaluator.per_image("heldout/reward")) == 4


RESUMED = {
    "other prompts": ({"data": {"heldout": prompt_file("shapes_train.jsonl")}}, "prompts"),
    "fewer prompts": ({"data": {"heldout_limit": 2}}, "prompts, images"),
    "a part": ({"trainer": {"limit_val_batches": 1}}, "prompts, images"),
    "other settings": ({"evaluation": EvaluationSpec(steps=3)}, "sampling"),
    "another reward": ({"untrained_reward": JPEGCompressibility()}, "reward jpeg"),
    "an average": ({"callbacks": [EMA()]}, "weights"),
}


@pytest.fixture(scope="module")
def trained(tiny_sd3, tmp_path_factory):
    """The folder of a run of two iterations."""
    folder = tmp_path_factory.mktemp("comparable") / "run"
    fit(tiny_sd3, folder, 2, callbacks=[Report(kept_images=0)])
    return folder


@pytest.fixture
def copied(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def test_a_single_evaluation_of_other_prompts_has_no_start(tiny_sd3, copied):
    options, _ = RESUMED["other prompts"]
    with pytest.warns(UserWarning, match=CHANGED):
        _, summary = fit(tiny_sd3, copied, 3, copied / "checkpoints/last.ckpt", evaluate_at_start=False, **options)
    assert summary["heldout_reward_start"] is None
    assert summary["heldout_metrics_start"] == {}
    assert "distance_to_start" not in summary["heldout_metrics_end"]


def test_prompts_held_out_from_the_resume_on_have_a_start(tiny_sd3, tmp_path):
    fit(tiny_sd3, tmp_path, data={"heldout": None})
    evaluator, summary = fit(tiny_sd3, tmp_path, 2, tmp_path / "checkpoints/last.ckpt")
    assert numbers(evaluator) == [1, 2]
    assert summary["heldout_reward_start"] == pytest.approx(evaluator.history[0].reward, abs=1e-6)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "other prompts")) for name in RESUMED]
)
def test_a_resumed_run_compares_only_evaluations_of_the_same(tiny_sd3, copied, name):
    """Other prompts have another mean, which would be the best of all or a collapse."""
    options, what = dict(RESUMED[name][0]), RESUMED[name][1]
    step, before = best_of(copied)
    last = copied / "checkpoints/last.ckpt"
    saved = torch.load(last, weights_only=True)
    (alarm,) = [state for state in saved["callbacks"].values() if "watches" in state]
    alarm["watches"]["images"] = (1, 0, torch.full((4,), -1e6), torch.ones(1))  # once more would be an alarm
    torch.save(saved, last)
    rule = "those from iteration 2 on are a new baseline, and are not compared with earlier ones."
    with pytest.warns(UserWarning, match=rf"{CHANGED} \({what}\): {rule}") as said:
        kept = [Report(kept_images=0), *options.pop("callbacks", ())]
        evaluator, summary = fit(tiny_sd3, copied, 4, last, callbacks=kept, **options)
    assert sum(CHANGED in str(one.message) for one in said) == 1
    assert numbers(evaluator) == [0, 1, 2, 2, 3, 4]
    assert [one.iteration for one in evaluator.comparable] == [2, 3, 4]
    assert summary["outcome"] == "finished"
    assert summary["alarms"] == []
    assert summary["heldout_reward_start"] == pytest.approx(evaluator.history[3].reward, abs=1e-6)
    assert summary["did_it_cheat"]["words"].startswith("Not checked")
    assert "distance_to_start" not in evaluator.history[3].metrics
    assert evaluator.history[4].metrics["distance_to_start"] > 0
    # The best of the earlier evaluations is not worse, so its weights are kept.
    assert best_of(copied)[1]["iteration"] in (2, 3, 4)
    kept = torch.load(copied / f"checkpoints/best-{before['iteration']}.ckpt", weights_only=True)
    assert kept["global_step"] == step

    data = read_run(copied)
    assert [point.iteration for point in data.evaluations] == [0, 1, 2, 2, 3, 4]
    assert [point.iteration for point in data.comparable] == [2, 3, 4]
    assert [bool(data.scores_at(point)) for point in data.evaluations[2:]] == [False, True, True, True]
    assert Verdict(data).reward.start == pytest.approx(evaluator.history[3].reward, abs=1e-6)
    assert " at iteration 2 to " in Verdict(data).sentence.replace("measurably:", "to")
    assert Verdict(data).cheating.words == summary["did_it_cheat"]["words"]


@pytest.mark.slow
def test_a_baseline_counts_again_and_an_unchanged_one_goes_on(tiny_sd3, copied):
    last = copied / "checkpoints/last.ckpt"
    fit(tiny_sd3, copied, 3, last, data={"heldout_limit": 2})
    evaluator, summary = fit(tiny_sd3, copied, 4, last, data={"eval_batch_size": 3})
    assert [one.iteration for one in evaluator.comparable] == [0, 1, 2, 4]
    assert summary["heldout_reward_start"] == pytest.approx(evaluator.history[0].reward, abs=1e-6)
    assert not summary["did_it_cheat"]["words"].startswith("Not checked")
    data = read_run(copied)
    assert [point.iteration for point in data.comparable] == [0, 1, 2, 4]
    (curve,) = [plot for plot in plots([data]) if plot.title == "Held-out reward"]
    assert [*np.flatnonzero(np.isnan(curve.series[0].ys))] == [3, 6]
    assert f"reward: from {data.comparable[-1].metrics['reward']:.4g} to" in curve.description.replace("sum", "reward")
    page = render([data])
    assert page.count("(not comparable)") == 2
    assert "are compared, from iteration 0 on." in page


def test_a_best_checkpoint_belongs_to_its_folder(tiny_sd3, copied, tmp_path):
    """Continued in a new folder, where nothing reaches the old best, and in the old one without its file."""
    saved, ends = torch.load(copied / "checkpoints/last.ckpt", weights_only=True), {}
    first = saved["lit_vgrpo"]["evaluator"]["history"][1]
    first["reward"] = first["metrics"]["reward"] = 1e6
    (best,) = [state["best"] for state in saved["callbacks"].values() if "best" in state]
    best |= {"value": 1e6, "iteration": 1}
    torch.save(saved, tmp_path / "last.ckpt")
    (copied / "checkpoints/best.ckpt").unlink()
    for folder in (tmp_path / "new", copied):
        fit(tiny_sd3, folder, 3, tmp_path / "last.ckpt")
        ends[folder] = best_of(folder)
    assert all(step == best["iteration"] == 3 for step, best in ends.values())


def test_a_run_that_repeats_iterations_keeps_the_best_of_those(tiny_sd3, copied):
    """Killed after a checkpoint and a better evaluation; the checkpoint does not know that evaluation."""
    path = copied / "checkpoints/best.ckpt"
    saved = torch.load(path, weights_only=True)
    next(state["best"] for state in saved["callbacks"].values() if "best" in state).update(value=1e6, iteration=5)
    torch.save(saved, path)
    fit(tiny_sd3, copied, 3, copied / "checkpoints/last.ckpt")
    assert best_of(copied)[1]["value"] == 1e6
    assert not [*path.parent.glob("best-*")]


@pytest.mark.parametrize("options", [{"reward": broken}, {"untrained_reward": broken}], ids=" ".join)
def test_a_reward_that_fails_on_every_image_ends_the_run_at_its_start(tiny_sd3, tmp_path, options):
    told = 'No held-out image could be scored before training. Reward "broken": .*test_comparable.py:.* OSError: gone.$'
    with pytest.raises(RewardError, match=told):
        fit(tiny_sd3, tmp_path, **options)
    assert json.loads((tmp_path / "summary.json").read_text())["images"] == 0


def test_a_pipeline_that_is_used_in_another_way_is_refused(tiny_sd3, copied):
    """As a learned one may be with another version of diffusers; another size is no other way."""
    path = copied / "checkpoints/last.ckpt"
    saved = torch.load(path, weights_only=True)
    module = make_module(tiny_sd3, reward=ByPrompt())
    module.policy.description = lambda: ["latents: [4, 8, 8]", "time: timestep = t"]
    for lines in (["latents: [4, 16, 8]", "time: timestep = 1000 t"], ["latents: [4, 16, 8]", "time: timestep = t"]):
        saved["lit_vgrpo"]["pipeline"] = lines
        torch.save(saved, path)
        refusal = pytest.raises(RuntimeError, match="in another way .*: 'time: timestep = t', but 'time: .* = 1000 t'")
        with refusal if "1000" in lines[1] else nullcontext():
            fit(tiny_sd3, copied, 3, path, module=module)


@pytest.mark.slow
def test_the_command_prints_one_line_and_best_ckpt_is_there(tiny_recipe, capfd):
    assert run([str(tiny_recipe), "run_dir=run"]) == 0
    words = ["trainer.max_epochs=3", "trainer.enable_progress_bar=false"]
    for folder, more in (
        ("run", ["run/config.yaml", "--resume", "data.heldout_images_per_prompt=2", "trainer.num_sanity_val_steps=1"]),
        ("new", [str(tiny_recipe), "ckpt_path=run/checkpoints/last.ckpt", "run_dir=new", "trainer.max_epochs=4"]),
    ):
        capfd.readouterr()
        with pytest.warns(UserWarning, match=CHANGED) as warned:
            assert run([*more, *words[folder == "new" :]]) == 0
        assert sum(CHANGED in str(one.message) for one in warned) == 1
        printed = capfd.readouterr().out
        for text in (printed, Path(folder, "report.html").read_text()):
            assert f"lightning eval {folder} --reference" in text
        assert re.search(r"Held-out reward \S+ after 2 iterations, " if folder == "run" else r"\S+ before, ", printed)
        assert evaluate([folder, "--checkpoint", "best.ckpt"]) == 0
    assert [entry["iteration"] for entry in json.loads(Path("run/summary.json").read_text())["evaluations"]] == [
        0,
        1,
        2,
        2,
        3,
    ]


def test_a_rank_with_other_settings_is_refused_but_not_for_what_its_machine_has():
    def guard(**recipe):
        guard = ResumeGuard()
        guard.carry({"model": {}, "run_dir": "a", **recipe}, {("data", "train"): "${oc.env:PLACE}/x.jsonl"})
        return guard

    def set_up(guard, first, **module):
        strategy = SimpleNamespace(broadcast=lambda value: first, checkpoint_io=None)
        guard.setup(
            SimpleNamespace(strategy=strategy, global_rank=1, datamodule=None), SimpleNamespace(**module), "test"
        )

    here, there = ({"train": f"/{machine}/x.jsonl"} for machine in "ab")
    first = guard(seed_everything=1, data=here)
    set_up(guard(seed_everything=1, data=there, run_dir="b"), first.recipe)
    with pytest.raises(RuntimeError, match=r"settings. seed_everything: 1 on rank 0, 2 on rank 1. Start all ranks"):
        set_up(guard(seed_everything=2, data=there), first.recipe)
    with pytest.raises(RuntimeError, match=r"settings. model.seed: 1 on rank 0, 2 on rank 1. Start all ranks"):
        set_up(ResumeGuard(), {"model": {"seed": 1}, "data": {"seed": None}}, seed=2)  # without a recipe
