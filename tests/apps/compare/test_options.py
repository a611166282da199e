"""The command line of a comparison."""

import json
from pathlib import Path

import pytest
from commands import compare, compare_options

from lit_vgrpo.apps.compare.command import locked
from lit_vgrpo.errors import UserError
from lit_vgrpo.system.paths import typed_path


def parsed(*words):
    return compare_options(["tiny_shapes", *words])


def test_all_options():
    options = parsed(
        "data.group_size=8", "--methods=vgrpo,nft", "--seeds", "2", "--target", "0.7,0.6",
        "--settings", "tuned", "--iterations", "7", "--evaluate-every", "3", "--jobs", "4", "--out", "there",
    )  # fmt: skip
    assert options.methods == ["vgrpo", "nft"]
    assert options.seeds == [0, 1]
    assert options.targets == [0.6, 0.7]
    assert options.settings == ["tuned"]
    assert (options.iterations, options.evaluate_every, options.jobs) == (7, 3, 4)
    assert options.out == Path("there")
    assert options.base["data"]["group_size"] == 8
    assert options.line.startswith("lightning compare tiny_shapes data.group_size=8 --methods=vgrpo,nft ")


def test_defaults_come_from_the_recipe():
    options = parsed()
    assert options.base_method == "vgrpo"
    assert parsed("--methods", "nft,vgrpo").base_method == "nft"
    assert parsed("--methods", "nft,./my.yaml", "--base", "my").base_method == "my"
    assert list(options.methods) == ["vgrpo", "flowgrpo", "mixgrpo", "nft", "dgpo"]
    assert options.seeds == [0, 1, 2]
    assert options.iterations == 60
    assert options.evaluate_every == 5
    assert options.out == Path("runs/compare-tiny_shapes")
    # A sweep uses other seeds and fewer iterations.
    options = parsed("--sweep")
    assert options.seeds == [100]
    assert options.iterations == 30
    assert options.out == Path("runs/sweep-tiny_shapes")
    assert not set(parsed("--sweep", "--seeds", "3").seeds) & set(parsed("--seeds", "3").seeds)


def test_a_sweep_does_not_see_the_races_prompts():
    def heldout(*words):
        options = parsed(*words)
        data = options.base["data"]
        assert data.get("exclude") == (None if data.get("heldout") else "shipped:prompts/shapes_heldout.jsonl")
        return data.get("heldout"), data.get("heldout_fraction"), options.prompts

    assert heldout()[:2] == ("shipped:prompts/shapes_heldout.jsonl", None)
    assert heldout("--sweep") == (None, 0.2, "training prompts")
    assert heldout("--sweep", "data.heldout_images_per_prompt=2") == (None, 0.2, "training prompts")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "high"], "--target high is not a held-out reward"),
        (["--settings", "tunned"], "--settings tunned is not published, tuned or published,tuned."),
        (["--methods", "vgrpo,nft", "--base", "nt"], "--base nt is not one of the methods. Did you mean nft?"),
        (["--methods", "vgrpo", "nft", "awm"], "Separate methods by commas: --methods vgrpo,nft,awm"),
        (["trainer.max_epochs=3"], "trainer.max_epochs is set by the comparison. Use its options."),
    ],
)
def test_an_error_in_the_options_is_one_line(words, message):
    with pytest.raises(UserError) as caught:
        parsed(*words)
    assert caught.value.errors[0].startswith(message)


def test_results_of_another_recipe_or_override_are_not_replaced(tmp_path):
    def checked(*words):
        parsed(*words).refuse_others_results()

    words = ["data.group_size=8", "--out", str(tmp_path)]
    file = tmp_path / "compare.json"
    file.write_text(json.dumps({"task": parsed(*words).task}))
    checked(*words, "--methods", "nft", "--iterations", "3")
    file.write_text(json.dumps({"task": parsed(*words).task, "iterations": 3, "evaluate_every": 2}))
    checked(*words, "--methods", "nft", "--iterations", "3", "--evaluate-every", "2")
    with pytest.raises(UserError, match="compare.json has results of --iterations 3. Choose another folder: --out DIR"):
        checked(*words, "--iterations", "4", "--evaluate-every", "2")
    checked("--sweep", *words[1:])  # other files
    for other in (["data.group_size=4", *words[1:]], words[1:]):
        with pytest.raises(UserError, match="compare.json has results of another recipe or override. Choose another f"):
            checked(*other)
    with pytest.raises(UserError, match="has results of another recipe"):
        compare_options(["tiny_ocr", *words]).refuse_others_results()
    for damaged in ("{", "[]", "{}"):
        file.write_text(damaged)
        with pytest.raises(UserError, match="has results of another recipe"):
            checked(*words)


def test_an_empty_list_of_methods_is_the_default_and_a_file_is_no_folder(here):
    assert parsed("--methods", ",").methods == parsed().methods
    Path("mine").touch()
    with pytest.raises(UserError, match=r"Cannot create mine: File exists. Choose another folder: --out DIR."):
        locked(typed_path("mine")).__enter__()


def test_a_mistake_in_what_was_typed_is_named_before_an_earlier_comparison(tmp_path, capsys):
    words = ["tiny_shapes", "--methods", "nfft", "--out", str(tmp_path)]
    (tmp_path / "compare.json").write_text("{}")
    assert compare(words) == 2
    assert capsys.readouterr().err == "nfft is neither a method nor an overlay file. Did you mean nft?\n"
    assert compare([*words[:2], "nft", *words[3:]]) == 2
    assert "has results of another recipe" in capsys.readouterr().err
