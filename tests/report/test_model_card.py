"""The model card that every export carries: what hubs read in its head, and what people read below."""

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from commands import export, run
from diffusers import DiffusionPipeline

from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.policies import KontextPolicy
from lit_vgrpo.report import verdict
from lit_vgrpo.report.model_card import LICENCE_KEYS, base_licence, card, loading_lines, sample_lines, without_places
from lit_vgrpo.report.run_data import differences, read_run, without_secrets
from lit_vgrpo.system.hub import local_folder
from lit_vgrpo.training.checkpoint_file import read, write

CALLBACKS = "[EMA, Export, {class_path: SampleGrid, init_args: {num_prompts: 1, images_per_prompt: 1}}]"


SHOWN = {
    "folders": [],
    "what": "LoRA of rank 4",
    "variant": "EMA",
    "iterations": 3,
    "lines": ["pipe"],
    "has_picture": False,
}


def head_and_text(path):
    _, head, text = Path(path).read_text().split("---\n", 2)
    return yaml.safe_load(head), text


@pytest.mark.slow
def test_exports_have_cards_with_the_numbers_of_their_time(tiny_recipe, capsys):
    assert run(["tiny.yaml", "trainer.max_epochs=1", "trainer.callbacks=[EMA]"]) == 0
    Path("first.ckpt").write_bytes(Path("runs/tiny/checkpoints/last.ckpt").read_bytes())
    first = json.loads(Path("runs/tiny/summary.json").read_text())
    assert run(["runs/tiny/config.yaml", "--resume", "trainer.max_epochs=2", f"trainer.callbacks={CALLBACKS}"]) == 0
    assert export(["runs/tiny", "--to=out"]) == 0
    code = capsys.readouterr().out
    assert re.search(r" after 2 iterations: \S+ \[.+\] \(EMA weights\)\.", code)
    assert "Measured on the averaged weights (EMA)" in Path("runs/tiny/report.html").read_text()
    end = json.loads(Path("runs/tiny/summary.json").read_text())
    for folder in (Path("runs/tiny/export"), Path("out")):
        head, text = head_and_text(folder / "README.md")
        assert head["tags"] == ["text-to-image", "reinforcement-learning", "lit-vgrpo"]
        assert "base_model" not in head  # a folder of this machine is no name on a hub
        assert "EMA weights after 2 iterations" in text
        assert f"to {verdict.score(end['heldout_reward_end'])} [" in text
        assert f"**Did it cheat?** {end['did_it_cheat']['words']}" in text
        assert "VGRPO" in text
        link = r"\n- \*\*Rewards:\*\* \w+ \(JPEGCompressibility\)\n- \*\*Recipe:\*\* \[recipe.yaml\]\(recipe.yaml\)\n"
        assert re.search(link, text)
        assert text.count("\n") < 70
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
        assert recipe["trainer"]["max_epochs"] == 2
        assert {"run_dir", "name", "found_in"}.isdisjoint(recipe)
        assert (folder / "before_after.png").read_bytes() == Path("runs/tiny/samples/after.png").read_bytes()
    lines = text.partition("````python\n")[2].partition("````")[0]
    assert lines.strip() in code
    found = {}
    exec(lines, found)
    assert isinstance(found["pipe"], DiffusionPipeline)

    assert export(["runs/tiny", "--to=early", "--checkpoint=first.ckpt"]) == 0
    _, text = head_and_text("early/README.md")
    assert "after 1 iteration," in text
    assert verdict.score(first["heldout_reward_end"]) in text
    assert not Path("early/before_after.png").exists()

    torn = read(Path("runs/tiny/checkpoints/last.ckpt"))
    torn["lit_vgrpo"]["iteration"] = {"image_ids": []}  # in the middle of one
    write(torn, Path("torn.ckpt"))
    for number, options in enumerate((["--no-ema"], ["--dtype=bfloat16"], ["--checkpoint=torn.ckpt"])):
        assert export(["runs/tiny", f"--to=other{number}", *options]) == 0
        _, text = head_and_text(f"other{number}/README.md")
        assert "weights after 2 iterations" in text
        assert "No score was measured on exactly these weights." in text
        assert verdict.score(end["heldout_reward_end"]) not in text
        assert Path(f"other{number}/before_after.png").exists() == (options == ["--dtype=bfloat16"])

    Path("runs/tiny/metrics.csv").write_text("a,b\n1,2\n")
    assert export(["runs/tiny", "--to=bare"]) == 0
    assert "No model card in bare: Cannot read runs/tiny/metrics.csv" in capsys.readouterr().err
    assert {path.name for path in Path("bare").glob("*.*")} == {"model_index.json"}


def test_the_licence_is_that_of_the_base_models_card(tmp_path):
    base = tmp_path / "base.md"
    base.write_text("---\nlicense: mit\nlicense_link: LICENSE.md\ntags: [a]\n---\n# Base\n")
    assert base_licence(base) == {"license": "mit", "license_link": "LICENSE.md"}
    shown = {**SHOWN, "base": "some/model", "task": "text-to-video"}
    (tmp_path / "config.yaml").write_text("model: {objective: VGRPO, reward: JPEGCompressibility}\nname: '````'\n")
    text = card(read_run(tmp_path), base, is_adapter=True, **shown)
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["license"] == "mit"
    assert (head["pipeline_tag"], head["tags"][0]) == ("text-to-video", "text-to-video")
    assert (head["base_model"], head["base_model_relation"]) == ("some/model", "adapter")
    assert "lora" in head["tags"]
    assert text.count("````") == 2
    assert "- **Rewards:** JPEGCompressibility\n" in text
    base.write_text("# no head")
    assert base_licence(base) == {}


BOMB = "".join(f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in pairwise("abcdefghi"))


@pytest.mark.parametrize(
    ("head", "licence"),
    [
        ("license: [mit, apache-2.0]", {"license": ["mit", "apache-2.0"]}),
        ("license:\n- cc-by-4.0\n- mit\nlicense_name: own", {"license": ["cc-by-4.0", "mit"], "license_name": "own"}),
        ("license: {a: b}\nlicense_link: 2024-02-01", {}),
        ("license: mit\n---\nlicense: other", {"license": "mit"}),
        ("license: null", {}),
        ("", {}),
        ("license: mit\ndate: 2024-02-30", None),
        ("license: !!python/object:os.system x", None),
        (f"a: &a [mit]\n{BOMB}license: *i", {}),
        ("[" * 400 + "]" * 400, None),
        ("- a", None),
        ("license: *nowhere", None),
    ],
)
def test_a_licence_that_cannot_be_read_is_unknown_and_said(tmp_path, capsys, head, licence):
    base = tmp_path / "README.md"
    content = f"\ufeff---\n{head}\n---\n# Base\n{'text ' * 99}".replace("\n", "\r\n")
    base.write_text(content, encoding="utf-8", newline="")
    assert base_licence(base) == (licence or {})
    err = capsys.readouterr().err
    assert (err == "") == (licence is not None)
    assert err.count("\n") == (licence is None)
    if licence is None:
        assert err.startswith(f"The base model's licence is not known: {base} cannot be read (")
        assert len(err) < 400 + len(str(base))
    text = card(read_run(tmp_path), base, is_adapter=True, **{**SHOWN, "base": "some/model", "task": "text-to-image"})
    shown = yaml.safe_load(text.split("---\n")[1])
    assert {key: shown[key] for key in LICENCE_KEYS if key in shown} == (licence or {})
    words = [word for value in (licence or {}).values() for word in (value if isinstance(value, list) else [value])]
    assert (", ".join(words) if words else "states no licence, cannot be read, or is not on the machine") in text


@pytest.mark.parametrize("content", [b"---\nlicense: \xff\n---\n", None])
def test_a_card_of_other_bytes_or_without_permission_is_unreadable(tmp_path, capsys, content):
    base = tmp_path / "README.md"
    base.symlink_to(base) if content is None else base.write_bytes(content)
    assert base_licence(base) == {}
    assert "licence is not known" in capsys.readouterr().err


@pytest.mark.slow
def test_nothing_beside_the_weights_keeps_them_from_being_written(tiny_recipe, tiny_sd3, tmp_path, capsys):
    """The base model's card, the sample grid, the run's tables and the export's own place cannot be used."""
    base = shutil.copytree(tiny_sd3, tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: mit\ndate: 2024-02-30\n---\n")
    words = ["name=other", f"model.policy.checkpoint={base}", f"trainer.callbacks={CALLBACKS}", "trainer.max_epochs=1"]
    assert run([str(tiny_recipe), *words]) == 0
    assert "The base model's licence is not known: " in capsys.readouterr().err
    assert "cannot be read, or is not" in Path("runs/other/export/README.md").read_text()
    shutil.rmtree("runs/other/samples")
    Path("runs/other/samples/after.png").mkdir(parents=True)
    Path("runs/other/report/scores.jsonl").write_text("5\n")
    assert export(["runs/other", "--to=out"]) == 0
    out = capsys.readouterr()
    assert "Written: out (pipeline in float32)" in out.out
    assert Path("out/transformer/diffusion_pytorch_model.safetensors").is_file()


def test_a_model_that_edits_pictures_says_how_to_call_it(tmp_path):
    options = {"max_sequence_length": 4, "height": 32, "width": 48}
    policy = KontextPolicy("shipped:assets/tiny_edit", **options).load()
    size = "max_area=1536, _auto_resize=False, height=32, width=48, max_sequence_length=4"
    start = f'image = pipe(prompt="a prompt", image=picture, {size}'
    (line,) = sample_lines(policy, RolloutSpec(None, 5, 3.0))
    assert line == f"{start}, num_inference_steps=5, true_cfg_scale=3.0, negative_prompt=['']).images[0]"
    place, export = local_folder("shipped:assets/tiny_edit"), tmp_path / "export"
    loads = [*loading_lines(policy, f"{place}", torch.float32), f'pipe.load_lora_weights("{export}")']
    assert f'("{place}", dtype=torch.float32)' in loads[0]
    shared, folders = without_places(loads, policy, export, export)
    assert '("path/to/tiny_edit", ' in shared[0]
    assert shared[1] == 'pipe.load_lora_weights("export")'
    shown = {**SHOWN, "base": "tiny_edit", "task": "image-to-image", "lines": [*shared, line], "folders": folders}
    text = card(read_run(tmp_path), None, is_adapter=True, **shown)
    head = yaml.safe_load(text.split("---\n")[1])
    assert (head["pipeline_tag"], head["tags"][0]) == ("image-to-image", "image-to-image")
    assert line in text
    assert "Replace `export` and `path/to/tiny_edit` with the folder or hub name that you load from." in text
    assert f"{place}" not in text
    assert "base_model" not in head  # the name of a folder


def test_what_looks_secret_is_hidden():
    text = (
        "connection:\n  token: hunter2\n  token_env: NAME\n  max_tokens: 5\n  api_key: null\n"
        "  - Authorization: Bearer abc\nurl: http://me:hunter2@host:80/score\nx-api-key: abc\npassword: 12345\n"
        "- token: |-\n    abc\n    def\n  limit: 7\nurl: http://host/score?API_KEY=abc&size=2\ncookie: 'a=abc'\n"
    )
    shown = without_secrets(text)
    assert "hunter2" not in shown
    assert not any(word in shown for word in ("abc", "def", "12345"))
    assert all(line in shown for line in ("- token: (hidden)\n  limit: 7\n", "?API_KEY=(hidden)&size=2\n"))
    kept = ("token_env: NAME", "max_tokens: 5", "api_key: null", "http://(hidden)@host:80/score", "token: (hidden)")
    assert all(line in shown for line in kept)
    rows = dict(differences([{"a": {"token": "hunter2"}}, {"a": {"n": 1}}]))
    assert rows["a.token"] == ["(hidden)", "not set"]
