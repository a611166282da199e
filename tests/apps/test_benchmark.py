"""``lightning eval --benchmark``: presets, prompts, comparable rows, and evaluations that continue."""

import json
import math
import os
import re
import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import evaluate, run
from fault_server import FaultServer, close_midway
from helpers import make_data, make_module, make_trainer
from PIL import Image
from safetensors.torch import load_file
from saved_runs import assert_one_line

from lit_vgrpo.apps.benchmark.result import by_task, results
from lit_vgrpo.apps.benchmark.scores import Subject
from lit_vgrpo.callbacks import Benchmark
from lit_vgrpo.cli.benchmark import _subjects
from lit_vgrpo.data.benchmark import Paper, differences, read_benchmark
from lit_vgrpo.data.benchmark_prompts import TASK, read_rows
from lit_vgrpo.errors import UserError
from lit_vgrpo.options import Evaluate
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.report.page import write_report
from lit_vgrpo.system.paths import shipped
from lit_vgrpo.training.resume_guard import hashed

SIZE = ["height=32", "width=32"]
NAMES = "dpg drawbench gedit geneval geneval2 hpdv2 imgedit ocr partiprompts pickapic t2i_compbench"
PROMPTS = b"a cat\na dog\na bird\n"
PRESET = f"""
title: Mine
prompts:
  base: ADDRESS/{{revision}}/
  revision: abc
  files: {{mine.txt: {sha256(PROMPTS).hexdigest()}}}
  licence: MIT
images_per_prompt: 2
height: 16
width: 16
steps: 1
guidance: 1.0
reward: JPEGCompressibility
papers: [{{name: Paper, protocol: {{prompts: 3, steps: 1}}}}]
"""


def preset(address="http://127.0.0.1:9"):
    Path("mine.yaml").write_text(PRESET.replace("ADDRESS", address))
    Path("mine.txt").write_bytes(PROMPTS)
    return read_benchmark("mine.yaml")


@pytest.fixture
def cache(here, monkeypatch):
    """An empty hub cache and an empty working directory, with a network."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(here / "hf"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return here


def test_a_preset_of_your_own_needs_no_paper(cache):
    preset()
    file, text = Path("mine.yaml"), Path("mine.yaml").read_text()
    file.write_text(re.sub("papers: .*", "", text))
    assert read_benchmark("mine.yaml").papers == []
    file.write_text(text.replace("steps: 1\n", ""))
    with pytest.raises(UserError, match="^The benchmark mine lacks steps. Add steps: VALUE to mine.yaml"):
        read_benchmark("mine.yaml")


def test_every_preset_is_small_and_names_its_source():
    assert sorted(shipped("benchmarks")) == NAMES.split()
    for name, file in shipped("benchmarks").items():
        benchmark = read_benchmark(name)
        assert len(file.read_text().splitlines()) < 30
        assert len(benchmark.prompts.revision) == 40
        assert benchmark.prompts.revision in benchmark.prompts.address
        assert name == "hpdv2" or all(len(digest) == 64 for digest in benchmark.prompts.files.values())
        assert set(benchmark.scale) <= set(benchmark.build_reward().part_names)
        for paper in benchmark.papers:
            assert paper.never or paper.protocol.keys() <= benchmark.protocol(1, "euler").keys()
    geneval = read_benchmark("geneval")
    protocol = geneval.protocol(553, "euler")
    assert [bool(differences(paper, geneval, [protocol])) for paper in geneval.papers] == [False, True, True]


def test_a_row_may_be_compared_only_if_all_stated_parts_agree(cache):
    benchmark = preset()
    paper, ours = benchmark.papers[0], benchmark.protocol(3, "euler")
    assert differences(paper, benchmark, [ours]) == []
    assert differences(paper, benchmark, [ours, {**ours, "prompts": 2}]) == ["prompts 2 instead of 3"]
    sized = Paper(name="P", protocol={"height": None})
    assert differences(sized, benchmark, [ours]) == ["height 16 instead of the default"]
    assert differences(Paper(name="P", never="people"), benchmark, [ours]) == ["people"]
    other = read_benchmark("mine.yaml", ["reward=PickScore", "reward.device=cpu"])
    assert differences(paper, other, [ours]) == ["another scorer: reward=PickScore"]


def test_the_mean_of_tasks_is_not_that_of_images():
    values, prompts = np.array([1.0, 1.0, 1.0, math.nan, 0.0, 0.0]), np.array([0, 0, 1, 1, 2, 3])
    tasks = ["a"] * 4 + ["b"] * 2
    found = by_task(values, prompts, tasks, "tasks")
    assert found["overall"] == {"mean": 0.5, "low": 0.5, "high": 0.5, "count": 5, "failed": 1}
    assert by_task(values[:5], prompts[:5], tasks[:5])["b"]["low"] is None, "one prompt has no interval"
    assert by_task(values, prompts, tasks)["overall"]["mean"] == 0.6
    # whole prompts are resampled: two prompts that differ give every mean from 0 to 1
    one = by_task(np.repeat([0.0, 1.0], 8), np.repeat([0, 1], 8), ["a"] * 16)
    assert (one["overall"]["low"], one["overall"]["high"]) == (0.0, 1.0)
    assert by_task(np.full(2, math.nan), np.arange(2), ["a", "b"])["overall"]["mean"] is None


def test_a_failed_retry_keeps_the_scores(tmp_path):
    one = Subject("one", {}, "dpm++", Policy, tmp_path, stem="x")
    lines = [{"images": [0, 1], "scores": {"r": values}, "errors": {}} for values in ([0.5, None], [None, 0.7])]
    for name, line in zip(("x-1of2.jsonl", "x-2of2.jsonl"), lines, strict=True):
        (tmp_path / name).write_text(json.dumps(line))
    one.read()
    assert one.scores == {0: {"r": 0.5}, 1: {"r": 0.7}}


def test_changed_code_of_a_reward_is_another_scorer(cache):
    preset()
    benchmark = read_benchmark("mine.yaml", ["reward=python:mine_to_edit:score"])
    stems = []
    for text in ("one", "one", "two"):
        Path("mine_to_edit.py").write_text(f"def score(images, prompts):\n    return '{text}'\n")
        subject = Subject("one", {}, "dpm++", Policy, cache)
        subject.set_stem(benchmark, [], hashed(benchmark.build_reward()))
        stems.append(subject.stem)
    assert stems[0] == stems[1] != stems[2]


def test_a_repeated_prompt_is_one_prompt_for_the_intervals(cache):
    rows = [{"prompt": prompt, TASK: "a"} for prompt in ("one", "two") * 3]
    scores = {image: {"r": image // 2 % 2 + image // 2 / 10} for image in range(12)}
    (found,) = results(preset(), rows, [Subject("one", {}, "dpm++", Policy, cache, scores)])["scores"].values()
    assert (found["r"]["overall"]["low"], found["r"]["overall"]["high"]) == pytest.approx((0.2, 1.3))


def test_prompts_are_downloaded_once_and_verified(cache):
    with FaultServer(pages={"/abc/mine.txt": (200, PROMPTS)}) as server:
        benchmark = preset(server.address)
        assert [row["prompt"] for row in read_rows(benchmark)] == ["a cat", "a dog", "a bird"]
        server.pages.clear()
        assert len(read_rows(benchmark)) == 3, "the second time from the cache"
    file = next((cache / "hf").rglob("mine.txt"))
    file.write_bytes(PROMPTS[:7])
    with pytest.raises(UserError, match="it has 7 bytes and the SHA-256 .* it was truncated or changed."):
        read_rows(benchmark)
    assert not file.exists(), "the next call downloads it again"


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ((200, PROMPTS[:9]), "it has 9 bytes and the SHA-256 "),
        (close_midway, "peer closed connection"),
        ((404, b""), "404"),
        (None, "HF_HUB_OFFLINE is set"),
    ],
)
def test_a_failed_download_leaves_nothing_and_says_what_to_run(cache, monkeypatch, page, reason):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", page is None)
    with FaultServer(pages={"/abc/mine.txt": page}) as server:
        benchmark = preset(server.address)
        with pytest.raises(UserError) as error:
            read_rows(benchmark)
    (line,) = error.value.errors
    assert reason in line
    download = f"curl -fL --create-dirs --output-dir FOLDER -O '{server.address}/abc/mine.txt'"
    assert line.endswith(f"{download}; add --prompts FOLDER/mine.txt")
    assert not [path for path in (cache / "hf").rglob("*") if path.is_file()]


def test_rows_of_every_format_have_their_task(cache):
    def rows(name, text, **prompts):
        benchmark = preset()
        Path(name).write_text(text)
        changed = {"files": {name: None}, **prompts}
        benchmark = benchmark.model_copy(update={"prompts": benchmark.prompts.model_copy(update=changed)})
        return [(row["prompt"], row[TASK]) for row in read_rows(benchmark, Path(name))]

    assert rows("a.txt", "x\n\nx\ny\n", distinct=True) == [("x", "all"), ("y", "all")]
    assert rows("a.jsonl", '{"prompt": "x", "tag": 3}\n', task="tag") == [("x", "3")]
    assert rows("a.tsv", 'P\tC\nsay "hi"\tb\n', prompt="P", task="C") == [('say "hi"', "b")]
    assert rows("b.json", '["x", "y"]', task="file") == [("x", "b"), ("y", "b")]
    assert rows("c.json", '{"1": {"prompt": "x"}}') == [("x", "all")]
    with pytest.raises(UserError, match='c.json row 1 has no prompt in its field "Q"'):
        rows("c.json", '{"1": {"prompt": "x"}}', prompt="Q")


def test_pictures_get_the_size_of_the_images(cache):
    benchmark = preset()
    Path("rows.json").write_text(json.dumps([{"prompt": "x", "id": "sub/a.jpg"}]))
    changed = {"files": {"rows.json": None}, "picture": "id", "get_pictures": "Run: get them"}
    benchmark = benchmark.model_copy(update={"prompts": benchmark.prompts.model_copy(update=changed)})
    with pytest.raises(UserError, match="mine edits pictures. Run: get them; then add --pictures FOLDER."):
        read_rows(benchmark, Path("rows.json"))
    with pytest.raises(UserError, match="pics/sub/a.jpg does not exist. Run: get them"):
        read_rows(benchmark, Path("rows.json"), Path("pics"))
    Path("pics/sub").mkdir(parents=True)
    pixels = np.zeros((20, 40, 3), dtype=np.uint8)
    pixels[:, 10:30] = 255
    Image.fromarray(pixels).save("pics/sub/a.jpg", quality=95)
    (row,) = read_rows(benchmark, Path("rows.json"), Path("pics"))
    with Image.open(row["image"]) as picture:
        assert picture.size == (16, 16)
        assert np.asarray(picture).min() > 200, "cropped around the centre"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--benchmark=genevals"], "genevals is not a benchmark. Use one of: dpg, drawbench, gedit, geneval, "),
        (["--benchmark=geneval", "step=3"], "step is not an option of the benchmark geneval. Did you mean steps?"),
        (["--benchmark=geneval", "steps=0"], "geneval: steps: Input should be greater than 0, not 0."),
        (["--benchmark=geneval", "--share=3/2"], "--share 3/2 is not a share. Write --share 2/8 "),
        (["--benchmark=geneval", "--features=x"], "--features has no effect with --benchmark NAME."),
        (["--share=1/2"], "--share has no effect without --benchmark NAME."),
        (["--benchmark=imgedit"], "imgedit edits pictures, but shipped:assets/tiny_sd3 is of SD3Policy, which "),
        (["--benchmark=geneval", "solver=ddim"], "solver=ddim is not one of SD3Policy. Use one of: euler, dpm++, "),
        (["--benchmark=geneval"], "model.policy.height and width of shipped:assets/tiny_sd3 are at most 32 pixels."),
        (["--benchmark=geneval", *SIZE, "--prompts=x"], "--prompts x has no file evaluation_metadata.jsonl."),
        (["--benchmark=hpdv2", *SIZE], "HF_HUB_OFFLINE is set. With a network, run: curl "),
    ],
)
def test_mistakes_are_one_line(here, monkeypatch, capsys, words, line):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(here))
    assert_one_line(evaluate, ["shipped:assets/tiny_sd3", *words], capsys, line)
    assert not any(here.iterdir())


def test_a_missing_scorer_has_its_command(cache, monkeypatch, capsys):
    preset()
    monkeypatch.setattr("lit_vgrpo.rewards.model.find_spec", lambda name: None)
    words = ["shipped:assets/tiny_sd3", "--benchmark=mine.yaml", "--prompts=mine.txt", "reward=HPSv2"]
    assert_one_line(evaluate, words, capsys, 'HPSv2 needs open_clip. Run: pip install "lit-vgrpo[hps]"')


def scores(folder="benchmarks"):
    """The result and the files of scores, all of one evaluation."""
    (report,) = Path(folder).glob("*.json")
    return json.loads(report.read_text()), sorted(Path(folder).glob("*.jsonl"))


STOPS = """
from pathlib import Path
def score(images, prompts):
    with Path('calls').open('a') as file:
        print(len(images), file=file)
    if Path('stop').exists() and Path('calls').read_text().count('\\n') == 3:
        raise KeyboardInterrupt
    return images.mean((1, 2, 3))
"""


@pytest.mark.slow
def test_two_models_in_one_table_and_an_interrupted_evaluation_continues(cache, capsys):
    preset()
    Path("stops.py").write_text(STOPS)
    words = ["--benchmark=mine.yaml", "--prompts=mine.txt", "batch_size=2", "reward=python:stops:score"]
    models = ["shipped:assets/tiny_sd3", "shipped:assets/tiny_ocr"]
    assert evaluate([*models, *words, "--out=whole/r.json"]) == 0
    whole, _ = scores("whole")
    for file in Path("benchmarks").iterdir():
        file.unlink()
    Path("calls").unlink()
    Path("stop").touch()
    assert evaluate([*models, *words]) == 130
    assert "Scores so far are kept: run the same command to continue." in capsys.readouterr().err
    (kept,) = Path("benchmarks").iterdir()
    with kept.open("a") as file:
        file.write('{"images": [4, ')  # a process that was killed while it wrote
    Path("stop").unlink()
    assert evaluate([*models, *words]) == 0
    assert len(Path("calls").read_text().splitlines()) == 3 + 4, "two of six batches are not sampled again"
    report, files = scores()
    assert report == whole
    assert len(files) == 2
    labels = list(report["scores"])
    assert labels == ["tiny_sd3", "tiny_ocr"]
    first, second = (report["scores"][label]["score"]["overall"] for label in labels)
    paired = report["differences"]["tiny_ocr"]["score"]["overall"]
    assert paired["mean"] == pytest.approx(second["mean"] - first["mean"])
    assert first["count"] == 6
    assert report["papers"] == {"Paper": ["another scorer: reward=python:stops:score"]}
    text = next(Path("benchmarks").glob("*.md")).read_text()
    for part in ("tiny_ocr minus tiny_sd3", "images_per_prompt | 2", "- Paper: no: another scorer", "seed 0"):
        assert part in text
    # the same images in two shares, scored by as many processes
    for file in files:
        file.unlink()
    for share in ("1/2", "2/2"):
        assert evaluate([models[0], *words, f"--share={share}"]) == 0
    calls = Path("calls").read_text()
    assert evaluate([models[0], *words, "--out=shared/r.json"]) == 0
    assert Path("calls").read_text() == calls
    assert scores("shared")[0]["scores"]["tiny_sd3"]["score"]["overall"]["count"] == 6


def test_models_of_the_same_name_have_a_column_each(cache, tiny_sd3):
    preset()
    for place in ("a", "b"):
        shutil.copytree(tiny_sd3, cache / place / "tiny")
    assert evaluate(["a/tiny", "b/tiny", "--benchmark=mine.yaml", "--prompts=mine.txt"]) == 0
    assert list(scores()[0]["scores"]) == ["a/tiny", "b/tiny"]


def test_a_changed_model_folder_is_another_model(cache, tiny_sd3):
    """Its weights, in both formats, its configurations and those behind links; the results may lie in it."""
    preset()
    shutil.copytree(tiny_sd3, "model")
    shutil.move("model/vae", "vae")
    Path("model/vae").symlink_to("../vae")
    weights = Path("model/transformer/diffusion_pytorch_model.safetensors")
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()

    def version():
        (subject,) = _subjects("model", "model", read_benchmark("mine.yaml"), [], Evaluate(words=[]))
        return subject.identity["version"]

    versions = [version()]
    for name in ("transformer/diffusion_pytorch_model.bin", "scheduler/scheduler_config.json", "vae/config.json"):
        os.utime(f"model/{name}", ns=(1, 1))
        versions.append(version())
        assert versions[-1] not in versions[:-1], name
    Path("model/vae/lost.json").symlink_to("nowhere")
    for name in ("benchmarks/mine.json", "README.md"):
        Path("model", name).parent.mkdir(exist_ok=True)
        Path("model", name).touch()
    assert version() == versions[-1]


def test_a_callback_serves_the_run_it_is_in_and_only_one_of_a_name(cache, tiny_sd3):
    preset()
    one, other = (Benchmark("mine.yaml", prompt_file="mine.txt") for _ in range(2))
    for module in (make_module(tiny_sd3), make_module(tiny_sd3)):
        make_trainer(cache, 1, [one]).validate(module, datamodule=make_data(), verbose=False)
        assert one._evaluator.policy is module.policy
    with pytest.raises(ValueError, match="Two Benchmark callbacks log heldout/mine"):
        make_trainer(cache, 1, [one, other]).fit(make_module(tiny_sd3), datamodule=make_data())


@pytest.mark.slow
def test_a_run_is_scored_while_it_trains_and_afterwards(cache, tiny_recipe):
    rows = [{"prompt": "a red circle", "tag": "one"}, {"prompt": "a blue square", "tag": "two"}]
    Path("mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    preset()
    digest = sha256(Path("mine.jsonl").read_bytes()).hexdigest()
    files = f"files: {{mine.jsonl: {digest}}}\n  task: tag"
    Path("mine.yaml").write_text(re.sub("files: {.*}", files, Path("mine.yaml").read_text()))
    callback = {"class_path": "Benchmark", "init_args": {"name": "mine.yaml", "prompt_file": "mine.jsonl"}}
    words = [f"trainer.callbacks=[{json.dumps(callback)}]", "run_dir=r", "trainer.max_epochs=4"]
    assert run([str(tiny_recipe), *words]) == 0
    summary = json.loads(Path("r/summary.json").read_text())
    for when in ("heldout_metrics_start", "heldout_metrics_end"):
        values = {name: value for name, value in summary[when].items() if name.startswith("mine/")}
        assert list(values) == ["mine/overall", "mine/one", "mine/two"]
        assert values["mine/overall"] == pytest.approx((values["mine/one"] + values["mine/two"]) / 2)
    words = ["--benchmark=mine.yaml", "--prompts=mine.jsonl", "--reference", "height=null", "width=null"]
    assert evaluate(["r", *words]) == 0
    report, _ = scores("r/benchmarks")
    assert list(report["scores"]) == ["r trained", "r reference"]
    assert "content" in report["models"]["r trained"]
    assert "base" in report["models"]["r reference"], "other weights are other images"
    assert list(report["scores"]["r trained"]["jpeg"]) == ["overall", "one", "two"]
    write_report(Path("r"), Path("page.html"))
    page = Path("page.html").read_text()
    for part in ("Held-out prompts of mine", "mine/one", 'id="benchmarks"', "r reference minus r trained", "jpeg: two"):
        assert part in page
