"""Sources by name: in batches on any number of ranks, in metrics, and what is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import prompt_file

from lit_vgrpo.data import PromptDataModule
from lit_vgrpo.data.datasets import HeldOutDataset, IterationDataset
from lit_vgrpo.data.source import PromptError, as_sources
from lit_vgrpo.errors import UserError
from lit_vgrpo.launch.build import build
from lit_vgrpo.report.curves import plots
from lit_vgrpo.report.run_data import Point, RunData
from lit_vgrpo.rewards import Scores
from lit_vgrpo.rollout.scores import scores_by_source, statistics


@pytest.fixture
def sources(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {number}\n" for number in range(40)))
    return [str(tmp_path / "a.txt"), {"path": str(tmp_path / "b.txt"), "name": "last", "weight": 2}]


def test_every_prompt_has_its_sources_name_on_any_number_of_ranks(sources):
    data = PromptDataModule(sources, 8, 4, heldout_fraction=0.2, heldout_images_per_prompt=2)
    data.setup()
    assert data.sets.describe() == "Prompts: 30 (a) + 30 (last) to train on, 20 held out."
    sets = data._sets

    def trained(world, rank):
        dataset = IterationDataset(sets.training, data.sizes, world, rank)
        return [dataset[iteration * len(dataset)] for iteration in range(3)]

    def held_out(world, rank):
        dataset = HeldOutDataset(sets.heldout, 2, 3, world, rank, sets.heldout_sources)
        return [dataset[number] for number in range(len(dataset))]

    for batches in (trained, held_out):
        one, two = (
            {
                (batch.iteration, slot): (row["prompt"], source)
                for rank in range(world)
                for batch in batches(world, rank)
                for slot, row, source in zip(batch.slots, batch.rows, batch.sources, strict=True)
            }
            for world in (1, 2)
        )
        assert one == two
        assert {(prompt[0], source) for prompt, source in one.values()} == {("a", "a"), ("b", "last")}


def test_a_weight_of_numpy_is_a_number():
    data = PromptDataModule({"prompts": ["a", "b"], "weight": np.float64(2)}, 1, 2)
    assert (data.check(), data.sets.training.weights) == ([], [2])


def test_names_are_the_files_unless_given(sources, tmp_path):
    assert [one.name for one in as_sources([*sources, str(tmp_path / "other" / "a.txt")])] == ["a", "last", "a_2"]
    assert as_sources(sources[0])[0].name is None


def test_prompts_may_be_a_list():
    texts = ["a cat", 'a "red" dog, running', "two words", "sunset"]
    data = PromptDataModule(texts, 1, 2, heldout={"prompts": ["sunset", {"prompt": "a cat", "count": 3}]})
    assert data.check() == []
    assert [row["prompt"] for row in data.training_rows()] == texts
    assert data.heldout_rows() == [{"prompt": "sunset"}, {"prompt": "a cat", "count": 3}]
    assert data.heldout_origin()["file"] == "prompts"
    for wrong, said in (
        (["cat", "dog"], 'cat does not exist. Use .*, or {"prompts": ["a cat", "a dog"]}.'),
        (["my prompts.txt"], "my prompts.txt does not exist"),
        ({"prompts": ["a", 3]}, 'prompts[1]: not a row. Write "a cat" or {"prompt": "a cat"}.'),
        ({"prompts": []}, "prompts has no prompts."),
    ):
        (found,) = PromptDataModule(wrong, 1, 2).check()
        assert re.search(re.escape(said).replace(r"\.\*", ".*"), found), found
    with pytest.raises(PromptError, match="The list of prompts is empty"):
        PromptDataModule([], 1, 2)


def test_statistics_by_source():
    total = torch.tensor([1.0, 3.0, float("nan"), 5.0])
    scores = scores_by_source(Scores(total, {}, total.isfinite()), ["a", "a", "b", "b"])
    assert statistics(scores, torch.tensor([0, 0, 1, 1])) == {
        "a": {"mean": 2, "std": 1, "no_spread": 0, "failed": 0},
        "b": {"mean": 5, "std": 0, "no_spread": 1, "failed": 1},
    }


def test_the_report_plots_each_source():
    metrics = {"source/a": 1.0, "source/b": 2.0}
    trained, held_out = (
        [Point({"iterations": n}, {**{name: n * x for name, x in metrics.items()}, **more}) for n in range(1, 5)]
        for more in ({"source/a/std": 1.0, "source/b/std": 1.0}, {})
    )
    found = {
        plot.title: [one.label for one in plot.series] for plot in plots([RunData(Path(), {}, {}, trained, held_out)])
    }
    assert found == {"Held-out reward by source": ["a", "b"], "Training reward by source": ["a", "b"]}


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"name": "shapes"}, "name=shapes occurs in 2 sources. Give each a different name."),
        ({"weight": -1}, "weight=-1: Use a number above 0"),
        ({"wieght": 1}, "wieght"),
        ({"column": "text"}, 'no column "text"'),
        ({"rewards": []}, "no reward applies. Name one, or leave it out."),
        ({"rewards": "shape"}, "names the reward shape in its field rewards, but no reward has this name."),
        ({"name": "cats"}, 'Reward "shapes" cannot score 2 of 2 prompts of the source cats '),
    ],
)
def test_bad_sources_are_one_line(tiny_recipe, second, said):
    (tiny_recipe.parent / "cats.txt").write_text("a cat\ntwo cats\n")
    given = [{"path": prompt_file("shapes_train.jsonl"), "name": "shapes"}, {"path": "cats.txt", **second}]
    words = [str(tiny_recipe), "model.reward=ShapesReward", f"data.train={json.dumps(given)}"]
    try:
        found = build(words, make_folder=False).errors()
    except UserError as error:
        found = error.errors
    assert said in found[0]
    assert "\n" not in found[0]


def test_a_list_of_rows_is_the_prompts_themselves():
    (source,) = as_sources([{"prompt": "a cat", "style": "ink"}, {"prompt": "a dog"}])
    assert source.prompts[0]["style"] == "ink"
    words = {f"word {number}" for number in range(9)}
    assert as_sources(words)[0].prompts == sorted(words)  # on every rank and in every run


def test_a_data_frame_is_refused_with_the_way_to_its_rows():
    frame = pd.DataFrame({"prompt": ["a cat", "a dog"], "my column": [1, 2]})
    with pytest.raises(TypeError, match=r"A DataFrame is not a list of rows. Pass them, such as df.to_dict"):
        PromptDataModule(frame, 2, 2)
    assert PromptDataModule(frame.to_dict("records"), 2, 2).check() == []
    assert PromptDataModule(frame["prompt"], 2, 2).check() == []


@pytest.mark.parametrize(("wrong", "named"), [(None, "None is"), (3, "3 is"), (["a b", None], "None in")])
def test_what_is_no_prompt_is_answered_with_what_to_pass(wrong, named):
    with pytest.raises(TypeError, match=rf'^{named}.*"prompts": \["a cat"'):
        PromptDataModule(wrong, 2, 2)
