"""Several recipes one after the other, each from the weights of the one before."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from commands import check, run

from lit_vgrpo.apps.curriculum.curriculum import (
    Curriculum,
    new_run,
    resumed_run,
    run_curriculum,
    run_process,
    stage_environment,
)
from lit_vgrpo.config.recipe import Command
from lit_vgrpo.errors import UserError
from lit_vgrpo.system.paths import write_atomically
from lit_vgrpo.training.folder import CONFIG_NAME, LOCK, FolderLock


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder with two recipes and a curriculum of them, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        (tmp_path / f"{name}.yaml").write_text("model: {}\n")
    (tmp_path / "both.yaml").write_text("stages: [first, second]\n")
    return tmp_path


def curriculum(*words):
    return Curriculum.of(Command.parse(words))


def finish(folder, outcome="finished"):
    folder.mkdir(parents=True)
    (folder / CONFIG_NAME).write_text("model: {}\n")
    (folder / "summary.json").write_text(json.dumps({"outcome": outcome}))


def test_stages_and_overlays_are_found_beside_the_file_or_shipped(here, monkeypatch):
    (here / "three.yaml").write_text("stages: [second, tiny_shapes, ./first.yaml]\n")
    stages = curriculum("three.yaml").stages
    assert [stage.folder for stage in stages] == ["1_second", "2_tiny_shapes", "3_first"]
    assert stages[0].recipe.parent == (here / "three.yaml").parent.relative_to(here)
    (here / "set.yaml").write_text("stages: [first]\noverlays: [small, strategy/ddp]\n")
    (here / "small.yaml").write_text("data: {group_size: 4}\n")
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    found = curriculum("../set.yaml")
    assert [Path(word).parent.resolve() == here for word in found.saved] == [True, False]
    assert found.saved[1].endswith("ddp.yaml")


def test_overrides_are_for_all_stages_or_for_one_and_the_last_word_is_the_commands(here):
    settings = "overrides: [a.b=1, stage2.a.b=2]\noverlays: [strategy/ddp]\n"
    (here / "set.yaml").write_text(f"stages: [first, second]\n{settings}")
    found = curriculum("set.yaml", "strategy/zero2", "a.b=3", "stage1.c=4", "run_dir=out")
    words = [found.run_words(stage, here) for stage in found.stages]
    ddp, zero2 = (next(word for word in words[0] if f"{name}.yaml" in word) for name in ("ddp", "zero2"))
    assert words[0][1:] == [ddp, "a.b=1", zero2, "a.b=3", "c=4", f"run_dir={here}/1_first"]
    assert words[1][1:] == [
        *(ddp, "a.b=1", "a.b=2", zero2, "a.b=3"),
        *(f"run_dir={here}/2_second", f"model.policy.start_from={here}/1_first"),
    ]
    assert found.run_dir.name == "out"
    found = curriculum("both.yaml", "stage1.model.policy.start_from=old")  # the first may start from an earlier run
    assert "model.policy.start_from=old" in found.run_words(found.stages[0], here)


@pytest.mark.parametrize(
    ("text", "words", "error"),
    [
        ("stages: []", [], "x.yaml lists no recipes. Write stages: [first, second]."),
        ("stages: [first]\noveride: {}", [], "overide is not an option of a curriculum. Did you mean override"),
        ("stages: [first]", ["stage2.a=1"], "stage2.a is for stage 2, but there are stages 1 to 1."),
        ("stages: [first]", ["stage1.run_dir=a"], "run_dir cannot be set: the curriculum decides it."),
        ("stages: [first]", ["model.policy.start_from=a"], "model.policy.start_from cannot be set"),
    ],
)
def test_an_error_in_a_curriculum_is_one_line(here, text, words, error):
    (here / "x.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        curriculum("x.yaml", *words)
    assert caught.value.errors[0].startswith(error)


def test_check_names_the_stages_of_each_error(here, tiny_recipe, capsys):
    text = tiny_recipe.read_text()
    (here / "first.yaml").write_text(text.replace("group_size: 2", "group_size: 1"))
    (here / "second.yaml").write_text(text)
    assert check(["both.yaml", "model.objective.num_mc_sample=2", "stage2.model.reward.checkpoint=x"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert any(line.startswith("Stages 1, 2: model.objective.num_mc_sample is not an option") for line in errors)
    assert any(line.startswith("Stage 1: data.group_size=1: Use") for line in errors), errors
    assert any(line.startswith("Stage 2: model.reward.checkpoint is not an option") for line in errors), errors


@pytest.mark.slow
def test_check_refuses_stages_that_train_other_weights(here, tiny_recipe, capsys):
    text = tiny_recipe.read_text()
    for name in ("first", "second"):
        (here / f"{name}.yaml").write_text(text)
    assert check(["both.yaml"]) == 0
    capsys.readouterr()
    assert check(["both.yaml", "stage2.model.policy.lora_rank=2"]) == 2
    line = "Stage 2: model.policy.lora_rank is 2, but None in stage 1, whose weights it starts from."
    assert line in capsys.readouterr().err


def test_a_stage_starts_from_the_one_before_or_resumes(here):
    found, out = curriculum("both.yaml", "a=1"), here / "out"
    second = found.stages[1]
    finish(out / "1_first")
    assert "--resume" not in found.run_words(second, out)
    (out / "2_second").mkdir()  # left by a start that failed before it wrote its recipe
    start = f"model.policy.start_from={out}/1_first"
    assert found.run_words(second, out)[-3:] == [f"run_dir={out}/2_second", start, "--resume"]
    (out / "2_second").rmdir()
    finish(out / "2_second", "interrupted")
    assert found.run_words(second, out) == [str(out / "2_second" / CONFIG_NAME), "a=1", start, "--resume"]


def test_a_run_folder_holds_the_curriculum_with_what_was_typed(here):
    typed = curriculum("both.yaml", "strategy/zero2", "a+=1", "a+=${b}", "stage2.c={x: 1}")
    (here / "out").mkdir()
    typed.write(here / "out", [*typed.typed, "allow_changes=true"])
    again = curriculum("out")
    assert again.saved == typed.typed
    assert [stage.recipe.resolve() for stage in again.stages] == [stage.recipe.resolve() for stage in typed.stages]


def test_settings_typed_with_resume_are_kept_if_the_stage_accepts_them(here, monkeypatch, capfd):
    lock = FolderLock()
    run_dir = new_run(curriculum("both.yaml", "stage1.a=1"), lock)
    lock.release()
    statuses = {"refused": 2, "stopped": 143}
    for name, status in statuses.items():  # the stage's process, without its imports
        (here / name).write_text(f"#!/bin/sh\ncase $3 in check) exit 0;; *) exit {status};; esac\n")
        (here / name).chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(here / name))
        assert run_curriculum(Command.parse([str(run_dir), f"stage2.b={name}"], resume=True)) == status
    refused, stopped = (line for line in capfd.readouterr().err.splitlines() if "Continue" in line)
    assert refused.endswith("--resume stage2.b=refused")
    assert stopped.endswith("--resume")
    assert curriculum(str(run_dir)).saved == ["stage1.a=1", "stage2.b=stopped"]


@pytest.fixture
def processes(here, monkeypatch):
    """The folder and the words of each process of a curriculum; a stage is terminated at once."""
    program, log = here / "program", here / "log"
    program.write_text(f'#!/bin/sh\necho "$PWD $@" >> {log}\ncase $3 in check) exit 0;; *) exit 143;; esac\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    def run_now(*words):
        log.unlink(missing_ok=True)
        assert run_curriculum(Command.parse(words, resume=True)) == 143
        lines = [line.split() for line in log.read_text().splitlines()]
        return [(Path(folder), words) for folder, _, _, *words in lines]

    return run_now


def test_one_command_starts_a_curriculum_and_continues_it(here, processes):
    words, over = ["both.yaml", "over.yaml", "run_dir=out", "x+=1", "stage1.y=2"], f"{here}/over.yaml"
    Path("over.yaml").touch()
    Path("out").mkdir()  # such as a mount point
    (_, checked), (_, first) = processes(*words)
    assert checked == ["check", f"{here}/both.yaml", over, "x+=1", "stage1.y=2", "run_dir=out"]
    assert first[0] == "run"
    assert first[2:] == [over, "x+=1", "y=2", f"run_dir={here}/out/1_first"]
    assert processes(*words)[-1][1][2:] == first[2:], "the same entry is not appended twice"
    finish(here / "out/1_first")
    Path("out/2_second").mkdir()
    assert processes(*words)[-1][1][2:5] == [over, "x+=1", f"run_dir={here}/out/2_second"], "stage1.y is no error"
    assert curriculum("out").saved == [over, "x+=1", "stage1.y=2"]
    assert processes("out", "x+=1", "z=3")[-1][1][2:6] == [over, "x+=1", "x+=1", "z=3"], "a new command"
    words = ["both.yaml", "run_dir=other", "stage1.y=2"]
    processes(*words)
    finish(here / "other/1_first")
    Path("other/2_second").mkdir()
    assert f"run_dir={here}/other/2_second" in processes(*words)[-1][1], "stage 1 is not run again"
    assert curriculum("other").saved == ["stage1.y=2"]


def test_stages_run_in_the_folder_of_the_start(here, processes, monkeypatch, tmp_path_factory):
    disk, other = tmp_path_factory.mktemp("disk"), tmp_path_factory.mktemp("other")
    Path("out").symlink_to(disk)
    for folder in (here, other):
        for name in ("train.txt", "more.txt", "over.yaml"):
            (folder / name).touch()
    processes("both.yaml", "run_dir=out", "data.train=train.txt")
    finish(disk / "1_first")
    monkeypatch.chdir(other)
    setting = "stage2.data.train+=[{path: more.txt}, none.txt]"
    (checked_in, _), (run_in, second) = processes(f"{here}/out", "over.yaml", setting)
    assert checked_in == run_in == here
    assert second[2:4] == ["data.train=train.txt", f"{other}/over.yaml"]
    assert " ".join(second[4:7]) == f'data.train+=[{{"path": "{other}/more.txt"}}, "none.txt"]'
    assert curriculum(f"{here}/out").start == here


def test_a_setting_that_no_stage_would_use_is_refused(here):
    found, out = curriculum("both.yaml", "stage1.a=1", "stage2.b=1", "c=1", "allow_changes=true"), here / "out"
    finish(out / "1_first")
    assert found.lost_words(out) == [], "the first may be extended, the second has not started"
    finish(out / "2_second", "interrupted")
    first = "stage1.a=1 has no effect: stage 1 is finished, and stage 2 started from it."
    assert found.lost_words(out) == [first]
    (out / "2_second/summary.json").write_text(json.dumps({"outcome": "finished"}))
    all_done = "c=1 has no effect: all stages are finished. For the last one: stage2.c=1"
    assert found.lost_words(out) == [first, all_done], "the last may be extended"


def test_resume_finds_the_run(here):
    def found(*words):
        return str(resumed_run(Command.parse(words, resume=True)))

    with pytest.raises(UserError, match="runs/both is not a curriculum run. Leave out --resume to start it"):
        found("both.yaml")
    for name in ("both", "both-2"):
        (here / "runs" / name).mkdir(parents=True)
        write_atomically(here / "runs" / name / CONFIG_NAME, "stages: [first]\n")
    assert found("both.yaml") == "runs/both"
    assert found("both.yaml", "run_dir=runs/both-2") == found("runs/both-2") == "runs/both-2"
    assert found("both.yaml", "run_dir=new") == "new"


def test_processes_of_one_start_use_one_folder(here, monkeypatch):
    found = curriculum("both.yaml")
    assert [str(new_run(found, FolderLock())) for _ in range(2)] == ["runs/both", "runs/both-2"]
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="runs/both exists. Set run_dir=/another/folder, or add --resume to continue"):
        new_run(found, FolderLock())
    assert sorted(path.name for path in (here / "runs").iterdir()) == ["both", "both-2"]
    Path("new").mkdir()
    assert str(new_run(curriculum("both.yaml", "run_dir=new"), FolderLock(), resumes=True)) == "new"
    monkeypatch.setenv("RANK", "3")
    assert str(new_run(found, FolderLock())) == "runs/both"


def test_each_stage_meets_at_a_store_of_its_own_under_torchrun(here, monkeypatch):
    stages = curriculum("both.yaml").stages
    assert stage_environment(stages[0]) == dict(os.environ)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_PORT", "65534")
    environments = [stage_environment(stage) for stage in stages]
    assert [env["MASTER_PORT"] for env in environments] == ["65535", "32768"]
    assert {env["TORCHELASTIC_USE_AGENT_STORE"] for env in environments} == {"False"}


@pytest.mark.slow
def test_a_status_is_that_of_a_shell_and_signals_are_forwarded(here, capfd):
    assert run_process(["--version"]) == 0
    assert run_process(["no-such-command"]) == 2
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert run_process(["run", "tiny_shapes"]) == 128 + signal.SIGTERM
    assert capfd.readouterr().out.startswith("lit-vgrpo ")


SCORES = """
import os, signal, time
from pathlib import Path

def bright(images, prompts, rows):
    return images.mean(dim=(1, 2, 3)).tolist()

def bright_and_stop(images, prompts, rows):
    if len(images) > 1 and Path("runs/both/2_second").exists() and not Path("stopped").exists():  # not in the check
        Path("stopped").touch()
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(1)
    return bright(images, prompts, rows)
"""


@pytest.mark.slow
def test_two_stages_of_which_the_second_is_interrupted(tiny_recipe, here, capfd):
    """Four processes: a check, the first stage, the second, and the second again."""
    (here / "scores.py").write_text(SCORES)
    text = tiny_recipe.read_text().replace("heldout_limit: 2", "heldout_limit: 1")
    for name, function in (("first", "bright"), ("second", "bright_and_stop")):
        (here / f"{name}.yaml").write_text(text.replace("JPEGCompressibility", f'{{python: "scores:{function}"}}'))
    words = ["model.optimizer.lr=1e-2", "stage1.trainer.max_epochs=1"]

    assert run(["both.yaml", *words]) == 128 + signal.SIGTERM
    out = capfd.readouterr()
    assert "Stage 2 of 2 (second) did not finish (status 143). Continue: lightning run " in out.err
    folder = here / "runs" / "both"
    first = (folder / "1_first" / "summary.json").stat().st_mtime_ns
    assert (folder / "2_second" / "checkpoints" / "interrupted.ckpt").is_file()

    assert run(["both.yaml", "--resume"]) == 0
    out = capfd.readouterr().err
    assert "Stage 1 of 2 (first) is finished." in out
    assert f"All stages are finished. The result is {folder / '2_second'}." in out
    assert (folder / "1_first" / "summary.json").stat().st_mtime_ns == first
    ends = [json.loads((folder / name / "summary.json").read_text()) for name in ("1_first", "2_second")]
    assert [end["iterations"] for end in ends] == [1, 2]
    assert ends[0]["heldout_reward_start"] != ends[0]["heldout_reward_end"]
    assert ends[1]["heldout_reward_start"] == pytest.approx(ends[0]["heldout_reward_end"], abs=1e-7)
    assert sorted(path.name for path in folder.iterdir()) == [LOCK, "1_first", "2_second", CONFIG_NAME]
    assert "scores" not in sys.modules
