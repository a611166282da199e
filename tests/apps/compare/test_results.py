"""Costs by hand-worked numbers, and the tables and files where seeds missed a target or failed."""

import json

import pytest
from commands import compare_options
from helpers import read_csv
from PIL import Image

from lit_vgrpo.apps.compare import report
from lit_vgrpo.apps.compare.plan import Budget, Entrant, Run
from lit_vgrpo.apps.compare.report import (
    Curve,
    cost_of,
    costs_by_seed,
    differing_seeds,
    mean_costs,
    reward_table,
    summaries,
    write_race,
)


def evaluations(rewards, seconds=10.0, every=5):
    """An evaluation every five iterations, which took ``seconds`` of CPU time."""
    per_iteration = {"iteration": 1, "images": 100, "passes": 1400, "forward_equivalents": 2200}
    counts = [{name: each * every * k for name, each in per_iteration.items()} for k in range(len(rewards))]
    times = [{"train_seconds": 2 * seconds * k, "cpu_seconds": seconds * k} for k in range(len(rewards))]
    return [{"reward": r, **count, **time} for r, count, time in zip(rewards, counts, times, strict=True)]


def curve(method, seed, rewards, seconds=10.0, settings="published", error=""):
    return Curve(method, settings, seed, evaluations(rewards, seconds), error)


def ratios(curves, target, base="vgrpo"):
    return list(mean_costs(costs_by_seed(curves, [target]), base)["cpu_ratio"])


def costs(curves, target, base="vgrpo"):
    each = costs_by_seed(curves, [target])
    return report.target_table(each, mean_costs(each, base), target, base)


def cells(table, method, settings="published"):
    (row,) = table[(table["method"] == method) & (table["settings"] == settings)].to_dict("records")
    return row


def test_an_evaluation_that_scored_no_image_is_left_out(tmp_path):
    entries = evaluations([0.2, None, 0.8])
    (tmp_path / "summary.json").write_text(json.dumps({"evaluations": entries}))
    found = Curve.of(Run("n", "nft", "published", 0, *[tmp_path] * 3, ""), "")
    assert [entry["reward"] for entry in found.evaluations] == [0.2, 0.8]
    assert summaries([found])["final"].tolist() == [0.8]


def test_a_cost_is_interpolated_at_the_first_crossing():
    # .4 at 5 iterations, .8 at 10: .5 lies a quarter of the way, at 6.25 iterations; the later dip does not matter.
    cost = cost_of(evaluations([0.2, 0.4, 0.8, 0.3, 0.9]), 0.5)
    expected = {"iteration": 6.25, "images": 625, "passes": 8750, "forward_equivalents": 13750}
    assert cost == pytest.approx({**expected, "train_seconds": 25.0, "cpu_seconds": 12.5})
    for target, iterations in {0.1: 0, 0.2: 0, 0.4: 5, 0.81: None}.items():
        assert cost_of(evaluations([0.2, 0.4, 0.8]), target).get("iteration") == iterations


def test_means_over_seeds_and_the_ratio():
    curves = [
        curve("vgrpo", 0, [0.2, 0.6, 0.9]),  # .4 at 2.5 iterations, 5 s
        curve("vgrpo", 1, [0.2, 0.4, 0.7]),  # .4 at 5 iterations, 10 s
        curve("nft", 0, [0.2, 0.3, 0.5], seconds=30),  # halfway between 5 and 10 iterations, 45 s
        curve("nft", 1, [0.2, 0.4, 0.5], seconds=30),  # 5 iterations, 30 s
    ]
    mean = mean_costs(costs_by_seed(curves, [0.4]), "vgrpo").set_index("method")
    assert mean["iteration"]["vgrpo"] == pytest.approx(3.75)
    assert mean["cpu_seconds"]["nft"] == pytest.approx(37.5)
    assert list(mean["cpu_ratio"]) == pytest.approx([1.0, 5.0])
    assert mean["equivalents_ratio"]["nft"] == pytest.approx(6.25 / 3.75)
    expected = ["2/2", "3.8", "7.5", "5,250", "8,250", "1.00", "1.00", "2.5 / 5.0"]
    assert list(cells(costs(curves, 0.4), "vgrpo").values())[2:] == expected
    rewards = reward_table(summaries(curves))
    assert list(cells(rewards, "nft").values())[2:6] == ["2/2", "0.200", "0.500", "0.500"]
    assert cells(rewards, "vgrpo")["final"] == "0.800"
    assert cells(rewards, "vgrpo")["each seed"] == "0.900 / 0.700"


@pytest.mark.parametrize(
    ("nft", "said"),
    [([0.5, 0.6], "{}; no seed of another method"), ([0.5, 0.75], "**{}; seeds of nft published reach this range")],
)
def test_it_tells_whether_the_seeds_of_two_methods_overlap(nft, said):
    curves = [curve("nft", seed, [0.2, end]) for seed, end in enumerate(nft)]
    curves += [curve("vgrpo", seed, [0.2, end]) for seed, end in enumerate([0.9, 0.7])]
    (sentence,) = differing_seeds(summaries(curves))
    assert sentence.startswith(said.format("The final reward of vgrpo published is 0.700 to 0.900 over its seeds"))
    assert differing_seeds(summaries(curves[:2])) == []


def test_the_ratio_is_to_the_base_with_the_same_settings():
    curves = [
        curve("vgrpo", 0, [0.0, 1.0], seconds=10, settings="published"),
        curve("vgrpo", 0, [0.0, 1.0], seconds=2, settings="tuned"),
        curve("nft", 0, [0.0, 1.0], seconds=8, settings="tuned"),
        curve("nft", 0, [0.0, 1.0], seconds=8, settings="published"),
    ]
    assert ratios(curves, 0.5) == pytest.approx([1.0, 1.0, 4.0, 0.8])
    assert ratios(curves, 0.5, "nft") == pytest.approx([1.25, 0.25, 1.0, 1.0])
    assert "CPU s / nft's" in costs(curves, 0.5, "nft")


def test_a_seed_that_missed_the_target_leaves_no_mean():
    curves = [curve("vgrpo", s, [0.2, 0.9]) for s in range(3)]
    curves += [curve("nft", 0, [0.2, 0.9]), curve("nft", 1, [0.2, 0.9]), curve("nft", 2, [0.2, 0.3])]
    assert list(cells(costs(curves, 0.5), "nft").values())[2:] == ["2/3", *"------", "2.1 / 2.1 / -"]
    assert cells(costs(curves, 0.5), "vgrpo")["reached"] == "3/3"
    row = cells(costs(curves, 0.5, "nft"), "vgrpo")  # the base missed it
    assert (row["CPU s / nft's"], row["iterations"]) == ("-", "2.1")


@pytest.mark.slow
def test_a_failed_seed_is_listed_and_leaves_no_mean_cost(here):
    curves = [curve("nft", 0, [0.2, 0.9]), Curve("nft", "published", 1, [], "RuntimeError: no room")]
    assert cells(reward_table(summaries(curves)), "nft")["seeds"] == "1/2"
    assert cells(costs(curves, 0.5), "nft")["iterations"] == "-"
    options = compare_options(["tiny_shapes", "--methods", "nft", "--target", "0.5", "--out", "."])
    assert "- nft published, seed 1: RuntimeError: no room" in write_race(options, [], curves)
    all_failed = [Curve("nft", "published", 0, [], "boom")]
    assert list(cells(reward_table(summaries(all_failed)), "nft").values())[2:] == ["0/1", *"-------"]
    assert write_race(options, [], all_failed)


def test_a_target_that_no_run_reached_is_said(here):
    words = ["tiny_shapes", "--methods", "nft", "--target", "0.5,0.9", "--out", "."]
    text = write_race(compare_options(words), [], [curve("nft", s, [0.2, 0.6 + s / 10]) for s in range(2)])
    reached, never = text.split("## To reach ")[1:]
    assert "2/2" in reached
    assert never.startswith("0.9\n\nNo run reached it. The highest held-out reward is 0.700. Choose a lower --target")


def test_one_seed_is_no_conclusion(here):
    options = compare_options(["tiny_shapes", "--methods", "nft", "--seeds", "1", "--out", "."])
    assert write_race(options, [], [curve("nft", 0, [0.2, 0.9])]).startswith("**One seed: no conclusion.**")
    assert "One seed: no conclusion." in (here / "compare.md").read_text()
    assert not (here / "targets.csv").exists()


@pytest.mark.slow
def test_the_plot_shows_the_methods(tmp_path):
    curves = [curve("vgrpo", s, [0.2, 0.9 - s / 10]) for s in range(2)]
    curves += [curve("nft", 0, [0.2, 0.4]), curve("nft", 0, [0.2, 0.4], settings="tuned")]
    path = tmp_path / "compare.png"
    report.draw(path, report.evaluation_table([*curves, Curve("dgpo", "published", 0, [], "boom")]), [0.5], "a race")
    with Image.open(path) as image:
        pixels = image.convert("RGB")
        colours = {colour for _, colour in pixels.getcolors(pixels.width * pixels.height)}
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= colours
    assert (0x00, 0x9E, 0x73) not in colours
    assert not list(tmp_path.glob("*.tmp*"))


@pytest.mark.slow
def test_the_files_of_a_race(here):
    words = ["tiny_shapes", "--methods", "vgrpo", "--target", "0.5", "--seeds", "2", "--out", "."]
    options = compare_options(words)
    found = [Entrant("vgrpo", "published", {}), Entrant("vgrpo", "tuned", {}, budget=Budget(8, 2, 30))]
    text = write_race(options, found, [curve("vgrpo", s, [0.2, 0.9]) for s in range(2)])
    assert "- vgrpo: 8 points x 2 seeds x 30 iterations" in text
    assert "One seed" not in text
    assert "The searches had different tasks" not in text
    saved = json.loads((here / "compare.json").read_text())
    assert saved["seeds"] == [0, 1]
    assert saved["versions"]["torch"]
    assert saved["costs"][0]["iteration"] == pytest.approx(5 * 3 / 7)
    assert saved["runs"][1]["evaluations"][1]["passes"] == 7000
    table = read_csv("compare.csv")
    assert len(table) == 4
    assert {**table[1]} == {
        **{"method": "vgrpo", "settings": "published", "seed": "0", "iteration": "5", "reward": "0.9"},
        **{"images": "500", "passes": "7000", "forward_equivalents": "11000"},
        **{"cpu_seconds": "10.0", "train_seconds": "20.0"},
    }
    targets = read_csv("targets.csv")
    assert [row["seed"] for row in targets] == ["0", "1", "mean"]
    assert float(targets[2]["forward_equivalents"]) == pytest.approx(11_000 * 3 / 7)
    assert targets[2]["equivalents_ratio"] == "1.0"
    markdown = (here / "compare.md").read_text()
    assert options.line in markdown
    assert text in markdown
    found.append(Entrant("nft", "tuned", {}, budget=Budget(8, 2, 30, "tiny_unet")))
    again = write_race(options, found, [curve("vgrpo", s, [0.2, 0.9]) for s in range(2)])
    assert "The searches had different tasks" in again


# --- sweeps ----------------------------------------------------------------------------------------------------------


def swept(*rewards_of_points, targets=(), seconds=(10,) * 3):
    """The points of a sweep that are each given as the rewards of their seeds."""
    points = [Entrant("vgrpo", f"sweep{n}", {}, {"lr": n}) for n in range(len(rewards_of_points))]
    curves = [
        curve("vgrpo", 100 + n, rewards, seconds=each, settings=point.settings)
        for point, seeds, each in zip(points, rewards_of_points, seconds, strict=False)
        for n, rewards in enumerate(seeds)
    ]
    table = report.sweep_points(points, curves, targets)
    return table, report.best_points(table, targets).get("vgrpo")


def test_a_sweep_picks_the_best_mean_of_the_last_two_evaluations_without_failed_seeds():
    points, best = swept([[0.9, 0.5, 0.9]], [[0.2, 0.8, 0.8]], [[0.9, 0.4]])
    assert list(points["final"]) == pytest.approx([0.7, 0.8, 0.4])
    assert best == 1
    points, best = swept([[0.2, 0.9], []], [[0.2, 0.4], [0.2, 0.3]])
    assert list(points["final"].isna()) == [True, False]
    assert best == 1
    assert swept([[0.2, 0.9], []])[1] is None


def test_the_best_point_reaches_the_highest_target_with_all_seeds_at_the_least_cost():
    late_high = ([0.2, 0.4, 0.8, 0.99], [0.2, 0.4, 0.8, 0.99])
    early = ([0.2, 0.8, 0.85, 0.85], [0.2, 0.85, 0.85, 0.85])
    one_seed = ([0.2, 0.9, 0.99, 0.99], [0.2, 0.5, 0.6, 0.7])
    points, best = swept(late_high, early, one_seed, targets=[0.7, 0.8])
    assert best == 1
    assert swept(late_high, early, one_seed)[1] == 0
    # .8 at 5 iterations and 5 * .6 / .65 of them; 11,000 equivalents are five iterations
    assert points["to 0.8"][1] == pytest.approx(11_000 * (1 + 0.6 / 0.65) / 2)
    assert points["to 0.8"].isna()[2]
    # A target that no point reached leaves the choice to the next one.
    slow, fast, never = ([0.2, 0.3, 0.8],) * 2, ([0.2, 0.7, 0.75],) * 2, ([0.2, 0.3, 0.4],) * 2
    assert swept(slow, fast, never, targets=[0.7, 0.9])[1] == 1
    assert swept(never, ([0.2, 0.4, 0.5],) * 2, targets=[0.9])[1] == 1
    assert swept([[0.2, 0.5, 0.9]], [[0.2, 0.9]], targets=[0.8], seconds=(1, 50))[1] == 1  # by passes, not by time


def test_the_files_of_a_sweep(here):
    words = ["--methods", "vgrpo", "--sweep", "--target", "0.5,0.85", "--iterations", "10", "--out", "."]
    options = compare_options(["tiny_shapes", *words])
    recipe = {"model": {"objective": {"class_path": "VGRPO", "init_args": {}}}}
    changes = [{"model.optimizer.lr": lr, "model.objective.clip": 0.1} for lr in (1e-4, 1e-3, 3e-3)]
    found = [Entrant("vgrpo", f"sweep{n}", recipe, changed) for n, changed in enumerate(changes)]
    curves = [
        curve("vgrpo", 100, [0.9, 0.5, 0.9], settings="sweep0"),
        curve("vgrpo", 100, [0.2, 0.8, 0.8], settings="sweep1"),
        Curve("vgrpo", "sweep2", 100, [], "boom"),
    ]
    text = report.write_sweep(options, found, curves)
    # .5 lies halfway to the evaluation at 5 iterations
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| vgrpo")]
    assert rows[1][2:] == ["lr=0.001, clip=0.1", *["0.200"], *["0.800"] * 2, "20.0", "22,000", "5,500", "-", "", ""]
    assert rows[0][-2] == "best"  # the only one that reached .85
    assert "- vgrpo sweep2, seed 100: boom" in text
    assert "Evaluated on training prompts." in text
    block = "tuned:\n  model:\n    objective:\n      init_args:\n        clip: 0.1\n    optimizer:\n      lr: 0.001\n"
    block += "found:\n  points: 8\n  seeds: 2\n  iterations: 30\n  prompts: tiny_shapes\n"
    assert report.tuned_block(found[1], Budget(8, 2, 30, "tiny_shapes")) == block
    saved = json.loads((here / "sweep.json").read_text())
    assert [point["is_best"] for point in saved["points"]] == [True, False, False]
    table = read_csv("sweep.csv")
    assert len(table) == 3
    assert (table[1]["forward_equivalents"], table[1]["to 0.85"]) == ("22000.0", "")
    assert (here / "sweep.md").read_text().endswith(f"{text}\n")
