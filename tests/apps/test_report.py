"""``lightning report``: the page of a run, and of several, from what is in their folders."""

import base64
import io
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from commands import report
from PIL import Image
from saved_runs import assert_one_line, folder_with, train

from lit_vgrpo.apps.report import wording
from lit_vgrpo.apps.report.command import read_runs
from lit_vgrpo.apps.report.kept import read_scores
from lit_vgrpo.apps.report.run_data import read_run
from lit_vgrpo.apps.report.verdict import Verdict

EVIL = 'a red circle <script>alert(1)</script> & "quotes" on the left'
RECIPE = """
seed_everything: 7
trainer:
  max_epochs: 4
  check_val_every_n_epoch: 2
  accelerator: cpu
  devices: 1
  callbacks:
    - {class_path: SampleGrid, init_args: {num_prompts: 2, images_per_prompt: 1, every_n_iterations: 2}}
model:
  policy: {class_path: SD3Policy, init_args: {checkpoint: CHECKPOINT, max_sequence_length: 1}}
  objective: {class_path: VGRPO, init_args: {num_mc_samples: 2, rollout: {steps: 2}}}
  reward:
    class_path: Weighted
    init_args: {rewards: [helpers.Brightness, JPEGCompressibility], weights: [1, 0.01]}
  optimizer: {lr: 1.0e-2}
data:
  train: train.txt
  heldout: heldout.txt
  heldout_images_per_prompt: 3
  prompts_per_iteration: 2
  group_size: 2
  micro_batch_size: 4
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
        Path("heldout.txt").write_text(f"a green circle on the right\n{EVIL}\n")
        train()
        train("name=other", "model.optimizer.lr=1e-3", "trainer.max_epochs=3")
        train("name=blind", "data.heldout=null", "trainer.max_epochs=1", "trainer.callbacks=[]")
    return place


@pytest.fixture
def inside(trained, tmp_path, monkeypatch):
    """A copy of it as the working directory."""
    shutil.copytree(trained / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)


def summary(name="tiny"):
    return json.loads(Path(f"runs/{name}/summary.json").read_text())


# --- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["tiny"], ["tiny", "other"]])
def test_a_page_needs_nothing_else_and_is_accessible(inside, names, capsys):
    assert report([*(f"runs/{name}" for name in names), "--out=page.html"]) == 0
    assert "Written: page.html" in capsys.readouterr().out
    page, raw = Parsed("page.html"), Path("page.html").read_text()
    assert len(raw) < 5e6
    assert "://" not in raw
    assert all(image["alt"].strip() and image["src"].startswith("data:image/") for image in page.all("img"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [link["href"] for link in page.all("a")]
    assert links
    assert {link.removeprefix("#") for link in links} <= set(ids)
    assert {found for found in re.findall(r'aria-labelledby="(.*?)"', raw)} <= set(ids)
    assert {label.get("for") for label in page.all("label")} - {None} <= set(ids)
    for tag, attributes in page.tags:
        assert not {"src", "href"} & set(attributes) or tag in ("img", "a", "link", "use")
        assert not [name for name in attributes if name.startswith("on")]
    assert len(page.all("h1")) == 1


def test_the_numbers_are_those_of_the_summary(inside):
    assert report(["runs/tiny"]) == 0
    text, found = Parsed("runs/tiny/report.html").text, summary()
    start, end = (wording.reward(found[f"heldout_reward_{when}"]) for when in ("start", "end"))
    assert f"from {start} [" in text
    assert f"to {end} [" in text
    for value in found["reward_parts_end"].values():
        assert wording.reward(value) in text
    passes = found["evaluations"][-1]["passes"]
    for number in (found["images"], passes, found["optimizer_steps"]):
        assert wording.amount(number) in text
    assert wording.duration(found["train_seconds"]) in text
    for version in found["versions"].values():
        assert version in text
    assert found["device"] in text
    run = read_run(Path("runs/tiny"))
    assert [point.iteration for point in run.evaluations] == [e["iteration"] for e in found["evaluations"]]
    assert [point.metrics["reward"] for point in run.evaluations] == [e["reward"] for e in found["evaluations"]]


def test_the_intervals_are_of_the_prompts_and_hold_the_means(inside):
    run = read_run(Path("runs/tiny"))
    for change in Verdict(run).changes:
        for mean, found in zip((change.start, change.end), change.intervals, strict=True):
            assert found.mean == pytest.approx(mean, rel=1e-4)
            assert found.low <= found.mean <= found.high
        assert change.difference.mean == pytest.approx(change.change, abs=1e-4 * abs(change.end) + 1e-6)
    scores = read_scores(Path("runs/tiny"))
    assert list(scores) == [0, 2, 4]
    assert [count for _, count in scores[4]["reward"]] == [3, 3]


def test_pictures_are_the_cells_of_the_sample_grids(inside):
    assert report(["runs/tiny"]) == 0
    page = Parsed("runs/tiny/report.html")
    pictures = [image["alt"] for image in page.all("img") if "data-stage" in image]
    stages = ["reference", "start", "iteration 2", "end"]
    prompts = ["a green circle on the right", EVIL]
    assert sorted(pictures) == sorted(f"{stage}: {prompt}" for stage in stages for prompt in prompts)
    assert page.all("input")[0]["aria-valuetext"] == "end"
    with Image.open("runs/tiny/samples/after.png") as sheet:
        layout = json.loads(sheet.info["layout"])
        left, top = layout["left"][1], layout["top"][0]
        expected = sheet.convert("RGB").getpixel((left + 1, top + 1))
    source = next(image["src"] for image in page.all("img") if image["alt"].startswith("end: a green"))
    with Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))) as cell:
        assert cell.size == (layout["size"][0] // layout["zoom"], layout["size"][1] // layout["zoom"])
        assert cell.convert("RGB").getpixel((0, 0)) == expected


def test_pictures_to_edit_are_shown_beside_their_prompt(trained, monkeypatch, flux_folder):
    monkeypatch.chdir(trained)
    rows = [{"prompt": "make it green", "image": f"{colour}.png"} for colour in ("red", "blue")]
    for row in rows:
        Image.new("RGB", (32, 32), row["image"][:-4]).save(row["image"])
    Path("edits.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = f"{{checkpoint: {flux_folder(False, True)}, max_sequence_length: 8, height: 32, width: 32}}"
    data = ["data.train=edits.jsonl", "data.heldout=edits.jsonl", "data.heldout_images_per_prompt=2"]
    policy = f"model.policy={{class_path: KontextPolicy, init_args: {options}}}"
    train("name=edits", policy, *data, "trainer.max_epochs=2", "trainer.callbacks+=Report")
    page, shown = Parsed("runs/edits/report.html"), {}
    for image in page.all("img"):
        if image["alt"] == "Picture to edit: make it green":
            with Image.open(io.BytesIO(base64.b64decode(image["src"].partition(",")[2]))) as picture:
                assert picture.size == (32, 32)
                shown.setdefault(picture.convert("RGB").getpixel((5, 5)), []).append(image)
    cards = len(rows) + len(json.loads(Path("runs/edits/report/images.json").read_text())["images"])
    assert sum(map(len, shown.values())) == cards
    assert shown.keys() == {(255, 0, 0), (0, 0, 255)}
    # one prompt with two pictures is two prompts for the intervals too
    assert [count for _, count in read_scores(Path("runs/edits"))[2]["reward"]] == [2, 2]


def test_what_prompts_say_is_text(inside):
    assert report(["runs/tiny"]) == 0
    raw, page = Path("runs/tiny/report.html").read_text(), Parsed("runs/tiny/report.html")
    assert "<script>alert" not in raw
    assert EVIL in page.text
    assert len(page.all("script")) == 1


def test_the_best_and_the_worst_image_are_shown_with_their_scores(inside):
    table = json.loads(Path("runs/tiny/report/images.json").read_text())
    assert table["iteration"] == 4
    assert table["of"] == 6
    best, worst = ([entry for entry in table["images"] if entry["reason"] == reason] for reason in ("best", "worst"))
    assert min(e["scores"]["reward"] for e in best) >= max(e["scores"]["reward"] for e in worst)
    assert {path.name for path in Path("runs/tiny/report").glob("*.png")} == {e["file"] for e in table["images"]}
    assert report(["runs/tiny"]) == 0
    text = Parsed("runs/tiny/report.html").text
    assert "Best" in text
    assert all(wording.reward(score) in text for score in best[0]["scores"].values())


def test_curves_are_drawn_against_every_cost(inside):
    assert report(["runs/tiny"]) == 0
    page = Parsed("runs/tiny/report.html")
    assert [radio["value"] for radio in page.all("input") if radio["type"] == "radio"] == [
        "iterations",
        "images",
        "seconds",
        "passes",
    ]
    drawings = [tag for tag in page.all("div") if tag.get("class") == "drawing"]
    assert len(drawings) >= 4 * 6
    assert len(drawings) % 4 == 0
    assert all(tag["role"] == "img" and tag["aria-label"] for tag in drawings)
    titles = Path("runs/tiny/report.html").read_text()
    for title in ("Held-out reward", "Training reward", "Probability ratio", "Gradient norm"):
        assert f"<h3>{title}</h3>" in titles
    assert "<h3>Clipped</h3>" not in titles  # nothing was: its curve is 0 throughout


def test_several_runs_are_side_by_side(inside):
    assert report(["runs/tiny", "runs/other"]) == 0
    page = Parsed("report.html")
    for name in ("tiny", "other"):
        assert wording.reward(summary(name)["heldout_reward_end"]) in page.text
    assert "Settings in which the runs differ" in page.text
    assert "model.optimizer.lr" in page.text
    assert "0.01" in page.text
    assert "0.001" in page.text
    assert "Resume" in page.text


# --- runs that did not end well --------------------------------------------------------------------------------------


def cut_off(run):
    """Leave what a kill in the fourth iteration leaves: no summary, no picture of the end, a row that is cut off."""
    (run / "summary.json").unlink()
    (run / "samples" / "after.png").unlink()
    table = run / "metrics.csv"
    rows = table.read_text().splitlines(keepends=True)
    table.write_text("".join(rows[:-1]) + rows[-1][: len(rows[-1]) // 2])
    scores = run / "report" / "scores.jsonl"
    scores.write_text(scores.read_text()[:-20])


def test_a_killed_run_has_a_report(inside):
    cut_off(Path("runs/tiny"))
    assert report(["runs/tiny"]) == 0
    text = Parsed("runs/tiny/report.html").text
    assert "still running, or was killed" in text
    assert "after 4 iterations" in text  # the row of the evaluation says so; that of the training is cut off


def test_the_summary_of_an_earlier_part_of_a_resumed_run_does_not_count(inside):
    path = Path("runs/tiny/summary.json")
    path.write_text(json.dumps({**summary(), "iterations": 2, "outcome": "interrupted", "images": 1}))
    run = read_run(Path("runs/tiny"))
    assert run.summary == {}
    assert run.total("images") == 16
    assert run.num_iterations == 4


def test_a_repeated_evaluation_replaces_those_after_it(inside):
    file = Path("runs/tiny/report/scores.jsonl")
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines, lines[1]]) + "\n")
    assert list(read_scores(Path("runs/tiny"))) == [0, 2]


def test_a_run_of_another_version_has_a_page_without_images(inside):
    shutil.rmtree("runs/tiny/report")
    for path in Path("runs/tiny/samples").glob("*.png"):
        with Image.open(path) as image:
            image.load()
        image.save(path)  # without the layout
    assert report(["runs/tiny"]) == 0
    page = Parsed("runs/tiny/report.html")
    assert [image["class"] for image in page.all("img")] == ["grid"]
    assert "Without intervals" in page.text


def test_damaged_images_are_left_out(inside):
    Path("runs/tiny/samples/before.png").write_bytes(b"not a picture")
    Path("runs/tiny/report/images.json").write_text("[1")
    assert report(["runs/tiny"]) == 0
    assert "start" not in [image.get("data-stage") for image in Parsed("runs/tiny/report.html").all("img")]


# --- mistakes --------------------------------------------------------------------------------------------------------


def test_what_is_no_run_is_refused(inside, capsys):
    Path("empty").mkdir()
    assert_one_line(report, ["empty"], capsys, "empty is not a run folder: it has no config.yaml")
    assert_one_line(report, ["runs/tinny"], capsys, "Did you mean")
    assert_one_line(report, ["--out=a.html"], capsys, "No run given")
    assert_one_line(report, ["runs/tiny", "a=b"], capsys, "a=b has no effect on a report")
    assert_one_line(report, ["runs/tiny", "--port=1"], capsys, "--port has no effect without --serve")


def test_a_run_without_evaluations_is_refused_and_keeps_its_own_page(inside, capsys):
    before = Path("runs/blind/report.html").read_text()
    assert "No held-out evaluation yet after 1 iteration" in before
    assert_one_line(
        report, ["runs/blind"], capsys, "runs/blind has no held-out evaluation yet. Train with data.heldout="
    )
    assert Path("runs/blind/report.html").read_text() == before


def test_runs_of_different_tasks_are_refused(inside, capsys):
    config = Path("runs/other/config.yaml")
    config.write_text(config.read_text().replace("heldout: heldout.txt", "heldout: others.txt"))
    line = (
        "runs/tiny and runs/other are different tasks: data.heldout is heldout.txt in the first and others.txt in the"
    )
    assert_one_line(report, ["runs/tiny", "runs/other"], capsys, line)
    assert not Path("report.html").exists()
    assert_one_line(report, ["runs/tiny", "runs/tiny/"], capsys, "given twice")


def test_another_file_is_not_overwritten(inside, capsys):
    Path("notes.html").write_text("mine")
    assert_one_line(report, ["runs/tiny", "--out=notes.html"], capsys, "notes.html exists and is not a report")
    assert Path("notes.html").read_text() == "mine"
    assert_one_line(report, ["runs/tiny", "--out=runs"], capsys, "--out runs is a folder")
    assert_one_line(report, ["runs/tiny", "--out=no/page.html"], capsys, "in no folder that exists")
    assert report(["runs/tiny", "--out=new.html"]) == 0
    assert report(["runs/tiny", "--out=new.html"]) == 0


def test_a_damaged_table_is_refused(inside, capsys):
    Path("runs/tiny/metrics.csv").write_text("a,b\n1,2\n")
    assert_one_line(report, ["runs/tiny"], capsys, "metrics.csv is not a run's table")
    assert len(read_runs([Path("runs/other")])) == 1
