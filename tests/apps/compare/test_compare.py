"""Real races of small runs, through the command."""

import json
import os
import signal
import threading
import time

import pytest
import yaml
from commands import compare, compare_options

from lit_vgrpo.apps.compare.command import is_finished, last_error, locked, prepare_run_folder
from lit_vgrpo.apps.compare.plan import Run, entrants, runs_of
from lit_vgrpo.errors import UserError
from lit_vgrpo.training.folder import FolderLock


def overlay(path, init_args, updates=1, sweep=None):
    """Write an overlay of one's own."""
    model = {"objective": {"class_path": "VGRPO", "init_args": init_args}}
    published = {"model": model, "data": {"updates_per_iteration": updates}}
    path.write_text(yaml.safe_dump({"published": published, "sweep": sweep or {}}, sort_keys=False))
    return path


def planned(recipe, *words):
    options = compare_options([str(recipe), *words])
    return runs_of(options, entrants(options))


def make_finished(run, **changes):
    """Write the files of a finished run."""
    run.folder.mkdir(parents=True)
    summary = {"outcome": "finished", "evaluations": [an_evaluation(0, 0.5)], **changes}
    (run.folder / "summary.json").write_text(json.dumps(summary))
    run.fingerprint_file.write_text(run.fingerprint)


@pytest.mark.slow
def test_two_methods_race_one_fails_and_a_second_call_runs_nothing(tiny_recipe, tmp_path, capsys):
    other = overlay(tmp_path / "other.yaml", {"num_mc_samples": 1, "clip": 0.01}, updates=2)
    (tmp_path / "breaks.py").write_text(
        "from lit_vgrpo import VGRPO\n\n\nclass Breaks(VGRPO):\n"
        "    def prepare(self, *args, **kwargs):\n        raise RuntimeError('no luck today')\n"
    )
    (tmp_path / "bad.yaml").write_text("published: {model: {objective: breaks.Breaks}}\n")
    words = [str(tiny_recipe), "--settings", "published", "--seeds", "1", "--iterations", "2"]
    words += ["--evaluate-every", "1", "--jobs", "2", "--target", "0.001", "--out", "race", "--methods"]
    assert compare([*words, f"bad.yaml,vgrpo,{other}"]) == 1
    race = tmp_path / "race"
    out, err = capsys.readouterr()
    assert "bad-published-seed0: breaks.py:6: RuntimeError: no luck today." in err
    assert "- bad published, seed 0: breaks.py:6: RuntimeError: no luck today" in out
    assert "1 of 3 runs failed. Run the same command to retry them." in err
    assert out.count("| vgrpo ") == out.count("| other ") == 1
    assert "## To reach 0.001\n\nNo run reached it. The highest held-out reward is " in out
    assert "vgrpo-published-seed0: finished" in err
    log = (race / "logs" / "vgrpo-published-seed0.log").read_text()
    assert "starting from the beginning" in log, "in this folder, also if it exists by then"

    runs = ("vgrpo-published-seed0", "other-published-seed0")
    stamps = {path: path.stat().st_mtime_ns for run in runs for path in (race / "runs" / run).rglob("*")}
    assert compare([*words, f"vgrpo,{other}"]) == 0
    assert stamps == {path: path.stat().st_mtime_ns for run in runs for path in (race / "runs" / run).rglob("*")}
    assert "2 of 2 runs are already finished." in capsys.readouterr().err

    saved = json.loads((race / "compare.json").read_text())
    assert {"method", "settings", "seed", "final"} <= saved["final"][0].keys()  # as benchmarks/gpu.py reads them
    assert {"method", "settings", "target"} <= saved["costs"][0].keys()
    first, second = (run["evaluations"] for run in saved["runs"])
    assert [e["iteration"] for e in first] == [e["iteration"] for e in second] == [0, 1, 2]
    assert first[0]["reward"] == second[0]["reward"]  # the same start, prompts and noise
    assert first[2]["images"] == second[2]["images"] == 2 * 4
    assert first[2]["passes"] == 2 * 4 * (2 + 4)
    assert second[2]["passes"] == 2 * 4 * (2 + 1 + 2 * 1)
    assert first[2]["forward_equivalents"] == 2 * 4 * (2 + 3 * 4)  # a pass with gradient counts three times
    assert second[2]["forward_equivalents"] == 2 * 4 * (2 + 1 + 3 * 2 * 1)
    assert second[1]["phases"]["update"] == {"with_grad": 4 * 2, "without_grad": 0}
    assert (race / "compare.png").stat().st_size > 10_000
    assert len((race / "compare.csv").read_text().splitlines()) == 1 + 2 * 3
    recipe = yaml.safe_load((race / "recipes" / "other-published.yaml").read_text())
    assert recipe["data"]["updates_per_iteration"] == 2

    overlay(other, {"num_mc_samples": 1, "clip": 0.02}, updates=2)
    assert compare([*words, str(other)]) == 0
    assert "1 finished run had other settings: repeated" in capsys.readouterr().err
    assert (race / "runs" / "other-published-seed0.old" / "summary.json").is_file()


@pytest.mark.slow
def test_a_sweep_goes_on_from_finished_runs(tiny_recipe, tmp_path, capsys):
    path = overlay(tmp_path / "mine.yaml", {"num_mc_samples": 1}, sweep={"model.objective.soft_clip": [3.0, None]})
    words = [str(tiny_recipe), "--methods", str(path), "--sweep", "--out", "sweep"]
    for run, reward in zip(planned(*words), (0.5, 0.7), strict=True):
        assert run.name == f"mine-{run.settings}-seed100"
        make_finished(run, evaluations=[an_evaluation(0, 0.2), an_evaluation(5, reward)])
    assert compare(words) == 0
    out, err = capsys.readouterr()
    assert "Searching for settings of mine on tiny: 2 runs of 1 iteration" in err
    assert "2 of 2 runs are already finished." in err
    assert "mine: soft_clip=null, final reward 0.700" in out
    assert "    tuned:\n" in out
    assert {p.name for p in (tmp_path / "sweep").glob("sweep.*")} == {"sweep.md", "sweep.csv", "sweep.json"}


def an_evaluation(iteration, reward):
    return {"iteration": iteration, "reward": reward} | dict.fromkeys(
        ("images", "passes", "forward_equivalents", "train_seconds", "cpu_seconds"), iteration
    )


@pytest.mark.slow
def test_what_counts_as_finished(tiny_recipe):
    words = ["--methods", "vgrpo", "--settings", "published", "--seeds", "4", "--iterations", "3", "--out", "x"]
    whole, failed, bare, strange = planned(tiny_recipe, *words)
    make_finished(whole)
    make_finished(failed, outcome="failed")
    make_finished(bare, evaluations=[])
    make_finished(strange)
    strange.fingerprint_file.write_text("of another recipe")
    assert [is_finished(run) for run in (whole, failed, bare, strange)] == [True, False, False, False]
    longer = planned(tiny_recipe, *words[:6], "--iterations", "4", "--out", "x")
    assert not is_finished(longer[0])
    other_sizes = planned(tiny_recipe, "data.group_size=4", *words)
    assert not is_finished(other_sizes[0])


@pytest.mark.slow
def test_nothing_in_the_place_of_a_run_is_thrown_away(tiny_recipe):
    words = ["--methods", "vgrpo", "--settings", "published", "--seeds", "1", "--iterations", "3", "--out", "x"]
    (unfinished,) = planned(tiny_recipe, *words)
    for name in ("old", "old-2"):
        make_finished(unfinished, outcome="interrupted")
        (unfinished.folder / "samples").mkdir()
        (unfinished.folder / "samples/notes.txt").write_text("mine")
        prepare_run_folder(unfinished)
        assert not unfinished.folder.exists()
        assert (unfinished.folder.parent / f"{unfinished.name}.{name}/samples/notes.txt").is_file()


def test_the_folder_of_a_run_that_outlived_its_comparison_is_not_renamed(tmp_path):
    run = Run("a-seed0", "a", "published", 0, tmp_path / "a.yaml", tmp_path / "a-seed0", tmp_path / "log", "mark")
    run.folder.mkdir()
    lock = FolderLock()
    lock.take(run.folder)
    with pytest.raises(UserError, match="Another process is still writing to .*/a-seed0. Wait for it, or stop it."):
        prepare_run_folder(run)
    lock.release()
    prepare_run_folder(run)
    assert not run.folder.exists()
    assert (tmp_path / "a-seed0.old").is_dir()


@pytest.mark.slow
def test_ctrl_c_ends_the_runs_and_says_how_to_continue(tiny_recipe, tmp_path, capsys):
    words = [str(tiny_recipe), "--methods", "vgrpo", "--settings", "published", "--seeds", "1"]
    log = tmp_path / "race" / "logs" / "vgrpo-published-seed0.log"
    children, before_it = [], set(_children(os.getpid()))  # such as what other tests' ranks are forked from

    def press_when_it_trains():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (log.is_file() and "Run folder" in log.read_text()):
            time.sleep(0.1)
        children.extend(set(_children(os.getpid())) - before_it)
        os.kill(os.getpid(), signal.SIGINT)

    finger = threading.Thread(target=press_when_it_trains)
    finger.start()
    before = signal.getsignal(signal.SIGINT)
    assert compare([*words, "--iterations", "5000", "--out", "race"]) == 130
    finger.join()
    assert signal.getsignal(signal.SIGINT) is before
    assert "Stopped. Finished runs are kept; continue: lightning compare " in capsys.readouterr().err
    assert len(children) == 1
    assert not os.path.exists(f"/proc/{children[0]}")


def _children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


@pytest.mark.slow
def test_a_folder_in_use_is_refused(tiny_recipe, tmp_path, capsys):
    words = ["--methods", "vgrpo", "--settings", "published", "--out", "race"]
    with locked(tmp_path / "race"):
        assert compare([str(tiny_recipe), *words]) == 2
    assert "Another process is still writing to race." in capsys.readouterr().err


def test_the_last_error_of_a_log(tmp_path):
    log = tmp_path / "x.log"
    log.write_text("iteration 1\nTraceback (most recent call last):\n  File x\n    y\nValueError: two\n  words\nbye\n")
    assert last_error(log) == "ValueError: two"
    log.write_text("plan\n\nEvery image of iteration 3 failed.\n\n")
    assert last_error(log) == "Every image of iteration 3 failed."
    log.write_text("")
    assert last_error(log) == "failed without output"
