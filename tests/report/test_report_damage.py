"""``lightning report`` over damaged files: the rest is shown, and a line names what is not."""

import json
import os
from pathlib import Path

import pytest
import torch
from commands import report
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from lit_vgrpo.callbacks.report import _add_scores
from lit_vgrpo.callbacks.samples import draw_grid
from lit_vgrpo.report.page import RunPage
from lit_vgrpo.report.run_data import LAYOUT, read_run, read_scores

EVALUATED = dict.fromkeys(("images", "passes", "train_seconds", "cpu_seconds", "forward_equivalents"), 1)
SUMMARY = {
    "outcome": "finished",
    "alarms": [],
    "heldout_reward_end": 0.5,
    "reward_parts_end": {"colour": 0.5},
    "heldout_metrics_start": {"sharpness": 0.1},
    "heldout_metrics_end": {"sharpness": None},
    "weights": "trained",
    **dict.fromkeys(("iterations", "images", "world_size", "peak_memory_bytes"), 2),
    **dict.fromkeys(("train_seconds", "cpu_seconds"), 2.5),
    "peak_memory_bytes_by_phase": {"update": 2},
    "device": "CPU",
    "evaluations": [{"iteration": 0, "reward": 0.1, **EVALUATED}, {"iteration": 2, "reward": None, **EVALUATED}],
    "date": "2026-11-27",
    "versions": {"torch": "2"},
}
SCORES = [{"iteration": done, "scores": {"reward": [[0.2 + 0.15 * done, 1], [0.25 * done, 1]]}} for done in (0, 2)]
KEPT = {"file": "00002_000000.png", "image": 0, "prompt": "a cat", "edited": None, "reason": "best", "pair": None}
KEPT |= {"scores": {"reward": 0.5}}
PROTOCOL = dict.fromkeys(("height", "width", "steps", "guidance", "images_per_prompt"), 1)
BENCHMARK = {"title": "T", "table": [["", "run"], ["all", "1"]], "papers": {"P": ["no"]}, "protocol": PROTOCOL}
FILES = {
    "config.yaml": "model: {reward: X}\ndata: {train: a.txt}\ntrainer: {callbacks: [EMA]}\n",
    "metrics.csv": "epoch,heldout/reward,reward/mean,step,time/iteration_s\n,0.1,,0,\n0,,0.2,1,1\n1,0.5,0.3,2,1\n",
    "summary.json": json.dumps(SUMMARY),
    "report/scores.jsonl": "".join(f"{json.dumps(line)}\n" for line in SCORES),
    "report/images.json": json.dumps({"images": [KEPT]}),
    "benchmarks/a.json": json.dumps(BENCHMARK),
}


@pytest.fixture
def run(here):
    """A run folder with every file that a report reads."""
    for name, text in FILES.items():
        write(name, text)
    Image.new("RGB", (4, 4)).save(f"r/report/{KEPT['file']}")
    write_grid({})
    return Path("r")


def write(name, content):
    path = Path("r", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def write_grid(change):
    Path("r/samples").mkdir(exist_ok=True)
    grid, notes = draw_grid(torch.rand(1, 2, 3, 4, 4), ["a cat"], ["reference", "trained"]), PngInfo()
    notes.add_text(LAYOUT, json.dumps({**grid.info[LAYOUT], "rewards": [0.5], **change}))
    grid.save("r/samples/after.png", pnginfo=notes)


def reported(capsys):
    """Return the exit status and the lines on stderr."""
    status = report(["r", "--out", "page.html"])
    return status, capsys.readouterr().err.splitlines()


def left_out():
    """Return the lines about what a page without plots lacks."""
    return RunPage(read_run(Path("r"))).run.left_out


def test_sound_files_are_all_shown(run, capsys):
    assert reported(capsys) == (0, [])
    page = Path("page.html").read_text()
    assert all(text in page for text in ("a cat", "EMA", "Benchmarks", "Best", "+0.400"))


BAD = ("x", [[1, [2]]], {"a": {"b": []}}, 10**400, -5)
OF_SUMMARY = [(key, bad) for key in SUMMARY for bad in BAD if key not in ("outcome", "weights", "device", "date")]
OF_SUMMARY = [(key, bad) for key, bad in OF_SUMMARY if not (key.endswith(("seconds", "end")) and bad == -5)]
OF_SUMMARY += [(key, 5) for key in ("outcome", "weights", "device", "date")]
NO_EVALUATIONS = [1, None, {"iteration": 0}, {**EVALUATED, "iteration": "x"}]
NO_EVALUATIONS += [{**SUMMARY["evaluations"][0], "metrics": 5}]
OF_SUMMARY += [("evaluations", [entry]) for entry in NO_EVALUATIONS]


def test_a_summary_of_any_other_type_is_left_out(run, capsys):
    for key, bad in OF_SUMMARY:
        write("summary.json", json.dumps({**SUMMARY, key: bad}))
        found = read_run(run)
        assert found.summary == {}, (key, bad)
        assert [line.split(": ")[:2] for line in found.left_out] == [["r/summary.json is damaged", key]]
    status, (line,) = reported(capsys)
    assert (status, line[:43]) == (0, "Left out: r/summary.json is damaged: evalua")
    assert "Left out: r/summary.json" in Path("page.html").read_text()
    write("summary.json", json.dumps({**SUMMARY, "iterations": "2", "images": 2.0}))  # numbers as they were meant
    assert reported(capsys) == (0, [])


HUGE = "x" * 131_072
NOT_JSON = ["", "5", "null", "[]", '{"a": ', "[" * 10_000, bytes(range(256))]
LINE = '{"iteration": 4, "scores": %s}'
NO_SCORES = ['{"reward": 5}', '{"reward": [1, 2]}', '{"reward": [[1, 2, 3]]}', '{"reward": [["a", 1]]}', "null", "[]"]
NO_SCORES += ['{"reward": [[1, -1]]}', '{"reward": [[1, 1e12]]}', '{"reward": [[1e308, 1], [1e308, 1]]}']
NO_LINE = ["5", "null", "[]", "{}", "[" * 10_000, "\xff", '{"iteration": "x", "scores": {}}', '{"iteration": 4}']
NO_LINE += [LINE % scores for scores in NO_SCORES]
NO_IMAGES = [{"images": 5}, {"images": [5]}, {"images": [{**KEPT, "pair": 5}]}]
NO_IMAGES += [{"images": [{**KEPT, key: [[]]}]} for key in KEPT if key not in ("prompt", "pair")]
NO_IMAGES += [{"images": [{k: v for k, v in KEPT.items() if k != key}]} for key in KEPT]
NO_RESULT = [{**BENCHMARK, key: 5} for key in BENCHMARK if key != "title"] + [{}, {**BENCHMARK, "table": [[]]}]
DAMAGE = [
    *(("summary.json", content) for content in NOT_JSON),
    *(("report/scores.jsonl", FILES["report/scores.jsonl"] + line + "\n") for line in NO_LINE),
    *(("report/images.json", content) for content in NOT_JSON),
    *(("report/images.json", json.dumps(content)) for content in NO_IMAGES),
    *(("benchmarks/a.json", content) for content in NOT_JSON),
    *(("benchmarks/a.json", json.dumps(content)) for content in NO_RESULT),
    *(("metrics.csv", FILES["metrics.csv"].replace("0.3", cell)) for cell in ("hello", HUGE)),
    ("samples/after.png", b"\x89PNG"),
]


def test_one_line_names_what_is_left_out(run):
    for name, content in DAMAGE:
        write(name, content)
        lines = left_out()
        assert [line.partition(" ")[0] for line in lines] == [f"r/{name}"], (name, content[:400], lines)
        assert len(lines[0]) < 300
        write(name, FILES[name]) if name in FILES else write_grid({})
    for key in ("prompts", "labels", "zoom", "size", "left", "top"):
        for bad in (None, [], {}, 0, "", [10**9]):
            write_grid({key: bad})
            lines = left_out()
            assert [line[:31] for line in lines] in ([], ["r/samples/after.png is damaged "]), (key, bad, lines)


NO_TABLES = [("metrics.csv", content) for content in ("a,b\n1,2\n", bytes(range(256)))]
BAD_RECIPES = ("5", "- a", "a: [", b"\xff", "trainer: 5", "data: a", "model: [1]")


@pytest.mark.parametrize(("name", "content"), [*NO_TABLES, *(("config.yaml", content) for content in BAD_RECIPES)])
def test_a_table_or_recipe_that_is_none_is_refused_in_one_line(run, capsys, name, content):
    write(name, content)
    status, err = reported(capsys)
    assert (status, len(err)) == (2, 1)
    assert f"r/{name}" in err[0]


def test_nothing_but_a_regular_file_is_read(run, capsys):
    """Opening a FIFO would block."""
    for name in [*FILES, "samples/after.png", f"report/{KEPT['file']}"]:
        path = Path("r", name)
        content = path.read_bytes()
        for make in (os.mkfifo, os.mkdir):
            path.unlink() if path.is_file() else None
            make(path)
            status, err = reported(capsys)
            assert status == (2 if name in ("metrics.csv", "config.yaml") else 0), (name, err)
            assert len(err) == (name != "report/scores.jsonl"), (name, err)
            path.unlink() if make is os.mkfifo else path.rmdir()
        path.write_bytes(content)


def test_a_line_that_was_cut_off_is_no_damage(run, capsys):
    path = Path("r/report/scores.jsonl")
    path.write_bytes(path.read_bytes()[:-20])
    assert reported(capsys) == (0, [])
    assert list(read_scores(Path("r"))) == [0]
    _add_scores(path.parent, 2, [("a", ())], {"reward": [0.5]})
    assert list(read_scores(Path("r"))) == [0, 2], "the cut line does not swallow the next one"
    assert reported(capsys) == (0, [])
    path.write_text('{"iteration":3,"scores":{"reward":[[3e38,1],[-6e38,2]]}}\n')
    assert list(read_scores(Path("r"))) == [3]
