"""The model card that every export carries: what hubs read in its head, and what people read below."""

import json
from pathlib import Path

import yaml
from commands import export, run
from diffusers import DiffusionPipeline

from lit_vgrpo.apps.report import wording
from lit_vgrpo.apps.report.model_card import Exported, base_licence, card
from lit_vgrpo.apps.report.recipe_diff import differences, without_secrets
from lit_vgrpo.apps.report.run_data import read_run

CALLBACKS = "[Export, {class_path: SampleGrid, init_args: {num_prompts: 1, images_per_prompt: 1}}]"


def head_and_text(path):
    _, head, text = Path(path).read_text().split("---\n", 2)
    return yaml.safe_load(head), text


def test_the_exports_of_a_run_and_of_the_command_have_cards(tiny_recipe, capsys):
    assert run(["tiny.yaml", f"trainer.callbacks={CALLBACKS}"]) == 0
    assert export(["runs/tiny", "--to=out"]) == 0
    end = json.loads(Path("runs/tiny/summary.json").read_text())
    for folder in (Path("runs/tiny/export"), Path("out")):
        head, text = head_and_text(folder / "README.md")
        assert head["library_name"] == "diffusers"
        assert head["tags"] == ["text-to-image", "reinforcement-learning", "lit-vgrpo"]
        assert "base_model" not in head  # a folder of this machine is no name on a hub
        assert "trained weights after 2 iterations" in text
        assert f"to {wording.reward(end['heldout_reward_end'])} [" in text
        assert "JPEGCompressibility" in text
        assert "VGRPO" in text
        assert "run_dir" not in text
        assert (folder / "before_after.png").read_bytes() == Path("runs/tiny/samples/after.png").read_bytes()
        assert "](before_after.png)" in text
    code = text.partition("````python\n")[2].partition("````")[0]
    assert code.strip() in capsys.readouterr().out
    found = {}
    exec(code, found)
    assert isinstance(found["pipe"], DiffusionPipeline)


def test_an_earlier_checkpoint_has_the_numbers_of_its_time(tiny_recipe):
    assert run(["tiny.yaml", "trainer.max_epochs=1"]) == 0
    Path("first.ckpt").write_bytes(Path("runs/tiny/checkpoints/last.ckpt").read_bytes())
    first = json.loads(Path("runs/tiny/summary.json").read_text())
    assert run(["runs/tiny/config.yaml", "--resume", "trainer.max_epochs=2"]) == 0
    assert export(["runs/tiny", "--to=out", "--checkpoint=first.ckpt"]) == 0
    _, text = head_and_text("out/README.md")
    assert "after 1 iteration," in text
    assert wording.reward(first["heldout_reward_end"]) in text
    assert not Path("out/before_after.png").exists()


def test_the_licence_is_that_of_the_base_models_card(tiny_recipe, tmp_path):
    base = tmp_path / "base.md"
    base.write_text("---\nlicense: other\nlicense_name: stable\nlicense_link: LICENSE.md\ntags: [a]\n---\n# Base\n")
    licence = {"license": "other", "license_name": "stable", "license_link": "LICENSE.md"}
    assert base_licence(base) == licence
    for text in ("# no head", "---\n[\n---\n", "---\n- a\n---\n", ""):
        base.write_text(text)
        assert base_licence(base) == {}
    assert base_licence(tmp_path / "none.md") == {}
    base.write_text("---\nlicense: mit\n---\n")
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("model: {objective: VGRPO, reward: JPEGCompressibility}\nname: '````'\n")
    exported = Exported("some/model", base, "LoRA of rank 4, float32", True, "EMA", 3, ["pipe = ..."])
    text = card(read_run(folder), exported, has_picture=False)
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["license"] == "mit"
    assert (head["base_model"], head["base_model_relation"]) == ("some/model", "adapter")
    assert "lora" in head["tags"]
    assert "No held-out evaluation yet" in text
    assert text.count("````") == 4


def test_a_run_that_cannot_be_read_is_exported_without_a_card(tiny_recipe, capsys):
    assert run(["tiny.yaml", "trainer.max_epochs=1"]) == 0
    Path("runs/tiny/metrics.csv").write_text("a,b\n1,2\n")
    capsys.readouterr()
    assert export(["runs/tiny", "--to=out"]) == 0
    assert "No model card in out: runs/tiny/metrics.csv is not a run's table" in capsys.readouterr().err
    assert Path("out/model_index.json").exists()
    assert not Path("out/README.md").exists()


def test_what_looks_secret_is_hidden():
    text = (
        "connection:\n  token: hunter2\n  token_env: NAME\n  max_tokens: 5\n  api_key: null\n"
        "  - Authorization: Bearer abc\nurl: http://me:hunter2@host:80/score\n"
    )
    shown = without_secrets(text)
    assert "hunter2" not in shown
    assert "abc" not in shown
    kept = ("token_env: NAME", "max_tokens: 5", "api_key: null", "http://(hidden)@host:80/score", "token: (hidden)")
    assert all(line in shown for line in kept)
    rows = dict(differences([{"a": {"token": "hunter2"}}, {"a": {"n": 1}}]))
    assert rows["a.token"] == ["(hidden)", "not set"]
