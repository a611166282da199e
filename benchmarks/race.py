"""Collects results of ``lightning compare`` in ``benchmarks/results/race.csv``, and draws its picture.

    python benchmarks/race.py add runs/compare-tiny_shapes --settings tuned
    python benchmarks/race.py add runs/sweep-tiny_shapes
    python benchmarks/race.py add runs/compare-smooth --settings tuned --untrained
    python benchmarks/race.py draw
    python benchmarks/race.py draw --settings "tuned, smooth reward, checked" --picture compare_smooth_reward.png

A row is the cost of reaching a target, interpolated between two evaluations; costs are empty where it was not reached.
Settings of runs with ``SmoothShapesReward`` end in "smooth reward"; costs by the checking reward, in "checked".
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lit_vgrpo.apps.compare.report import cost_of

RESULTS = Path(__file__).parent / "results"
KEYS = ["task", "settings", "method", "seed", "target"]
COSTS = {"iterations": "iteration", "equivalents": "forward_equivalents", "cpu_seconds": "cpu_seconds"}
NAMES = {
    "vgrpo_anchor": "V-GRPO, anchor",
    "vgrpo": "V-GRPO",
    "nft_anchor": "DiffusionNFT, anchor",
    "nft_anchor_no_replay": "DiffusionNFT, anchor,\nno replay",
    "nft": "DiffusionNFT",
    "awm_anchor": "AWM, anchor",
    "awm_anchor_no_replay": "AWM, anchor,\nno replay",
    "awm": "AWM",
    "dgpo_shared": "DGPO, shared pass",
    "dgpo_anchor": "DGPO, shared pass,\nanchor",
    "dgpo_shared_noisiest_3": "DGPO, shared pass,\nnoisiest 3",
    "dgpo": "DGPO",
    "epg": "EPG",
    "pepg": "PEPG",
    "pepg_anchor": "PEPG, anchor",
    "pepg_anchor_noisiest_2": "PEPG, anchor,\nnoisiest 2",
    "flowbp": "FlowBP-Sparse",
    "refl": "ReFL",
    "draft_k": "DRaFT-K",
    "draft_lv": "DRaFT-LV",
    "ram": "RAM",
    "rvm": "RVM",
    "crd": "CRD",
    "flowdppo": "Flow-DPPO",
    "nft_norm": "DiffusionNFT,\nNormGuard",
}


def untrained(folder: Path, run: dict[str, Any]) -> list[dict[str, float]]:
    """Return a run's evaluations by the held-out reward that was not trained on."""
    place = folder / "runs" / f"{run['method']}-{run['settings']}-seed{run['seed']}"
    rewards = pd.read_csv(place / "metrics.csv")["heldout/untrained_reward"].dropna().tolist()
    rewards.append(json.loads((place / "summary.json").read_text())["heldout_metrics_end"]["untrained_reward"])
    return [one | {"reward": reward} for one, reward in zip(run["evaluations"], rewards, strict=False)]


def add(folder: Path, settings: str | None, targets: list[float], by_untrained: bool = False) -> None:
    """Write the costs of a folder's finished runs to the file, replacing earlier ones of the same runs."""
    (found,) = folder.glob("*.json")
    content = json.loads(found.read_text())
    task = content["command"].partition(" compare ")[2].split()[0]
    suffix = ", smooth reward" * ("SmoothShapesReward" in content["command"]) + ", checked" * by_untrained
    values = {(p["method"], p["settings"]): f"sweep: {p['values']}" for p in content.get("points", [])}
    rows = []
    for run in content["runs"]:
        if run["error"]:  # a killed run has not missed its targets
            continue
        of_run = values.get((run["method"], run["settings"]), run["settings"])
        name = f"{settings or of_run}{suffix}"
        evaluations = untrained(folder, run) if by_untrained else run["evaluations"]
        for target in targets:
            cost = cost_of(evaluations, target)
            key = dict(zip(KEYS, (task, name, run["method"], run["seed"], target), strict=True))
            rows.append(key | {ours: round(cost[theirs], 1) for ours, theirs in COSTS.items() if cost})
    table = pd.DataFrame(rows, columns=[*KEYS, *COSTS])
    path = RESULTS / "race.csv"
    if path.exists():
        table = pd.concat([pd.read_csv(path), table]).drop_duplicates(KEYS, keep="last")
    table.sort_values(KEYS, kind="stable").to_csv(path, index=False, lineterminator="\n")


def draw(task: str = "tiny_shapes", settings: str = "tuned", picture: str = "compare_tiny_shapes.png") -> None:
    """Draw the equivalents to each target: a dot per seed, and a bar at their mean if all seeds reached it."""
    table = pd.read_csv(RESULTS / "race.csv").query("task == @task and settings == @settings")
    table = table[table["target"].isin([0.7, 0.8, 0.9])]
    table["equivalents"] /= 1000
    whole = table.groupby(["method", "target"])["equivalents"].agg(lambda costs: costs.mean(skipna=False)).unstack()
    whole = whole.sort_values([0.9, 0.8, 0.7], ascending=False, na_position="first")
    figure = Figure(figsize=(11, 1.2 + 0.42 * len(whole)), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, target in zip(figure.subplots(1, 3, sharey=True), whole.columns, strict=True):
        for row, method in enumerate(whole.index):
            costs = table[(table["method"] == method) & (table["target"] == target)]["equivalents"]
            colour = "#0072B2" if method.startswith("vgrpo") else "#D55E00"
            axis.barh(row, 0.0 if costs.isna().any() else costs.mean(), color=colour, alpha=0.35)
            axis.scatter(costs, [row] * len(costs), s=14, color=colour)
            if costs.isna().any():
                axis.text(
                    0.02,
                    row,
                    f"{costs.notna().sum()} of {len(costs)} seeds",
                    ha="left",
                    va="center",
                    fontsize=8,
                    transform=axis.get_yaxis_transform(),
                )
        axis.set(xlabel="thousand forward-pass equivalents", title=f"to {target:g}", xlim=(0, 37))
        axis.set_yticks(range(len(whole)), [NAMES.get(method, method) for method in whole.index])
        axis.grid(alpha=0.25, axis="x")
    figure.savefig(RESULTS / picture, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("add", "draw"))
    parser.add_argument("folders", nargs="*", type=Path, help="Output folders of lightning compare.")
    parser.add_argument("--settings", help="Name of the runs' settings in the file.")
    parser.add_argument("--untrained", action="store_true", help="Costs by the reward that was not trained on.")
    parser.add_argument("--picture", default="compare_tiny_shapes.png")
    parser.add_argument("--targets", type=float, nargs="+", default=[0.6, 0.7, 0.8, 0.9])
    options = parser.parse_args()
    for folder in options.folders:
        add(folder, options.settings, options.targets, options.untrained)
    if options.action == "draw":
        draw(settings=options.settings or "tuned", picture=options.picture)
