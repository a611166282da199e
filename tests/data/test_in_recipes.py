import pytest
from commands import check, run
from helpers import prompt_file
from lightning import Trainer

from lit_vgrpo.cli.eval import heldout_rows
from lit_vgrpo.data import PromptDataModule
from lit_vgrpo.launch.build import build

SHIPPED = f"train: {prompt_file('shapes_train.jsonl')}"


@pytest.fixture
def recipe(tiny_recipe, write):
    """``recipe("[a.csv, b.txt]")``: the tiny recipe with these training prompts; both files are there."""
    write("a.csv", "prompt\na red circle\na blue square\n")
    write("b.txt", "".join(f"prompt {i}\n" for i in range(40)))

    def with_train(train):
        tiny_recipe.write_text(tiny_recipe.read_text().replace(SHIPPED, f"train: {train}"))
        return str(tiny_recipe)

    return with_train


MIXED = "[a.csv, {path: b.txt, weight: 3, rewards: [jpeg]}]"


@pytest.mark.parametrize(
    ("train", "words", "sources"),
    [
        # the parser must not take a file that is there for the source's options
        ("a.csv", [], [("a.csv", 1)]),
        (MIXED, [], [("a.csv", 1), ("b.txt", 3)]),
        ("a.csv", ["data.train=[a.csv,b.txt]"], [("a.csv", 1), ("b.txt", 1)]),
        ("{path: a.csv}", ["data.train.weight=4"], [("a.csv", 4)]),
    ],
)
def test_a_recipe_names_a_source_or_several(recipe, train, words, sources):
    cli = build([recipe(train), *words], make_folder=False)
    assert cli.errors() == []
    assert [(source.path, source.weight) for source in cli.datamodule.choice.train] == sources


@pytest.mark.slow
def test_a_text_to_image_run_needs_no_pictures(recipe, write):
    write("rows.jsonl", [{"prompt": f"prompt {number}", "image": "gone.png"} for number in range(4)])
    words = [recipe("rows.jsonl"), "data.heldout=rows.jsonl", "trainer.max_epochs=1"]
    assert check(words) == 0
    assert run(words) == 0
    cli = build(words, make_folder=False)
    data = PromptDataModule("rows.jsonl", 2, 2)  # as in Python, where only the trainer knows the policy
    Trainer(fast_dev_run=True, accelerator="cpu", logger=False).fit(cli.model, datamodule=data)
    assert [row["image"] for row in data.training_rows()] == ["gone.png"] * 4


def test_a_saved_recipe_has_the_same_sources(recipe):
    cli = build([recipe(MIXED), "data.heldout=null", "data.heldout_fraction=0.2", "data.deduplicate=true"])
    cli.save_recipe()
    again = build([str(cli.folder / "config.yaml")], make_folder=False)
    assert again.datamodule.choice == cli.datamodule.choice
    assert again.datamodule.sets.describe() == cli.datamodule.sets.describe()
    cli.give_back()


@pytest.mark.slow
def test_a_missing_source_is_said_next_to_an_unknown_reward(recipe, capsys):
    assert check([recipe("[a.csv, none.parquet]"), "model.reward=Nothing"]) == 2
    assert "none.parquet does not exist." in capsys.readouterr().err


def test_eval_finds_the_held_out_prompts_that_training_left_out(recipe):
    words = [recipe("b.txt"), "data.heldout=null", "data.heldout_fraction=0.2", "data.heldout_limit=3"]
    cli = build(words, make_folder=False)
    rows = heldout_rows(cli)
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in cli.datamodule.heldout_samples(100)]
    assert len(rows) == 3
    trained = [row for row in cli.datamodule.training_rows() if row not in rows]
    assert len(trained) < 40 - 3
