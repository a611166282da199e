"""``lightning eval``: the held-out scores of a run's weights, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from pydantic_core import to_json

from lit_vgrpo.callbacks import FID
from lit_vgrpo.callbacks.summary import versions
from lit_vgrpo.cli.eval_scores import HeldOutEvaluation, ImageScores
from lit_vgrpo.cli.saved_policy import ChosenRun
from lit_vgrpo.config.parts import with_full_key
from lit_vgrpo.config.recipe import refuse_overrides
from lit_vgrpo.core.gather import image_ranks
from lit_vgrpo.data.datasets import Rows, held_out_error
from lit_vgrpo.data.prompts import text_of
from lit_vgrpo.errors import UserError, counted, say, shell_line, with_interval
from lit_vgrpo.launch.build import build
from lit_vgrpo.launch.checks import picture_errors
from lit_vgrpo.launch.recipe_cli import RecipeCLI
from lit_vgrpo.launch.train import leave_together
from lit_vgrpo.metrics import diversity
from lit_vgrpo.metrics.features import INCEPTION, FeatureNetwork, TransformersFeatures, feature_network
from lit_vgrpo.metrics.reference import STATISTICS_SUFFIX
from lit_vgrpo.metrics.statistics import LEVEL, RESAMPLES, bootstrap_interval
from lit_vgrpo.options import Evaluate
from lit_vgrpo.rewards import CLIPScore, Weighted, as_weighted
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.system.paths import check_writable, typed_path, write_atomically
from lit_vgrpo.system.process import is_first_process
from lit_vgrpo.training.folder import CONFIG_NAME, candidates
from lit_vgrpo.training.saved_weights import REFERENCE
from lit_vgrpo.training.settings import module_errors
from lit_vgrpo.training.trainer_internals import callbacks_of

OVERRIDES = ("trainer.logger=false", "ckpt_path=null", "trainer.inference_mode=false")
"""Disables logging, resuming and inference mode, so that tensors are as in training."""
TRAINING_KEYS = ("model.optimizer", "model.lr_scheduler", "trainer.max_epochs", "trainer.max_steps", "trainer.max_time")
UNUSED = dict.fromkeys(TRAINING_KEYS, "has no effect on an evaluation.")
UNUSED["ckpt_path"] = "has no effect on an evaluation. Use --checkpoint FILE."


def evaluate(options: Evaluate) -> int:
    """Score a run's weights on held-out prompts, or on a benchmark; return 1 if no image could be scored."""
    has_benchmark = options.benchmark is not None
    for name in ("fid_reference", "features") if has_benchmark else ("prompts", "pictures", "share"):
        if getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} has no effect with{'out' * (not has_benchmark)} --benchmark NAME. Leave it out.")
    if options.out is not None and options.out.suffix != ".json":
        fitting = shell_line("--out", options.out.with_suffix(".json"))
        raise UserError(f"--out {options.out} is not a JSON file. Use {fitting}.")
    if has_benchmark:
        from lit_vgrpo.cli.benchmark import evaluate_benchmark

        return evaluate_benchmark(options)
    run = ChosenRun.of(options)
    refuse_overrides(run.words, UNUSED)
    saved, variant = run.read_weights()
    out = options.out or run.folder / "eval.json"
    if is_first_process():
        check_writable(out)
    cli = build([f"{run.folder / CONFIG_NAME}", *run.words, *OVERRIDES], make_folder=False)
    if not options.reference:
        cli.model.policy.start_from = None  # the checkpoint replaces its weights
    rows, data = heldout_rows(cli), cli.datamodule
    fids, network = image_metrics(cli, options)
    rewards = rewards_with_similarity(cli.model.evaluator.observed, network)
    network = network if data.heldout_images_per_prompt > 1 else None
    variants = [variant, *([REFERENCE] if options.reference else [])]
    module = HeldOutEvaluation(cli.model, rows, data, saved, variants, rewards, fids, network)
    # The recipe's callbacks and loggers train, save and log into the run directory.
    cli.trainer.callbacks, cli.trainer.loggers = [], []  # type: ignore[attr-defined]
    try:
        cli.trainer.validate(module, verbose=False)
    except SystemExit as error:  # Lightning turns Ctrl-C into it
        raise KeyboardInterrupt from error
    except (LoadError, MisconfigurationException, ValueError) as error:
        raise UserError(str(error)) from error
    leave_together()
    if not cli.trainer.is_global_zero:
        return 0
    per_prompt, progress = data.heldout_images_per_prompt, saved.progress
    counts = {"count": len(rows), "images_per_prompt": per_prompt, "images": len(rows) * per_prompt}
    about = {"file": f"{saved.path}", "iteration": progress.iterations, "optimizer_steps": progress.optimizer_steps}
    report = {
        "run": f"{run.folder}",
        "checkpoint": about,
        "prompts": {**data.heldout_origin(), **counts},
        "seed": cli.model.seed,
        "overrides": run.words,
        "interval": {"level": LEVEL, "resamples": RESAMPLES, "of": "prompts"},
        "rewards": {name: {"weight": weight, "untrained": weight == 0} for name, weight in rewards.weight_of.items()},
        "world_size": cli.trainer.world_size,
        "versions": versions(),
        **results(module.scores, [text for row in rows for text in [text_of(row)] * per_prompt]),
    }
    say(table(report))
    whole, table_file = write(report, module.scores, out)
    say(f"Written: {whole} and {table_file}")
    return int(any(scores.images["reward"].isna().all() for scores in module.scores.values()))


def heldout_rows(cli: RecipeCLI) -> Rows:
    """Return the held-out prompts; raise UserError without any. The training prompts may be missing."""
    data = cli.datamodule
    if not data.has_heldout:
        raise UserError("The run's recipe has no held-out prompts. Set data.heldout=prompts.txt.")
    if errors := module_errors(cli.model, data.sizes):
        raise UserError(*errors)
    try:
        rows = data.heldout_rows()
    except (ValueError, ModuleNotFoundError) as error:
        raise UserError(with_full_key(str(error), cli.recipe.values)) from error
    with cli.model.policy.sized(*cli.model.evaluator.sides):
        if errors := picture_errors(cli.model.policy, rows, "held-out prompts"):
            raise UserError(*(f"data.heldout: {error}" for error in errors))
    images = len(rows) * data.heldout_images_per_prompt
    if message := held_out_error(images, data.eval_batch_size, image_ranks(cli.trainer)[1]):
        raise UserError(message)
    return rows


def image_metrics(cli: RecipeCLI, options: Evaluate) -> tuple[list[FID], FeatureNetwork | None]:
    """Return the FID callbacks and the network of the diversity; raise UserError if a metric's check fails."""
    fids = callbacks_of(cli.trainer, FID)
    if fids and (options.fid_reference or options.features):
        changed: dict[str, Any] = {"features": options.features} if options.features else {}
        reference = options.fid_reference or fids[0].reference
        fids = [replace(fids[0], reference=reference, **changed)]
    elif options.fid_reference:  # a file of statistics need not hold the features that KID needs
        kid = not options.fid_reference.endswith(STATISTICS_SUFFIX)
        fids = [FID(options.fid_reference, options.features or INCEPTION, kid=kid)]
    if fids and cli.model.policy.num_frames is not None:
        raise UserError("FID compares images, but the policy makes videos. Leave out --fid-reference.")
    network = fids[0].network if fids else feature_network(options.features) if options.features else None
    errors = [error for fid in fids for error in fid.check()]
    errors += network.check() if network is not None and not fids else []
    if errors:
        raise UserError(*errors)
    return fids, network


def rewards_with_similarity(rewards: Weighted, network: FeatureNetwork | None) -> Weighted:
    """Return the rewards, with a CLIPScore of weight 0 if the feature network is a CLIP model, which embeds prompts."""
    if isinstance(network, TransformersFeatures) and network.is_clip:
        similarity = CLIPScore(network.source)
        if similarity.name not in rewards.part_names and not similarity.check():
            return rewards.observing(as_weighted(similarity))
    return rewards


def interval(values: Sequence[float], prompts: Sequence[str] | Sequence[int]) -> dict[str, Any]:
    """Return the mean and its bootstrap interval, without NaN values; whole prompts are resampled.

    >>> interval([1.0, 3.0, math.nan], [0, 0, 1])  # no interval of a single prompt
    {'mean': 2.0, 'low': None, 'high': None, 'count': 2, 'failed': 1}
    """
    kept = [value for value in values if not math.isnan(value)]
    mean = math.fsum(kept) / len(kept) if kept else None
    ends = bootstrap_interval(values, prompts)
    low, high = (None if math.isnan(end) else end for end in ends)
    return {"mean": mean, "low": low, "high": high, "count": len(kept), "failed": len(values) - len(kept)}


def results(scores: Mapping[str, ImageScores], prompts: Sequence[str]) -> dict[str, Any]:
    """Return the means with intervals of each set of weights, and its differences to the reference image by image.

    Args:
        scores: For each set of weights, the scores of the same images: same prompts, same noise.
        prompts: Each image's prompt, by number; rows of the same prompt are one prompt.
    """

    def intervals(metrics: Mapping[str, pd.Series]) -> dict[str, Any]:
        return {name: interval(values.tolist(), values.index.tolist()) for name, values in metrics.items()}

    measured = {variant: _measured(score, prompts) for variant, score in scores.items()}
    variants = {
        variant: {"means": intervals(measured[variant]), "distances": score.distances, "errors": score.errors}
        for variant, score in scores.items()
    }
    if REFERENCE not in scores:
        return {"variants": variants}
    start = measured.pop(REFERENCE)
    differences = {
        variant: intervals({name: values - start[name].to_numpy() for name, values in metrics.items()})
        for variant, metrics in measured.items()
    }
    return {"variants": variants, "difference_to_reference": differences}


def _measured(scores: ImageScores, prompts: Sequence[str]) -> dict[str, pd.Series]:
    """Return the values of each metric by prompt."""
    images = scores.images.set_index(scores.images["image"].map(dict(enumerate(prompts))))
    metrics = {name: images[name] for name in images.columns.drop(["prompt", "image"])}
    if scores.features is not None:
        sound = scores.features.isfinite().all(dim=1)
        spread = diversity(scores.features[sound], images.index[sound.numpy()].tolist())
        metrics["diversity"] = pd.Series(spread, dtype=float).reindex(images.index.unique())
    return metrics


def write(report: dict[str, Any], scores: Mapping[str, ImageScores], wanted: Path) -> tuple[Path, Path]:
    """Write the JSON and a CSV with one line per image; never overwrite an earlier evaluation."""
    paths = (stem.with_name(f"{stem.name}.json") for stem in candidates(typed_path(wanted).with_suffix("")))
    path = next(path for path in paths if not path.exists() and not path.with_suffix(".csv").exists())
    path.parent.mkdir(parents=True, exist_ok=True)
    images = pd.concat([score.images.assign(variant=variant) for variant, score in scores.items()])
    columns = ["prompt", "image", "variant"]
    images = images[[*columns, *images.columns.drop(columns)]]
    write_atomically(path.with_suffix(".csv"), images.to_csv(index=False, lineterminator="\n"))
    write_atomically(path, to_json(report, indent=2, inf_nan_mode="null").decode() + "\n")
    return path, path.with_suffix(".csv")


def table(report: dict[str, Any]) -> str:
    """Return the terminal's table: one line per metric, one column per set of weights."""
    variants = report["variants"].values()
    differences = report.get("difference_to_reference", {}).values()
    lines: dict[str, list[str]] = {}
    trained = [name for name, part in report["rewards"].items() if not part["untrained"]]
    for name in next(iter(variants))["means"]:
        if trained == [name] and all(result["means"][name] == result["means"]["reward"] for result in variants):
            continue  # the line above has the same numbers
        shown = f"{name} (untrained)" if report["rewards"].get(name, {}).get("untrained") else name
        means = [result["means"][name] for result in variants]
        lines[shown] = [with_interval(mean) for mean in means]
        if any(mean["failed"] for mean in means):
            lines[f"  failed: {name}"] = [str(mean["failed"]) for mean in means]
        if differences:
            lines[f"  minus reference: {name}"] = [*(with_interval(result[name], "+") for result in differences), ""]
    for name in dict.fromkeys(name for result in variants for name in result["distances"]):
        lines[name] = [format(result["distances"].get(name, math.nan), ".4g") for result in variants]
    saved, prompts = report["checkpoint"], report["prompts"]
    sampled = f"{counted(prompts['count'], 'held-out prompt')} x {counted(prompts['images_per_prompt'], 'image')}"
    parts = [
        f"{saved['file']} after {counted(saved['iteration'], 'iteration')}\n{sampled}, seed {report['seed']}\n",
        pd.DataFrame.from_dict(lines, orient="index", columns=list(report["variants"])).to_string(),
        f"\nIn brackets: {LEVEL:.0%} intervals of the mean, from {RESAMPLES} bootstrap samples of the prompts.",
    ]
    for variant, result in report["variants"].items():
        parts += [f'{variant}: reward "{name}" failed: {message}' for name, message in result["errors"].items()]
    return "\n".join(parts)
