"""Module, data and trainer of a recipe, with the loggers and callbacks of a run folder."""

from __future__ import annotations

import copy
import os
import random
from dataclasses import replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lit_vgrpo import callbacks as our_callbacks
from lit_vgrpo import objectives, policies, rewards  # noqa: F401  registers the short names of their classes
from lit_vgrpo.config.parts import CONSTRUCTOR_ERRORS, recipe_error, with_full_key
from lit_vgrpo.config.recipe import FOUND_IN, Recipe
from lit_vgrpo.config.tree import replaced
from lit_vgrpo.core.gather import image_ranks
from lit_vgrpo.data.module import PromptDataModule
from lit_vgrpo.errors import UserError, shell_line
from lit_vgrpo.launch.checks import LINKED, callback_errors, metric_errors, picture_errors
from lit_vgrpo.module import VGRPOModule
from lit_vgrpo.system.hub import with_commands
from lit_vgrpo.system.memory import device_name, idle_gpu
from lit_vgrpo.system.paths import remove_drafts, start_folder, typed_path
from lit_vgrpo.system.process import bar, is_first_process, report_on_first
from lit_vgrpo.training.checkpoint import RunCheckpoint
from lit_vgrpo.training.checkpoint_file import CheckpointDamage, read_sound
from lit_vgrpo.training.folder import CHECKPOINTS, CONFIG_NAME, FolderLock, RunFolder, release, reserve
from lit_vgrpo.training.loggers import MetricsTable, TensorBoard, continue_trackers, log_recipe, rows_up_to
from lit_vgrpo.training.optimizer import OptimizerConfig
from lit_vgrpo.training.resume import (
    UNDONE,
    Progress,
    Resumption,
    last_good_checkpoint,
    newest_checkpoint,
    read_summary,
    resumed_folder,
)
from lit_vgrpo.training.resume_guard import ResumeGuard, inputs_of, refuse_changes
from lit_vgrpo.training.settings import TRAINER_DEFAULTS, errors_under, gradient_note, prompt_errors
from lit_vgrpo.training.strategies import AbsentGPU

# For the default of Lightning's Timer, an Enum, in config.yaml.
yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_data(member.value))


class RecipeCLI(LightningCLI):
    """Module, data and trainer of a recipe, with the loggers and callbacks of a run folder.

    Args:
        recipe: The recipe, read once.
        make_folder: Create the run folder, instead of only naming it.
        elsewhere: Build the trainer for a GPU even if this machine has none; it can be checked, but not run.
    """

    def __init__(self, recipe: Recipe, make_folder: bool = True, elsewhere: bool = False) -> None:
        self.recipe, self.make_folder, self.elsewhere = recipe, make_folder, elsewhere
        self.folder, self.made, self.lock = Path(), list[Path](), FolderLock()
        self.checkpoints, self.guard = RunCheckpoint(), ResumeGuard()
        self.resumption: Resumption | None = None
        self.allowed_changes: list[str] = []
        self.continued: list[str] = []  # a line for each tracker
        # Only save_hyperparameters() reads it, which neither class calls; making it takes a tenth of the building time.
        self.config_dump: dict[str, Any] = {}
        try:
            super().__init__(
                VGRPOModule,
                PromptDataModule,
                save_config_callback=None,
                trainer_defaults=TRAINER_DEFAULTS,
                seed_everything_default=0,
                parser_kwargs={"exit_on_error": False},
                args=copy.deepcopy(recipe.values),  # which the parser changes
                run=False,
                auto_configure_optimizers=False,
            )
        except BaseException:  # also Ctrl-C
            self.give_back()
            raise

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for name in ("name", "run_dir", "ckpt_path"):
            parser.add_argument(f"--{name}", type=str | None)
        parser.add_argument("--allow_changes", type=bool, default=False)
        for target, source in LINKED.items():
            parser.link_arguments(source, target, compute_fn=int)  # 0 for false

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        if args.get("seed_everything") is True:
            # Processes that Lightning starts inherit the seed of the first; ResumeGuard refuses others' differing ones.
            inherited = None if is_first_process() else os.environ.get("PL_GLOBAL_SEED")
            args["seed_everything"] = int(inherited or random.SystemRandom().randrange(2**31))
        self.config = parser.parse_object(args)
        command, swapped = self.recipe.command, self.recipe.swapped
        if not self.config.name:
            suffix = "" if swapped is None else f"_{swapped.rpartition('.')[2]}"
            self.config.name = f"{command.recipe.stem}{suffix}"
        if (name := self.config.name) in (".", "..") or "/" in name:
            raise UserError(f"name={name} is not the name of a folder in runs. For another folder, set run_dir=FOLDER.")
        if command.resume:
            typed = dict(command.overrides)
            # A config.yaml may have moved, with its folder, away from the run_dir that it names.
            named = None if command.recipe.name == CONFIG_NAME else self.config.run_dir
            folder = typed_path(resumed_folder(command.recipe, typed.get("run_dir") or named))
            if self.make_folder and is_first_process() and (folder / CONFIG_NAME).is_file():
                self.folder = folder
                self.lock.take(folder)  # before: a run that is ending saves more
            self.resumption = last_good_checkpoint(folder, report_on_first)
            self.resumption.check(typed.get("ckpt_path"))
            if self.resumption.checkpoint is not None:
                _ = self._dump  # before: a new run of config.yaml continues no tracker's
                self.continued = continue_trackers(as_list(self.config.trainer.logger, Namespace), folder)

    @property
    def ckpt_path(self) -> Path | None:
        """Checkpoint to continue from: that of the resumed run folder, or the one the user named."""
        if self.resumption is not None and self.resumption.checkpoint is not None:
            return self.resumption.checkpoint
        return None if self.config.ckpt_path is None else typed_path(self.config.ckpt_path)

    @override
    def instantiate_classes(self) -> None:
        trains = self.make_folder  # before it is narrowed to the first rank
        super().instantiate_classes()
        self.datamodule.read_for(self.model.policy)
        if trains or self.ckpt_path is not None:
            self.guard.carry(self.plain_recipe(), self.recipe.texts)
        self._check_checkpoint()

    def plain_recipe(self) -> dict[str, Any]:
        """Return the recipe as plain values, with defaults as the classes resolve them."""
        recipe: dict[str, Any] = yaml.safe_load(self._dump)
        if isinstance(self.model.optimization.optimizer, OptimizerConfig):
            optimizer = vars(self.model.optimization.optimizer).items()
            recipe["model"]["optimizer"] = {k: list(v) if isinstance(v, tuple) else v for k, v in optimizer}
        recipe["model"] |= {name: getattr(self.model, name) for name in ("advantage_std", "advantage_aggregate")}
        recipe["trainer"] |= {"precision": self.trainer.precision}
        return recipe

    def _check_checkpoint(self) -> None:
        path, trainer = self.ckpt_path, self.trainer
        if path is None or (self.resumption is not None and self.resumption.is_over(trainer)):
            return
        what = f"ckpt_path={path}" if self.resumption is None else f"{path}"
        checkpoint = read_checkpoint(path, what)
        inputs, allowed = inputs_of(self.model, self.datamodule), self.config.allow_changes
        recipe, texts, command = self.plain_recipe(), self.recipe.texts, self.recipe.command.line("allow_changes=true")
        self.allowed_changes = refuse_changes(checkpoint, recipe, inputs, allowed, what, texts, command)
        progress = Progress.of(checkpoint)
        if self.resumption is None and progress.is_finished(trainer.max_epochs, trainer.max_steps):
            limit = "max_epochs" if progress.is_finished(trainer.max_epochs, max_steps=-1) else "max_steps"
            raise UserError(
                f"{what} is already at {progress}. trainer.{limit}={getattr(trainer, limit)} leaves nothing to do. "
                "Set it higher."
            )

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        settings = self.config_init.trainer
        has_gpu = torch.cuda.is_available() or MPSAccelerator.is_available()
        if settings.accelerator in ("gpu", "cuda") and not has_gpu:
            if not self.elsewhere:
                raise UserError(
                    f"trainer.accelerator={settings.accelerator}: torch {torch.__version__} finds no GPU here. Set "
                    "trainer.accelerator=auto to use the CPU. lightning check works without a GPU."
                )
            kwargs["accelerator"] = AbsentGPU()
        self.make_folder = self.make_folder and is_first_process()
        self.folder = self._asked_folder if self.resumption is None else self.resumption.folder
        if self.make_folder:
            self.folder, self.made = reserve(self.folder, self.lock, self.resumption is not None)
            for name in ("", CHECKPOINTS, "samples", "report", "benchmarks"):
                remove_drafts(self.folder / name)
        try:
            return super().instantiate_trainer(
                **kwargs,
                default_root_dir=str(self.folder),
                logger=run_loggers(settings.logger, self.folder, getattr(self.resumption, "progress", None)),
                callbacks=self._callbacks(as_list(settings.callbacks, Callback)),
            )
        except (MisconfigurationException, *CONSTRUCTOR_ERRORS) as error:
            raise UserError(recipe_error(error, {"trainer": self.recipe.values.get("trainer")}, {})) from error

    def _callbacks(self, chosen: list[Callback]) -> list[Callback]:
        def lacks(kind: type[Callback]) -> bool:
            return not any(isinstance(callback, kind) for callback in chosen)

        self.keeper = RunFolder(None if self.ckpt_path is None else f"{self.ckpt_path}")
        callbacks: list[Callback] = [self.keeper, self.guard, *chosen]
        if lacks(our_callbacks.RunSummary):
            callbacks.append(our_callbacks.RunSummary())
        if self.config.trainer.enable_progress_bar is not False and lacks(ProgressBar):
            callbacks.append(our_callbacks.ProgressBar())
        if lacks(our_callbacks.Report):
            callbacks.append(our_callbacks.Report())
        callbacks.sort(key=lambda callback: isinstance(callback, our_callbacks.Report))  # it shows the others' results
        own = [callback for callback in chosen if isinstance(callback, RunCheckpoint)]
        if own:
            self.checkpoints = own[0]
        elif self.config.trainer.enable_checkpointing is not False:
            callbacks.append(self.checkpoints)  # also with a ModelCheckpoint, which may leave out the end of the run
        return callbacks

    def errors(self) -> list[str]:
        """Return all errors that can be found without loading weights."""
        ranks, data, model = image_ranks(self.trainer)[1], self.datamodule, self.model
        chosen = as_list(self.config_init.trainer.callbacks, Callback)
        with bar("Checking the recipe", total=1):  # imports the pipeline's classes
            errors = errors_under(model, self.trainer, data.sizes, data.has_heldout)
        of_data = data.check(ranks) or self._picture_errors()
        errors += [*(of_data or prompt_errors(model, data)), *callback_errors(chosen)]
        errors += metric_errors(chosen, model.optimization.make_schedule, data.has_heldout)
        return with_commands([with_full_key(error, self.recipe.values) for error in errors])

    def _picture_errors(self) -> list[str]:
        """Return why the policy cannot use the rows' pictures, or their absence."""
        policy = self.model.policy
        errors = picture_errors(policy, self.datamodule.training_rows())
        if self.datamodule.has_heldout:
            with policy.sized(*self.model.evaluator.sides):
                errors += picture_errors(policy, self.datamodule.heldout_rows(), "held-out prompts")
        return errors[:1]

    def plan(self) -> str:
        """Return a table of the batch sizes at this world size."""
        ranks = image_ranks(self.trainer)[1]
        sizes = replace(self.datamodule.sizes, ranks=ranks)
        plan = sizes.plan(ranks)  # raises where the sizes do not fit
        objective = self.model.objective
        table = plan.table(objective.passes_per_image(sizes, self.model.policy), objective.decodes_per_image())
        return "\n".join([table, *self.model.evaluator.describe(), *gradient_note(self.model)])

    def about_prompts(self) -> list[str]:
        """Return lines on the prompts that were read, and on those that a reward truncates."""
        rows = [*self.datamodule.training_rows(), *self.datamodule.heldout_rows()]
        sets, asked = self.datamodule.sets, self.datamodule.sizes.prompts_per_iteration
        known = sum(map(len, sets.training.sources))
        repeated = f"An iteration repeats prompts: it has {asked} (data.prompts_per_iteration), the files {known}."
        lines = [sets.describe(), *[repeated] * (known < asked)]
        return [*lines, *self.model.evaluator.observed.truncations(rows)]

    def opening(self) -> list[str]:
        """Return the lines to print before training; ``lightning check`` prints all sizes."""
        lines, device, asked = [*self.recipe.notes], self.trainer.strategy.root_device, self._asked_folder
        lines += [f"Changed: {change}" for change in self.allowed_changes]
        taken = ""
        if self.resumption is None and self.folder != asked:
            is_open = (read_summary(asked) or {}).get("outcome") in UNDONE and newest_checkpoint(asked) is not None
            whose = "a run that is not finished: add --resume to continue it" if is_open else "another run"
            taken = f" ({asked} belongs to {whose})"
        sizes = self.datamodule.sizes.plan(image_ranks(self.trainer)[1]).line()
        lines += [*self.about_prompts(), sizes, *gradient_note(self.model), f"Device: {device_name(device)}"]
        lines.append(f"Run folder: {self.folder}{taken}")
        if (gpu := idle_gpu(device)) is not None:
            lines.append(f"WARNING: {gpu} is not used. To train on it: trainer.accelerator=gpu")
        if self.resumption is not None:
            lines += [self.resumption.opening, *self.continued]
        return lines

    @property
    def _asked_folder(self) -> Path:
        return typed_path(self.config.run_dir or Path("runs") / self.config.name)

    def save_recipe(self) -> None:
        """Write ``config.yaml``, itself a recipe with ``${oc.env:NAME}`` as written.

        A run that is resumed without other settings keeps its file.

        The loggers get the same recipe.
        """
        if not self.make_folder:
            return
        header = f"# {shell_line('lightning', 'run', self.folder / CONFIG_NAME)}\n"
        text = self._dump
        if texts := self.recipe.texts:
            text = yaml.safe_dump(replaced(yaml.safe_load(text), texts), sort_keys=False, allow_unicode=True)
        log_recipe(self.trainer.loggers, yaml.safe_load(text), self.folder)
        real = self.folder.resolve()  # from a link's target, other folders are elsewhere
        places = [os.path.relpath(place, real) for place in (*self.recipe.places, start_folder())]
        command = self.recipe.command
        is_changed = bool(command.overlays or {key for key, _ in command.overrides} - {"run_dir", "allow_changes"})
        is_changed |= self.resumption is None
        text = f"{header}{text}{FOUND_IN}: {[*dict.fromkeys(places)]}\n"
        self.keeper.write_recipe(self.folder, text, is_changed)

    @cached_property
    def _dump(self) -> str:
        config = self.config.clone()
        config.allow_changes = False  # it holds for one checkpoint only
        return str(self.parser.dump(config, skip_none=False, skip_check=True))

    def give_back(self) -> None:
        """Remove the run folder if this process has it and nothing was written to it."""
        if self.lock.is_held:
            release(self.folder, self.made)  # before another run can take it
        self.lock.release()


def read_checkpoint(path: Path, what: str) -> dict[str, Any]:
    """Read the checkpoint to continue from, called ``what``; raise UserError if it is damaged or not a file."""
    if not path.is_file():
        newest = newest_checkpoint(path) if path.is_dir() else None
        advice = f"Set ckpt_path={newest}, or continue it with --resume." if newest else "Give a checkpoint file."
        raise UserError(f"{what} is not a file. {advice}")
    try:
        return read_sound(path)
    except CheckpointDamage as damage:
        raise UserError(f"{what} {damage.reason}. Give another checkpoint of the same run.") from damage


def run_loggers(setting: Any, folder: Path, progress: Progress | None) -> list[Logger]:
    """Return the recipe's loggers, with ``metrics.csv`` and, unless it is false or has one, TensorBoard.

    Args:
        setting: The recipe's ``trainer.logger``.
        folder: The run folder.
        progress: Point at which to continue the tables; ``None`` starts them.
    """
    loggers = as_list(setting, Logger)
    loggers.insert(0, MetricsTable(folder, None if progress is None else rows_up_to(progress)))
    if setting is not False and not any(isinstance(logger, TensorBoardLogger) for logger in loggers):
        purge: Any = {} if progress is None else {"purge_step": progress.optimizer_steps + 1}
        loggers.append(TensorBoard(folder, name="", version="tensorboard", **purge))
    return loggers


def as_list(value: Any, kind: type) -> list[Any]:
    """Return one part or several as a list; ``None`` and booleans are none."""
    if isinstance(value, kind):
        return [value]
    return [] if value is None or isinstance(value, bool) else list(value)
