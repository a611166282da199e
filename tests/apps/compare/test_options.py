"""The command line of a comparison."""

from pathlib import Path

import pytest
from commands import compare_options

from lit_vgrpo.errors import UserError


def parsed(*words):
    return compare_options(["tiny_shapes", *words])


def test_all_options():
    options = parsed(
        "data.group_size=8", "--methods=vgrpo,nft", "--seeds", "2", "--first-seed=5", "--target", "0.7,0.6",
        "--settings", "tuned", "--iterations", "7", "--evaluate-every", "3", "--jobs", "4", "--out", "there",
    )  # fmt: skip
    assert options.methods == ["vgrpo", "nft"]
    assert options.seeds == [5, 6]
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
    assert options.methods == ["vgrpo", "flowgrpo", "mixgrpo", "nft", "dgpo"]
    assert options.seeds == [0, 1, 2]
    assert options.iterations == 60
    assert options.evaluate_every == 5
    assert options.out == Path("runs/compare-tiny_shapes")


def test_another_recipes_results_are_not_overwritten(tmp_path):
    (tmp_path / "compare.json").write_text('{"recipe": "tiny_ocr"}')
    with pytest.raises(UserError, match="holds the results of tiny_ocr. Give tiny_shapes a folder of its own"):
        parsed("--out", str(tmp_path))
    (tmp_path / "compare.json").write_text('{"recipe": "tiny_shapes"}')
    assert parsed("--out", str(tmp_path)).out == tmp_path


def test_a_sweep_uses_other_seeds_and_fewer_iterations():
    options = parsed("--sweep")
    assert options.seeds == [100]
    assert options.iterations == 30
    assert options.out == Path("runs/sweep-tiny_shapes")
    assert not set(parsed("--sweep", "--seeds", "3").seeds) & set(parsed("--seeds", "3").seeds)


def heldout(*words):
    options = parsed(*words)
    data = options.base["data"]
    return data.get("heldout"), data.get("heldout_fraction"), options.heldout_text


def test_a_sweep_does_not_see_the_races_prompts():
    assert heldout()[:2] == ("shipped:prompts/shapes_heldout.jsonl", None)
    file, share, text = heldout("--sweep")
    assert (file, share) == (None, 0.2)
    assert text.startswith("training prompts held out by hash (data.heldout=null, data.heldout_fraction=0.2)")


def test_prompts_that_the_command_line_sets_stay_in_a_sweep():
    assert heldout("--sweep", "data.heldout=x.txt")[0] == "x.txt"
    assert heldout("--sweep", "data.heldout=null", "data.heldout_fraction=0.3")[:2] == (None, 0.3)
    assert heldout("--sweep", "data.heldout=x.txt")[2] == "the held-out prompts that the command line sets"
    assert heldout("--sweep", "data.heldout_images_per_prompt=2")[:2] == (None, 0.2)


def test_a_share_that_the_recipe_holds_out_itself_stays_and_is_said(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("data: {train: prompts.txt, heldout_fraction: 0.1}\n")
    options = compare_options([str(path), "--sweep"])
    assert options.base["data"]["heldout_fraction"] == 0.1
    assert "which a comparison uses too" in options.heldout_text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "three"], "--seeds three is not a whole number. Use an integer such as 3."),
        (["--seeds", "0"], "--seeds 0 is too small. Use 1 or more."),
        (["--jobs", "-1"], "--jobs -1 is too small."),
        (["--target", "high"], "--target high is not a number."),
        (["--target", "nan"], "--target nan is not a number."),
        (["--settings", "tunned"], "--settings tunned is not one of the settings. Did you mean tuned?"),
        (["--method", "vgrpo"], "--method is not an option of compare. Did you mean methods?"),
        (["--methods", "vgrpo,vgrpo"], "--methods names vgrpo twice."),
        (["--methods", ","], "--methods ',' names nothing."),
        (["--methods"], "--methods has no value."),
        (["--methods", "vgrpo,nft", "--base", "nt"], "--base nt is not one of the methods. Did you mean nft?"),
        (["--sweep", "--base", "vgrpo"], "--base has no effect with --sweep."),
        (["--seeds", "1", "--seeds", "2"], "--seeds is given twice."),
        (["trainer.max_epochs=3"], "trainer.max_epochs is set by the comparison. Use --iterations."),
        (["seed_everything=3"], "seed_everything is set by the comparison. Use --seeds and --first-seed."),
        (["--run_dir=x"], "--run_dir=x is set by the comparison. Use --out."),
        (["trainer.logger=true"], "trainer.logger is set by the comparison. Leave it out."),
        (["--sweep", "--settings", "tuned"], "--settings has no effect with --sweep."),
    ],
)
def test_bad_words_are_one_line(words, message):
    with pytest.raises(UserError) as caught:
        parsed(*words)
    assert caught.value.errors[0].startswith(message)


def test_several_errors_are_said_at_once():
    with pytest.raises(UserError) as caught:
        parsed("--seeds", "0", "--jobs", "x", "--target", "y")
    assert len(caught.value.errors) == 3
