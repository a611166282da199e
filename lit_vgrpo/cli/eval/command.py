"""``lightning eval``: the held-out scores of a run's weights, with intervals."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_vgrpo.callbacks import FID
from lit_vgrpo.callbacks.summary import versions
from lit_vgrpo.cli.eval.report import INTERVAL, results, table, write
from lit_vgrpo.cli.eval.scores import HeldOutEvaluation
from lit_vgrpo.cli.saved_policy import RunOptions, saved_weights
from lit_vgrpo.config.recipe import refuse_overrides
from lit_vgrpo.data.datasets import Rows, held_out_error
from lit_vgrpo.errors import UserError, say
from lit_vgrpo.launch.build import build
from lit_vgrpo.launch.recipe_cli import RecipeCLI
from lit_vgrpo.launch.train import leave_together
from lit_vgrpo.metrics.features import INCEPTION, FeatureNetwork, feature_network
from lit_vgrpo.metrics.reference import STATISTICS_SUFFIX
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.training.folder import CONFIG_NAME
from lit_vgrpo.training.saved_weights import AVERAGE, REFERENCE, TRAINED, SavedWeights
from lit_vgrpo.training.trainer_internals import callbacks_of

OVERRIDES = ("trainer.logger=false", "ckpt_path=null", "trainer.inference_mode=false")
"""Nothing is logged or resumed, and weights and images are not inference tensors, as in training."""


INSTEAD = {"ckpt_path": "--checkpoint FILE", "run_dir": "--out FILE.json", "name": "--out FILE.json"}


@dataclass(kw_only=True)
class EvaluateOptions(RunOptions):
    """Options of ``lightning eval``, whose help describes them."""

    reference: bool = False
    features: str | None = None
    fid_reference: str | None = None
    out: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_overrides(self.words, {k: f"has no effect on an evaluation. Use {v}." for k, v in INSTEAD.items()})
        self.out = self.out or self.run / "eval.json"
        if self.out.suffix != ".json" or self.out.is_dir():
            raise UserError(f"--out {self.out} is not a JSON file. Use --out {self.out.with_suffix('.json')}.")

    @property
    def variants(self) -> list[str]:
        """Sets of weights to evaluate."""
        return [TRAINED, *([AVERAGE] if self.ema else []), *([REFERENCE] if self.reference else [])]


def evaluate(options: EvaluateOptions) -> int:
    """Score a run's weights on held-out prompts: ``RUN [--ema] [--reference] [key=value ...]``.

    Returns:
        0; 1 if no image could be scored; 2 for a mistake in the command line; 130 after Ctrl-C.
    """
    saved = saved_weights(options.run, options.checkpoint, *options.variants)
    cli = build([str(options.run / CONFIG_NAME), *options.words, *OVERRIDES], make_folder=False)
    if REFERENCE not in options.variants:
        cli.model.policy.ignore_start()
    rows = heldout_rows(cli)
    fids, network, missing = image_metrics(cli, options)
    data = cli.datamodule
    module = HeldOutEvaluation(
        cli.model, rows, data.heldout_images_per_prompt, data.eval_batch_size, saved, options.variants, fids, network
    )
    # The recipe's callbacks and loggers train, save and log into the run directory.
    cli.trainer.callbacks, cli.trainer.loggers = [], []  # type: ignore[attr-defined]
    try:
        cli.trainer.validate(module, verbose=False)
    except SystemExit as error:  # Lightning turns Ctrl-C into it
        raise KeyboardInterrupt from error
    except (LoadError, MisconfigurationException) as error:
        raise UserError(str(error)) from error
    leave_together()
    if not cli.trainer.is_global_zero:
        return 0
    evaluation = {
        **description(cli, options, saved, len(rows)),
        **results(module.scores, module.images_per_prompt),
        "missing": missing,
    }
    say(table(evaluation))
    try:
        files = write(evaluation, module.scores, options.out)
    except OSError as error:
        raise UserError(f"Cannot write {options.out}: {error.strerror}. Set --out /another/file.json.") from error
    say(f"Written: {' and '.join(map(str, files))}")
    return int(any(scores.total.isnan().all() for scores in module.scores.values()))


def heldout_rows(cli: RecipeCLI) -> Rows:
    """Return the held-out prompts; the training prompts may be missing, or not fit the number of ranks.

    Raises:
        UserError: there are no held-out prompts, or the recipe is invalid.
    """
    data = cli.datamodule
    if not data.has_heldout:
        raise UserError("The run's recipe has no held-out prompts. Set data.heldout=prompts.txt.")
    errors = cli.model.check(data.sizes)
    rows: Rows = []
    try:
        rows = data.heldout_rows()
    except (ValueError, ModuleNotFoundError) as error:
        errors.append(str(error))
    else:
        images = len(rows) * data.heldout_images_per_prompt
        message = held_out_error(images, data.eval_batch_size, cli.trainer.world_size)
        errors += [message] if message else []
    if errors:
        raise UserError(*errors)
    return rows


def image_metrics(cli: RecipeCLI, options: EvaluateOptions) -> tuple[list[FID], FeatureNetwork | None, dict[str, str]]:
    """Return the image metrics besides rewards, and why the others are missing.

    Returns:
        The recipe's FID callbacks, or one from the options; the feature network of the diversity; ``{metric: reason}``.

    Raises:
        UserError: a metric's check fails.
    """
    fids = callbacks_of(cli.trainer, FID)
    if options.fid_reference is not None or (fids and options.features is not None):
        fids = [_fid_asked_for(options, fids[0] if fids else None)]
    missing = {} if fids else {"fid": "the recipe has no FID callback. Give --fid-reference FOLDER."}
    network = feature_network(options.features) if options.features is not None else None
    if fids:
        network = fids[0].network
    errors = [error for fid in fids for error in fid.check(cli.trainer.world_size)]
    errors += network.check() if network is not None and not fids else []
    if errors:
        raise UserError(*errors)
    if cli.datamodule.heldout_images_per_prompt < 2:
        missing["diversity"] = "there is only one image per prompt. Set data.heldout_images_per_prompt=4."
        return fids, None, missing
    if network is None:
        missing["diversity"] = f"there is no feature network. Give --features {INCEPTION}, or another."
    return fids, network, missing


def _fid_asked_for(options: EvaluateOptions, own: FID | None) -> FID:
    """Return the recipe's FID, changed by the options."""
    reference = options.fid_reference or (own.reference if own is not None else "")
    if own is None:
        # A file of statistics need not hold what KID needs.
        return FID(reference, options.features or INCEPTION, kid=not reference.endswith(STATISTICS_SUFFIX))
    changed: dict[str, Any] = {} if options.features is None else {"features": options.features, "size": None}
    return replace(own, reference=reference, every_n_evaluations=1, **changed)


def description(cli: RecipeCLI, options: EvaluateOptions, saved: SavedWeights, prompts: int) -> dict[str, Any]:
    """Return what was evaluated and how, for the JSON."""
    data, weights = cli.datamodule, cli.model.observed.weight_of
    return {
        "run": str(options.run),
        "checkpoint": {
            "file": str(saved.path),
            "iteration": saved.progress.iterations,
            "optimizer_steps": saved.progress.optimizer_steps,
        },
        "prompts": {
            **data.heldout_origin(),
            "count": prompts,
            "images_per_prompt": data.heldout_images_per_prompt,
            "images": prompts * data.heldout_images_per_prompt,
        },
        "seed": cli.model.seed,
        "overrides": options.words,
        "interval": INTERVAL,
        "rewards": {name: {"weight": weight, "held_out": weight == 0} for name, weight in weights.items()},
        "world_size": cli.trainer.world_size,
        "versions": versions(),
    }
