"""``lightning run``: a recipe and its overrides become a training run in a folder of its own."""

from __future__ import annotations

import logging
import os
import random
import sys
import traceback
import warnings
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lit_vgrpo import callbacks as our_callbacks
from lit_vgrpo import objectives, policies, rewards  # noqa: F401  imported so that their classes go by short names
from lit_vgrpo.data.module import PromptDataModule
from lit_vgrpo.errors import UserError, from_parser, one_line, report
from lit_vgrpo.hub import LoadError
from lit_vgrpo.interrupt import RunCheckpoint
from lit_vgrpo.module import VGRPOModule
from lit_vgrpo.recipe import Command, parse_command, parser_config, read_recipe
from lit_vgrpo.rewards.base import RewardError
from lit_vgrpo.run_folder import CONFIG_NAME, RunFolder, is_first_process, release, reserve
from lit_vgrpo.schema import CONSTRUCTOR_ERRORS, recipe_faults

TRAINER_DEFAULTS = {"num_sanity_val_steps": 0, "log_every_n_steps": 1, "enable_model_summary": False}
LINKED = {"model.seed": "seed_everything", "data.seed": "seed_everything"}
TOP_LEVEL: dict[str, Any] = {
    "name": str | None,
    "run_dir": str | None,
    "ckpt_path": str | None,
    "seed_everything": bool | int,
    "trainer": Trainer,
    "model": VGRPOModule,
    "data": PromptDataModule,
}
EXPECTED_WARNINGS = (
    ".*does not have many workers.*",  # the loader yields prompts: there is nothing to prefetch
    ".*exists and is not empty.*",  # the run folder holds config.yaml before the loggers start
    ".*module\\(s\\) in eval mode at the start.*",  # a policy is trained as it samples, without dropout
    ".*across ranks is zero.*",  # no held-out prompts: nothing to evaluate
    ".*sync_dist=True.*",  # what is logged is computed over all ranks already
    ".*all_gather is deprecated.*",
    ".*LeafSpec.*is deprecated.*",
)


@cache
def _drawn_seed() -> int:
    return random.SystemRandom().randrange(2**31)


def fixed_seed(seed_everything: bool | int) -> int:
    """The seed of rollouts and prompts: a number as it is, ``true`` a random one (see config.yaml), ``false`` 0."""
    if seed_everything is True:
        return _drawn_seed()
    return int(seed_everything)


class RecipeCLI(LightningCLI):
    """Builds module, data and trainer from a recipe, with the loggers and callbacks every run folder needs.

    Args:
        command: what was typed.
        make_folder: create the run folder; otherwise only say where it would be asked for.
    """

    def __init__(self, command: Command, make_folder: bool = True) -> None:
        self.command = command
        self.make_folder = make_folder
        self.folder = Path()
        self.checkpoints = RunCheckpoint()
        with parser_config(command) as (config, self.note):
            super().__init__(
                VGRPOModule,
                PromptDataModule,
                save_config_callback=None,
                trainer_defaults=TRAINER_DEFAULTS,
                seed_everything_default=0,
                parser_kwargs={"parser_mode": "omegaconf+", "exit_on_error": False, "allow_abbrev": False},
                args=command.parser_args(config),
                run=False,
                auto_configure_optimizers=False,
            )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--name", type=str | None, default=None, help="Name of the run; the recipe's by default.")
        parser.add_argument(
            "--run_dir", type=str | None, default=None, help="Folder to write to; runs/NAME by default."
        )
        parser.add_argument("--ckpt_path", type=str | None, default=None, help="Checkpoint to continue from.")
        for target, source in LINKED.items():
            parser.link_arguments(source, target, compute_fn=fixed_seed)

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)
        if self.config.seed_everything is True:
            self.config.seed_everything = _drawn_seed()
        self.config.name = self.config.name or self.command.recipe.stem
        if self.config.trainer.default_root_dir is not None:
            raise UserError("trainer.default_root_dir is set by the command. Use run_dir=... instead.")
        ckpt_path = self.config.ckpt_path
        if ckpt_path is not None and not Path(ckpt_path).exists():
            raise UserError(f"ckpt_path={ckpt_path} does not exist. Give a checkpoint of an earlier run.")
        if ckpt_path is not None and Path(ckpt_path).is_file() and not is_zipfile(ckpt_path):
            raise UserError(f"ckpt_path={ckpt_path} is not a checkpoint, or half of one. Give another of its folder.")

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        base = Path(self.config.run_dir or Path("runs") / self.config.name).expanduser()
        self.make_folder = self.make_folder and is_first_process()
        self.folder = reserve(base) if self.make_folder else base
        try:
            return self._trainer_in(self.folder)
        except (MisconfigurationException, *CONSTRUCTOR_ERRORS) as error:
            self.give_back()
            raise UserError(f"trainer: {one_line(error)}") from error

    def _trainer_in(self, folder: Path) -> Trainer:
        settings = self.config_init.trainer
        loggers = _as_list(settings.logger, Logger)
        if not any(isinstance(logger, CSVLogger) for logger in loggers):
            # name and version empty: the table lies in the run folder itself
            loggers.insert(0, CSVLogger(folder, name="", version="", flush_logs_every_n_steps=1))
        if settings.logger in (None, True):
            loggers.append(TensorBoardLogger(folder, name="", version="tensorboard"))
        return super().instantiate_trainer(
            default_root_dir=str(folder),
            logger=loggers,
            callbacks=self._callbacks(_as_list(settings.callbacks, Callback)),
        )

    def _callbacks(self, chosen: list[Callback]) -> list[Callback]:
        wanted: list[type[Callback]] = [our_callbacks.RewardLogger, our_callbacks.RunSummary]
        if self.config.trainer.enable_progress_bar is not False:
            wanted.append(our_callbacks.ProgressBar)
        added = [cls() for cls in wanted if not any(isinstance(callback, cls) for callback in chosen)]
        callbacks: list[Callback] = [RunFolder(), *chosen, *added]
        if self.config.trainer.enable_checkpointing is not False:
            if any(isinstance(callback, ModelCheckpoint) for callback in chosen):
                self.checkpoints.every_n_iterations = 0
            callbacks.append(self.checkpoints)
        return callbacks

    def faults(self) -> list[str]:
        """What is wrong with the parts, found without loading a weight."""
        return [*self.model.check(self.datamodule.sizes), *self.datamodule.check(self.trainer.world_size)]

    def plan(self) -> str:
        """What the sizes make of this world size, as a table."""
        sizes = self.datamodule.sizes
        passes = self.model.objective.passes_per_image(sizes)
        return sizes.plan(self.trainer.world_size).table(passes)

    def save_recipe(self) -> None:
        """Write ``config.yaml``, itself a recipe."""
        if not self.make_folder:
            return
        text = self.parser.dump(self.config, skip_none=False)
        header = f"# lightning run {self.folder / CONFIG_NAME}\n"
        (self.folder / CONFIG_NAME).write_text(header + text)

    def give_back(self) -> None:
        """Remove the run folder if nothing was written to it."""
        if self.make_folder:
            release(self.folder)


def _as_list(value: Any, kind: type) -> list[Any]:
    if isinstance(value, kind):
        return [value]
    return [] if value is None or isinstance(value, bool) else list(value)


def build(args: Sequence[str], make_folder: bool = True) -> RecipeCLI:
    """Parse and build everything that is cheap; no weight is loaded.

    Args:
        args: what was typed after the verb.
        make_folder: create the run folder.

    Raises:
        UserError: with every fault that was found.
    """
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if os.getcwd() not in sys.path:
        # a console script does not look there, and that is where a user's own reward lies
        sys.path.insert(0, os.getcwd())
    command = parse_command(args)
    recipe = read_recipe(command)
    try:
        return RecipeCLI(command, make_folder)
    except UserError:
        raise
    except (ArgumentError, MisconfigurationException, *CONSTRUCTOR_ERRORS) as error:
        faults = recipe_faults(recipe, TOP_LEVEL, LINKED) or [from_parser(error)]
        raise UserError(*faults) from error


def guarded(body: Callable[[Sequence[str]], int], args: Sequence[str]) -> int:
    """Run a verb; a user's mistake becomes lines on stderr and the status 2."""
    try:
        return body(args)
    except UserError as error:
        if is_first_process():
            report(error.faults)
        return 2


def run(args: Sequence[str]) -> int:
    """Train a recipe: ``RECIPE.yaml [key=value ...]``.

    Returns:
        The exit status: 0, 1 when training failed, 2 for a mistake in the recipe, 130 after Ctrl-C.
    """
    return guarded(_run, args)


def _run(args: Sequence[str]) -> int:
    cli = build(args)
    faults = cli.faults()
    if faults:
        cli.give_back()
        raise UserError(*faults)
    cli.save_recipe()
    if is_first_process():
        if cli.note is not None:
            print(cli.note)
        print(f"{cli.plan()}\nRun folder: {cli.folder}", flush=True)
    return _fit(cli)


def _fit(cli: RecipeCLI) -> int:
    checkpoints = cli.checkpoints
    try:
        with checkpoints.listening():
            cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=cli.config.ckpt_path)
    except (SystemExit, KeyboardInterrupt):
        if not checkpoints.interrupted:
            raise
    except RewardError as error:
        report([str(error)])
        return 1
    except LoadError as error:
        raise UserError(str(error)) from error
    except (RuntimeError, ValueError, KeyError) as error:
        if checkpoints.training:
            raise
        if cli.config.ckpt_path is not None:
            raise UserError(f"Cannot continue from ckpt_path={cli.config.ckpt_path}: {one_line(error)}") from error
        if isinstance(error, KeyError) or not _is_a_refusal(error):
            raise
        raise UserError(str(error)) from error
    if is_first_process():
        _say_how_it_went(cli)
    if not checkpoints.interrupted:
        return 0
    if is_first_process():
        print(f"Interrupted: {_what_was_saved(cli)}", file=sys.stderr)
    return 130


def _is_a_refusal(error: Exception) -> bool:
    """Whether an error before training was raised by Lightning or by us: they check settings, others break."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and bool({"lightning", "lit_vgrpo", "callbacks"} & set(Path(frames[-1].filename).parts))


def _say_how_it_went(cli: RecipeCLI) -> None:
    for callback in cli.trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, our_callbacks.RunSummary):
            continue
        # A run that was continued and stopped at once has a start but no end.
        start, end = (scores.get("heldout/reward") for scores in (callback.heldout_start, cli.model.heldout))
        if start is not None and end is not None:
            print(f"Held-out reward {start:.3f} before, {end:.3f} after {cli.trainer.current_epoch} iterations.")
    print(f"Everything is in {cli.folder}: summary.json, metrics.csv, samples, checkpoints.", flush=True)


def _what_was_saved(cli: RecipeCLI) -> str:
    path = cli.checkpoints.saved
    if path is None:
        return "nothing to save before the first iteration."
    return f"{path} is saved. Continue: lightning run {path.parent.parent / CONFIG_NAME} ckpt_path={path}"
