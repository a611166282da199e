"""Costs by hand-worked numbers, and what the tables say about seeds that missed a target."""

import csv
import json

import pytest
from commands import compare_options
from PIL import Image

from lit_vgrpo.apps.compare.overlays import Budget
from lit_vgrpo.apps.compare.picture import averaged, draw, styles_of
from lit_vgrpo.apps.compare.plan import Entrant
from lit_vgrpo.apps.compare.report import reward_table, tables, target_table, verdict, write_report
from lit_vgrpo.apps.compare.results import Curve, cost_of, rows_of
from lit_vgrpo.apps.compare.sweep import best_of, final_reward, trials_of, tuned_block, write_sweep


def evaluations(rewards, seconds=10.0, every=5):
    """An evaluation every five iterations, each of which costs a tenth of ``seconds`` on the CPU at ten iterations."""
    return [
        {
            "iteration": every * k,
            "reward": reward,
            "images": 100 * every * k,
            "passes": 1400 * every * k,
            "forward_equivalents": 2200 * every * k,
            "train_seconds": 2 * seconds * k,
            "cpu_seconds": seconds * k,
        }
        for k, reward in enumerate(rewards)
    ]


def curve(method, seed, rewards, seconds=10.0, settings="published", error=""):
    return Curve(method, settings, seed, evaluations(rewards, seconds), error)


def cells(table, *start):
    """The cells of the row that starts with these words."""
    for line in table.splitlines():
        row = [cell.strip() for cell in line.strip("|").split("|")]
        if row[: len(start)] == list(start):
            return row[len(start) :]
    raise AssertionError(f"{start} is not in\n{table}")


def test_a_cost_is_interpolated_at_the_first_crossing():
    # .4 at 5 iterations, .8 at 10: .5 lies a quarter of the way, at 6.25 iterations; the later dip does not matter.
    cost = cost_of(evaluations([0.2, 0.4, 0.8, 0.3, 0.9]), 0.5)
    assert cost == pytest.approx(
        {
            "iteration": 6.25,
            "images": 625,
            "passes": 8750,
            "forward_equivalents": 13750,
            "train_seconds": 25.0,
            "cpu_seconds": 12.5,
        }
    )


def test_a_target_met_exactly_costs_what_that_evaluation_did():
    assert cost_of(evaluations([0.2, 0.4, 0.8]), 0.4)["iteration"] == 5
    assert cost_of(evaluations([0.2, 0.4, 0.8]), 0.2)["cpu_seconds"] == 0
    assert cost_of(evaluations([0.2, 0.4, 0.8]), 0.1)["iteration"] == 0
    assert cost_of(evaluations([0.2, 0.4, 0.8]), 0.81) is None
    assert cost_of([], 0.5) is None


def test_means_over_seeds_and_the_ratio():
    curves = [
        curve("vgrpo", 0, [0.2, 0.6, 0.9]),  # .4 at 2.5 iterations, 5 s
        curve("vgrpo", 1, [0.2, 0.4, 0.7]),  # .4 at 5 iterations, 10 s
        curve("nft", 0, [0.2, 0.3, 0.5], seconds=30),  # halfway between 5 and 10 iterations, 45 s
        curve("nft", 1, [0.2, 0.4, 0.5], seconds=30),  # 5 iterations, 30 s
    ]
    vgrpo, nft = rows_of(curves, [0.4])
    assert vgrpo.targets[0.4]["mean"]["iteration"] == pytest.approx(3.75)
    assert vgrpo.targets[0.4]["cpu_ratio"] == 1.0
    assert nft.targets[0.4]["mean"]["cpu_seconds"] == pytest.approx(37.5)
    assert nft.targets[0.4]["cpu_ratio"] == pytest.approx(5.0)
    assert (vgrpo.start, vgrpo.final, vgrpo.best) == pytest.approx((0.2, 0.8, 0.8))
    assert vgrpo.final_range == (0.7, 0.9)
    assert nft.targets[0.4]["equivalents_ratio"] == pytest.approx(6.25 / 3.75)
    expected = ["2/2", "3.8", "2.5 / 5.0", "7.5", "5,250", "8,250", "1.00", "1.00"]
    assert cells(target_table([vgrpo, nft], 0.4, "vgrpo"), "vgrpo", "published") == expected
    assert cells(reward_table([vgrpo, nft]), "nft", "published")[:4] == ["2", "0.200", "0.500", "0.500 / 0.500"]


def test_the_ratio_is_to_the_same_settings():
    curves = [
        curve("vgrpo", 0, [0.0, 1.0], seconds=10, settings="published"),
        curve("vgrpo", 0, [0.0, 1.0], seconds=2, settings="tuned"),
        curve("nft", 0, [0.0, 1.0], seconds=8, settings="tuned"),
        curve("nft", 0, [0.0, 1.0], seconds=8, settings="published"),
    ]
    rows = rows_of(curves, [0.5])
    assert [row.targets[0.5]["cpu_ratio"] for row in rows] == pytest.approx([1.0, 1.0, 4.0, 0.8])


def test_the_ratio_is_to_the_chosen_base_or_the_first_method():
    curves = [curve("nft", 0, [0.0, 1.0], seconds=8), curve("vgrpo", 0, [0.0, 1.0], seconds=2)]
    assert [row.targets[0.5]["cpu_ratio"] for row in rows_of(curves, [0.5])] == pytest.approx([1, 0.25])
    rows = rows_of(curves, [0.5], "vgrpo")
    assert [row.targets[0.5]["cpu_ratio"] for row in rows] == pytest.approx([4, 1])
    assert "| CPU s / nft's | equivalents / nft's |" in target_table(rows, 0.5, "nft")
    assert verdict(rows_of(curves, [0.5]), 0.5, "nft") == "nft lost to: vgrpo published (0.25 of its CPU seconds)."


def test_the_report_says_what_each_search_was_given():
    curves = [curve(name, 0, [0.2, 0.9], settings=kind) for name in ("a", "b") for kind in ("published", "tuned")]
    rows = rows_of(curves, [], found={("a", "tuned"): Budget(8, 2, 30)})
    text = tables(rows, [], "a")
    assert "- a: 8 points x 2 seeds x 30 iterations\n- b: its overlay does not say (found:)" in text
    assert "Search for" not in tables(rows_of(curves[:1], []), [], "a")


def test_a_seed_that_missed_the_target_leaves_no_mean():
    curves = [curve("vgrpo", s, [0.2, 0.9]) for s in range(3)]
    curves += [curve("nft", 0, [0.2, 0.9]), curve("nft", 1, [0.2, 0.9]), curve("nft", 2, [0.2, 0.3])]
    rows = rows_of(curves, [0.5])
    assert cells(target_table(rows, 0.5, "vgrpo"), "nft", "published") == ["2/3", "-", "2.1 / 2.1 / -", *"-----"]
    assert cells(target_table(rows, 0.5, "vgrpo"), "vgrpo", "published")[0] == "3/3"
    assert rows[1].targets[0.5]["seeds"][2] is None
    assert rows[1].targets[0.5]["seeds"][0]["iteration"] == pytest.approx(5 * 3 / 7)
    assert "only where every seed reached the target" in tables(rows, [0.5], "vgrpo")


def test_when_vgrpo_missed_the_target_nobody_has_a_ratio():
    rows = rows_of([curve("vgrpo", 0, [0.2, 0.3]), curve("nft", 0, [0.2, 0.9])], [0.5])
    assert cells(target_table(rows, 0.5, "vgrpo"), "nft", "published")[-1] == "-"
    assert cells(target_table(rows, 0.5, "vgrpo"), "nft", "published")[1] == "2.1"


def test_a_lost_race_is_said():
    curves = [
        curve("vgrpo", 0, [0.2, 0.8]),
        curve("nft", 0, [0.2, 0.8], seconds=5.0),
        curve("dgpo", 0, [0.2, 0.8], seconds=20.0),
        curve("vgrpo", 0, [0.2, 0.3], settings="tuned"),
        curve("dgpo", 0, [0.2, 0.8], settings="tuned"),
    ]
    assert verdict(rows_of(curves, [0.6]), 0.6, "vgrpo") == (
        "vgrpo lost to: nft published (0.50 of its CPU seconds), dgpo tuned (vgrpo did not reach it with every seed)."
    )
    assert "No method reached it" in verdict(rows_of([curves[0], curves[2]], [0.6]), 0.6, "vgrpo")
    assert verdict(rows_of([curves[1]], [0.6]), 0.6, "vgrpo") == ""


def test_a_failed_seed_is_said_and_not_hidden():
    curves = [curve("nft", 0, [0.2, 0.9]), Curve("nft", "published", 1, [], "RuntimeError: no room")]
    rows = rows_of(curves, [0.5])
    text = tables(rows, [0.5], "vgrpo")
    assert cells(text, "nft", "published")[0] == "1/2"
    assert cells(target_table(rows, 0.5, "vgrpo"), "nft", "published")[:2] == ["1/2", "-"]
    assert "nft published, seed 1, failed: RuntimeError: no room" in text


def test_all_seeds_failed():
    rows = rows_of([Curve("nft", "published", 0, [], "boom"), curve("vgrpo", 0, [0.1, 0.2])], [0.15])
    assert cells(reward_table(rows), "nft", "published") == ["0/1", *"-------"]


def test_the_band_is_that_of_the_seeds():
    x, mean, low, high = averaged([curve("a", 0, [0.2, 0.6], 10), curve("a", 1, [0.2, 0.8], 30)], "cpu_seconds")
    assert x == [0, 20]
    assert mean == pytest.approx([0.2, 0.7])
    assert (low, high) == ([0.2, 0.6], [0.2, 0.8])
    assert averaged([curve("a", 0, [0.2, 0.6])], "passes")[0] == pytest.approx([0, 7.0])


def test_the_picture_shows_the_methods(tmp_path):
    curves = [curve("vgrpo", s, [0.2, 0.9 - s / 10]) for s in range(2)]
    curves += [curve("nft", 0, [0.2, 0.4]), Curve("nft", "published", 1, [], "boom")]
    curves += [Curve("dgpo", "published", 0, [], "boom")]
    path = tmp_path / "compare.png"
    draw(path, rows_of(curves, [0.5]), [0.5], "a race")
    with Image.open(path) as image:
        pixels = image.convert("RGB")
        colours = {colour for _, colour in pixels.getcolors(pixels.width * pixels.height)}
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= colours
    assert (0x00, 0x9E, 0x73) not in colours
    assert not list(tmp_path.glob("*.tmp*"))


def test_thirteen_methods_are_told_apart():
    names = ["vgrpo", "mixgrpo", "nft", "dgpo", "flowgrpo", "dancegrpo", "awm", "vgrpo_anchor", "vgrpo_dpm5", "epg"]
    names += ["pepg", "flowgrpo_fast", "awm_nopull"]
    styles = styles_of(names)
    looks = {(style["color"], str(style["linestyle"])) for style in styles.values()}
    assert len(looks) == 13
    assert styles["vgrpo"]["linestyle"] == "-"
    assert styles["vgrpo_anchor"]["color"] == styles["vgrpo_dpm5"]["color"] == styles["vgrpo"]["color"]


def test_a_picture_of_nothing_but_failures_does_not_fail(tmp_path):
    draw(tmp_path / "x.png", rows_of([Curve("nft", "published", 0, [], "boom")], []), [], "nothing")
    assert (tmp_path / "x.png").is_file()


def test_the_files_hold_everything(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = compare_options(["tiny_shapes", "--methods", "vgrpo", "--target", "0.5", "--seeds", "2", "--out", "."])
    rows = rows_of([curve("vgrpo", s, [0.2, 0.9]) for s in range(2)], options.targets)
    text = write_report(options, rows)
    saved = json.loads((tmp_path / "compare.json").read_text())
    assert saved["seeds"] == [0, 1]
    assert saved["versions"]["torch"]
    assert saved["methods"][0]["targets"]["0.5"]["mean"]["iteration"] == pytest.approx(5 * 3 / 7)
    assert saved["methods"][0]["runs"][1]["evaluations"][1]["passes"] == 7000
    with open(tmp_path / "compare.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 4
    assert table[1] == {
        "method": "vgrpo", "settings": "published", "seed": "0", "iteration": "5", "reward": "0.9",
        "images": "500", "passes": "7000", "forward_equivalents": "11000", "cpu_seconds": "10.0",
        "train_seconds": "20.0",
    }  # fmt: skip
    with open(tmp_path / "targets.csv", newline="") as file:
        costs = list(csv.DictReader(file))
    assert [row["seed"] for row in costs] == ["0", "1", "mean"]
    assert float(costs[2]["forward_equivalents"]) == pytest.approx(11_000 * 3 / 7)
    assert costs[2]["equivalents_ratio"] == "1.0"
    markdown = (tmp_path / "compare.md").read_text()
    assert options.line in markdown
    assert text in markdown


def trial_inputs():
    objective = {"class_path": "VGRPO", "init_args": {}}
    entrants = [
        Entrant(
            "vgrpo",
            f"sweep{n}",
            {"model": {"objective": objective}},
            {"model.optimizer.lr": lr, "model.objective.clip": 0.1},
        )
        for n, lr in enumerate([1e-4, 1e-3, 3e-3])
    ]
    curves = [
        curve("vgrpo", 100, [0.9, 0.5, 0.9], settings="sweep0"),
        curve("vgrpo", 100, [0.2, 0.8, 0.8], settings="sweep1"),
        Curve("vgrpo", "sweep2", 100, [], "boom"),
    ]
    return entrants, curves


def test_a_sweep_picks_the_best_mean_of_the_last_two_evaluations():
    entrants, curves = trial_inputs()
    assert final_reward(curves[0]) == pytest.approx(0.7)
    assert final_reward(curve("a", 0, [0.9, 0.4])) == pytest.approx(0.4)
    trials = trials_of(entrants, curves)
    best = best_of(trials)["vgrpo"]
    assert best is trials[1]
    assert trials[2].final is None
    block = "tuned:\n  model:\n    objective:\n      init_args:\n        clip: 0.1\n    optimizer:\n      lr: 0.001\n"
    block += "found:\n  points: 8\n  seeds: 2\n  iterations: 30\n  prompts: tiny_shapes\n"
    assert tuned_block(best, Budget(8, 2, 30, "tiny_shapes")) == block


def swept(*rewards_of_points, targets):
    """Trials of points that are each given as the rewards of their seeds."""
    entrants = [Entrant("vgrpo", f"sweep{n}", {}, {"lr": n}) for n in range(len(rewards_of_points))]
    curves = []
    for entrant, seeds in zip(entrants, rewards_of_points, strict=True):
        curves += [curve("vgrpo", 100 + n, rewards, settings=entrant.settings) for n, rewards in enumerate(seeds)]
    return trials_of(entrants, curves, targets)


def test_the_best_point_reaches_the_highest_target_with_all_seeds_at_the_least_cost():
    late_high = ([0.2, 0.4, 0.8, 0.99], [0.2, 0.4, 0.8, 0.99])
    early = ([0.2, 0.8, 0.85, 0.85], [0.2, 0.85, 0.85, 0.85])
    one_seed = ([0.2, 0.9, 0.99, 0.99], [0.2, 0.5, 0.6, 0.7])
    trials = swept(late_high, early, one_seed, targets=[0.7, 0.8])
    assert best_of(trials)["vgrpo"] is trials[1]
    assert best_of(swept(late_high, early, one_seed, targets=[]))["vgrpo"].entrant.settings == "sweep0"
    # .8 at 5 iterations and 5 * .6 / .65 of them; 11,000 equivalents are five iterations
    assert trials[1].cost(0.8) == pytest.approx(11_000 * (1 + 0.6 / 0.65) / 2)
    assert trials[2].cost(0.8) == float("inf")


def test_a_target_that_no_point_reached_leaves_the_choice_to_the_next_one():
    slow, fast, never = ([0.2, 0.3, 0.8],) * 2, ([0.2, 0.7, 0.75],) * 2, ([0.2, 0.3, 0.4],) * 2
    trials = swept(slow, fast, never, targets=[0.7, 0.9])
    assert best_of(trials)["vgrpo"] is trials[1]
    equal = swept(never, ([0.2, 0.4, 0.5],) * 2, targets=[0.9])
    assert best_of(equal)["vgrpo"] is equal[1]


def test_a_ranking_is_by_passes_and_not_by_the_machines_time():
    busy = trials_of(
        [Entrant("vgrpo", f"sweep{n}", {}) for n in range(2)],
        [
            curve("vgrpo", 100, [0.2, 0.5, 0.9], seconds=1, settings="sweep0"),
            curve("vgrpo", 100, [0.2, 0.9], seconds=50, settings="sweep1"),
        ],
        [0.8],
    )
    assert best_of(busy)["vgrpo"] is busy[1]


def test_the_sweeps_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--methods", "vgrpo", "--sweep", "--target", "0.5,0.85", "--iterations", "10", "--out", "."]
    options = compare_options(["tiny_shapes", *words])
    text = write_sweep(options, trials_of(*trial_inputs(), options.targets))
    # .5 lies halfway to the evaluation at 5 iterations
    row = ["0.200", "0.800", "0.800", "20.0", "22,000", "5,500", "0 of 1", ""]
    assert cells(text, "vgrpo", "lr=0.001, clip=0.1") == row
    assert cells(text, "vgrpo", "lr=0.003, clip=0.1") == ["-", "-", "-", "-", "-", "0 of 1", "0 of 1", ""]
    assert cells(text, "vgrpo", "lr=0.0001, clip=0.1")[-1] == "best"  # the only one that reached .85
    assert "vgrpo was given 3 points x 1 seed x 10 iterations, tiny_shapes, training prompts." in text
    assert "    found:\n      points: 3\n      seeds: 1\n      iterations: 10\n" in text
    assert "Chosen on training prompts held out by hash (data.heldout=null, data.heldout_fraction=0.2)" in text
    assert "vgrpo sweep2, seed 100, failed: boom" in text
    saved = json.loads((tmp_path / "sweep.json").read_text())
    assert [trial["is_best"] for trial in saved["trials"]] == [True, False, False]
    assert saved["budgets"]["vgrpo"]["points"] == 3
    table = (tmp_path / "sweep.csv").read_text().splitlines()
    assert len(table) == 3
    assert table[0].endswith("forward_equivalents,equivalents_to_0.5,equivalents_to_0.85")
    assert table[2].endswith("22000,5500,")
    assert (tmp_path / "sweep.md").read_text().endswith(f"{text}\n")
