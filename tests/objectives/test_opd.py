"""OPD against the KL in float64, with teachers loaded another way; what it trains, keeps and refuses."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from commands import run as run_recipe
from helpers import Brightness, SaveAt, make_trainer, prompt_file, repeating, weights
from pair_methods import PROMPTS, assert_same_gradient, loss_and_gradient, nudge, roll
from policy_copies import load_copy
from teachers import LORA, make_student, make_task, save_teachers

from lit_vgrpo import OPD, RolloutSpec, SD3Policy, UNetPolicy
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.snapshots import Snapshot, trainable_parameters
from lit_vgrpo.core.types import Conditioning
from lit_vgrpo.objectives.base import PrepareContext
from lit_vgrpo.rewards import as_weighted
from lit_vgrpo.training.saved_weights import load_policy
from lit_vgrpo.training.teachers import load_teachers, teacher_errors, teacher_hashes

SIZES, S = Sizes(2, 3), 4
ROWS = [{"teacher": name} for name in ("two", "one") for _ in range(3)]
CASES = {
    "ode": (SD3Policy, "euler", {}),
    "some steps, unweighted": (SD3Policy, "dpm++", {"num_steps": 2, "late_bias": 3.0, "weighting": "none"}),
    "sde": (SD3Policy, "flow_sde", {"num_steps": 2}),
    "vp": (UNetPolicy, "ddim", {}),
}


def mean_and_std(path_kind, solver, v, z, t, t_next):
    """One step, written out: Euler's, Flow-GRPO's with its noise of 0.7, or DDIM's."""
    h = t - t_next
    if solver == "flow_sde":
        sigma = 0.7 * (t / (1 - (t if t < 1 else 1 - h))) ** 0.5
        return z * (1 - sigma**2 * h / (2 * t)) - v * h * (1 + sigma**2 * (1 - t) / (2 * t)), sigma * h**0.5
    if path_kind == "flow":
        return z - h * v, 1.0
    (a, b), (c, d) = path_kind(t), path_kind(t_next)
    return c * (z - b * v) / a + d * v, 1.0


@pytest.mark.parametrize("name", repeating(CASES, slow=("some steps, unweighted", "vp")))
def test_loss_and_gradient_are_those_of_the_kl_in_float64(tiny_sd3, unet_folder, tmp_path, name):
    family, solver, options = CASES[name]
    folder, extra = (tiny_sd3, LORA) if family is SD3Policy else (unet_folder("epsilon"), {"lora_rank": 2})
    teachers = save_teachers(folder, tmp_path, ("one", "two"), family, extra)
    policy = load_copy(family, folder, **extra)
    objective = OPD(teachers, RolloutSpec(solver, S), **options)
    objective.setup(policy)
    load_teachers(objective, policy)
    nudge(policy, 7)
    rollout = roll(policy, objective)
    context = PrepareContext(policy, rollout, torch.zeros(6), 2, data_rows=ROWS)
    experience = objective.prepare(context)
    loss, gradient = loss_and_gradient(policy, objective, experience.micro_batches(3))

    kind = policy.path_kind
    if kind == "vp":
        abar = torch.cat([torch.ones(1), policy.pipeline.scheduler.alphas_cumprod]).double()
        kind = lambda t: (abar[round(float(t) * 1000)].sqrt(), (1 - abar[round(float(t) * 1000)]).sqrt())  # noqa: E731
    student, cond = deepcopy(policy.network).double(), policy.encode(PROMPTS)
    cond = Conditioning({key: value.double() for key, value in cond.tensors.items()})
    total, times = 0.0, [*rollout.schedule.double().tolist(), 0.0]
    steps = objective.trained_steps(0)
    assert len(steps) == (objective.num_steps or S)
    for group, teacher in enumerate(("two", "one")):
        started = load_policy(family(str(folder), **extra, start_from=teachers[teacher])).network.double()
        for image in range(3 * group, 3 * group + 3):
            for place, k in enumerate(steps):
                state = rollout.trajectory.states[image, k if solver == "flow_sde" else place].double()[None]
                t, row = torch.tensor([times[k]], dtype=torch.float64), cond.select(torch.tensor([group]))
                with policy.using(student):
                    ours = policy.predict(state, t, row)
                with torch.no_grad(), policy.using(started):
                    theirs = policy.predict(state, t, row)
                mean, std = mean_and_std(kind, solver, ours, state, times[k], times[k + 1])
                other, _ = mean_and_std(kind, solver, theirs, state, times[k], times[k + 1])
                kl = ((mean - other) ** 2).mean() / (2 * std**2)
                total += (((ours - theirs) ** 2).mean() if objective.weighting == "none" else kl) / (6 * len(steps))
    named = [p for p in student.parameters() if p.requires_grad]
    parts = torch.autograd.grad(total, named, allow_unused=True)
    flat = [torch.zeros_like(p) if g is None else g for p, g in zip(named, parts, strict=True)]
    assert loss == pytest.approx(total.item(), rel=1e-5)
    assert_same_gradient(gradient, torch.cat([g.flatten() for g in flat]).float(), rtol=1e-4)


@pytest.mark.slow
def test_only_the_student_is_trained_saved_and_exported(tiny_sd3, tmp_path):
    module = make_student(tiny_sd3, tmp_path)
    trainer = make_trainer(tmp_path, 2)
    module.configure_model()
    teachers = {name: deepcopy(copy.tensors) for name, copy in module.objective.copies.items()}
    start = weights(module)
    trainer.fit(module, datamodule=make_task())
    assert [*teachers] == ["teacher one", "teacher two"]
    for name, tensors in teachers.items():
        assert all(torch.equal(module.objective.copies[name].tensors[key], value) for key, value in tensors.items())
    assert module.objective.state_dict()["copies"] == {}
    moved = weights(module)
    assert any(not torch.equal(moved[key], value) for key, value in start.items())
    trained = trainable_parameters(module.policy)
    assert all(".lora_" in key for key in trained)
    again = load_policy(SD3Policy(str(tiny_sd3), **LORA, start_from=str(module.policy.save(tmp_path / "student"))))
    for key, value in trainable_parameters(again).items():
        torch.testing.assert_close(value, trained[key])
    counts = module.ledger.training_counts()
    planned = module.objective.passes_per_image(trainer.datamodule.sizes)
    assert planned == {"rollout": 3, "update": 3, "teacher": 3}
    assert planned == {phase: sum(count.values()) / module.ledger.images for phase, count in counts.items()}
    assert trainer.callback_metrics["reward/mean"] > 0


class Broken(Brightness):
    """Raises an error or, if it cannot continue, breaks its contract."""

    def __init__(self, is_outage):
        self.is_outage = is_outage

    def __call__(self, images, prompts, rows):
        return torch.zeros(99) if self.is_outage else 1 / 0


@pytest.mark.parametrize("is_outage", [False, True])
def test_a_reward_that_fails_does_not_end_a_run_that_only_logs_it(tiny_sd3, tmp_path, is_outage):
    module = make_student(tiny_sd3, tmp_path, reward := as_weighted(Broken(is_outage)))
    assert not reward.is_only_logged, "another module may train on it"
    with pytest.warns(UserWarning, match='"brightness"') as warned:
        make_trainer(tmp_path, 2).fit(module, datamodule=make_task())
    said = [text for one in warned if (text := str(one.message)).startswith('Reward "brightness" failed for ')]
    assert [text.split(": ")[0].split(" for ")[1] for text in said] == [
        "all 2 held-out images",
        "16 of 16 images of iteration 1",
        "all 2 held-out images",
        "16 of 16 images of iteration 2",
        "all 2 held-out images",
    ]
    assert module.objective.num_updates == 2
    assert not [one for one in warned if "degrees of freedom" in str(one.message)]


def test_a_teacher_of_fewer_ranks_and_layers_is_exact_and_the_student_stays(tiny_sd3, tmp_path):
    options = {**LORA, "lora_targets": ["attn.to_q"], "lora_alpha": 3}
    narrow = save_teachers(tiny_sd3, tmp_path, ("one",), options=options)
    policy = load_copy(SD3Policy, tiny_sd3, max_sequence_length=1, lora_rank=4)
    nudge(policy, 5)
    before = Snapshot(policy).tensors
    objective = OPD(narrow, RolloutSpec(steps=S))
    objective.setup(policy)
    load_teachers(objective, policy)
    assert all(torch.equal(value, before[key]) for key, value in Snapshot(policy).tensors.items())
    lone = load_policy(SD3Policy(str(tiny_sd3), **options, start_from=narrow["one"]))
    z, t, cond = policy.prior([torch.Generator().manual_seed(0)]), torch.tensor([0.5]), policy.encode(PROMPTS[:1])
    with objective.copies["teacher one"].swapped_into(policy):
        torch.testing.assert_close(policy(z, t, cond), lone(z, t, cond).detach())
    assert not torch.equal(policy(z, t, cond), lone(z, t, cond))


def refusal(path, **student):
    return teacher_errors(OPD({"ocr": str(path)}, RolloutSpec(steps=S)), SD3Policy(**{**LORA, **student}))


def test_teachers_that_do_not_fit_are_one_line_before_loading(tiny_sd3, unet_folder, tmp_path):
    sd3 = save_teachers(tiny_sd3, tmp_path, ("sd3",))["sd3"]
    unet = save_teachers(unet_folder("epsilon"), tmp_path, ("unet",), UNetPolicy, {"lora_rank": 2})["unet"]
    folder = {"checkpoint": str(tiny_sd3)}
    assert refusal(sd3, **folder) == []
    (line,) = refusal(sd3, **folder, lora_rank=None)
    assert line.startswith("model.objective.teachers are LoRAs, but the policy trains full weights. Set model.policy.")
    what = "model.objective.teachers.ocr="
    for path, options, start in (
        (unet, {}, f"{what}{unet} is not a LoRA of SD3Transformer2DModel alone: "),
        (tmp_path / "missing", {}, f"{what}{tmp_path / 'missing'} "),
        (tmp_path / "missing.safetensors", {}, f"{what}{tmp_path / 'missing.safetensors'} does not exist."),
        (tmp_path, {}, f"{what}{tmp_path} is not a LoRA. Give a LoRA folder, such as RUN/export of a run."),
    ):
        (line,) = refusal(path, **{**folder, **options})
        assert line.startswith(start)
    (line,) = refusal(sd3, **folder, lora_rank=1)
    assert line.startswith(f"{what}{sd3} adapts ")
    assert "with rank 2, more than this run would train. Set model.policy.lora_rank=2" in line


def test_rows_and_settings_that_cannot_work_are_one_line(policy, tmp_path, monkeypatch, capsys):
    objective = OPD({"one": "a", "two": "b"}, RolloutSpec(steps=S))
    context = PrepareContext(policy, roll(policy, objective), torch.zeros(6), 6)
    with pytest.raises(RuntimeError, match="Give PrepareContext data_rows"):
        objective.prepare(context)
    with pytest.raises(ValueError, match="names the unknown teacher tow in its field teacher. Did you mean two"):
        objective.prepare(replace(context, data_rows=[{"prompt": "a cat", "teacher": "tow"}] * 6))
    for named in (["two"], {"two": 1}):  # a field of a row may hold anything
        assert "names the unknown teacher" in objective.row_error({"prompt": "a cat", "teacher": named})
    assert OPD({}).check(SIZES)[0].startswith("model.objective.teachers is empty.")
    (line,) = OPD({"one": "a"}, RolloutSpec(steps=S), num_steps=5).check(SIZES)
    assert line == "model.objective.num_steps=5 exceeds the rollout's 4. Use at most 4."
    monkeypatch.chdir(tmp_path)
    assert run_recipe(["tiny_opd", f"data.train={prompt_file('shapes_train.jsonl')}"]) == 2
    err = capsys.readouterr().err
    assert err.count("model.objective.teachers.") == 3
    assert 'The row of prompt "a red circle on the right" names no teacher in its field teacher. Use one of: ' in err


def test_changed_teachers_are_noticed_on_resume(tiny_sd3, tmp_path):
    objective = OPD(save_teachers(tiny_sd3, tmp_path, ("one", "two")))
    student = SD3Policy(str(tiny_sd3), **LORA)
    before = teacher_hashes(objective, student)
    (tmp_path / "two" / "pytorch_lora_weights.safetensors").write_bytes(b"")
    after = teacher_hashes(objective, student)
    assert [name for name in before if after[name] != before[name]] == ["two weights"]


@pytest.mark.slow
def test_in_the_middle_of_an_iteration(tiny_sd3, tmp_path):
    def fit(callbacks=(), ckpt=None):
        module = make_student(tiny_sd3, tmp_path, num_steps=2)
        data = make_task(updates_per_iteration=2, split_updates=True)
        make_trainer(tmp_path, 3, callbacks).fit(module, datamodule=data, ckpt_path=ckpt)
        return module

    whole = fit([SaveAt(tmp_path / "middle.ckpt", 1, 1)])
    resumed = fit(ckpt=tmp_path / "middle.ckpt")
    assert whole.objective.num_updates == resumed.objective.num_updates == 6
    assert all(torch.equal(value, weights(whole)[key]) for key, value in weights(resumed).items())
