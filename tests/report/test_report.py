"""``lightning report``: the page of a run, and of several, from what is in their folders."""

import base64
import io
import json
import re
import shutil
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from commands import report, sample_images
from PIL import Image, ImageSequence
from saved_runs import assert_one_line, folder_with, train

from lit_vgrpo.report import verdict
from lit_vgrpo.report.curves import plots
from lit_vgrpo.report.defaults import own_settings
from lit_vgrpo.report.page import RunPage, read_kept, read_pairs, render
from lit_vgrpo.report.run_data import Point, RunData, by_task, difference, interval, read_run, read_scores
from lit_vgrpo.report.verdict import Change, Verdict

EVIL = 'a red circle <script>alert(1)</script> & "quotes" on the left'
HELDOUT = ("a green circle on the right", EVIL)
RECIPE = """
seed_everything: 7
trainer:
  {max_epochs: 4, check_val_every_n_epoch: 2, accelerator: cpu, devices: 1, callbacks: [{class_path: SampleGrid,
  init_args: {num_prompts: 2, images_per_prompt: 1, every_n_iterations: 2}}]}
model:
  policy: {class_path: SD3Policy, init_args: {checkpoint: CHECKPOINT, max_sequence_length: 1}}
  objective: {class_path: VGRPO, init_args: {num_mc_samples: 2, rollout: {steps: 2}}}
  reward: {class_path: Weighted, init_args: {rewards: [helpers.Brightness, JPEGCompressibility], weights: [1, 0.01]}}
  optimizer: {lr: 1.0e-2}
data:
  {train: train.txt, heldout: heldout.txt, heldout_images_per_prompt: 3, prompts_per_iteration: 2, group_size: 2,
  micro_batch_size: 4}
"""


class Parsed(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(Path(path).read_text())
        self.text = " ".join(" ".join(self.words).replace("\u00a0", " ").split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)

    def all(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_sd3):
    """A folder with the finished runs runs/tiny and runs/other, of other rates, and runs/blind, not evaluated."""
    place = tmp_path_factory.mktemp("report")
    with folder_with(place, RECIPE, tiny_sd3, ["a red circle on the left", "a blue square at the top"]):
        Path("heldout.txt").write_text("\n".join(HELDOUT))
        train()
        train("name=other", "model.optimizer.lr=1e-3", "trainer.max_epochs=3")
        train("name=blind", "data.heldout=null", "trainer.max_epochs=1", "trainer.callbacks=[]")
    return place


@pytest.fixture
def inside(trained, here):
    """A copy of it as the working directory."""
    shutil.copytree(trained / "runs", here / "runs")


def test_a_recipe_begins_with_the_settings_that_differ_from_the_defaults(inside):
    assert report(["runs/tiny"]) == 0
    assert "Settings that differ from the defaults" in Parsed("runs/tiny/report.html").text
    found = dict(own_settings(read_run(Path("runs/tiny")).recipe))
    expected = {"trainer.callbacks[0].num_prompts": "2", "model.objective.rollout.steps": "2", "data.group_size": "2"}
    expected |= {"model.optimizer.lr": "0.01", "model.reward.rewards[0]": "helpers.Brightness", "seed_everything": "7"}
    assert expected.items() <= found.items()
    assert len(found) <= 35
    usual = ("trainer.log_every_n_steps", "model.objective.rollout.guidance", "model.optimizer.betas", "run_dir")
    assert not found.keys() & {*usual, "model.objective.clip", "data.deduplicate"}


def test_images_of_an_unfinished_iteration_are_told_apart(inside):
    run = read_run(Path("runs/tiny"))
    for outcome, images, said in (
        ("finished", 16, "16"),
        ("interrupted", 16, "16"),
        ("interrupted", 20, "20, 4 of an unfinished iteration"),
    ):
        seen = RunPage(replace(run, summary={**run.summary, "outcome": outcome, "images": images}))
        assert dict(seen.figures)["Images"] == said


def summary(name="tiny"):
    return json.loads(Path(f"runs/{name}/summary.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("names", [["tiny"], ["tiny", "other"]])
def test_a_page_needs_nothing_else_and_is_accessible(inside, names, capsys):
    assert report([*(f"runs/{name}" for name in names), "--out=page.html"]) == 0
    *printed, written = capsys.readouterr().out.splitlines()
    assert "Written: page.html" in written
    assert len(names) > 1 or len(printed) == 2  # a line each, however long, without a terminal
    assert any(line.startswith("Did it cheat? ") for line in printed) == (len(names) == 1)
    lines = [line for line in printed if line.startswith("runs/")]
    assert len(lines) == len(names)
    ends = [summary(line.partition(":")[0].removeprefix("runs/"))["heldout_reward_end"] for line in lines]
    assert ends == sorted(ends, reverse=True)
    page, raw = Parsed("page.html"), Path("page.html").read_text()
    assert len(raw) < 5e6
    assert "://" not in raw
    assert all(image["alt"].strip() and image["src"].startswith("data:image/") for image in page.all("img"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = {link["href"].removeprefix("#") for link in page.all("a")}
    assert links
    assert links | set(re.findall(r'aria-labelledby="(.*?)"', raw)) <= set(ids)
    for tag, attributes in page.tags:
        assert not {"src", "href"} & set(attributes) or tag in ("img", "a", "link", "use")
        assert not [name for name in attributes if name.startswith("on")]
    assert len(page.all("h1")) == len(page.all("script")) == 1
    assert "<script>alert" not in raw  # the prompt is text
    assert EVIL in page.text
    assert raw.index('alt="before: ') < raw.index('id="cheating"' if len(names) == 1 else 'id="curves"')
    assert "<table" not in raw[: raw.index('alt="before: ')] or len(names) > 1
    drawings = [tag for tag in page.all("div") if tag.get("class") == "drawing"]
    assert len(drawings) >= 4 * 5
    assert {tag["data-axis"] for tag in drawings} == {"iterations", "images", "seconds", "passes"}
    assert all(tag["role"] == "img" and tag["aria-label"] for tag in drawings)
    for title in ("Held-out reward", "Training reward", "Grad norm"):
        assert f"<h3>{title}" in raw
    for title in ("Clip fraction", "Probability ratio"):  # one update per iteration: their curves are 0 throughout
        assert f"<h3>{title}" not in raw
    images = [image["src"] for image in page.all("img")]
    assert len(images) == len(set(images))
    for name in names:
        assert verdict.score(summary(name)["heldout_reward_end"]) in page.text
    if len(names) > 1:
        assert "Settings in which the runs differ" in page.text
        assert re.search(r"model.optimizer.lr\s+0.01\s+0.001", page.text)


@pytest.mark.slow
def test_the_numbers_are_those_of_the_summary(inside):
    assert report(["runs/tiny"]) == 0
    text, found = Parsed("runs/tiny/report.html").text, summary()
    start, end = (verdict.score(found[f"heldout_reward_{when}"]) for when in ("start", "end"))
    assert f"{start} \u2192 {end}" in text
    before, after, change = (" ".join(cell) for cell in Verdict(read_run(Path("runs/tiny"))).reward.cells)
    assert f"{before.partition(' ')[2]} to {after.partition(' ')[2]}, change {change}. In brackets" in text
    assert found["date"][:10] in text
    assert f"CPU time {verdict.duration(found['cpu_seconds'])}" in text
    assert f"Did it cheat? {found['did_it_cheat']['words']}" in text
    for value in found["reward_parts_end"].values():
        assert verdict.score(value) in text
    for number in (found["images"], found["evaluations"][-1]["passes"]):
        assert verdict.amount(number) in text
    assert verdict.duration(found["train_seconds"]) in text
    for fact in (found["device"], *found["versions"].values()):
        assert fact in text
    run = read_run(Path("runs/tiny"))
    assert [point.iteration for point in run.evaluations] == [e["iteration"] for e in found["evaluations"]]
    assert [point.metrics["reward"] for point in run.evaluations] == [e["reward"] for e in found["evaluations"]]
    assert list(run.scores) == [0, 2, 4]
    assert [count for _, count in run.scores[4]["reward"]] == [3, 3]
    scored = [change for change in Verdict(run).changes if change.difference]
    assert [change.name for change in scored] == ["reward", "brightness", "jpeg"]
    for change in scored:
        for mean, own in zip((change.start, change.end), change.intervals, strict=True):
            assert own.mean == pytest.approx(mean, rel=1e-4)
            assert own.low <= own.mean <= own.high
        assert change.difference.mean == pytest.approx(change.change, abs=1e-4 * abs(change.end) + 1e-6)


@pytest.mark.slow
def test_images_are_the_cells_of_the_sample_grids_and_the_best_and_worst(inside):
    assert report(["runs/tiny"]) == 0
    page = Parsed("runs/tiny/report.html")
    pictures = [image["alt"] for image in page.all("img") if image["alt"].startswith(("before: ", "after: "))]
    assert sorted(pictures) == sorted(f"{time}: {prompt}" for time in ("before", "after") for prompt in HELDOUT)
    changes = [pair.change for pair in read_pairs(Path("runs/tiny"))]
    assert changes == sorted(changes, reverse=True)
    assert changes[-1] > 0
    with Image.open("runs/tiny/samples/after.png") as sheet:
        layout = json.loads(sheet.info["layout"])
        expected = sheet.convert("RGB").getpixel((layout["left"][1] + 1, layout["top"][0] + 1))
    evaluations, rewards = summary()["evaluations"], [pair.rewards for pair in read_pairs(Path("runs/tiny"))]
    for label, evaluation in zip(("before", "after"), (evaluations[0], evaluations[-1]), strict=True):
        assert sum(own[label] for own in rewards) / len(rewards) == pytest.approx(evaluation["reward"])
    source = next(image["src"] for image in page.all("img") if image["alt"].startswith("after: a green"))
    with Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))) as cell:
        assert cell.size == (layout["size"][0] // layout["zoom"], layout["size"][1] // layout["zoom"])
        assert cell.convert("RGB").getpixel((0, 0)) == expected
    table = json.loads(Path("runs/tiny/report/images.json").read_text())
    assert (table["iteration"], table["of"]) == (4, 6)
    best, worst = ([entry for entry in table["images"] if entry["reason"] == reason] for reason in ("best", "worst"))
    assert min(e["scores"]["reward"] for e in best) >= max(e["scores"]["reward"] for e in worst)
    assert {path.name for path in Path("runs/tiny/report").glob("*.png")} == {e["file"] for e in table["images"]}
    grids = {image["src"] for image in page.all("img") if image["alt"].startswith(("before: ", "after: "))}
    kept = [entry for entries in read_kept(Path("runs/tiny"), set(grids)).values() for entry in entries]
    assert kept  # which of the kept images a grid shows already depends on the CPU
    assert {entry["picture"].source for entry in kept} <= {image["src"] for image in page.all("img")}
    assert all(score in page.text for entry in kept for score in entry["scores"].values())


@pytest.mark.slow
def test_no_picture_of_another_folder_is_shown(inside):
    folder = Path("runs/tiny/report")
    Image.new("RGB", (32, 32), "red").save("secret.png")
    table = json.loads((folder / "images.json").read_text())
    (folder / table["images"][0]["file"]).unlink()
    (folder / table["images"][0]["file"]).symlink_to(Path("secret.png").absolute())
    for name in (table["images"][0]["file"], "../../../secret.png", str(Path("secret.png").absolute())):
        for changed, shown in (({"file": name}, []), ({"file": table["images"][1]["file"], "edited": name}, [None])):
            (folder / "images.json").write_text(json.dumps({"images": [{**table["images"][0], **changed}]}))
            kept = read_kept(Path("runs/tiny"), set()).values()
            assert [entry["edited"] for entries in kept for entry in entries] == shown


@pytest.mark.slow
def test_pictures_to_edit_are_shown_with_their_prompt(trained, monkeypatch, flux_folder):
    monkeypatch.chdir(trained)
    rows = [{"prompt": "make it green", "image": f"{colour}.png"} for colour in ("red", "blue")]
    for row in rows:
        Image.new("RGB", (32, 32), row["image"][:-4]).save(row["image"])
    Path("edits.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = f"{{checkpoint: {flux_folder(False, True)}, max_sequence_length: 8, height: 32, width: 32}}"
    data = ["data.train=edits.jsonl", "data.heldout=edits.jsonl", "data.heldout_images_per_prompt=2"]
    policy = f"model.policy={{class_path: KontextPolicy, init_args: {options}}}"
    train("name=edits", policy, *data, "trainer.max_epochs=2", "trainer.callbacks+=Report")
    for row in rows:
        Path(row["image"]).unlink()
    assert report(["runs/edits"]) == 0  # from its copies
    page = Parsed("runs/edits/report.html")
    images = page.all("img")
    shown = [image["src"] for image in images if image["alt"] == "Picture to edit: make it green"]
    assert len(shown) == len([image for image in images if image["alt"].startswith(("before", "Best", "Worst"))])
    assert len(set(shown)) == 2
    # one prompt with two pictures is two prompts for the intervals too
    assert [count for _, count in read_scores(Path("runs/edits"))[2]["reward"]] == [2, 2]


@pytest.mark.slow
def test_videos_move_with_the_frames_of_the_strips(trained, monkeypatch, capsys, large_folder):
    monkeypatch.chdir(trained)
    options = f"{{checkpoint: {large_folder('wan')}, max_sequence_length: 16, height: 32, width: 48, num_frames: 5}}"
    policy = f"model.policy={{class_path: WanPolicy, init_args: {options}}}"
    reward = "model.reward={class_path: Frames, init_args: {reward: helpers.Brightness}}"
    train("name=moving", policy, reward, "trainer.max_epochs=2", "trainer.callbacks+=Report")
    page, run = Parsed("runs/moving/report.html"), Path("runs/moving")
    strips = Image.open(run / "samples" / "after.png")
    layout = json.loads(strips.info["layout"])
    for time, x in zip(("before", "after"), layout["left"], strict=True):
        for prompt, top in zip(HELDOUT, layout["top"], strict=True):
            frames = [strips.crop((left, top, left + 48, top + 32)).tobytes() for left in range(x, x + 240, 48)]
            (image,) = [image for image in page.all("img") if image["alt"] == f"{time}: {prompt}"]
            with Image.open(io.BytesIO(base64.b64decode(image["src"].partition(",")[2]))) as file:
                assert [frame.convert("RGB").tobytes() for frame in ImageSequence.Iterator(file)] == frames
                assert (file.info["duration"], len(set(frames))) == (62, 5)
    stills = [source for source in page.all("source") if source["media"] == "(prefers-reduced-motion: reduce)"]
    assert len(stills) == 4
    assert all(source["srcset"].startswith("data:image/png;base64,") for source in stills)

    capsys.readouterr()
    asked = ["runs/moving", "--prompt=a red circle", "--format=mp4"]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "imageio_ffmpeg", None)
        line = 'needs imageio and imageio-ffmpeg. Run: pip install "lit-vgrpo[video]"'
        assert_one_line(sample_images, asked, capsys, line)
    pytest.importorskip("imageio_ffmpeg", reason="needs the extra video")
    assert sample_images(asked) == 0
    assert capsys.readouterr().out == "runs/moving/sample/001_seed0.mp4\n"
    assert {path.name for path in (run / "sample").iterdir()} == {"001_seed0.png", "001_seed0.mp4"}


@pytest.mark.slow
def test_a_run_that_continues_elsewhere_is_judged_from_its_start(trained, monkeypatch):
    monkeypatch.chdir(trained)
    train("name=more", "ckpt_path=runs/tiny/checkpoints/last.ckpt", "trainer.max_epochs=6")
    run = read_run(Path("runs/more"))
    assert run.evaluations[0].iteration == 0
    assert Verdict(run).cheating.words == summary("more")["did_it_cheat"]["words"]
    across = next(change for change in Verdict(run).evidence if change.name == "diversity_across_prompts")
    start = next(change for change in Verdict(read_run(Path("runs/tiny"))).evidence if change.name == across.name)
    assert across.start == pytest.approx(start.start, abs=1e-5)


@pytest.mark.slow
def test_a_killed_run_has_a_report(inside):
    """Without a summary and a picture of the end; one row, one line and one image are damaged."""
    run = Path("runs/tiny")
    (run / "summary.json").unlink()
    (run / "samples" / "after.png").unlink()
    (run / "samples" / "before.png").write_bytes(b"not a picture")
    (run / "report" / "images.json").write_text("[1")
    table, scores = run / "metrics.csv", run / "report" / "scores.jsonl"
    rows = table.read_text().splitlines(keepends=True)
    table.write_text("".join(rows[:-1]) + rows[-1][: len(rows[-1]) // 2])
    scores.write_text(scores.read_text()[:-20])
    assert report(["runs/tiny"]) == 0
    page = Parsed("runs/tiny/report.html")
    assert "still running, or was killed" in page.text
    assert "Iterations 3 " in page.text  # the row of the last one is cut off
    assert f"iteration 2: {HELDOUT[0]}" in [image["alt"] for image in page.all("img")]
    assert "lightning run runs/tiny/config.yaml --resume" in page.text


@pytest.mark.slow
def test_a_failed_run_shows_its_reason_and_only_commands_that_work(inside):
    reason = "RewardError: the judge does not answer"
    Path("runs/tiny/summary.json").write_text(json.dumps({**summary(), "outcome": "failed", "reason": reason}))
    assert report(["runs/tiny"]) == 0
    page = Parsed("runs/tiny/report.html")
    assert "The run failed after 4 iterations" in page.text
    assert page.text.count(reason) == 1
    assert "lightning export runs/tiny" in page.text
    shutil.rmtree("runs/tiny/checkpoints")
    assert report(["runs/tiny"]) == 0
    assert "lightning export runs/tiny" not in Parsed("runs/tiny/report.html").text


ALIKE = {"diversity_across_prompts": 0.01}
HONEST = {"diversity_across_prompts": 0.1, "sharpness": 0.05, "saturation": 0.1}


@pytest.mark.parametrize(
    ("start", "end", "likely", "words"),
    [
        ({}, ALIKE, True, "Probably: the reward rose, and images of different prompts became alike. Not checked with"),
        ({}, {"sharpness": 0.02, "saturation": 0.3}, True, "images became blurred and colours became oversaturated"),
        ({}, {"sharpness": 0.2, "saturation": 0.03}, True, "and images became noisy or hard-edged and colours faded"),
        # an honest run changes its images too
        ({}, {"diversity_across_prompts": 0.07, "saturation": 0.15}, False, "No sign of it in the images"),
        ({"sharpness": 0.002}, {"sharpness": 0.006}, False, "add model.untrained_reward"),
        ({"untrained_reward": 0.4}, {"untrained_reward": 0.2}, True, "and the untrained reward fell."),
        ({"untrained_reward": 0.4}, {"untrained_reward": 0.6}, False, "rose too, 0.400 before, 0.600 after."),
        ({}, {"reward": 0.1, **ALIKE}, False, "rise measurably, but images of different prompts became alike."),
        ({}, {"reward": 0.1}, False, "The reward did not rise measurably, so there is nothing to check."),
        ({}, {"reward": 0.2004, **ALIKE}, False, "rise measurably, but images of different prompts became alike."),
        ({"untrained_reward": 0.4001}, {"untrained_reward": 0.3999}, False, "measurably: 0.400 before, 0.400 after."),
    ],
)
def test_did_it_cheat(start, end, likely, words):
    points = [Point({"iterations": 0}, {"reward": 0.2, **HONEST, **start})]
    points.append(Point({"iterations": 9}, {"reward": 0.5, **HONEST, **start, **end}))
    found = Verdict(RunData(Path("run"), {}, {}, [], points))
    assert found.cheating.is_likely == likely
    assert words in found.cheating.words
    hacked = "docs/when_it_goes_wrong.md#the-reward-rises-but-the-images-got-worse"
    assert (hacked in found.help) == likely
    points[0].costs["iterations"] = 1
    late = Verdict(RunData(Path("run"), {}, {}, [], points))
    assert late.cheating.words == "Not checked: that needs an evaluation at the start and a later one."
    points[0].metrics["fingerprint"] = 7.0
    edited = Verdict(RunData(Path("run"), {}, {}, [], points))
    assert edited.cheating.words.endswith("Earlier ones had other prompts, settings or rewards.")
    if likely:
        assert found.headline == f"Reward rose, and {found.cheating.signs[0]}"
        assert f"and {found.cheating.signs[0]}: +0.300" in found.sentence


def test_an_alarm_is_shown_once_and_peaks_of_memory_only_if_they_differ():
    alarms = ["Reward hacking? Since iteration 0 it rose.", "Reward hacking? Since iteration 5 it rose."]
    points = [Point({"iterations": number}, {"reward": 0.1 * number}) for number in (0, 9)]
    for outcome, reason, phases in (
        ("finished", "", {"decode": 1.01e9}),
        ("reward hacking", alarms[0], {"decode": 2e9}),
    ):
        found = {"outcome": outcome, "reason": reason, "alarms": alarms, "peak_memory_bytes": 1e9}
        found["peak_memory_bytes_by_phase"] = {"rollout": 1e9, **phases}
        page = render([RunData(Path("run"), {}, found, [], points)])
        assert page.count("Reward hacking? Since") == 1
        assert ("decode 2.0 GB" in page) == ("Peak memory by phase" in page) == (outcome != "finished")


FALLS = "The reward falls, or all images look alike"
HACKED = "The reward rises, but the images got worse"
SECTIONS = [("finished", 0.1, FALLS), ("collapsed", 0.3, FALLS), ("reward hacking", 0.3, HACKED)]
SECTIONS += [("finished", 0.2, "The reward does not move"), ("failed", 0.3, "Out of memory")]


@pytest.mark.parametrize(
    ("outcome", "end", "title"), [*SECTIONS, ("unfinished", 0.3, "It hangs"), ("finished", 0.3, None)]
)
def test_a_result_names_the_section_that_helps(outcome, end, title):
    points = [Point({"iterations": number}, {"reward": reward}) for number, reward in ((0, 0.2), (9, end))]
    alarms = ["Reward hacking?"] if outcome == "reward hacking" else []
    reason = "CUDA out of memory." if outcome == "failed" else None
    summary = {"outcome": outcome, "reason": reason, "alarms": alarms}
    page = Path(__file__).parents[2] / "docs" / "when_it_goes_wrong.md"
    assert title is None or f"## {title}\n" in page.read_text()
    slug = "" if title is None else re.sub("[^a-z -]", "", title.lower()).replace(" ", "-")
    found = Verdict(RunData(Path("run"), {}, summary, [], points)).help
    assert found == ([f"docs/when_it_goes_wrong.md#{slug}"] if title else [])


@pytest.mark.slow
def test_files_of_an_earlier_part_of_a_resumed_run_do_not_count(inside):
    path = Path("runs/tiny/summary.json")
    path.write_text(json.dumps({**summary(), "iterations": 2, "outcome": "interrupted", "images": 1}))
    scores = Path("runs/tiny/report/scores.jsonl")
    lines = scores.read_text().splitlines()
    scores.write_text("\n".join([*lines, lines[1]]) + "\n")  # the second evaluation again
    run = read_run(Path("runs/tiny"))
    assert run.summary == {}
    assert run.total("images") == 16
    assert run.num_iterations == 4
    assert list(run.scores) == [0, 2]


@pytest.mark.slow
def test_a_run_without_evaluations_has_a_page(inside):
    before = Path("runs/blind/report.html").read_text()
    assert '<h1 id="verdict-title">No held-out evaluation yet</h1>' in before
    assert 'Did it cheat?</h2>\n  <p class="answer">Not checked' in before
    assert report(["runs/blind"]) == 0
    assert Path("runs/blind/report.html").read_text() == before


@pytest.mark.slow
def test_refusals(inside, capsys):
    assert_one_line(report, ["runs/tinny"], capsys, "Did you mean")
    assert_one_line(report, ["runs/tiny", "a=b"], capsys, "a=b has no effect on a report")
    Path("notes.html").write_text("mine")
    assert_one_line(report, ["runs/tiny", "--out=notes.html"], capsys, "notes.html exists and is not a report")
    assert Path("notes.html").read_text() == "mine"
    assert report(["runs/other", "--out=new.html"]) == report(["runs/other", "--out=new.html"]) == 0
    capsys.readouterr()
    config = Path("runs/other/config.yaml")
    config.write_text(config.read_text().replace("heldout: heldout.txt", "heldout: others.txt"))
    for file in Path("runs").glob("*/summary.json"):  # as of a version that did not write it
        file.write_text(file.read_text().replace('"heldout_prompts"', '"unknown"'))
    for name in ("other", "tiny"):
        shutil.copytree(f"runs/{name}", f"both/{name}")
    assert report(["both"]) == 0  # all below
    line, *lines = capsys.readouterr().out.splitlines()
    assert line == "Not compared with each other, since data.heldout differs: other / tiny"
    shown = [line for name in ("other", "tiny") for line in (f"--- {name}", f"both/{name}")]
    assert [one.partition(":")[0] for one in lines] == [*shown, "Written"]
    Path("runs/tiny/metrics.csv").write_text("a,b\n1,2\n")
    assert_one_line(report, ["runs/tiny"], capsys, "Cannot read runs/tiny/metrics.csv")


def test_a_result_says_when_it_was_measured():
    rows = [Point({"iterations": number}, {"time/iteration_s": 1.0}) for number in range(1, 7)]
    start, end = (Point({"iterations": number}, {"reward": 0.1 + number, **HONEST}) for number in (0, 4))
    scores = {0: {"reward": [(0.1, 1), (0.2, 1)]}}
    once = RunData(Path("run"), {}, {"outcome": "failed"}, rows, [start], scores)
    assert Verdict(once).sentence.startswith("Held-out reward 0.100 [0.100, 0.200] before training, not evaluated si")
    page = render([once])
    assert "Held-out reward before training: [0.100, 0.200]. In" in page
    assert '<th scope="col" class="n">Before training</th></tr>' in page
    twice = RunData(Path("run"), {}, {}, rows, [start, end], {4: {"reward": [(4.0, 1), (4.2, 1)]}})
    assert Verdict(twice).brief.endswith(": 0.100 to 4.100 after 4 iterations.")  # an interval for both or none
    twice = RunData(Path("run"), {}, {}, rows, [start, end])
    assert " after 4 iterations, not evaluated since; the run has 6 iterations." in Verdict(twice).sentence
    assert "Held-out reward before and after 4 iterations" in render([twice])
    lost = RunData(Path("run"), {}, {}, rows, [start, end, Point({"iterations": 6}, {"failed": 9.0, **HONEST})])
    assert " to 4.100: +4.000 after 4 iterations, not evaluated since" in Verdict(lost).sentence
    assert Verdict(lost).cheating == Verdict(twice).cheating
    assert "9 held-out images could not be scored at the last evaluation." in Verdict(lost).alarms
    done = RunData(Path("run"), {}, {}, rows[:4], [start, end])
    assert Verdict(done).sentence.endswith(": +4.000 after 4 iterations.")


def test_a_change_has_the_decimals_of_its_ends_and_a_plot_the_name_of_its_curve():
    ends = [
        {"reward": 0.1, "sharpness": 0.0207, "saturation": 900.0, "distance_to_start": 0.0},
        {"reward": 0.2, "sharpness": 0.02, "saturation": 1000.0, "distance_to_start": 0.00999},
    ]
    points = [Point({"iterations": 4 * n}, {**HONEST, **values}) for n, values in enumerate(ends)]
    rows = [Point({"iterations": n}, {"policy/anchor_distance": n / 9, "time/iteration_s": 1.0}) for n in range(1, 5)]
    one = RunData(Path("run"), {"model": {"objective": "VGRPO"}}, {}, rows, points)
    page = render([one])
    assert all(f'<td class="n">{text} <' in page for text in ("\u22120.0007", "+100.0", "0.00000", "0.00999"))
    assert all(f'<td class="n">{text}</td>' in page for text in ("0.00000", "0.00999"))  # each evaluation
    assert '<p class="eyebrow">Training run with VGRPO</p>' in page
    assert [plot.title for plot in plots([one])] == ["Held-out reward", "Distance to the anchor"]
    assert "If it grows steadily, lower the learning rate" in page


@pytest.mark.parametrize(("start", "end"), [(99.6, 100.0), (1233.7, 1234.0), (0.0096, 0.0104), (0.2, 0.8)])
def test_round_numbers_hide_no_change(start, end):
    before, after = ([(4 * value * part, 4) for part in (0.999, 1.001)] for value in (start, end))
    change = Change("reward", start, end, (interval(before), interval(after)), difference(before, after))
    assert change.direction == 1
    assert change.cells[0][0] != change.cells[1][0]


def test_a_change_is_that_of_the_prompts_that_were_scored_twice():
    before, after = [(0.0, 4), (2.0, 4), (4.0, 4)], [(0.0, 0), (2.0, 4), (4.0, 4)]
    change = Change("reward", 0.5, 0.75, (interval(before), interval(after)), difference(before, after))
    assert (change.change, change.direction) == (0, 0)


def test_a_reward_that_prints_like_the_sum_is_shown():
    ends = [{"reward": 12345.15, "a": 12345.1, "b": 12345.2}, {"reward": 12344.95, "a": 12345.3, "b": 12344.6}]
    points = [Point({"iterations": 4 * n}, {**HONEST, **values}) for n, values in enumerate(ends)]
    run = RunData(Path("run"), {}, {"reward_parts_end": {"a": 1.0, "b": 1.0}}, [], points)
    assert {"reward", "a", "b"} <= {change.name for change in Verdict(run).changes}
    points[1].metrics["a"] = 2e4
    assert "Did not rise measurably: b. To change what counts" in render([run])


def test_numbers_that_overflow_an_axis_are_left_out():
    values = [-1e308, 1e308, 1.0, 2.0, 3.0]
    rows = [Point({"iterations": n}, {"policy/kl": kl, "time/iteration_s": 1.0}) for n, kl in enumerate(values)]
    (plot,) = plots([RunData(Path("run"), {}, {}, rows, [])])
    assert np.isnan(plot.series[0].ys).tolist() == [True, True, False, False, False]


def test_a_single_prompt_has_no_interval_and_no_direction():
    start, end = [(0.2, 2)], [(1.8, 2)]
    change = Change("reward", 0.1, 0.9, (interval(start), interval(end)), difference(start, end))
    assert (change.ends, change.direction) == (["0.100", "0.900"], 0)


def test_runs_with_the_same_answer_share_a_line():
    points = [Point({"iterations": number}, {"reward": 0.1 * number, **HONEST}) for number in (0, 9)]
    other = [points[0], Point({"iterations": 9}, {"reward": 0.9, **HONEST, **ALIKE})]
    page = render([RunData(Path(name), {}, {}, [], use) for name, use in (("a", points), ("b", other), ("c", points))])
    assert re.findall(r"<strong>(.*?)\.</strong> Did it cheat\? (\w+)", page) == [("a, c", "No"), ("b", "Probably")]
    assert [
        '<ul class="alarms"' in render([RunData(Path(n), {}, {"outcome": "finished"}, [], use) for n in "ac"])
        for use in (points, other)
    ] == [False, True]
    alone = [render([RunData(Path("run"), {}, {}, [], use)]) for use in (points, other)]
    assert ['class="suspect"' in page for page in alone] == [False, True]
    assert all("sharpness below 0.5 or above 2; saturation below" in page for page in alone)


def test_the_page_leaves_out_where_files_were_found(tmp_path):
    (tmp_path / "config.yaml").write_text("name: mine\nfound_in: ['../..']\n")
    shown = read_run(tmp_path)
    assert (shown.config, shown.recipe) == ("name: mine\n", {"name": "mine"})
    assert "found_in" not in render([shown])


def test_a_run_without_an_evaluation_is_the_reason_that_it_is_not_compared():
    points, summary = [Point({"iterations": 0}, {"reward": 0.1, **HONEST})], {"heldout_prompts": "1"}
    done, stopped = (
        RunData(Path("done"), {}, summary | {"reward_parts_end": {"red": 1.0}}, [], points),
        RunData(Path("stopped"), {}, {}, [], []),
    )
    groups, apart = by_task([stopped, done])
    line = "Not compared with each other, since stopped has no held-out evaluation yet: done / stopped"
    assert (groups, apart) == ([[done], [stopped]], line)
    assert line in render([stopped, done])
    assert by_task([stopped])[0] == [[stopped]]


def test_a_run_that_stopped_before_its_first_iteration_has_the_same_rewards():
    start, prompts = Point({"iterations": 0}, {"reward": 0.1, **HONEST}), {"heldout_prompts": "1", "rewards": ["votes"]}
    trained = Point({"iterations": 1}, {"reward/mean": 0.0, "reward/votes/std": 1.0, "time/iteration_s": 1.0})
    runs = [RunData(Path(name), {}, prompts, rows, [start]) for name, rows in (("done", [trained]), ("stopped", []))]
    assert by_task(runs)[0] == [runs]


def test_runs_of_several_tasks_are_grouped_in_one_page(tmp_path):
    """Of three runs, two have the same held-out prompts; the third has others and another reward."""
    rows = [Point({"iterations": n}, {"reward/mean": n / 9, "time/iteration_s": 1.0}) for n in range(1, 5)]
    points = [Point({"iterations": number}, {"reward": 0.1 * number, **HONEST}) for number in (0, 4)]
    runs = [
        RunData(Path(name), {"data": {"heldout": file}}, {"reward_parts_end": {reward: 1.0}}, rows, points)
        for name, file, reward in (("a", "x.txt", "red"), ("b", "y.txt", "ocr"), ("c", "x.txt", "red"))
    ]
    (tmp_path / "page.html").write_text(page := render(runs))
    parsed = Parsed(tmp_path / "page.html")
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {link["href"].removeprefix("#") for link in parsed.all("a")} <= set(ids)
    assert "Not compared with each other, since data.heldout and model.reward differ: a, c / b" in parsed.text
    for run, prompts in zip(runs, "112", strict=True):  # the same prompts in two files, and others in one of that name
        run.summary["heldout_prompts"] = prompts
    _, apart = by_task(runs)
    assert apart == "Not compared with each other, since the content of data.heldout and model.reward differ: a / b / c"
    headlines = re.findall(r'<(h\d) id="\w+-verdict-title">(.*?)</', page)
    assert headlines == [("h2", "2 runs on the same held-out prompts"), ("h2", "Reward rose")]
    assert len(parsed.all("h1")) == 1
    assert {radio["name"] for radio in parsed.all("input")} == {"task0-axis", "task1-axis"}


def test_a_sum_of_one_reward_is_not_shown_twice(tmp_path):
    (tmp_path / "report").mkdir()
    entry = {"file": "1.png", "image": 1, "prompt": "a", "edited": None, "reason": "best", "pair": None}
    Image.new("RGB", (8, 8)).save(tmp_path / "report" / "1.png")
    for scores, shown in (
        ({"reward": 0.5, "untrained_reward": 1.0, "redness": 0.5, "shape": 1.0}, ["redness", "shape"]),
        ({"reward": 0.5, "red": 0.3, "blue": 0.2}, ["reward", "red", "blue"]),
    ):
        (tmp_path / "report" / "images.json").write_text(json.dumps({"images": [{**entry, "scores": scores}]}))
        ((image,),) = read_kept(tmp_path, set()).values()
        assert list(image["scores"]) == shown


def test_runs_of_one_name_are_told_apart_and_alike_curves_are_drawn_once():
    rows = [Point({"iterations": n, "images": n}, {"reward/mean": n / 9, "time/iteration_s": 1.0}) for n in range(1, 5)]
    points = [Point({"iterations": n, "images": n}, {"reward": 0.1 * n, "untrained_reward": 0.1 * n}) for n in (0, 4)]
    runs = [RunData(Path(name), {}, {}, rows, points) for name in ("first/run", "second/run")]
    page = render(runs)
    assert re.findall(r'class="key s\d"></span>(.*?)</th>', page) == ["first/run", "second/run"]
    heldout, training = plots(runs)
    assert [heldout.title, training.title] == ["Held-out reward: reward", "Training reward"]
    heights = [re.findall('data-y=".*?"', plot.drawings["images"]) for plot in (heldout, training)]
    assert heights[0] == heights[1]  # rewards of the two are compared by eye


def test_many_runs_have_no_bands_and_their_images_are_folded(tmp_path):
    rows = [Point({"iterations": n}, {"reward/mean": n / 9, "time/iteration_s": 1.0}) for n in range(1, 5)]
    points = [Point({"iterations": n}, {"reward": 0.1 * n}) for n in (0, 4)]
    scores = {n: {"reward": [(0.1 * n, 1), (0.2 * n, 1)]} for n in (0, 4)}
    entry = {"file": "1.png", "image": 1, "prompt": "a", "edited": None, "reason": "best", "pair": None, "scores": {}}
    for name in "abcd":
        (tmp_path / name / "report").mkdir(parents=True)
        Image.new("RGB", (8, 8), (ord(name), 0, 0)).save(tmp_path / name / "report" / "1.png")
        (tmp_path / name / "report" / "images.json").write_text(json.dumps({"images": [entry]}))
    for count, has_band, opened in ((2, True, 2), (4, False, 0)):
        runs = [RunData(tmp_path / name, {}, {}, rows, points, scores) for name in "abcd"[:count]]
        assert [plot.has_band for plot in plots(runs)] == [has_band, False]
        page = render(runs)
        assert ("the band is" in page) == has_band
        assert page.count("<details open>") == opened
        assert page.count("<summary>a</summary>") == 1
